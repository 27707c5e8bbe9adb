#include "reference/draw_row.h"

#include <algorithm>

namespace ds4 {
namespace {

using namespace drawing;

void edit(const DrawPlan& plan, std::span<float> logits) {
  for (const auto& [id, bias] : plan.bias) logits[static_cast<size_t>(id)] += bias;
  for (const int32_t id : plan.forbidden) logits[static_cast<size_t>(id)] = minus_infinity();
  if (!plan.mask) return;
  for (size_t i = 0; i < logits.size(); ++i) {
    const bool allowed = i / 32 < plan.mask->size() && ((*plan.mask)[i / 32] >> (i % 32) & 1) != 0;
    if (!allowed) logits[i] = minus_infinity();
  }
}

}  // namespace

int32_t draw_row(const DrawPlan& plan, std::span<float> logits, int32_t capacity) {
  const DrawSettings& s = plan.settings;
  logits = logits.first(static_cast<size_t>(s.vocab));
  edit(plan, logits);
  const auto blocks = static_cast<size_t>(blocks_of(s.vocab));
  const auto block = [&](size_t b) {
    return logits.subspan(b * kBlock, std::min<size_t>(kBlock, logits.size() - b * kBlock));
  };
  std::vector<float> maxima;
  for (size_t b = 0; b < blocks; ++b) {
    float most = minus_infinity();
    for (const float x : block(b)) most = x > most ? x : most;
    maxima.push_back(most);
  }
  std::vector<uint64_t> sums(blocks);
  const float best = *std::max_element(maxima.begin(), maxima.end());
  if (needs_sums(s))
    for (size_t b = 0; b < blocks; ++b)
      for (const float x : block(b)) sums[b] += weight(x, best, s.scale);
  std::vector<Candidate> list(static_cast<size_t>(capacity)), overflow(truncates(s) ? logits.size() : 0);
  int32_t count = 0;
  const Row row{logits.data(), maxima.data(), sums.data(), list.data(), overflow.data(), capacity, &count};
  return drawing::draw(OneThread{}, OneThread{}, s, row);
}

}  // namespace ds4
