// The filters of a walk: the sentences of a unit at one time, a filter in each lane.
#pragma once

#include "convolution/lanes.h"
#include "convolution/problem.h"

namespace lightconv {

struct Unit {
  const Sequence* sequences;  // of neighbouring sentences, with the same outputs
  int64_t count;
  int64_t begin, end;  // source rows

  int64_t batch() const { return sequences->batch; }
};

// The filters of a unit's sentences at one time, after normalisation and dropout: a table (tap, filter), where filter
// (b − first b)·H + h is in a lane of its own.
template <class T>
class FilterTable {
 public:
  using S = Sum<T>;

  FilterTable(const Problem<T>& p, const Unit& unit, Arena& arena);

  int64_t pitch() const { return pitch_; }
  int64_t size() const { return p_.kernel_size * pitch_; }

  // The logits of time t.
  void read(int64_t t, S* table) const;

  // Overwrites logits with normalised weights.
  void normalize(int64_t t, S* table) const;

  // The factors of dropout.
  void draw(int64_t t, S* table) const;

  // Overwrites the gradient of normalised weights with that of the logits; `logits` is room for a table, which softmax
  // does not need.
  void normalize_backward(int64_t t, const S* weights, S* grad, S* logits) const;

  // Sets to 0 what belongs to taps without a source.
  void mask(int64_t t, S* table) const;

  // Writes the gradients of time t.
  void write(int64_t t, const S* table) const;

  // f(first filter, how many) for each vector of filters.
  template <class F>
  void each_vector(F f) const {
    for (int64_t i = 0; i < filters_; i += kWidth<S>) f(i, std::min<int64_t>(kWidth<S>, filters_ - i));
  }

 private:
  // With `some`: the taps that meet a source.
  TakingPart<S> inside(int64_t t, int64_t f, int64_t count, bool some) const;
  // Fetches the logits of time t into the cache: a row of them is too short for the hardware to predict the next one.
  void fetch(int64_t t) const;

  const Problem<T>& p_;
  const Unit& unit_;
  int64_t filters_, pitch_;
  int64_t *offsets_, *gradient_offsets_, *row_offsets_;  // of filters in the weight, its gradient, and rows of K
  uint32_t* words_ = nullptr;
  S* factors_ = nullptr;
  T* rows_ = nullptr;
};

}  // namespace lightconv
