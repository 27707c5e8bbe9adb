// Binds single operations of a backend on numpy arrays, for tests and benchmarks: no model, no session.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>

#include "bindings.h"
#include "cpu/cpu.h"
#include "ops.h"
#include "ops_latent.h"
#include "quant/quant.h"
#include "reference/reference.h"

namespace ds4 {
namespace py = pybind11;

namespace {

using Floats = py::array_t<float, py::array::c_style>;

// A matrix in a file format: its bytes as Python gave them, and the shape they claim.
MatrixView view(const py::buffer& data, int32_t type, int64_t rows, int64_t cols) {
  const py::buffer_info info = data.request();
  const auto dtype = static_cast<DType>(type);
  if (rows <= 0 || cols <= 0) throw Invalid("a matrix of " + std::to_string(rows) + " x " + std::to_string(cols));
  const auto have = static_cast<size_t>(info.size * info.itemsize);
  const size_t want = static_cast<size_t>(rows) * row_bytes(dtype, cols);
  if (have != want)
    throw Invalid("a " + std::string(dtype_name(dtype)) + " matrix of " + std::to_string(rows) + " x " +
                  std::to_string(cols) + " has " + std::to_string(want) + " bytes, not " + std::to_string(have));
  return {info.ptr, rows, cols, dtype};
}

Tensor tensor(Floats& a, const char* what) {
  if (a.ndim() != 2) throw Invalid(std::string(what) + ": a matrix [rows, columns] of float32 expected");
  return {a.mutable_data(), a.shape(0), a.shape(1)};
}

// Weights and states keep what they were made from: the bytes of the file, and the backend whose memory they use.
struct BoundWeight {
  std::vector<py::buffer> bytes;
  std::shared_ptr<Ops> ops;
  std::unique_ptr<Weight> weight;
};
struct BoundState {
  std::shared_ptr<Ops> ops;
  std::unique_ptr<State> state;
};

using Parts = std::vector<std::tuple<py::buffer, int32_t, int64_t, int64_t>>;
using Spec = std::tuple<std::string, std::string, int32_t, int64_t, int64_t, int64_t, int64_t>;
using Rows = std::vector<std::pair<BoundState*, int32_t>>;

WeightUse use_of(const std::string& name) {
  if (name == "linear") return WeightUse::Linear;
  if (name == "precise") return WeightUse::Precise;
  if (name == "swiglu") return WeightUse::SwiGLU;
  if (name == "embedding") return WeightUse::Embedding;
  if (name == "tied") return WeightUse::TiedHead;
  throw Invalid("use \"" + name + "\" is none of linear, precise, swiglu, embedding, tied");
}

StateKind kind_of(const std::string& name) {
  if (name == "append") return StateKind::Append;
  if (name == "ring") return StateKind::Ring;
  if (name == "recurrent") return StateKind::Recurrent;
  if (name == "counter") return StateKind::Counter;
  throw Invalid("kind \"" + name + "\" is none of append, ring, recurrent, counter");
}

std::vector<RowRef> refs(const Rows& rows) {
  std::vector<RowRef> out;
  for (const auto& [state, position] : rows) out.push_back({state->state.get(), position});
  return out;
}

struct BoundOps {
  std::shared_ptr<Ops> ops;

  std::unique_ptr<BoundWeight> load(const Parts& parts, const std::string& use) const {
    auto out = std::make_unique<BoundWeight>();
    out->ops = ops;
    std::vector<MatrixView> views;
    for (const auto& [bytes, type, rows, cols] : parts) {
      views.push_back(view(bytes, type, rows, cols));
      out->bytes.push_back(bytes);
    }
    const WeightUse for_use = use_of(use);
    const py::gil_scoped_release release;
    out->weight = ops->load(views, for_use);
    return out;
  }

  std::unique_ptr<BoundState> new_state(const std::vector<Spec>& specs, int64_t capacity) const {
    std::vector<StateSpec> list;
    for (const auto& [name, kind, type, heads, width, ratio, rows] : specs)
      list.push_back({name, kind_of(kind), static_cast<DType>(type), heads, width, ratio, rows});
    return std::make_unique<BoundState>(BoundState{ops, ops->new_state(list, capacity)});
  }

  // Runs `op` `times` times without the GIL; returns the shortest run in seconds.
  template <class Op>
  double timed(int times, Op&& op) const {
    double best = 1e30;
    const py::gil_scoped_release release;
    for (int i = 0; i < std::max(times, 1); ++i) {
      const auto start = std::chrono::steady_clock::now();
      op();
      best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return best;
  }

  void embed(const BoundWeight& w, const std::vector<int32_t>& ids, Floats out) const {
    ops->embed(*w.weight, ids, tensor(out, "out"));
  }
  void rms_norm(Floats x, const BoundWeight& gain, float eps, Floats y) const {
    ops->rms_norm(tensor(x, "x"), {gain.weight.get(), eps}, tensor(y, "y"));
  }
  double linear(const BoundWeight& w, Floats x, Floats y, const BoundWeight* gain, float eps, const BoundWeight* bias,
                int times) const {
    const Tensor in = tensor(x, "x"), out = tensor(y, "y");
    const Norm norm{gain ? gain->weight.get() : nullptr, eps};
    return timed(times,
                 [&] { ops->linear(*w.weight, in, gain ? &norm : nullptr, bias ? bias->weight.get() : nullptr, out); });
  }
  double linear_add(const BoundWeight& w, Floats x, Floats y, int times) const {
    const Tensor in = tensor(x, "x"), out = tensor(y, "y");
    return timed(times, [&] { ops->linear_add(*w.weight, in, out); });
  }
  double linear_swiglu(const BoundWeight& w, Floats x, Floats y, const BoundWeight* gain, float eps, int times) const {
    const Tensor in = tensor(x, "x"), out = tensor(y, "y");
    const Norm norm{gain ? gain->weight.get() : nullptr, eps};
    return timed(times, [&] { ops->linear_swiglu(*w.weight, in, gain ? &norm : nullptr, out); });
  }
  void rope_table(const Rows& rows, const std::vector<double>& freq, Floats out) const {
    ops->rope_table(refs(rows), freq, tensor(out, "out"));
  }
  double rope_store(Floats qkv, Floats table, bool interleaved, const Rows& rows, size_t k, size_t v, int64_t q_heads,
                    int64_t kv_heads, int64_t head_dim, int times) const {
    const Tensor x = tensor(qkv, "qkv"), cs = tensor(table, "table");
    const std::vector<RowRef> list = refs(rows);
    return timed(times, [&] {
      ops->rope_store(x, cs, interleaved ? RopeKind::Interleaved : RopeKind::HalfSplit, list, {k, v}, q_heads, kv_heads,
                      head_dim);
    });
  }
  double attention(Floats q, const Rows& rows, size_t k, size_t v, int64_t q_heads, int64_t kv_heads, int64_t head_dim,
                   float scale, Floats out, int times) const {
    const Tensor in = tensor(q, "q"), to = tensor(out, "out");
    const std::vector<RowRef> list = refs(rows);
    return timed(times, [&] { ops->attention(in, list, {k, v}, q_heads, kv_heads, head_dim, scale, to); });
  }
  LatentOps& latent() const {
    if (LatentOps* found = ops->latent()) return *found;
    throw Unsupported("backend " + ops->name() + " has no latent operations");
  }
  void rope_table_f32(const Rows& rows, const std::vector<float>& freq, Floats out) const {
    const Tensor to = tensor(out, "out");
    if (to.n != static_cast<int64_t>(rows.size()) || to.dim != 2 * static_cast<int64_t>(freq.size()))
      throw Invalid("out: a row of cosines and sines for each row expected");
    latent().rope_table_f32(refs(rows), freq, to);
  }
  void hc_in(const BoundWeight& fn, const BoundWeight& base, const BoundWeight& scale, Floats streams, Floats y,
             Floats mix) const {
    const Tensor x = tensor(streams, "streams"), to = tensor(y, "y"), m = tensor(mix, "mix");
    const int64_t n = to.dim > 0 ? x.dim / to.dim : 0, all = 2 * n + n * n;
    if (fn.weight->rows() != all || fn.weight->cols() != x.dim || base.weight->cols() != all ||
        scale.weight->cols() != 3)
      throw Invalid("fn, base or scale of another number of streams");
    latent().hc_in({fn.weight.get(), base.weight.get(), scale.weight.get(), n}, x, to, m);
    ops->reset_scratch();
  }
  // The selected rows of each token row, ascending; None where all are visible.
  py::list select(Floats q, Floats weight, const Rows& rows, size_t index_rows, int64_t ratio, int64_t k) const {
    const Tensor in = tensor(q, "q"), w = tensor(weight, "weight");
    if (in.n != static_cast<int64_t>(rows.size())) throw Invalid("q: one row for each row of the step expected");
    if (k < 1 || ratio < 1) throw Invalid("a selection of no rows");
    const std::vector<RowRef> list = refs(rows);
    Selection chosen;
    {
      const py::gil_scoped_release release;
      chosen = latent().select(in, w, list, index_rows, ratio, w.dim, k);
    }
    py::list out;
    for (int64_t t = 0; t < chosen.n; ++t) {
      if (chosen.counts[t] < 0)
        out.append(py::none());
      else
        out.append(py::array_t<int32_t>(chosen.counts[t], chosen.ids + t * chosen.capacity));
    }
    ops->reset_scratch();
    return out;
  }
  void gather(Floats x, const std::vector<int32_t>& index, Floats out) const {
    ops->gather(tensor(x, "x"), index, tensor(out, "out"));
  }
};

}  // namespace

void bind_ops(py::module_& m) {
  m.def("cpu_isas", &cpu_isas);
  py::class_<BoundWeight>(m, "OpsWeight")
      .def_property_readonly("rows", [](const BoundWeight& w) { return w.weight->rows(); })
      .def_property_readonly("cols", [](const BoundWeight& w) { return w.weight->cols(); })
      .def_property_readonly("resident_bytes", [](const BoundWeight& w) { return w.weight->resident_bytes(); });
  py::class_<BoundState>(m, "OpsState")
      .def_property_readonly("capacity", [](const BoundState& s) { return s.state->capacity(); })
      .def_property_readonly("resident_bytes", [](const BoundState& s) { return s.state->resident_bytes(); })
      .def("reserve", [](const BoundState& s, int64_t n) { s.state->reserve(n); })
      .def("truncate", [](const BoundState& s, int64_t n) { s.state->truncate(n); })
      .def("fork_from", [](const BoundState& s, const BoundState& o, int64_t n) { s.state->fork_from(*o.state, n); })
      .def("export_rows",
           [](const BoundState& s, size_t index, int64_t first, int64_t count, py::array_t<uint8_t> out) {
             s.state->export_rows(
                 index, first, count,
                 std::as_writable_bytes(std::span(out.mutable_data(), static_cast<size_t>(out.size()))));
           })
      .def("import_rows", [](const BoundState& s, size_t index, int64_t first, int64_t count,
                             const py::array_t<uint8_t>& in) {
        s.state->import_rows(index, first, count, std::as_bytes(std::span(in.data(), static_cast<size_t>(in.size()))));
      });
  const auto in = [](const char* name) { return py::arg(name).noconvert(); };
  py::class_<BoundOps>(m, "Ops")
      .def_property_readonly("name", [](const BoundOps& o) { return o.ops->name(); })
      .def("load", &BoundOps::load, py::arg("parts"), py::arg("use") = "linear")
      .def("new_state", &BoundOps::new_state, py::arg("specs"), py::arg("capacity"))
      .def("reset_scratch", [](const BoundOps& o) { o.ops->reset_scratch(); })
      .def("embed", &BoundOps::embed, py::arg("table"), py::arg("ids"), in("out"))
      .def("rms_norm", &BoundOps::rms_norm, in("x"), py::arg("gain"), py::arg("eps"), in("y"))
      .def("linear", &BoundOps::linear, py::arg("w"), in("x"), in("y"), py::arg("gain") = nullptr,
           py::arg("eps") = 1e-5f, py::arg("bias") = nullptr, py::arg("times") = 1)
      .def("linear_add", &BoundOps::linear_add, py::arg("w"), in("x"), in("y"), py::arg("times") = 1)
      .def("linear_swiglu", &BoundOps::linear_swiglu, py::arg("w"), in("x"), in("y"), py::arg("gain") = nullptr,
           py::arg("eps") = 1e-5f, py::arg("times") = 1)
      .def("rope_table", &BoundOps::rope_table, py::arg("rows"), py::arg("freq"), in("out"))
      .def("rope_store", &BoundOps::rope_store, in("qkv"), in("table"), py::arg("interleaved"), py::arg("rows"),
           py::arg("k"), py::arg("v"), py::arg("q_heads"), py::arg("kv_heads"), py::arg("head_dim"),
           py::arg("times") = 1)
      .def("attention", &BoundOps::attention, in("q"), py::arg("rows"), py::arg("k"), py::arg("v"), py::arg("q_heads"),
           py::arg("kv_heads"), py::arg("head_dim"), py::arg("scale"), in("out"), py::arg("times") = 1)
      .def("rope_table_f32", &BoundOps::rope_table_f32, py::arg("rows"), py::arg("freq"), in("out"))
      .def("hc_in", &BoundOps::hc_in, py::arg("fn"), py::arg("base"), py::arg("scale"), in("streams"), in("y"),
           in("mix"))
      .def("select", &BoundOps::select, in("q"), in("weight"), py::arg("rows"), py::arg("index_rows"), py::arg("ratio"),
           py::arg("k"))
      .def("gather", &BoundOps::gather, in("x"), py::arg("index"), in("out"));
  m.def(
      "cpu_ops", [](int threads, const std::string& isa) { return BoundOps{make_cpu_ops(threads, isa)}; },
      py::arg("threads") = 0, py::arg("isa") = "auto");
  m.def("reference_ops", [] { return BoundOps{make_reference_ops()}; });
}

}  // namespace ds4
