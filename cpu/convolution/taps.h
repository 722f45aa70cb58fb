// The inner loops of short filters. All weights of a few neighbouring outputs stay in registers, in one pass over the
// channels of a head, so rows are read and written in the order of memory.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "common/scalars.h"
#include "convolution/inner.h"

namespace lightconv {

namespace detail {

// How many outputs fit into the registers, with their weights and sums.
template <int kTaps>
constexpr int kTimes = 4 * kTaps + 6 <= kVectorRegisters ? 4 : 2 * kTaps + 4 <= kVectorRegisters ? 2 : 1;

template <class S>
using Weigh = void (*)(const S*, int64_t, Weights<S>, const S*, S*, int64_t, int64_t);

// out[i] = bias + Σ_m weight[i][m] · source[i + m], m < kTaps, in the order of m. The last vector of channels, of which
// there are at least one, may overlap the one before.
template <class S, int kTaps, int kTimes>
void weigh(
    const S* source, int64_t source_pitch, Weights<S> weights, const S* bias, S* out, int64_t out_pitch,
    int64_t channels) {
  Vector<S> w[kTimes][kTaps > 0 ? kTaps : 1];
#pragma GCC unroll 4
  for (int i = 0; i < kTimes; ++i) {
#pragma GCC unroll 8
    for (int m = 0; m < kTaps; ++m) w[i][m] = broadcast(weights.data[i * weights.time + m * weights.step]);
  }
  for (int64_t next = 0; next < channels; next += kWidth<S>) {
    const int64_t c = std::min<int64_t>(next, channels - kWidth<S>);
    Vector<S> sum[kTimes];
#pragma GCC unroll 4
    for (int i = 0; i < kTimes; ++i) sum[i] = bias ? load(bias + c) : Vector<S>{};
#pragma GCC unroll 16
    for (int j = 0; j < kTaps + kTimes - 1; ++j) {
      const Vector<S> x = load(source + j * source_pitch + c);
#pragma GCC unroll 4
      for (int i = 0; i < kTimes; ++i) {
        if (j - i >= 0 && j - i < kTaps) sum[i] += w[i][j - i] * x;
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kTimes; ++i) store(out + i * out_pitch + c, sum[i]);
  }
}

template <class S, bool kSeveral, size_t... kTaps>
constexpr std::array<Weigh<S>, kShort + 1> weigh_table(std::index_sequence<kTaps...>) {
  return {&weigh<S, int(kTaps), kSeveral ? kTimes<int(kTaps)> : 1>...};
}

template <size_t... kTaps>
constexpr std::array<int, kShort + 1> times_table(std::index_sequence<kTaps...>) {
  return {kTimes<int(kTaps)>...};
}

// Σ over channels of grad[i] · source[i + m], lane by lane: sums[i·time + m·step] is a vector. kAdd: adds to `sums`,
// with time = 0.
template <class S, int kTaps, int kTimes, bool kAdd>
void correlate(
    const S* grad, int64_t grad_pitch, const S* source, int64_t source_pitch, int64_t channels, S* sums, int64_t time,
    int64_t step) {
  constexpr int kSums = kAdd ? 1 : kTimes;
  Vector<S> sum[kSums][kTaps];
#pragma GCC unroll 4
  for (int i = 0; i < kSums; ++i) {
#pragma GCC unroll 8
    for (int m = 0; m < kTaps; ++m) sum[i][m] = kAdd ? load(sums + m * step) : Vector<S>{};
  }
  const auto add = [&](auto load_channels) __attribute__((always_inline)) {
    Vector<S> g[kTimes];
#pragma GCC unroll 4
    for (int i = 0; i < kTimes; ++i) g[i] = load_channels(grad + i * grad_pitch);
#pragma GCC unroll 16
    for (int j = 0; j < kTaps + kTimes - 1; ++j) {
      const Vector<S> x = load_channels(source + j * source_pitch);
#pragma GCC unroll 4
      for (int i = 0; i < kTimes; ++i) {
        if (j - i >= 0 && j - i < kTaps) sum[kAdd ? 0 : i][j - i] += g[i] * x;
      }
    }
  };
  int64_t c = 0;
  for (; c + kWidth<S> <= channels; c += kWidth<S>) {
    add([&](const S* row) __attribute__((always_inline)) { return load(row + c); });
  }
  if (c < channels) add([&](const S* row) __attribute__((always_inline)) { return load_some(row + c, channels - c); });
#pragma GCC unroll 4
  for (int i = 0; i < kSums; ++i) {
#pragma GCC unroll 8
    for (int m = 0; m < kTaps; ++m) store(sums + i * time + m * step, sum[i][m]);
  }
}

template <class S>
using Correlate = void (*)(const S*, int64_t, const S*, int64_t, int64_t, S*, int64_t, int64_t);

// Shared filters have one set of sums, which leaves registers for more rows.
template <int kTaps, bool kAdd>
constexpr int kCorrelateTimes = kAdd ? 4 : 2 * kTaps + 4 <= kVectorRegisters ? 2 : 1;

template <class S, bool kSeveral, bool kAdd, size_t... kTaps>
constexpr std::array<Correlate<S>, kShort> correlate_table(std::index_sequence<kTaps...>) {
  return {&correlate<S, int(kTaps) + 1, kSeveral ? kCorrelateTimes<int(kTaps) + 1, kAdd> : 1, kAdd>...};
}

template <bool kAdd, size_t... kTaps>
constexpr std::array<int, kShort> correlate_times_table(std::index_sequence<kTaps...>) {
  return {kCorrelateTimes<int(kTaps) + 1, kAdd>...};
}

}  // namespace detail

}  // namespace lightconv
