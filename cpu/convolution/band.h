// The inner loops: the filters of one head applied to rows of time, on tiles that are in a core's cache.
//
// A tile is a matrix in the type of the sums S, one row for each time step. Output row t and tap k meet source row
// t + offset + k; for a block of neighbouring outputs the taps form a band:
//
//     out[i] = Σ_j w[i][j − i] · source[j]          forward
//     dsource[i] = Σ_j w[j][i − j + K − 1] · grad[j]   its transpose, rows of w belonging to grad
//
// Every output adds its terms one by one in the order of j, whatever block it is in, so the result does not depend on
// how time is divided into blocks. Terms outside the sequence are skipped, never multiplied by zero.
#pragma once

#include <algorithm>

#include "common/vector.h"

namespace lightconv {

// Rows of time of one head: row `first` is at `data`.
template <class S>
struct Rows {
  S* data = nullptr;
  int64_t pitch = 0;
  int64_t first = 0;

  S* at(int64_t row) const { return data + (row - first) * pitch; }
};

template <class S>
Rows<const S> constant(Rows<S> rows) {
  return {rows.data, rows.pitch, rows.first};
}

// Weights of outputs at neighbouring times: that of output i and its m-th source, in ascending time, is
// data[i·time + m·step].
template <class S>
struct Weights {
  const S* data;
  int64_t time, step;
};

template <class S>
struct BandBlock {
  const S* source;  // row j = 0, first channel of the block
  int64_t source_pitch;
  Weights<S> weights;
  int64_t kernel_size;
  int64_t first, last;  // the rows j that exist
  const S* bias;        // of the block's channels, or null
  S* out;
  int64_t out_pitch;
};

// The most vectors of channels in a block. With 16 registers, six rows of two vectors need fewer loads per product than
// two rows of four.
constexpr int kBandVectors = kVectorRegisters == 32 ? 4 : 2;

namespace detail {

// Row j adds to outputs kFrom … kTo − 1 of the block.
template <class S, int kRows, int kVectors, int kFrom, int kTo>
LIGHTCONV_INLINE void band_row(const BandBlock<S>& b, int64_t j, Vector<S> (&sum)[kRows][kVectors]) {
  const S* row = b.source + j * b.source_pitch;
  const S* weights = b.weights.data + j * b.weights.step;
  const int64_t next = b.weights.time - b.weights.step;  // to the next output's weight of the same row
  Vector<S> x[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) x[v] = load(row + v * kWidth<S>);
#pragma GCC unroll 16
  for (int i = kFrom; i < kTo; ++i) {
    const Vector<S> w = broadcast(weights[i * next]);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[i][v] += w * x[v];
  }
}

// The band's two triangles, unrolled so that the sums stay in registers.
template <class S, int kRows, int kVectors, int kStep>
LIGHTCONV_INLINE void band_head(const BandBlock<S>& b, Vector<S> (&sum)[kRows][kVectors]) {
  if constexpr (kStep < kRows - 1) {
    if (kStep >= b.first && kStep < b.last) band_row<S, kRows, kVectors, 0, kStep + 1>(b, kStep, sum);
    band_head<S, kRows, kVectors, kStep + 1>(b, sum);
  }
}

template <class S, int kRows, int kVectors, int kStep>
LIGHTCONV_INLINE void band_tail(const BandBlock<S>& b, Vector<S> (&sum)[kRows][kVectors]) {
  if constexpr (kStep < kRows) {
    const int64_t j = b.kernel_size - 1 + kStep;
    if (j >= b.first && j < b.last) band_row<S, kRows, kVectors, kStep, kRows>(b, j, sum);
    band_tail<S, kRows, kVectors, kStep + 1>(b, sum);
  }
}

// kRows outputs (≤ K) of kVectors vectors of channels.
template <class S, int kRows, int kVectors>
void band_block(const BandBlock<S>& b) {
  Vector<S> sum[kRows][kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const Vector<S> start = b.bias ? load(b.bias + v * kWidth<S>) : Vector<S>{};
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) sum[i][v] = start;
  }
  band_head<S, kRows, kVectors, 0>(b, sum);
  const int64_t from = b.first > kRows - 1 ? b.first : kRows - 1;
  const int64_t to = b.last < b.kernel_size ? b.last : b.kernel_size;
  for (int64_t j = from; j < to; ++j) band_row<S, kRows, kVectors, 0, kRows>(b, j, sum);
  band_tail<S, kRows, kVectors, 1>(b, sum);
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(b.out + i * b.out_pitch + v * kWidth<S>, sum[i][v]);
  }
}

template <class S, int kVectors, int kRows>
int64_t band_rows(const BandBlock<S>& b, int64_t rows) {
  if constexpr (kRows > 1) {
    if (rows < kRows || b.kernel_size < kRows) {
      return band_rows<S, kVectors, (kRows >= 6 ? 4 : kRows / 2)>(b, rows);
    }
  }
  band_block<S, kRows, kVectors>(b);
  return kRows;
}

// Uses as many rows of sums as fit into the registers, next to the vectors of the source and one weight.
template <class S>
int64_t band_vectors(const BandBlock<S>& b, int64_t rows, int vectors) {
  if constexpr (kBandVectors == 4) {
    if (vectors == 4) return band_rows<S, 4, 6>(b, rows);
  }
  if (vectors == 2) return band_rows<S, 2, kVectorRegisters == 32 ? 8 : 6>(b, rows);
  return band_rows<S, 1, 8>(b, rows);
}

}  // namespace detail

// ------------------------------------------------------------------------------------------------ lanes over time
//
// A head with fewer channels than a vector has lanes is computed with neighbouring time steps in the lanes, from
// transposed tiles: row r of `source` and of `out` is a channel, row k of `weight` a tap. Taps that meet no source are
// zero, and so are sources outside the sequence.

template <class S>
struct Columns {
  S* data = nullptr;
  int64_t pitch = 0;
  int64_t first = 0;  // the time step in column 0

  S* at(int64_t row, int64_t time) const { return data + row * pitch + (time - first); }
};

// Outputs `begin` … `end` − 1 of `channels` channels; reads and writes up to kWidth<S> − 1 columns beyond. Adds the
// taps `first` … `last` − 1, which are the rows of `weight`, to `bias` (null: 0), or with kMore to what the outputs are.
template <class S, bool kTransposed, bool kMore>
void convolve_columns(
    Columns<S> out, int64_t begin, int64_t end, Columns<S> source, Columns<S> weight, int64_t first, int64_t last,
    int64_t offset, int64_t channels, const S* bias) {
  const auto block = [&](auto count, int64_t c) {
    constexpr int kChannels = decltype(count)::value;
    for (int64_t t = begin; t < end; t += kWidth<S>) {
      Vector<S> sum[kChannels];
      for (int i = 0; i < kChannels; ++i) {
        sum[i] = kMore ? load(out.at(c + i, t)) : bias ? broadcast(bias[c + i]) : Vector<S>{};
      }
      for (int64_t step = 0; step < last - first; ++step) {
        // Ascending time of the source in both directions.
        const int64_t row = kTransposed ? last - first - 1 - step : step, k = first + row;
        const int64_t at = kTransposed ? t - offset - k : t + offset + k;
        const Vector<S> w = load(weight.at(row, kTransposed ? at : t));
        for (int i = 0; i < kChannels; ++i) sum[i] += w * load(source.at(c + i, at));
      }
      for (int i = 0; i < kChannels; ++i) store(out.at(c + i, t), sum[i]);
    }
  };
  int64_t c = 0;
  for (; c + 4 <= channels; c += 4) block(std::integral_constant<int, 4>{}, c);
  for (; c < channels; ++c) block(std::integral_constant<int, 1>{}, c);
}

// ------------------------------------------------------------------------------------------------ weights' gradient
//
// dw[t][k] = Σ_r grad[t][r] · source[t + offset + k][r]: the band of a product of two matrices. With the source
// transposed (time in the lanes) there are no sums across lanes. Products outside the band are discarded.

constexpr int kDotRows = kVectorRegisters == 32 ? 8 : 4;

namespace detail {

template <class S, int kVectors>
void dot_block(
    const S* const (&grad)[kDotRows], const S* source, int64_t source_pitch, int64_t channels, S* out,
    int64_t out_pitch) {
  Vector<S> sum[kDotRows][kVectors] = {};
  for (int64_t r = 0; r < channels; ++r) {
    Vector<S> x[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) x[v] = load(source + r * source_pitch + v * kWidth<S>);
#pragma GCC unroll 8
    for (int i = 0; i < kDotRows; ++i) {
      const Vector<S> g = broadcast(grad[i][r]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[i][v] += g * x[v];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kDotRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(out + i * out_pitch + v * kWidth<S>, sum[i][v]);
  }
}

}  // namespace detail

// The number of columns in a row of products.
template <class S>
int64_t correlation_pitch(int64_t kernel_size) {
  return round_up<S>(kernel_size + kDotRows - 1);
}

// The position in the products where dw[t] begins, t − begin = row.
template <class S>
int64_t correlation_at(int64_t row, int64_t kernel_size) {
  return row * correlation_pitch<S>(kernel_size) + row % kDotRows;
}

// The columns of a row of products that hold the taps `first` … `last` − 1, in whole vectors.
template <class S>
struct ProductColumns {
  int64_t first, last;

  ProductColumns(int64_t first_tap, int64_t last_tap)
      : first(first_tap / kWidth<S> * kWidth<S>), last(std::max(first, round_up<S>(last_tap + kDotRows - 1))) {}
};

// products[correlation_at(t − begin) + k] = dw[t][k] for the rows `begin` … `end` − 1 and some taps k; whole blocks of
// kDotRows are written. `source` is transposed; its columns are read up to end + offset + columns.last.
template <class S>
void correlate(
    Rows<const S> grad, int64_t begin, int64_t end, Columns<S> source, ProductColumns<S> columns, int64_t kernel_size,
    int64_t offset, int64_t channels, S* products) {
  constexpr int w = kWidth<S>;
  const int64_t pitch = correlation_pitch<S>(kernel_size);
  for (int64_t t = begin; t < end; t += kDotRows) {
    const S* rows[kDotRows];
    // Rows past the end repeat the last.
    for (int i = 0; i < kDotRows; ++i) rows[i] = grad.at(t + i < end ? t + i : end - 1);
    S* out = products + (t - begin) * pitch;
    for (int64_t at = columns.first; at < columns.last;) {
      const S* from = source.at(0, t + offset + at);
      const int vectors = int(std::min<int64_t>((columns.last - at) / w, 3));
      if (vectors == 3) {
        detail::dot_block<S, 3>(rows, from, source.pitch, channels, out + at, pitch);
      } else if (vectors == 2) {
        detail::dot_block<S, 2>(rows, from, source.pitch, channels, out + at, pitch);
      } else {
        detail::dot_block<S, 1>(rows, from, source.pitch, channels, out + at, pitch);
      }
      at += vectors * w;
    }
  }
}

}  // namespace lightconv
