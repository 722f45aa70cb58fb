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

// Filters up to this length are normalised with a filter in each lane (lanes.h), longer ones with their taps in the lanes
// (normalize.h): they fill vectors by themselves, and the blocks of band.h read their taps one after the other. The
// backward pass of long filters works on tiles (tile_backward.cpp).
constexpr int64_t kMostInLanes = 16;

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

  // Overwrites the gradient of normalised weights with that of the logits; `logits` is room for a table, which softmax
  // does not need.
  void normalize_backward(int64_t t, const S* weights, S* grad, S* logits) const;

  // Of filters in lanes, the backward pass:
  //
  // A table of products, those of filter f in the row at products + f·apart, with 0 for taps without a source.
  void take(int64_t t, const S* products, int64_t apart, S* table) const;

  // Writes the gradients of time t.
  void write(int64_t t, const S* table) const;

  // f(first filter, how many) for each vector of filters, a filter in each lane.
  template <class F>
  void each_vector(F f) const {
    for (int64_t i = 0; i < filters_; i += kWidth<S>) f(i, std::min<int64_t>(kWidth<S>, filters_ - i));
  }

 private:
  // The logits of time t.
  void read(int64_t t, S* table) const;
  // f(filter, its row of the table, its sentence) for each filter, where they have rows.
  template <class F>
  void each_row(S* table, F f) const {
    for (int64_t i = 0; i < filters_; ++i) f(i, table + i * pitch_, unit_.sequences[i / p_.heads]);
  }
  void mask(int64_t t, S* table) const;
  // With `some`: the taps that meet a source.
  TakingPart<S> inside(int64_t t, int64_t f, int64_t count, bool some) const;
  // Fetches the logits of time t into the cache: a row of them is too short for the hardware to predict the next one.
  void fetch(int64_t t) const;

  const Problem<T>& p_;
  const Unit& unit_;
  bool long_;
  int64_t filters_, pitch_;
  int64_t *offsets_, *gradient_offsets_, *row_offsets_;  // of filters in the weight, its gradient, and rows of K
  uint32_t* words_ = nullptr;
  S* factors_ = nullptr;
  T* rows_ = nullptr;
};

}  // namespace lightconv
