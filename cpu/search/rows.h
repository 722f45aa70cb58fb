// What beam search reads from a row of logits: the logarithm of the sum of exponentials, and the largest entries.
// Both accept a row in pieces. Also sums of probabilities that are given as logarithms.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/vector.h"

namespace lightconv::decoding {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// n floats at `from`, n < kWidth<float>; −∞ in the other lanes.
LIGHTCONV_INLINE Vector<float> load_or_lowest(const float* from, int64_t n) {
  float lanes[kWidth<float>];
  for (int64_t i = 0; i < kWidth<float>; ++i) lanes[i] = i < n ? from[i] : -kInfinity;
  return load(lanes);
}

template <class F>
LIGHTCONV_INLINE void each_vector(const float* row, int64_t n, F f) {
  constexpr int64_t lanes = kWidth<float>;
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) f(load(row + i));
  if (i < n) f(load_or_lowest(row + i, n - i));
}

inline float largest(const float* row, int64_t n) {
  Vector<float> found = broadcast(-kInfinity);
  each_vector(row, n, [&](Vector<float> x) { found = larger<float>(found, x); });
  return largest_across<float>(found)[0];
}

// log Σ exp, to within a few units in the last place. NaN and infinities in a row give NaN or an infinity.
class LogSum {
 public:
  void add(const float* piece, int64_t n) {
    const float top = std::max(top_, largest(piece, n));
    if (top == -kInfinity) {
      // There is nothing to add yet, and −∞ − −∞ would be NaN. But a NaN in the piece must not be lost.
      for (int64_t i = 0; i < n; ++i) sum_ += piece[i] == piece[i] ? 0.0f : piece[i];
      return;
    }
    Vector<float> sum{};
    each_vector(piece, n, [&](Vector<float> x) { sum += exponential(x - top); });
    const float added = sum_across<float>(sum)[0];
    // Before the first piece there is no sum, and −∞ − −∞ would be NaN.
    sum_ = sum_ == 0 ? added : sum_ * std::exp(top_ - top) + added;
    top_ = top;
  }
  float value() const { return top_ + std::log(sum_); }

 private:
  float top_ = -kInfinity, sum_ = 0;
};

// log(e^a + e^b); both may be −∞.
inline float log_add(float a, float b) {
  const float high = std::max(a, b), low = std::min(a, b);
  return high == -kInfinity ? high : high + std::log1p(std::exp(low - high));
}

// Raises bounds a from above to bounds of log_add(a, b), without a logarithm: log(1 + e^−d) ≤ log 2 − d/2 + d²/8, which
// falls until d = 2. The excess is at most d⁴/192, and nowhere above 0.2. 1e-6 more covers the rounding on either side.
inline void bound_log_add(float* a, const float* b, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float high = std::max(a[i], b[i]), apart = high - std::min(a[i], b[i]);
    const float d = apart < 2 ? apart : 2;  // in this order also for −∞ − −∞
    a[i] = high + ((d * 0.125f - 0.5f) * d + 0.6931482f);
  }
}

// The largest entries in descending order; equal ones in the order of their indices. Pieces come in that order too.
class BestEntries {
 public:
  BestEntries(float* values, int64_t* indices, int64_t count) : values_(values), indices_(indices), count_(count) {}

  void add(const float* piece, int64_t n, int64_t first) {
    add(piece, n, first, [&](int64_t i) { return piece[i]; });
  }

  // The entries are value(i) ≤ bounds[i]. It is not called for those that cannot be among the largest.
  template <class F>
  void add(const float* bounds, int64_t n, int64_t first, F value) {
    const auto look = [&](int64_t i) {
      if (held_ < count_ || bounds[i] > values_[count_ - 1]) offer(value(i), first + i);
    };
    int64_t i = 0;
    for (; i < n && held_ < count_; ++i) look(i);
    // Four vectors at a time: after the first few hundred entries hardly any vector has a candidate.
    constexpr int64_t lanes = kWidth<float>, step = 4 * lanes;
    for (; i + step <= n; i += step) {
      const Vector<float> top = larger<float>(
          larger<float>(load(bounds + i), load(bounds + i + lanes)),
          larger<float>(load(bounds + i + 2 * lanes), load(bounds + i + 3 * lanes)));
      if (!(largest_across<float>(top)[0] > values_[count_ - 1])) continue;
      for (int64_t j = i; j < i + step; ++j) look(j);
    }
    for (; i < n; ++i) look(i);
  }

 private:
  void offer(float value, int64_t index) {
    if (held_ == count_ && !(value > values_[count_ - 1])) return;
    int64_t place = held_ < count_ ? held_++ : count_ - 1;
    for (; place > 0 && value > values_[place - 1]; --place) {
      values_[place] = values_[place - 1];
      indices_[place] = indices_[place - 1];
    }
    values_[place] = value;
    indices_[place] = index;
  }

  float* values_;
  int64_t* indices_;
  int64_t count_, held_ = 0;
};

}  // namespace lightconv::decoding
