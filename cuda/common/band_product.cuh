// The product of a band and its rows in a warp's registers, and how it is stored (band.cuh says what a band is).
//
// Rows outside a sequence are staged as zeros, and taps that meet them are zeros in the band. Rows inside may hold
// non-finite values, which the band's own zeros must not spread (0 * NaN). Any such value makes every sum of its
// channel in the tile non-finite. So a tile with a non-finite sum is computed again with non-finite factors replaced by
// zeros. Then the sums to which such a factor belongs are computed one by one. All other results keep their bits.
#pragma once

#include "common/band.cuh"

#include <cstring>

namespace lightconv {
namespace band {

__device__ __forceinline__ bool finite(float value) { return fabsf(value) <= 3.402823466e38f; }

// Replaces halves that are not finite by zeros.
template <class T>
__device__ __forceinline__ uint32_t scrub(uint32_t pair) {
  constexpr uint32_t kExponent = std::is_same_v<T, __nv_bfloat16> ? 0x7f80u : 0x7c00u;
  if ((pair & kExponent) == kExponent) pair &= 0xffff0000u;
  if ((pair >> 16 & kExponent) == kExponent) pair &= 0x0000ffffu;
  return pair;
}
template <class T>
__device__ __forceinline__ void scrub(uint32_t (&pairs)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = scrub<T>(pairs[i]);
}

template <class T>
__device__ __forceinline__ uint32_t pair_of(float low, float high) {
  uint32_t bits;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    memcpy(&bits, &pair, sizeof bits);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    memcpy(&bits, &pair, sizeof bits);
  }
  return bits;
}

// A warp's 16 x 64 sums.
using Sums = float[kGroups][4];

// sums = the products of the band's chunks with their rows; kScrubbing: without non-finite factors.
template <bool kScrubbing, class T, int kChunks, class Load, class RowsOf>
__device__ __forceinline__ void multiply_band(Sums& sums, const Shape& shape, int width, Load load, RowsOf rows) {
  const int lane = lane_index();
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[n][e] = 0.0f;
  }
#pragma unroll
  for (int chunk = 0; chunk < (kChunks > 0 ? kChunks : shape.chunks); ++chunk) {
    uint32_t a[4];
    load(chunk, a);
    if constexpr (kScrubbing) scrub<T>(a);
    const T* row = rows(chunk) + lane % 16 * shape.row_pitch + lane / 16 * 8;
#pragma unroll
    for (int n = 0; n < kGroups; n += 2) {
      if (8 * n < width) {
        uint32_t b[4];
        load_matrices<true>(b, row + 8 * n);
        if constexpr (kScrubbing) scrub<T>(b);
        multiply_add<T>(sums[n], a, b[0], b[1]);
        multiply_add<T>(sums[n + 1], a, b[2], b[3]);
      }
    }
  }
}

// sums = the products of the band's chunks with their rows: load(chunk, a) loads a 16 x 16 fragment of the band,
// rows(chunk) points at the first of 16 staged rows; add(sums) adds the remaining terms. Returns whether a non-finite
// factor took part; `sums` are then without it. kChunks: shape.chunks if it is a constant.
template <class T, int kChunks = 0, class Load, class RowsOf, class Add>
__device__ __forceinline__ bool band_product(Sums& sums, const Shape& shape, int width, Load load, RowsOf rows,
                                             Add add) {
  __syncwarp();  // ldmatrix needs all lanes together, and they may have diverged
  multiply_band<false, T, kChunks>(sums, shape, width, load, rows);
  add(sums);
  // The rounded sums times zeros: NaN in the rows with a sum that is not finite. (A sum that only overflows T is also
  // computed again, with the same bits.)
  float zeros[4] = {};
#pragma unroll
  for (int n = 0; n < kGroups; n += 2) {
    const uint32_t rounded[4] = {pair_of<T>(sums[n][0], sums[n][1]), pair_of<T>(sums[n][2], sums[n][3]),
                                 pair_of<T>(sums[n + 1][0], sums[n + 1][1]),
                                 pair_of<T>(sums[n + 1][2], sums[n + 1][3])};
    multiply_add<T>(zeros, rounded, 0, 0);
  }
  if (__all_sync(kFullWarp, zeros[0] + zeros[2] == 0.0f)) return false;
  multiply_band<true, T, 0>(sums, shape, width, load, rows);
  add(sums);
  return true;
}

// What lanes q = 0 ... 3 of a row hold as v[m] goes to lane m as its v[q].
template <class V>
__device__ __forceinline__ void transpose(V (&v)[4]) {
  const int q = lane_index() % 4;
#pragma unroll
  for (int m = 0; m < 4; m += 2) {
    const V received = __shfl_xor_sync(kFullWarp, q & 1 ? v[m] : v[m + 1], 1);
    (q & 1 ? v[m] : v[m + 1]) = received;
  }
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const V received = __shfl_xor_sync(kFullWarp, q & 2 ? v[m] : v[m + 2], 2);
    (q & 2 ? v[m] : v[m + 2]) = received;
  }
}

// The four lanes of a row hold two channels of each of four groups of 8. These two functions gather the groups and call
// store(row, channel, values) for 8 neighbouring channels: as floats, or rounded before the exchange, which halves its
// cost. All lanes must call.
template <class Store>
__device__ __forceinline__ void store_sums(const Sums& sums, int width, Store store) {
  const int lane = lane_index();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int n = 0; n < kGroups; n += 4) {
      float values[8];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float v[4];
#pragma unroll
        for (int m = 0; m < 4; ++m) v[m] = sums[n + m][2 * half + e];
        transpose(v);
#pragma unroll
        for (int m = 0; m < 4; ++m) values[2 * m + e] = v[m];
      }
      const int channel = 8 * (n + lane % 4);
      if (channel < width) store(lane / 4 + 8 * half, channel, values);
    }
  }
}

template <class T, class Store>
__device__ __forceinline__ void store_rounded_sums(const Sums& sums, int width, Store store) {
  const int lane = lane_index();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int n = 0; n < kGroups; n += 4) {
      uint32_t v[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) v[m] = pair_of<T>(sums[n + m][2 * half], sums[n + m][2 * half + 1]);
      transpose(v);
      const int channel = 8 * (n + lane % 4);
      if (channel < width) store(lane / 4 + 8 * half, channel, make_uint4(v[0], v[1], v[2], v[3]));
    }
  }
}

// After a scrubbed product: computes, one by one, the sums of a 16 x width tile to which a non-finite factor belongs,
// and calls store(row, channel, sum) for them. factors(row, k, channel, w, u) gives the two factors of tap k, or
// returns false if it has none.
template <class Factors, class Store>
__device__ inline void repair(int kernel_size, int width, Factors factors, Store store) {
  __syncwarp();  // after the other lanes' stores to the same places
#pragma unroll 1
  for (int at = lane_index(); at < kTile * width; at += 32) {
    const int row = at / width, channel = at % width;
    float sum = 0.0f;
    bool touched = false;
#pragma unroll 1
    for (int k = 0; k < kernel_size; ++k) {
      float w, u;
      if (!factors(row, k, channel, w, u)) continue;
      sum += w * u;
      touched = touched || !finite(w) || !finite(u);
    }
    if (touched) store(row, channel, sum);
  }
}

}  // namespace band
}  // namespace lightconv
