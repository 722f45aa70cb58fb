// Filters of up to 32 taps, next to each other in memory, in a warp's registers, for softmax and none: no shared memory
// between weights and products.
//
// 16 filters are laid out as the fragments that multiply_add takes and gives: lane 4g + q has columns
// 16c + 2q + {0, 1, 8, 9} of the band's rows g and g + 8, for every chunk c. Column j of row i is tap j - i, and meets
// row j of u in every row. So a lane reads its own taps from memory; a filter's maximum and sum are those of four
// lanes; and the gradients of the dropped taps, the product of grad and u, are where the taps are.
//
// lightconv has one filter for a block: lane k has its tap k, and one warp writes the band.
#pragma once

#include "common/band_product.cuh"
#include "convolution/band_taps.cuh"

namespace lightconv {
namespace band {

// exponential() of x <= 0, where less than 2^-126 is 0.
__device__ __forceinline__ float flushed_exponential(float x) {
#if defined(LIGHTCONV_HOST)
  const float value = exponential(x);
  return value < 1.17549435e-38f ? 0.0f : value;
#else
  float value;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x * 1.44269504f));
  return value;
#endif
}

// A lane's columns are lane % 4 * 2 + column_of(n), n = 0 ... 4 * chunks - 1.
__host__ __device__ constexpr int column_of(int n) { return n / 4 * kTile + n % 4 / 2 * 8 + n % 2; }

template <int kChunks>
struct Fragments {
  static constexpr int kColumns = 4 * kChunks;
  float tap[2][kColumns];  // normalised, of rows g and g + 8; zeros where a row has no tap
  uint64_t kept[2];        // by dropout: bit column_of(n)
  float keep;              // their factor
  int begin[2], end[2];    // the columns column_of(n) of a row's taps
  int low, high;           // those that meet a row of the sequence
  bool whole;              // no dropout, and all columns do

  // Row 15 begins at column 15.
  __device__ __forceinline__ bool has(int r, int n) const {
    return (column_of(n) >= kTile || column_of(n) >= begin[r]) && column_of(n) < end[r];
  }
  __device__ __forceinline__ bool meets(int n) const { return column_of(n) >= low && column_of(n) < high; }

  // A tap, or its gradient, through dropout; zero where it meets no row. kWhole: `whole`, in code of its own.
  template <bool kWhole>
  __device__ __forceinline__ float dropped(float value, int r, int n) const {
    if constexpr (kWhole) return value;
    value *= (kept[r] >> column_of(n) & 1) != 0 ? keep : 0.0f;
    return meets(n) ? value : 0.0f;
  }
};
template <>
struct Fragments<0> {};

// The weights of both rows, all of them in flight at once; `absent` where a row has no tap. from[r]: column 0.
template <class T, int kChunks>
__device__ __forceinline__ void load_rows_of_taps(const T* const (&from)[2], float absent, Fragments<kChunks>& to) {
  constexpr int kColumns = Fragments<kChunks>::kColumns;
  const T none = from_float<T>(absent);
  T weights[2][kColumns];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      weights[r][n] = none;
      if (to.has(r, n)) weights[r][n] = from[r][column_of(n)];
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) to.tap[r][n] = to_float(weights[r][n]);
  }
}

template <int kColumns>
__device__ __forceinline__ void normalize_row(bool any, float (&taps)[kColumns]) {
  float maximum = taps[0];
#pragma unroll
  for (int n = 1; n < kColumns; ++n) maximum = fmaxf(maximum, taps[n]);
  maximum = group_max(maximum, 4);
  if (maximum == -INFINITY) maximum = 0.0f;
  float sum = 0.0f;
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    taps[n] = flushed_exponential(taps[n] - maximum);
    sum += taps[n];
  }
  sum = group_sum(sum, 4);
  const float scale = any ? 1.0f / sum : 0.0f;
#pragma unroll
  for (int n = 0; n < kColumns; ++n) taps[n] *= scale;
}

// Which taps of a lane's two rows dropout keeps: bit j - i of filter i.
__device__ inline void kept_taps(const ConvParams& p, const Place& place, const TapTile& tile, uint64_t (&kept)[2]) {
  uint64_t bits = 0;
  for_each_dropped(p, place, tile, lane_index() / 2, TapRange{0, p.kernel_size},
                   [&](int k, float factor) { bits |= uint64_t{factor != 0.0f} << k; });
  bits |= __shfl_xor_sync(kFullWarp, bits, 1);
#pragma unroll
  for (int r = 0; r < 2; ++r) kept[r] = __shfl_sync(kFullWarp, bits, 2 * (lane_index() / 4 + 8 * r));
}

// dynamicconv's 16 filters of a tile.
template <class T, int kChunks>
__device__ __forceinline__ void make_fragments(const ConvParams& p, const Place& place, const TapTile& tile,
                                               Fragments<kChunks>& to) {
  constexpr int kColumns = Fragments<kChunks>::kColumns;
  const int g = lane_index() / 4, first = lane_index() % 4 * 2;
  const bool softmax = p.normalize == Normalize::kSoftmax;
  const float absent = softmax ? -INFINITY : 0.0f;
  to.low = tile.low - first, to.high = tile.high - first;
  const bool inside = tile.low <= 0 && tile.high >= kTile * kChunks;
  const T* data = static_cast<const T*>(p.weight.data) + tile.t * p.weight.stride_t + place.b * p.weight.stride_b +
                  place.head * p.weight.stride_h;
  bool any[2];
  const T* from[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int i = g + 8 * r;
    to.begin[r] = i - first;
    to.end[r] = i < tile.real ? to.begin[r] + p.kernel_size : -kTile;
    any[r] = i < tile.real;
    from[r] = data + i * p.weight.stride_t - to.begin[r];
  }
  load_rows_of_taps(from, absent, to);
  if (p.renorm_padding && !inside) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      any[r] = any[r] && max(to.begin[r], to.low) < min(to.end[r], to.high);
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        if (!to.meets(n)) to.tap[r][n] = absent;
      }
    }
  }
  if (softmax) {
#pragma unroll
    for (int r = 0; r < 2; ++r) normalize_row(any[r], to.tap[r]);
  }
  to.whole = inside && p.seed == nullptr;
  to.keep = 1.0f;
  to.kept[0] = to.kept[1] = ~uint64_t{0};
  if (p.seed != nullptr) {
    kept_taps(p, place, tile, to.kept);
    to.keep = p.keep_scale;
#pragma unroll
    for (int r = 0; r < 2; ++r) to.kept[r] = to.kept[r] << (g + 8 * r) >> first;
  }
}

// Writes a pair of row r of a band tile, columns column_of(n) and the next.
template <class T>
__device__ __forceinline__ void store_pair(T* band, int pitch, int r, int n, float low, float high) {
  T* to = band + (lane_index() / 4 + 8 * r) * pitch + lane_index() % 4 * 2 + column_of(n);
  *reinterpret_cast<uint32_t*>(to) = pair_of<T>(low, high);
}

template <bool kWhole, class T, int kChunks>
__device__ __forceinline__ void store_dropped(const Fragments<kChunks>& from, int pitch, T* band) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int n = 0; n < Fragments<kChunks>::kColumns; n += 2) {
      store_pair(band, pitch, r, n, from.template dropped<kWhole>(from.tap[r][n], r, n),
                 from.template dropped<kWhole>(from.tap[r][n + 1], r, n + 1));
    }
  }
}

// Writes all of a band tile: the dropped taps.
template <class T, int kChunks>
__device__ __forceinline__ void store_fragments(const Fragments<kChunks>& from, int pitch, T* band) {
  if (from.whole) {
    store_dropped<true>(from, pitch, band);
  } else {
    store_dropped<false>(from, pitch, band);
  }
}

// lightconv's filter as a band tile.
template <class T>
__device__ __forceinline__ void make_light_band(const ConvParams& p, int head, int pitch, T* band) {
  const int k = lane_index();
  const bool real = k < p.kernel_size, softmax = p.normalize == Normalize::kSoftmax;
  const T* from = static_cast<const T*>(p.weight.data) + head * p.weight.stride_h;
  float tap = real ? to_float(from[k]) : softmax ? -INFINITY : 0.0f;
  if (softmax) {
    tap = flushed_exponential(tap - group_max(tap, 32));
    tap *= 1.0f / group_sum(tap, 32);
  }
  if (p.seed != nullptr) {
    const uint64_t flat = flat_index(p, 0, 0, head) + k;
    tap *= component(dropout_factors(p, flat / 4, p.seed[0]), static_cast<int>(flat % 4));
  }
  clear_band(band, pitch);
  if (!real) return;
#pragma unroll
  for (int i = 0; i < kTile; ++i) band[i * pitch + i + k] = from_float<T>(tap);
}

// ------------------------------------------------------------------------------------------------ gradients

// The gradients of a tile's dropped taps: sums[2 * chunk + n][2 * r + e] is that of tap[r][4 * chunk + 2 * n + e].
template <int kChunks>
using Gradients = float[2 * kChunks][4];

// sums += grad * u^T over the channels of a slice: grad is the tile's first row, source the one that column 0 meets.
template <class T, int kChunks>
__device__ __forceinline__ void correlate(const Shape& shape, int width, const T* grad, const T* source,
                                          Gradients<kChunks>& sums) {
  const int lane = lane_index();
  const T* left = grad + lane % 16 * shape.row_pitch + lane / 16 * 8;
  const T* right = source + (lane % 8 + lane / 16 * 8) * shape.row_pitch + lane / 8 % 2 * 8;
  __syncwarp();  // ldmatrix needs all lanes together; what was stored before it lets them part
#pragma unroll
  for (int channel = 0; channel < kSlice; channel += 16) {
    if (channel < width) {
      uint32_t a[4];
      load_matrices<false>(a, left + channel);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        uint32_t b[4];
        load_matrices<false>(b, right + c * kTile * shape.row_pitch + channel);
        multiply_add<T>(sums[2 * c], a, b[0], b[1]);
        multiply_add<T>(sums[2 * c + 1], a, b[2], b[3]);
      }
    }
  }
}

// The gradients of the weights of dynamicconv's filters, as a band tile.
template <bool kWhole, class T, int kChunks>
__device__ __forceinline__ void differentiate(const ConvBackwardParams& p, const Fragments<kChunks>& filters,
                                              const Gradients<kChunks>& sums, int pitch, T* to) {
  constexpr int kColumns = Fragments<kChunks>::kColumns;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float gradient[kColumns], along = 0.0f;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      // Other columns hold products that are no tap's, and may not be finite.
      const float sum = filters.has(r, n) ? sums[n / 2][2 * r + n % 2] : 0.0f;
      gradient[n] = filters.template dropped<kWhole>(sum, r, n);
      along += gradient[n] * filters.tap[r][n];
    }
    if (p.normalize == Normalize::kSoftmax) {
      along = group_sum(along, 4);
#pragma unroll
      for (int n = 0; n < kColumns; ++n) gradient[n] = (gradient[n] - along) * filters.tap[r][n];
    }
#pragma unroll
    for (int n = 0; n < kColumns; n += 2) store_pair(to, pitch, r, n, gradient[n], gradient[n + 1]);
  }
}

// Stores the gradients of the weights of dynamicconv's filters. scratch: a band tile that no other warp uses.
template <class T, int kChunks>
__device__ __forceinline__ void store_gradients(const ConvBackwardParams& p, const Place& place, const TapTile& tile,
                                                const Fragments<kChunks>& filters, const Gradients<kChunks>& sums,
                                                int pitch, T* scratch) {
  if (filters.whole) {
    differentiate<true>(p, filters, sums, pitch, scratch);
  } else {
    differentiate<false>(p, filters, sums, pitch, scratch);
  }
  __syncwarp();
  const int k = lane_index();
  if (k >= p.kernel_size) return;
  T* to = static_cast<T*>(p.dweight) + tile.t * p.dweight_stride_t + place.b * p.dweight_stride_b +
          place.head * p.dweight_stride_h + k * p.dweight_stride_k;
#pragma unroll 4
  for (int i = 0; i < tile.real; ++i, to += p.dweight_stride_t) *to = scratch[i * pitch + i + k];
}

// Writes the gradients of a tile's dropped taps to rows of `pitch` floats, for lightconv's sum over all rows.
template <int kChunks>
__device__ __forceinline__ void spread_gradients(const TapTile& tile, int kernel_size, const Gradients<kChunks>& sums,
                                                 int pitch, float* to) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int i = lane_index() / 4 + 8 * r, first = lane_index() % 4 * 2;
#pragma unroll
    for (int n = 0; n < Fragments<kChunks>::kColumns; ++n) {
      const int j = first + column_of(n), k = j - i;
      if (k >= 0 && k < kernel_size) {
        to[i * pitch + k] = i < tile.real && tile.meets(j) ? sums[n / 2][2 * r + n % 2] : 0.0f;
      }
    }
  }
}

}  // namespace band
}  // namespace lightconv
