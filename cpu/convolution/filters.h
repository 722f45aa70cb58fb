// The filters of a walk: those of a unit's sentences at one time.
#pragma once

#include "convolution/lanes.h"
#include "convolution/tile.h"

namespace lightconv {

struct Unit {
  const Sequence* sequences;  // of neighbouring sentences, with the same outputs
  int64_t count;
  int64_t begin, end;  // source rows

  int64_t batch() const { return sequences->batch; }
};

// The filters of a unit's sentences at one time, after normalisation and dropout: a table in which tap k of filter
// (b − first b)·H + h is at k·tap() + filter·apart().
template <class T>
class FilterTable {
 public:
  using S = Sum<T>;

  FilterTable(const Problem<T>& p, const Unit& unit, Arena& arena);

  int64_t tap() const { return long_ ? 1 : pitch_; }
  int64_t apart() const { return long_ ? pitch_ : 1; }
  int64_t size() const { return (long_ ? filters_ : p_.kernel_size) * pitch_; }

  // The normalised weights of time t.
  void normalize(int64_t t, S* table) const;

  // The factors of dropout.
  void draw(int64_t t, S* table) const;

  // Overwrites the gradient of the normalised weights with the gradient of the logits. `logits` is scratch space for a
  // table; softmax does not need it.
  void normalize_backward(int64_t t, const S* weights, S* grad, S* logits) const;

  // For the backward pass of filters in lanes:
  //
  // Makes a table of the products, with 0 for taps without a source. The products of filter f are at products +
  // f·apart.
  void take(int64_t t, const S* products, int64_t apart, S* table) const;

  // Writes the gradients of time t.
  void write(int64_t t, const S* table) const;

  // Calls f(first filter, how many) for each vector of filters, with one filter in each lane.
  template <class F>
  void each_vector(F f) const {
    for (int64_t i = 0; i < filters_; i += kWidth<S>) f(i, std::min<int64_t>(kWidth<S>, filters_ - i));
  }

 private:
  // The logits of time t.
  void read(int64_t t, S* table) const;
  // Calls f(filter, its row of the table, its sentence) for each filter, where filters are rows of the table.
  template <class F>
  void each_row(S* table, F f) const {
    for (int64_t i = 0; i < filters_; ++i) f(i, table + i * pitch_, unit_.sequences[i / p_.heads]);
  }
  void mask(int64_t t, S* table) const;
  // With `some`: the taps that meet a source.
  TakingPart<S> inside(int64_t t, int64_t f, int64_t count, bool some) const;
  // Prefetches the logits of time t: a row of them is too short for the hardware to predict the next one.
  void fetch(int64_t t) const;

  const Problem<T>& p_;
  const Unit& unit_;
  bool long_;
  int64_t filters_, pitch_;
  int64_t *offsets_, *gradient_offsets_, *row_offsets_;  // of filters in the weight, its gradient, and rows of K
  uint32_t* words_ = nullptr;
  S* factors_ = nullptr;
};

}  // namespace lightconv
