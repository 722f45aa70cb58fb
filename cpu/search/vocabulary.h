// The best next words of hypotheses.
#pragma once

#include <cstdint>
#include <vector>

#include "search/model.h"

namespace lightconv::decoding {

struct Batch;
struct Options;

// How a hypothesis may not continue, in addition to what is forbidden for all.
struct Constraint {
  std::vector<int64_t> blocked;
  int64_t forced = -1;   // the only word that is allowed, −1 for none
  int64_t copy_of = -1;  // an earlier row whose best words are also those of this one, −1 for its own
  bool only_end = false, no_end = false, suppress = true;
};

// The output layers of an ensemble, with a column for each word of the vocabulary or, for a batch with a shortlist, for
// each word of that. It holds no other words: probabilities are normalised over these.
class Outputs {
 public:
  Outputs(const std::vector<const Model*>& ensemble, const Batch& batch);
  Outputs(const Outputs&) = delete;
  Outputs& operator=(const Outputs&) = delete;

  int64_t models() const { return static_cast<int64_t>(layers_.size()); }
  const Linear& layer(int64_t model) const { return *layers_[model]; }
  int64_t columns() const { return layers_[0]->outputs(); }
  int64_t word(int64_t column) const { return words_ ? words_[column] : column; }
  // −1 for a word without a column.
  int64_t column(int64_t word) const;

 private:
  std::vector<Linear> selected_;
  std::vector<const Linear*> layers_;
  const int64_t* words_;
};

// Log-normalisers and the best words of an ensemble, by the mean of its probabilities. With one model and no forced
// words, nothing of size rows × columns is ever kept: outputs are computed and read some columns at a time.
class Vocabulary {
 public:
  Vocabulary(const Outputs& outputs, const Options& options, Workshop& shop);

  int64_t words() const { return words_; }

  // Finds the `count` best words of each row. hidden: the input of each model's output layer, (rows, …).
  void best(
      const std::vector<const float*>& hidden, int64_t rows, int64_t count, const std::vector<Constraint>& constraints);

  int64_t count() const { return count_; }
  // The log-probability of a row's k-th best word, and the word.
  float value(int64_t row, int64_t k) const { return values_[row * count_ + k]; }
  int64_t word(int64_t row, int64_t k) const { return outputs_.word(indices_[row * count_ + k]); }

 private:
  void in_pieces(const float* hidden, int64_t rows, const std::vector<Constraint>& constraints);
  void at_once(const std::vector<const float*>& hidden, int64_t rows, const std::vector<Constraint>& constraints);
  // The best words of a row by the mean of the models, whose logits are `pitch` floats apart. bounds: scratch.
  void average(float* logits, int64_t pitch, int64_t row, const Constraint& constraint, float* bounds);
  template <class F>
  void each_row(int64_t rows, int64_t columns, F f);
  void constrain(float* logits, int64_t first, int64_t last, const Constraint& constraint) const;
  void cool(float* logits, int64_t n) const;
  void settle(int64_t row, float normaliser);

  const Outputs& outputs_;
  const Options& options_;
  Workshop& shop_;
  int64_t pad_, unk_, eos_;  // columns, −1 for none
  std::vector<int64_t> suppress_;
  int64_t words_, count_ = 0;
  std::vector<float> values_;
  std::vector<int64_t> indices_;  // columns
  Buffer<float> logits_;
};

}  // namespace lightconv::decoding
