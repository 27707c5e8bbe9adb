// Chooses the next token of one sequence from its logits.
//
// Order of the steps: logit bias, penalties (repetition, then frequency and presence), forbidden ids and mask,
// temperature, top-k, top-p, min-p, draw. After temperature all three truncations are prefixes of the vocabulary
// ordered by (logit descending, id ascending), so the vocabulary is never sorted: maxima of blocks of 64 logits say
// which blocks can hold a survivor, and the border of a prefix is found by selection.
//
// The result is a function of (parameters, seed, index of the token, observed tokens, logits), bit for bit on every
// platform. The random number is counter-based (SplitMix64 of seed and token index). Exponentials are our own
// polynomial in single precision. Weights are rounded to multiples of 2^-34, so that sums of up to 2^19 of them are
// exact in double and do not depend on their order: a token less likely than 2^-35 times the best is never drawn.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "draw.h"
#include "types.h"

namespace ds4 {

struct SamplerParams {
  double temperature = 1.0;  // <= 0: greedy
  int64_t top_k = 0;         // 0: off
  double top_p = 1.0;        // 1: off
  double min_p = 0.0;        // 0: off; relative to the most probable token
  uint64_t seed = 0;
  double presence_penalty = 0.0;                      // output tokens
  double frequency_penalty = 0.0;                     // output tokens
  double repetition_penalty = 1.0;                    // prompt and output tokens
  std::vector<std::pair<int32_t, float>> logit_bias;  // (id, added to the logit)
  std::optional<int64_t> logprobs;                    // number of best tokens to report; nullopt: no log-probabilities
};

// Natural-log probabilities after bias, penalties, forbidden ids and mask, before temperature and truncation.
struct SampleLogprobs {
  double chosen = 0.0;
  std::vector<std::pair<int32_t, double>> top;  // best first, ties by lower id
};

class Sampler {
 public:
  static constexpr int64_t kMaxVocab = int64_t{1} << 19;

  // Throws Invalid (naming the parameter, the value found and the values allowed).
  Sampler(SamplerParams params, int64_t vocab);

  int64_t vocab() const { return vocab_; }
  bool wants_logprobs() const { return params_.logprobs.has_value(); }
  uint64_t seed() const { return params_.seed; }

  // Draws the token after `logits` [vocab], counts it as output, and moves to the next random number (also when the
  // choice was greedy). -1 when nothing may be chosen; then nothing is counted. NaN is never chosen; +inf always
  // is, the lowest id first. `logprobs` is filled when the parameters ask for it. `logits` is not modified.
  // Not thread-safe per sampler; different samplers are independent. Throws Invalid when the size differs.
  int32_t sample(std::span<const float> logits, SampleLogprobs* logprobs = nullptr);

  // The next draw for a backend that draws where its logits are; `sample` of the same logits and then `drawn` of its
  // result are the same thing. Nullopt where the draw needs more than a plan says: log-probabilities, penalties, a bias
  // with an id twice. Valid until the sampler changes.
  std::optional<DrawPlan> plan() const;
  // The plan's draw has given `id`; -1 counts as nothing.
  void drawn(int32_t id);

  void force_greedy(bool on) { force_greedy_ = on; }
  // Ids that are never chosen; replaces the former set.
  void forbid(std::span<const int32_t> ids);
  // Allowed ids as bits, id i at bit i % 32 of word i / 32; ids beyond the last word are not allowed.
  // nullopt allows all. The words are copied.
  void set_mask(std::optional<std::span<const uint32_t>> words);
  // Counts tokens for the penalties; `sample` has already counted what it returned.
  void observe(std::span<const int32_t> ids, bool prompt);

 private:
  struct Candidate {
    float logit;
    int32_t id;
    double weight;
  };
  struct Seen {
    int32_t id;
    int32_t output_count;
  };

  bool tracks_tokens() const {
    return params_.presence_penalty != 0 || params_.frequency_penalty != 0 || params_.repetition_penalty != 1;
  }
  void check_ids(std::span<const int32_t> ids, const char* what) const;
  void count(int32_t id, bool output);
  const float* adjusted(const float* logits);  // bias, penalties, forbidden ids, mask; into scratch_ when needed
  int32_t argmax(const float* logits, float best) const;
  int32_t draw(const float* logits, float best);
  double sum_all(const float* logits, float best, float scale) const;  // weights of the whole vocabulary
  int32_t draw_from_all(const float* logits, float best, float inverse_temperature, double total) const;
  void fill_logprobs(const float* logits, float best, int32_t chosen, SampleLogprobs& out);
  // candidates_ = tokens with (logit - best) * scale >= threshold, in id order, without weights.
  void collect(const float* logits, float best, float scale, float threshold);
  void collect_top(const float* logits, int64_t k);
  double weigh(float best, float scale);   // fills the weights of candidates_, returns their sum
  void cut_to_mass(double mass);           // shortest prefix of candidates_ that weighs at least `mass`
  void keep_up_to(const Candidate& last);  // drops what orders after `last`

  SamplerParams params_;
  int64_t vocab_;
  float inverse_temperature_ = 0;
  float log_min_p_ = 0;
  bool biased_twice_ = false;
  uint64_t key_;
  uint64_t index_ = 0;
  bool force_greedy_ = false;
  std::vector<int32_t> forbidden_;
  std::vector<uint32_t> mask_;
  bool masked_ = false;
  std::vector<Seen> seen_;
  std::vector<int32_t> seen_index_;  // id -> index in seen_, or -1; sized on first use
  std::vector<float> scratch_;       // [vocab], sized on first use
  std::vector<float> block_max_;
  std::vector<float> selection_;
  std::vector<Candidate> candidates_;
  std::vector<Candidate> order_;
};

// The uniform random number in [0, 1) of token `index` of a sequence seeded with `seed`; 53 bits.
double sampler_uniform(uint64_t seed, uint64_t index);

// Sum of the weights of a row by each variant of the vocabulary passes that this CPU can run: equal bits, a test says.
std::vector<std::pair<std::string, double>> sampler_sums(std::span<const float> logits, float temperature);

}  // namespace ds4
