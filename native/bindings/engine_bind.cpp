// Binds the block formats, and the backend, model and session classes with the step. Everything that computes or waits
// for the backend runs without the GIL.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <algorithm>

#include "bindings.h"
#include "quant/encode.h"
#include "quant/quant.h"
#include "quant/scaled.h"
#include "reference/faulty.h"
#include "session/session.h"

namespace ds4 {
namespace py = pybind11;

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

py::array_t<float> dequantize(int32_t type, const py::buffer& data) {
  const py::buffer_info info = data.request();
  if (info.ndim != 1 || info.itemsize != 1 || info.strides[0] != 1)
    throw Invalid("dequantize takes a contiguous row of bytes");
  const auto dtype = static_cast<DType>(type);
  const auto bytes = static_cast<int64_t>(info.size);
  const auto block = static_cast<int64_t>(block_bytes(dtype));
  if (bytes % block != 0)
    throw Invalid(std::to_string(bytes) + " bytes are not a whole number of " + dtype_name(dtype) + " blocks");
  py::array_t<float> out(bytes / block * block_elements(dtype));
  dequantize_row(dtype, info.ptr, out.mutable_data(), out.size());
  return out;
}

// What a backend loads for a matrix with scales beside it: (type id, bytes).
py::array_t<uint8_t> encode(int32_t type, const py::array_t<float, py::array::c_style>& values, int threads) {
  const auto dtype = static_cast<DType>(type);
  py::array_t<uint8_t> out(static_cast<py::ssize_t>(row_bytes(dtype, values.size())));
  const std::span<const float> from{values.data(), static_cast<size_t>(values.size())};
  const std::span<std::byte> to{reinterpret_cast<std::byte*>(out.mutable_data()), static_cast<size_t>(out.size())};
  const py::gil_scoped_release free;
  encode_rows(dtype, from, threads, to);
  return out;
}

std::pair<int32_t, py::bytes> plain_matrix(int32_t type, int64_t rows, int64_t cols, const py::buffer& data,
                                           const py::buffer& scales) {
  const auto dtype = static_cast<DType>(type);
  const py::buffer_info codes = data.request(), beside = scales.request();
  if (!has_scales(dtype)) throw Invalid(std::string("type ") + dtype_name(dtype) + " has no scales beside it");
  if (rows < 1 || rows > (int64_t{1} << 40) / std::max<int64_t>(1, cols)) throw Invalid("an impossible shape");
  if (static_cast<int64_t>(row_bytes(dtype, cols)) * rows != codes.size * codes.itemsize ||
      scale_count(dtype, rows, cols) != beside.size * beside.itemsize)
    throw Invalid("codes or scales of another shape");
  const MatrixView view{codes.ptr, rows, cols, dtype, static_cast<const uint8_t*>(beside.ptr)};
  const PlainViews plain({&view, 1});
  const MatrixView& m = plain.front();
  return {static_cast<int32_t>(m.type),
          py::bytes(static_cast<const char*>(m.data), row_bytes(m.type, cols) * static_cast<size_t>(rows))};
}

// Token ids from a list, tuple or numpy array; every id is range-checked against int32 here, against the vocabulary
// later.
std::vector<int32_t> token_ids(const py::handle& ids) {
  std::vector<int32_t> out;
  if (py::isinstance<py::array_t<int32_t, py::array::c_style>>(ids)) {
    const auto array = py::reinterpret_borrow<py::array_t<int32_t, py::array::c_style>>(ids);
    if (array.ndim() != 1) throw Invalid("token ids have " + std::to_string(array.ndim()) + " dimensions, expected 1");
    out.assign(array.data(), array.data() + array.size());
    return out;
  }
  const auto fast = py::reinterpret_steal<py::object>(PySequence_Fast(ids.ptr(), "token ids are not a sequence"));
  if (!fast) throw py::error_already_set();
  const Py_ssize_t n = PySequence_Fast_GET_SIZE(fast.ptr());
  out.reserve(static_cast<size_t>(n));
  for (Py_ssize_t i = 0; i < n; ++i) {
    PyObject* item = PySequence_Fast_GET_ITEM(fast.ptr(), i);
    const py::object index = PyLong_CheckExact(item) ? py::reinterpret_borrow<py::object>(item)
                                                     : py::reinterpret_steal<py::object>(PyNumber_Index(item));
    if (!index) throw py::error_already_set();
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
    if (overflow != 0 || value < INT32_MIN || value > INT32_MAX)
      throw Invalid("token " + py::str(index).cast<std::string>() + " is outside the vocabulary");
    out.push_back(static_cast<int32_t>(value));
  }
  return out;
}

struct PyBackend {
  std::string kind;
  std::shared_ptr<Backend> backend;
  std::shared_ptr<FaultPlan> faults;
};

PyBackend open_backend(const std::string& kind, int threads, const std::string& isa, bool faulty) {
  std::unique_ptr<Ops> ops = open_ops(kind, threads, isa);
  std::shared_ptr<FaultPlan> plan;
  if (faulty) {
    plan = std::make_shared<FaultPlan>();
    ops = make_faulty_ops(std::move(ops), plan);
  }
  return {kind, std::make_shared<Backend>(std::move(ops)), std::move(plan)};
}

HyperValue hyper_list(const std::string& name, const py::sequence& values) {
  bool whole = true;
  for (const auto& v : values) {
    if (py::isinstance<py::bool_>(v) || !(py::isinstance<py::int_>(v) || py::isinstance<py::float_>(v)))
      throw Invalid(name + " is a list of something else than numbers");
    whole = whole && py::isinstance<py::int_>(v);
  }
  if (whole) return values.cast<std::vector<int64_t>>();
  return values.cast<std::vector<double>>();
}

std::map<std::string, HyperValue> hyper_params(const py::dict& given) {
  std::map<std::string, HyperValue> out;
  for (const auto& [key, value] : given) {
    const auto name = key.cast<std::string>();
    if (py::isinstance<py::bool_>(value))
      out[name] = value.cast<bool>();
    else if (py::isinstance<py::int_>(value))
      out[name] = value.cast<int64_t>();
    else if (py::isinstance<py::float_>(value))
      out[name] = value.cast<double>();
    else if (py::isinstance<py::str>(value))
      out[name] = value.cast<std::string>();
    else if (py::isinstance<py::list>(value) || py::isinstance<py::tuple>(value))
      out[name] = hyper_list(name, value.cast<py::sequence>());
    else
      throw Invalid(name + " is neither a number nor a string nor a list of numbers");
  }
  return out;
}

// tensors: name -> (buffer of bytes, shape, type id), or with a fourth item, the buffer of the scales. The buffers'
// exports are held until the model goes, so the mapping behind them cannot be closed.
std::shared_ptr<LoadedModel> make_loaded_model(const PyBackend& backend, const std::string& family,
                                               const py::dict& params, const py::dict& tensors, int32_t kv_type) {
  auto views = std::shared_ptr<std::vector<py::buffer_info>>(new std::vector<py::buffer_info>(),
                                                             [](std::vector<py::buffer_info>* v) {
                                                               const py::gil_scoped_acquire gil;
                                                               delete v;
                                                             });
  std::map<std::string, StoredTensor> table;
  for (const auto& [key, value] : tensors) {
    const auto name = key.cast<std::string>();
    const auto items = value.cast<py::tuple>();
    if (items.size() != 3 && items.size() != 4) throw Invalid(name + ": expected (data, shape, type[, scales])");
    const auto shape = items[1].cast<std::vector<int64_t>>();
    const auto type = items[2].cast<int32_t>();
    const auto hold = [&](const py::handle& buffer) {
      views->push_back(buffer.cast<py::buffer>().request());
      const py::buffer_info& held = views->back();
      if (held.ndim != 1 || held.itemsize != 1 || held.strides[0] != 1)
        throw Invalid(name + ": the data is not a contiguous run of bytes");
      return std::span(static_cast<const uint8_t*>(held.ptr), static_cast<size_t>(held.size));
    };
    const std::span<const uint8_t> data = hold(items[0]);
    StoredTensor t;
    t.axes = static_cast<int64_t>(shape.size());
    t.view = {data.data(), 1, shape.empty() ? 1 : shape.back(), static_cast<DType>(type)};
    for (const int64_t n : shape)
      if (n < 1) throw Invalid(name + ": an axis of " + std::to_string(n));
    for (size_t i = 0; i + 1 < shape.size(); ++i)
      if (__builtin_mul_overflow(t.view.rows, shape[i], &t.view.rows)) throw Invalid(name + ": the shape overflows");
    const size_t row = row_bytes(t.view.type, t.view.cols);
    size_t need = 0;
    if (__builtin_mul_overflow(row, static_cast<size_t>(t.view.rows), &need) || need != data.size())
      throw Invalid(name + ": " + std::to_string(data.size()) + " bytes, shape and type ask for " +
                    std::to_string(t.view.rows) + " rows of " + std::to_string(row));
    if (has_scales(t.view.type) != (items.size() == 4))
      throw Invalid(name + ": type " + dtype_name(t.view.type) +
                    (items.size() == 4 ? " takes no scales" : " without scales"));
    if (items.size() == 4) {
      const std::span<const uint8_t> scales = hold(items[3]);
      if (const int64_t n = scale_count(t.view.type, t.view.rows, t.view.cols);
          n != static_cast<int64_t>(scales.size()))
        throw Invalid(name + ": " + std::to_string(scales.size()) + " scales, the shape asks for " + std::to_string(n));
      if (t.axes != 2) throw Invalid(name + ": scales beside a tensor of " + std::to_string(t.axes) + " axes");
      t.view.scales = scales.data();
    }
    table[name] = t;
  }
  auto loaded = std::make_shared<LoadedModel>();
  loaded->keep_alive = views;
  loaded->backend = backend.backend;
  loaded->model =
      make_model(family, HyperParams(hyper_params(params)), TensorTable(std::move(table)), static_cast<DType>(kv_type));
  return loaded;
}

void load_weights(LoadedModel& m, const py::object& progress) {
  LoadProgress report;
  if (!progress.is_none())
    report = [&progress](size_t done, size_t total) {
      const py::gil_scoped_acquire gil;
      progress(done, total);
    };
  const py::gil_scoped_release release;
  const std::scoped_lock lock(m.backend->busy);
  if (m.loaded) throw Invalid("the weights are loaded already");
  m.model->load(*m.backend->ops, report);
  m.loaded = true;
}

// Residual streams of a prompt, [layers + 1, T, E]: before each layer, and after the final norm. With `inputs`,
// [layers, T, E], layer l reads those of its number, and row l of the result is still what came out of layer l - 1.
py::array_t<float> hidden_states(LoadedModel& m, const py::handle& tokens,
                                 const std::optional<py::array_t<float, py::array::c_style>>& inputs) {
  const std::vector<int32_t> ids = token_ids(tokens);
  const auto n = static_cast<int64_t>(ids.size());
  if (n == 0 || !m.loaded) throw Invalid("hidden states of no tokens, or of a model without weights");
  for (const int32_t id : ids)
    if (id < 0 || id >= m.model->vocab()) throw Invalid("token " + std::to_string(id) + " is outside the vocabulary");
  py::array_t<float> out({m.model->layers() + 1, n, m.model->width()});
  if (inputs && (inputs->ndim() != 3 || inputs->shape(0) != m.model->layers() || inputs->shape(1) != n ||
                 inputs->shape(2) != m.model->width()))
    throw Invalid("inputs of another shape than [layers, tokens, width]");
  const float* given = inputs ? inputs->data() : nullptr;
  float* data = out.mutable_data();
  const py::gil_scoped_release release;
  const std::scoped_lock lock(m.backend->busy);
  const auto state = m.backend->ops->new_state(m.model->state_specs(), n);
  state->reserve(n);
  std::vector<RowRef> rows;
  for (int64_t i = 0; i < n; ++i) rows.push_back({state.get(), static_cast<int32_t>(i)});
  m.model->forward({.ids = ids, .rows = rows, .wanted = {}, .probe = [&](int64_t layer, const Tensor& x) {
                      m.backend->ops->to_host(x, data + layer * n * x.dim);
                      const bool replace = given && layer < m.model->layers();
                      if (replace) m.backend->ops->to_device(given + layer * n * x.dim, x);
                      return replace;
                    }});
  return out;
}

py::list state_specs(const LoadedModel& m) {
  static constexpr const char* kinds[] = {"append", "ring", "recurrent", "counter"};
  py::list out;
  for (const StateSpec& s : m.model->state_specs())
    out.append(py::make_tuple(s.name, kinds[static_cast<int>(s.kind)], static_cast<int32_t>(s.type), s.heads, s.width,
                              s.ratio, s.kind == StateKind::Ring ? s.kept() : s.capacity, s.draft));
  return out;
}

int64_t buffer_rows(const LoadedModel& m, size_t index, int64_t tokens) {
  const auto& specs = m.model->state_specs();
  if (index >= specs.size()) throw Invalid("state buffer " + std::to_string(index) + " does not exist");
  return payload_rows(specs[index], tokens);
}

using RowsTuple = std::tuple<size_t, int64_t, int64_t>;

std::vector<Session::Rows> session_rows(const std::vector<RowsTuple>& which) {
  std::vector<Session::Rows> out;
  for (const auto& [index, first, count] : which) out.push_back({index, first, count});
  return out;
}

// Waiting for a running step must not stop every Python thread.
struct DeleteWithoutGil {
  void operator()(Session* s) const {
    const py::gil_scoped_release release;
    delete s;
  }
};
using SessionHolder = std::unique_ptr<Session, DeleteWithoutGil>;

py::array_t<int32_t> session_tokens(const Session& s) {
  std::vector<int32_t> ids;
  {
    const py::gil_scoped_release release;
    ids = s.tokens();
  }
  return py::array_t<int32_t>(static_cast<py::ssize_t>(ids.size()), ids.data());
}

py::array_t<float> session_logits(const Session& s) {
  std::vector<float> logits;
  {
    const py::gil_scoped_release release;
    logits = s.logits();
  }
  return py::array_t<float>(static_cast<py::ssize_t>(logits.size()), logits.data());
}

template <typename Byte>
std::span<Byte> byte_span(const py::buffer_info& info) {
  if (info.ndim != 1 || info.itemsize != 1 || info.strides[0] != 1) throw Invalid("not a contiguous run of bytes");
  return {static_cast<Byte*>(info.ptr), static_cast<size_t>(info.size)};
}

// Logits of every position of one session's next tokens, [tokens, vocab].
py::array_t<float> all_logits(LoadedModel& model, Session& session, const py::handle& tokens) {
  const std::vector<int32_t> ids = token_ids(tokens);
  py::array_t<float> out({static_cast<py::ssize_t>(ids.size()), static_cast<py::ssize_t>(model.model->vocab())});
  StepRow row;
  row.session = &session;
  row.tokens = ids;
  row.every = out.mutable_data();
  {
    const py::gil_scoped_release release;
    step(model, {&row, 1});
  }
  return out;
}

// As an eventfd takes it. Whoever reads there is awake already where there is no room.
void write_one(int fd) {
  const uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(fd, &one, sizeof(one));
}

py::tuple drawn(int32_t token, const Sampler& sampler, const SampleLogprobs& logprobs) {
  if (token < 0 || !sampler.wants_logprobs()) return py::make_tuple(token, py::none());
  return py::make_tuple(token, py::make_tuple(logprobs.chosen, logprobs.top));
}

// rows: [(session, tokens, sampler or None, want_logits[, drafts])] -> [(token or None, None or (logprob, top))]
// wake: a file descriptor, < 0: none.
py::list step_model(LoadedModel& m, const py::sequence& rows, int wake) {
  const size_t n = rows.size();
  std::vector<StepRow> step_rows(n);
  std::vector<std::vector<int32_t>> ids(n), drafts(n);
  std::vector<py::object> hold;  // the step runs without the GIL: nobody else may free these meanwhile
  hold.reserve(n);
  for (size_t i = 0; i < n; ++i) {
    hold.push_back(rows[i]);
    const auto row = hold.back().cast<py::tuple>();
    if (row.size() != 4 && row.size() != 5) throw Invalid("a row is (session, tokens, sampler, want_logits[, drafts])");
    ids[i] = token_ids(row[1]);
    if (row.size() == 5) drafts[i] = token_ids(row[4]);
    step_rows[i].drafts = drafts[i];
    step_rows[i].session = row[0].cast<Session*>();
    step_rows[i].tokens = ids[i];
    step_rows[i].sampler = row[2].cast<Sampler*>();
    step_rows[i].want_logits = row[3].cast<bool>();
    if (!step_rows[i].session) throw Invalid("a row without a session");
  }
  {
    const py::gil_scoped_release release;
    step(m, step_rows, wake < 0 ? std::function<void()>() : [wake] { write_one(wake); });
  }
  py::list out(n);
  for (size_t i = 0; i < n; ++i) {
    const StepRow& row = step_rows[i];
    if (!row.sampler)
      out[i] = py::make_tuple(py::none(), py::none());
    else
      out[i] = drawn(row.sampled, *row.sampler, row.logprobs);
  }
  return out;
}

// rows: [(session, token, most)] -> [drafts]
std::vector<std::vector<int32_t>> draft_tokens(LoadedModel& m, const py::sequence& rows) {
  std::vector<DraftRequest> requests;
  std::vector<py::object> hold;
  for (const auto& item : rows) {
    hold.push_back(py::reinterpret_borrow<py::object>(item));
    const auto row = hold.back().cast<py::tuple>();
    if (row.size() != 3 || row[0].is_none()) throw Invalid("a row is (session, token, most)");
    requests.push_back({row[0].cast<Session*>(), row[1].cast<int32_t>(), row[2].cast<int64_t>(), nullptr});
  }
  const py::gil_scoped_release release;
  return draft(m, requests);
}

// (drafts, their logits [drafts, vocab]) of one session.
py::tuple draft_logits(LoadedModel& m, Session& session, int32_t token, int64_t most) {
  std::vector<float> logits;
  std::vector<std::vector<int32_t>> drafts;
  {
    const DraftRequest row{&session, token, most, &logits};
    const py::gil_scoped_release release;
    drafts = draft(m, {&row, 1});
  }
  const auto vocab = static_cast<py::ssize_t>(m.model->vocab());
  py::array_t<float> out({static_cast<py::ssize_t>(logits.size()) / vocab, vocab});
  std::copy(logits.begin(), logits.end(), out.mutable_data());
  return py::make_tuple(drafts.front(), out);
}

// The token after `token`, as of `step_model`; None when `token` was not evaluated ahead.
py::object advance_session(Session& s, int32_t token, Sampler& sampler) {
  int32_t sampled = -1;
  SampleLogprobs logprobs;
  bool taken = false;
  {
    const py::gil_scoped_release release;
    taken = s.advance(token, sampler, sampled, logprobs);
  }
  if (!taken) return py::none();
  return drawn(sampled, sampler, logprobs);
}

void raise_typed(const char* name, const py::object& error) {
  PyErr_SetObject(py::module_::import("ds4.errors").attr(name).ptr(), error.ptr());
}

void translate(std::exception_ptr p) {
  try {
    if (p) std::rethrow_exception(p);
  } catch (const ContextLength& e) {
    const py::object cls = py::module_::import("ds4.errors").attr("ContextLengthError");
    PyErr_SetObject(cls.ptr(), cls(e.n_tokens, e.n_ctx).ptr());
  } catch (const SessionInvalid& e) {
    raise_typed("SessionInvalidError", py::str(e.what()));
  } catch (const StepFailed& e) {
    raise_typed("EngineError", py::str(e.what()));
  }
}

}  // namespace

void bind_engine(py::module_& m) {
  py::register_local_exception<Unsupported>(m, "Unsupported", PyExc_RuntimeError);
  py::register_local_exception_translator(&translate);

  m.def("dequantize", &dequantize, py::arg("type"), py::arg("data"));
  m.def("encode", &encode, py::arg("type"), py::arg("values"), py::arg("threads") = 0);
  m.def("can_encode", [](int32_t type) { return can_encode(static_cast<DType>(type)); }, py::arg("type"));
  m.def(
      "row_bytes", [](int32_t type, int64_t cols) { return row_bytes(static_cast<DType>(type), cols); },
      py::arg("type"), py::arg("cols"));
  m.def("dtype_name", [](int32_t type) { return dtype_name(static_cast<DType>(type)); }, py::arg("type"));
  m.def("plain_matrix", &plain_matrix, py::arg("type"), py::arg("rows"), py::arg("cols"), py::arg("data"),
        py::arg("scales"));
  m.def("float_to_half", &float_to_half, py::arg("value"));
  m.def("half_to_float", &half_to_float, py::arg("half"));
  m.def("float_to_bf16", &float_to_bf16, py::arg("value"));

  py::class_<PyBackend>(m, "Backend", py::module_local())
      .def(py::init(&open_backend), py::arg("kind"), py::kw_only(), py::arg("threads") = 0, py::arg("isa") = "auto",
           py::arg("faulty") = false)
      .def_property_readonly("name", [](const PyBackend& b) { return b.backend->ops->name(); })
      .def_property_readonly("scratch_bytes",
                             [](const PyBackend& b) {
                               const py::gil_scoped_release release;
                               const std::scoped_lock lock(b.backend->busy);
                               return b.backend->ops->scratch_bytes();
                             })
      .def_property_readonly("free_device_memory",
                             [](const PyBackend& b) {
                               const py::gil_scoped_release release;
                               return free_device_memory(b.kind);
                             })
      .def(
          "fail_after",
          [](const PyBackend& b, int64_t operations) {
            if (!b.faults) throw Invalid("the backend was not opened with faulty=True");
            b.faults->operations_left = operations;
          },
          py::arg("operations"));

  py::class_<LoadedModel, std::shared_ptr<LoadedModel>>(m, "Model", py::module_local())
      .def(py::init(&make_loaded_model), py::arg("backend"), py::arg("family"), py::arg("params"), py::arg("tensors"),
           py::kw_only(), py::arg("kv_type") = static_cast<int32_t>(DType::F16))
      .def("load", &load_weights, py::arg("progress") = py::none())
      .def_property_readonly("vocab", [](const LoadedModel& l) { return l.model->vocab(); })
      .def_property_readonly("layers", [](const LoadedModel& l) { return l.model->layers(); })
      .def_property_readonly("resident_bytes",
                             [](const LoadedModel& l) { return l.loaded ? l.model->resident_bytes() : 0; })
      .def_property_readonly("state_specs", &state_specs)
      .def_property_readonly("host_memory", [](const LoadedModel& l) { return l.backend->ops->host_memory(); })
      .def("buffer_rows", &buffer_rows, py::arg("index"), py::arg("tokens"))
      .def(
          "state_bytes",
          [](const LoadedModel& l, int64_t tokens) { return payload_bytes(l.model->state_specs(), tokens); },
          py::arg("tokens"))
      .def(
          "workspace_bytes",
          [](const LoadedModel& l, int64_t rows, int64_t wanted) { return l.model->workspace_bytes(rows, wanted); },
          py::arg("rows"), py::arg("wanted"))
      .def("hidden_states", &hidden_states, py::arg("tokens"), py::arg("inputs") = py::none())
      .def("step", &step_model, py::arg("rows"), py::arg("wake") = -1)
      .def_property_readonly("drafter",
                             [](const LoadedModel& l) -> std::optional<std::string> {
                               const Drafter* d = l.model->drafter();
                               return d ? std::optional(d->name()) : std::nullopt;
                             })
      .def_property_readonly("most_ahead", [](const LoadedModel& l) { return most_ahead(l.model->state_specs()); })
      .def_property_readonly("spare_bytes",
                             [](const LoadedModel& l) {
                               size_t bytes = 0;
                               for (const StateSpec& s : l.model->state_specs())
                                 bytes += static_cast<size_t>(s.spare) * row_bytes(s.type, s.row_elements());
                               return bytes;
                             })
      .def("draft", &draft_tokens, py::arg("rows"))
      .def("draft_logits", &draft_logits, py::arg("session"), py::arg("token"), py::arg("most"))
      .def("all_logits", &all_logits, py::arg("session"), py::arg("tokens"));

  py::class_<Session, SessionHolder>(m, "Session", py::module_local())
      .def(py::init([](std::shared_ptr<LoadedModel> model, int64_t ctx) {
             return SessionHolder(new Session(std::move(model), ctx));
           }),
           py::arg("model"), py::arg("ctx"))
      .def_property_readonly("ctx", &Session::ctx)
      .def_property_readonly("n_tokens", &Session::n_tokens)
      .def_property_readonly("tokens", &session_tokens)
      .def_property_readonly("has_logits", py::cpp_function(&Session::has_logits, NoGil()))
      .def_property_readonly("resident_bytes", py::cpp_function(&Session::resident_bytes, NoGil()))
      .def("logits", &session_logits)
      .def(
          "common_prefix",
          [](const Session& s, const py::handle& tokens, int64_t beyond) {
            // Routing asks every session about one long prompt: its array is read where it lies.
            if (py::isinstance<py::array_t<int32_t, py::array::c_style>>(tokens)) {
              const auto held = py::reinterpret_borrow<py::array_t<int32_t, py::array::c_style>>(tokens);
              if (held.ndim() != 1) throw Invalid("token ids have " + std::to_string(held.ndim()) + " dimensions");
              const std::span ids(held.data(), static_cast<size_t>(held.size()));
              const py::gil_scoped_release release;
              return s.common_prefix(ids, beyond);
            }
            const std::vector<int32_t> ids = token_ids(tokens);
            const py::gil_scoped_release release;
            return s.common_prefix(ids, beyond);
          },
          py::arg("tokens"), py::arg("beyond") = 0)
      .def_property_readonly("longest", &Session::longest)
      .def("can_rewind", &Session::can_rewind, py::arg("n_tokens"), NoGil())
      .def_property_readonly("n_ahead", py::cpp_function(&Session::n_ahead, NoGil()))
      .def("advance", &advance_session, py::arg("token"), py::arg("sampler"))
      .def("rewind", &Session::rewind, py::arg("n_tokens"), NoGil())
      .def("clear", &Session::clear, NoGil())
      .def("fork_from", &Session::fork_from, py::arg("other"), py::arg("n_tokens"), NoGil())
      .def(
          "export_rows",
          [](const Session& s, const std::vector<RowsTuple>& which, const py::buffer& out) {
            const py::buffer_info info = out.request(true);
            const std::vector<Session::Rows> rows = session_rows(which);
            const py::gil_scoped_release release;
            s.export_rows(rows, byte_span<std::byte>(info));
          },
          py::arg("which"), py::arg("out"))
      .def(
          "begin_import",
          [](Session& s, const py::handle& tokens, int64_t longest) {
            const std::vector<int32_t> ids = token_ids(tokens);
            const py::gil_scoped_release release;
            s.begin_import(ids, longest);
          },
          py::arg("tokens"), py::arg("longest"))
      .def(
          "import_rows",
          [](Session& s, const std::vector<RowsTuple>& which, const py::buffer& in) {
            const py::buffer_info info = in.request();
            const std::vector<Session::Rows> rows = session_rows(which);
            const py::gil_scoped_release release;
            s.import_rows(rows, byte_span<const std::byte>(info));
          },
          py::arg("which"), py::arg("data"))
      .def(
          "finish_import",
          [](Session& s, const std::optional<py::array_t<float, py::array::c_style>>& logits) {
            std::span<const float> view;
            if (logits) view = {logits->data(), static_cast<size_t>(logits->size())};
            const py::gil_scoped_release release;
            s.finish_import(view);
          },
          py::arg("logits"));
}

}  // namespace ds4
