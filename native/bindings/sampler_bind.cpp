// Sampler: one sequence's sampler, from Python and for the engine's step.
#include "session/sampler.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "bindings.h"
#include "reference/draw_row.h"

namespace py = pybind11;

namespace ds4 {
namespace {

template <typename T>
using Dense = py::array_t<T, py::array::c_style | py::array::forcecast>;

template <typename T>
std::span<const T> span_of(const Dense<T>& array) {
  if (array.ndim() != 1) throw Invalid("expected one dimension, got " + std::to_string(array.ndim()));
  return {array.data(), static_cast<size_t>(array.shape(0))};
}

}  // namespace

void bind_sampler(py::module_& m) {
  py::class_<Sampler>(m, "Sampler", "Chooses the next token of one sequence; see native/session/sampler.h.",
                      py::module_local())
      .def(py::init([](int64_t vocab, double temperature, int64_t top_k, double top_p, double min_p, uint64_t seed,
                       double presence_penalty, double frequency_penalty, double repetition_penalty,
                       std::vector<std::pair<int32_t, float>> logit_bias, std::optional<int64_t> logprobs) {
             return Sampler({temperature, top_k, top_p, min_p, seed, presence_penalty, frequency_penalty,
                             repetition_penalty, std::move(logit_bias), logprobs},
                            vocab);
           }),
           py::kw_only(), py::arg("vocab"), py::arg("temperature"), py::arg("top_k"), py::arg("top_p"),
           py::arg("min_p"), py::arg("seed"), py::arg("presence_penalty"), py::arg("frequency_penalty"),
           py::arg("repetition_penalty"), py::arg("logit_bias"), py::arg("logprobs"))
      .def_property_readonly("vocab", &Sampler::vocab)
      .def_property_readonly("seed", &Sampler::seed)
      .def("force_greedy", &Sampler::force_greedy, py::arg("on"))
      .def(
          "forbid", [](Sampler& s, const Dense<int32_t>& ids) { s.forbid(span_of(ids)); }, py::arg("ids"))
      .def(
          "set_mask",
          [](Sampler& s, const std::optional<Dense<uint32_t>>& mask) {
            if (mask)
              s.set_mask(span_of(*mask));
            else
              s.set_mask(std::nullopt);
          },
          py::arg("mask"))
      .def(
          "observe", [](Sampler& s, const Dense<int32_t>& ids, bool prompt) { s.observe(span_of(ids), prompt); },
          py::arg("ids"), py::kw_only(), py::arg("prompt"))
      .def(
          "sample",
          [](Sampler& s, const Dense<float>& logits) -> py::tuple {
            const auto view = span_of(logits);
            SampleLogprobs logprobs;
            int32_t id;
            {
              py::gil_scoped_release release;
              id = s.sample(view, &logprobs);
            }
            if (id < 0 || !s.wants_logprobs()) return py::make_tuple(id, py::none());
            return py::make_tuple(id, py::make_tuple(logprobs.chosen, logprobs.top));
          },
          py::arg("logits"), "(token, None or (logprob, [(id, logprob), ...])) after logits [vocab]; -1 for none.");
  m.def(
      "draw_planned",
      [](Sampler& s, const Dense<float>& logits, int32_t capacity) -> std::optional<int32_t> {
        const auto view = span_of(logits);
        if (static_cast<int64_t>(view.size()) != s.vocab()) throw Invalid("logits of another vocabulary");
        if (capacity < 1) throw Invalid("a list of " + std::to_string(capacity) + " candidates");
        const auto plan = s.plan();
        if (!plan) return std::nullopt;
        std::vector<float> row(view.begin(), view.end());
        const int32_t id = draw_row(*plan, row, capacity);
        s.drawn(id);
        return id;
      },
      py::arg("sampler"), py::arg("logits"), py::arg("capacity") = 1024,
      "What a backend draws from logits [vocab] by the sampler's plan; None when the sampler draws by itself.");
  m.def(
      "sampler_sums",
      [](const Dense<float>& logits, float temperature) { return sampler_sums(span_of(logits), temperature); },
      py::arg("logits"), py::arg("temperature"), "Sum of a row's weights by each variant of the vocabulary passes.");
  m.def("sampler_uniform", &sampler_uniform, py::arg("seed"), py::arg("index"),
        "The random number in [0, 1) of token `index` of a sequence.");
}

}  // namespace ds4
