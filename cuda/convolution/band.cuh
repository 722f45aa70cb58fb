// The tensor-core path of lightconv and dynamicconv: which calls it supports, their shapes, rows of u in shared memory.
#pragma once

#include "common/band.cuh"
#include "convolution/arithmetic.cuh"

namespace lightconv {
namespace band {

inline Shape shape_of(const ConvParams& p, int warps) {
  Shape shape = rows_shape(p, warps);
  shape.chunks = divide_up(kTile - 1 + p.kernel_size, kTile);
  shape.band_pitch = kTile * shape.chunks + 8;
  shape.tap_pitch = p.kernel_size | 1;
  return shape;
}

inline int band_bytes(const Shape& shape) { return shape.band_tiles * kTile * shape.band_pitch * 2; }
inline int tap_bytes(const Shape& shape, int tiles) { return round_up(tiles * kTile * shape.tap_pitch * 4, 16); }

// The chunks of a band whose taps are in registers (band_registers.cuh); 0 where they are in shared memory.
inline int chunks_in_registers(const ConvParams& p) {
  const bool simple = p.normalize == Normalize::kSoftmax || p.normalize == Normalize::kNone;
  return simple && p.kernel_size <= 32 && p.weight.stride_k == 1 ? divide_up(kTile - 1 + p.kernel_size, kTile) : 0;
}

// The requirements of both directions. Short filters are supported where this takes fewer instructions than short.cuh.
// With some normalisations, weights can overflow in float16 although the products in float do not.
inline bool operands_supported(const ConvParams& p) {
  const bool half = p.type == Type::kBFloat16 || p.type == Type::kFloat16;
  const bool grows = p.normalize == Normalize::kSquare ||
                     (p.drop_below != 0 && (p.normalize == Normalize::kNone || p.normalize == Normalize::kAbs));
  return p.compute_capability >= 80 && half && !(grows && p.type == Type::kFloat16) &&
         (p.kernel_size >= 8 || (p.kernel_size >= 3 && per_head(p) >= kSlice && chunks_in_registers(p) > 0)) &&
         per_head(p) >= 16 && per_head(p) % 8 == 0 && aligned(p.x, 2, 16);
}

// Like stage_rows, for rows of u. With a GLU they are computed on the way, several at a time so that their loads
// overlap.
template <class T>
__device__ __forceinline__ void stage_inputs(T* to, const ConvParams& p, const Shape& shape, int count, int low,
                                             int high, int width, int start, int b, int channel) {
  if (!p.glu) {
    stage_rows(to, shape, count, low, high, width, p.x, start, b, channel);
    return;
  }
  constexpr int kBatch = 4;
  const Carrier carrier(width, count);
  for (int first = carrier.first; first < count; first += kBatch * carrier.step) {
    Pack<T, 8> u[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = first + i * carrier.step;
      const bool real = row >= low && row < high && carrier.column < width;
      u[i] = real ? load_input<T, 8>(p, start + row, b, channel + carrier.column) : zero_pack<T, 8>();
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = first + i * carrier.step;
      if (row < count) store_pack(to + row * shape.row_pitch + carrier.column, u[i]);
    }
  }
}

}  // namespace band
}  // namespace lightconv
