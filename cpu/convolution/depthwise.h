// Depthwise convolution: shared filters for heads of one channel. Neighbouring channels are in the lanes, each with its
// own weights, from a transposed table.
#pragma once

#include "convolution/tile.h"

namespace lightconv {

// The taps of the tile's channels, (K, pitch), padded with zeros to whole vectors.
template <class S>
struct ChannelTaps {
  const S* data = nullptr;
  int64_t pitch = 0;

  const S* at(int64_t k) const { return data + k * pitch; }
};

template <class T>
ChannelTaps<Sum<T>> channel_taps(const Problem<T>& p, const Tile& tile, const Filters<T>& filters, Arena& arena) {
  using S = Sum<T>;
  const int64_t pitch = round_up<S>(tile.heads());
  S* taps = arena.take<S>(p.kernel_size * pitch);
  std::fill(taps, taps + p.kernel_size * pitch, S(0));
  for (int64_t c = 0; c < tile.heads(); ++c) {
    const S* row = filters.taps(c).data;
    for (int64_t k = 0; k < p.kernel_size; ++k) taps[k * pitch + c] = row[k];
  }
  return {taps, pitch};
}

// Rows `begin` … `end` − 1 of outputs from the sources `valid_first` … `valid_last` − 1, as convolve_band computes
// them. `bias` holds whole vectors, or is null.
template <class S, bool kTransposed>
void convolve_each(
    Rows<S> out, int64_t begin, int64_t end, Rows<S> source, int64_t valid_first, int64_t valid_last,
    ChannelTaps<S> taps, int64_t kernel_size, int64_t offset, const S* bias) {
  constexpr int kRows = 4;
  const int64_t span = kernel_size - 1;
  // Output t meets the sources top(t) … top(t) + K − 1, in ascending time; step j is tap j, or K − 1 − j.
  const auto top = [&](int64_t t) { return kTransposed ? t - offset - span : t + offset; };
  const auto tap = [&](int64_t step) { return taps.at(kTransposed ? span - step : step); };
  for (int64_t c = 0; c < taps.pitch; c += kWidth<S>) {
    const Vector<S> start = bias ? load(bias + c) : Vector<S>{};
    for (int64_t t = begin; t < end;) {
      const int64_t at = top(t);
      if (t + kRows <= end && at >= valid_first && at + span + kRows <= valid_last) {
        Vector<S> sum[kRows];
#pragma GCC unroll 4
        for (int i = 0; i < kRows; ++i) sum[i] = start;
        for (int64_t step = 0; step < kernel_size; ++step) {
          const Vector<S> w = load(tap(step) + c);
#pragma GCC unroll 4
          for (int i = 0; i < kRows; ++i) sum[i] += w * load(source.at(at + step + i) + c);
        }
#pragma GCC unroll 4
        for (int i = 0; i < kRows; ++i) store(out.at(t + i) + c, sum[i]);
        t += kRows;
        continue;
      }
      Vector<S> sum = start;
      const int64_t last = std::min(kernel_size, valid_last - at);
      for (int64_t step = std::max<int64_t>(0, valid_first - at); step < last; ++step) {
        sum += load(tap(step) + c) * load(source.at(at + step) + c);
      }
      store(out.at(t) + c, sum);
      ++t;
    }
  }
}

// dw[c][k] = Σ_t grad[t][c] · source[t + offset + k][c] over the rows `begin` … `end` − 1 that meet a source, added to
// `sum` (channels, sum_pitch).
template <class S>
void correlate_each(
    Rows<S> grad, int64_t begin, int64_t end, Rows<S> source, int64_t valid_first, int64_t valid_last,
    int64_t kernel_size, int64_t offset, int64_t channels, S* sum, int64_t sum_pitch) {
  constexpr int w = kWidth<S>, kTaps = 8;
  const auto first = [&](int64_t k) { return std::max(begin, valid_first - offset - k); };
  const auto last = [&](int64_t k) { return std::min(end, valid_last - offset - k); };
  for (int64_t c = 0; c < channels; c += w) {
    for (int64_t k = 0; k < kernel_size; k += kTaps) {
      const int taps = int(std::min<int64_t>(kTaps, kernel_size - k));
      Vector<S> total[kTaps] = {};
      const auto add = [&](int j, int64_t from, int64_t to) {
        for (int64_t t = from; t < to; ++t) total[j] += load(grad.at(t) + c) * load(source.at(t + offset + k + j) + c);
      };
      // The rows for which all taps of the block have a source. The rows before and after are added tap by tap.
      const int64_t low = first(k), high = last(k + kTaps - 1);
      const bool whole = taps == kTaps && low < high;
      for (int j = 0; j < taps; ++j) add(j, first(k + j), whole ? low : last(k + j));
      if (whole) {
        for (int64_t t = low; t < high; ++t) {
          const Vector<S> g = load(grad.at(t) + c);
#pragma GCC unroll 8
          for (int j = 0; j < kTaps; ++j) total[j] += g * load(source.at(t + offset + k + j) + c);
        }
        for (int j = 0; j < kTaps; ++j) add(j, high, last(k + j));
      }
      for (int j = 0; j < taps; ++j) {
        S lanes[w];
        store(lanes, total[j]);
        for (int64_t i = 0; i < std::min<int64_t>(w, channels - c); ++i) sum[(c + i) * sum_pitch + k + j] += lanes[i];
      }
    }
  }
}

}  // namespace lightconv
