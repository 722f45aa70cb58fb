// Filters of up to 32 taps that are contiguous in memory, in a warp's registers, for softmax and none: no shared memory
// between weights and products.
//
// 16 filters are laid out as the fragments that multiply_add reads and returns: lane 4g + q has columns
// 16c + 2q + {0, 1, 8, 9} of the band's rows g and g + 8, for every chunk c. Column j of row i is tap j - i, and meets
// row j of u in every row. So a lane reads its own taps from memory, the maximum and sum of a filter are reductions
// over four lanes, and the gradients of the dropped taps (the product of grad and u) are in the same places as the
// taps.
//
// lightconv has one filter per block: lane k has tap k, and one warp writes the band.
#pragma once

#include "common/band_product.cuh"
#include "convolution/band_taps.cuh"

namespace lightconv {
namespace band {

// exponential() of x <= 0; results below 2^-126 are 0.
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

// 1 / x with an error of 2^-23; the exact 1.0f / x takes a branch.
__device__ __forceinline__ float fast_reciprocal(float x) {
#if defined(LIGHTCONV_HOST)
  return 1.0f / x;
#else
  float value;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
  return value;
#endif
}

// A lane's columns are lane % 4 * 2 + column_of(n), n = 0 ... 4 * chunks - 1.
__host__ __device__ constexpr int column_of(int n) { return n / 4 * kTile + n % 4 / 2 * 8 + n % 2; }

template <int kChunks>
struct Fragments {
  static constexpr int kColumns = 4 * kChunks;
  float tap[2][kColumns];  // normalised, times `keep`, of rows g and g + 8; zeros where a row has no tap
  uint64_t used[2];        // bit 8 + column_of(n): a tap that dropout keeps and that meets a row of the sequence
  float keep;              // dropout's factor
  bool whole;              // all taps are used

  __device__ __forceinline__ bool uses(int r, int n) const { return (used[r] >> (8 + column_of(n)) & 1) != 0; }

  // A tap where it is used, else zero. kWhole: separate code for `whole`.
  template <bool kWhole>
  __device__ __forceinline__ float dropped(int r, int n) const {
    return kWhole || uses(r, n) ? tap[r][n] : 0.0f;
  }
};
template <>
struct Fragments<0> {};

// Bits 0 ... count - 1, for count < 64.
__device__ __forceinline__ uint64_t low_bits(int count) { return (uint64_t{1} << count) - 1; }

template <int kColumns>
__device__ __forceinline__ void normalize_row(bool any, float keep, float (&taps)[kColumns]) {
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
  const float scale = any ? keep * fast_reciprocal(sum) : 0.0f;
#pragma unroll
  for (int n = 0; n < kColumns; ++n) taps[n] *= scale;
}

// Which of the four weights of a Philox block dropout keeps.
__device__ __forceinline__ uint32_t kept_words(const ConvParams& p, const uint4& words) {
  // drop_below is 1 ... 2^32.
  const uint32_t most = static_cast<uint32_t>(p.drop_below - 1);
  return (words.x > most ? 1u : 0u) | (words.y > most ? 2u : 0u) | (words.z > most ? 4u : 0u) |
         (words.w > most ? 8u : 0u);
}

// Which taps of rows g and g + 8 dropout keeps: bit k. Four weights with neighbouring row-major indices share a Philox
// block. A filter begins anywhere in a block and spans up to nine of them. The four lanes of a row compute two blocks
// each; two of the lanes also compute the ninth block, each for one row.
template <int kChunks>
__device__ __forceinline__ void kept_taps(const ConvParams& p, const Place& place, const TapTile& tile,
                                          uint32_t (&kept)[2]) {
  const int q = lane_index() % 4;
  const uint64_t seed = bits(p.seed);
  uint64_t block[2];
  int shift[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint64_t flat = flat_index(p, int64_t{tile.t} + lane_index() / 4 + 8 * r, place.b, place.head);
    block[r] = flat / 4;
    shift[r] = static_cast<int>(flat % 4);
  }
  kept[0] = kept[1] = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (i > 0 && kChunks < 3 && p.kernel_size <= 13) break;
    uint4 words[2];
    philox<2>({block[0] + q + 4 * i, block[1] + q + 4 * i}, seed, words);
#pragma unroll
    for (int r = 0; r < 2; ++r) kept[r] |= kept_words(p, words[r]) << 16 * i;
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    kept[r] <<= 4 * q;
    kept[r] |= __shfl_xor_sync(kFullWarp, kept[r], 1);
    kept[r] |= __shfl_xor_sync(kFullWarp, kept[r], 2);
  }
  uint32_t beyond = 0;
  if (kChunks > 2 && __any_sync(kFullWarp, max(shift[0], shift[1]) + p.kernel_size > 32)) {
    uint4 words[1];
    philox<1>({(q % 2 == 0 ? block[0] : block[1]) + 8}, seed, words);
    beyond = kept_words(p, words[0]);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint32_t ninth = kChunks > 2 ? __shfl_sync(kFullWarp, beyond, r, 4) : 0u;
    kept[r] = static_cast<uint32_t>((uint64_t{ninth} << 32 | kept[r]) >> shift[r]);
  }
}

// dynamicconv's 16 filters of a tile.
template <class T, int kChunks>
__device__ __forceinline__ void make_fragments(const ConvParams& p, const Place& place, const TapTile& tile,
                                               Fragments<kChunks>& to) {
  constexpr int kColumns = Fragments<kChunks>::kColumns;
  const int g = lane_index() / 4, first = lane_index() % 4 * 2;
  const bool softmax = p.normalize == Normalize::kSoftmax;
  const float absent = softmax ? -INFINITY : 0.0f;
  const T none = from_float<T>(absent);
  const uint32_t taps = static_cast<uint32_t>(low_bits(p.kernel_size));
  // The weights of both rows, all of them in flight at once.
  const T* data = static_cast<const T*>(p.weight.data) + offset(tile.t, p.weight.stride_t) +
                  offset(place.b, p.weight.stride_b) + offset(place.head, p.weight.stride_h);
  T weights[2][kColumns];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int i = g + 8 * r;
    to.used[r] = i < tile.real ? uint64_t{taps} << (8 + i - first) : 0;
    const T* from = data + offset(i, p.weight.stride_t) + (first - i);
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      weights[r][n] = none;
      if (to.uses(r, n)) weights[r][n] = from[column_of(n)];
    }
  }
  const bool dropout = p.drop_below != 0, inside = tile.low <= 0 && tile.high >= kTile * kChunks;
  uint32_t kept[2];
  if (dropout) kept_taps<kChunks>(p, place, tile, kept);  // while the weights are being loaded
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) to.tap[r][n] = to_float(weights[r][n]);
  }
  bool any[2] = {g < tile.real, g + 8 < tile.real};  // whether a row has taps to normalise
  if (!inside) {
    const uint64_t meeting = (low_bits(clip(tile.high, 48)) & ~low_bits(clip(tile.low, 48))) << (8 - first);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      to.used[r] &= meeting;
      if (!p.renorm_padding) continue;
      // All taps of a row may be in its other lanes.
      any[r] = max(tile.low, g + 8 * r) < min(tile.high, g + 8 * r + p.kernel_size) && g + 8 * r < tile.real;
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        if (!to.uses(r, n)) to.tap[r][n] = absent;
      }
    }
  }
  to.keep = dropout ? p.keep_scale : 1.0f;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (softmax) {
      normalize_row(any[r], to.keep, to.tap[r]);
    } else if (dropout) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) to.tap[r][n] *= to.keep;
    }
    if (dropout) to.used[r] &= uint64_t{kept[r]} << (8 + g + 8 * r - first);
  }
  to.whole = inside && !dropout;
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
      store_pair(band, pitch, r, n, from.template dropped<kWhole>(r, n), from.template dropped<kWhole>(r, n + 1));
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
  if (p.drop_below != 0) {
    const uint64_t flat = flat_index(p, 0, 0, head) + k;
    tap *= component(dropout_factors(p, flat / 4, bits(p.seed)), static_cast<int>(flat % 4));
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
  __syncwarp();  // ldmatrix needs all lanes together, and the stores before it may have let them diverge
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

// The gradients of the weights of dynamicconv's filters, as a band tile. Only s = keep * tap is kept of a tap: with the
// gradients d of the dropped taps, softmax gives (keep * d - sum(keep * d * tap)) * tap = (d - sum(d * s) / keep) * s.
template <class T, int kChunks>
__device__ __forceinline__ void differentiate(const ConvBackwardParams& p, const Fragments<kChunks>& filters,
                                              const Gradients<kChunks>& sums, int pitch, T* to) {
  constexpr int kColumns = Fragments<kChunks>::kColumns;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float gradient[kColumns], along = 0.0f;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      // Other columns hold products that belong to no tap, and may not be finite.
      gradient[n] = filters.uses(r, n) ? sums[n / 2][2 * r + n % 2] : 0.0f;
      along += gradient[n] * filters.tap[r][n];
    }
    if (p.normalize == Normalize::kSoftmax) {
      along = group_sum(along, 4) * fast_reciprocal(filters.keep);
#pragma unroll
      for (int n = 0; n < kColumns; ++n) gradient[n] = (gradient[n] - along) * filters.tap[r][n];
    } else if (p.drop_below != 0) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) gradient[n] *= filters.keep;
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
  differentiate(p, filters, sums, pitch, scratch);
  __syncwarp();
  const int k = lane_index();
  if (k >= p.kernel_size) return;
  T* to = static_cast<T*>(p.dweight) + offset(tile.t, p.dweight_stride_t) + offset(place.b, p.dweight_stride_b) +
          offset(place.head, p.dweight_stride_h) + offset(k, p.dweight_stride_k);
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
