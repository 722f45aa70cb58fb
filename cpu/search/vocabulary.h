// The best next words of hypotheses.
#pragma once

#include <cstdint>
#include <vector>

#include "search/model.h"

namespace lightconv::decoding {

struct Options;

// How a hypothesis may not continue, in addition to what is forbidden for all.
struct Constraint {
  std::vector<int64_t> blocked;
  int64_t forced = -1;   // the only word that is allowed, −1 for none
  int64_t copy_of = -1;  // the row whose logits stand in for this one's, −1 for its own
  bool only_end = false, no_end = false, suppress = true;
};

// Outputs, log-normalisers and the best words of an ensemble, by the mean of its probabilities. With one model and no
// forced words, nothing of size rows × words is ever kept: outputs are computed and read some columns at a time.
class Vocabulary {
 public:
  Vocabulary(const std::vector<const Model*>& ensemble, const Options& options, Workshop& shop);

  int64_t words() const { return words_; }

  // Finds the `count` best words of each row. hidden: the input of each model's output layer, (rows, …).
  void best(
      const std::vector<const float*>& hidden, int64_t rows, int64_t count, const std::vector<Constraint>& constraints);

  int64_t count() const { return count_; }
  // The log-probability of a row's k-th best word, and the word.
  float value(int64_t row, int64_t k) const { return values_[row * count_ + k]; }
  int64_t word(int64_t row, int64_t k) const { return indices_[row * count_ + k]; }

 private:
  void in_pieces(const float* hidden, int64_t rows, const std::vector<Constraint>& constraints);
  void at_once(const std::vector<const float*>& hidden, int64_t rows, const std::vector<Constraint>& constraints);
  template <class F>
  void each_row(int64_t rows, int64_t columns, F f);
  void constrain(float* logits, int64_t first, int64_t last, const Constraint& constraint) const;
  void cool(float* logits, int64_t n) const;
  void settle(int64_t row, float normaliser);

  const std::vector<const Model*>& ensemble_;
  const Options& options_;
  Workshop& shop_;
  int64_t words_, count_ = 0;
  std::vector<float> values_;
  std::vector<int64_t> indices_;
  Buffer<float> logits_, others_;
};

}  // namespace lightconv::decoding
