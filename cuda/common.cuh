// What all kernels share: number types, vector accesses, the dropout mask, sequences, normalisations.
//
// Under LIGHTCONV_HOST the same sources run on a CPU (tests/cuda/cuda_on_host.h), so whatever is not plain C++ with
// CUDA's builtins stays behind the functions and macros of this file (matrix instructions: band.cuh).
#pragma once

#include "lightconv.h"

#ifndef LIGHTCONV_HOST
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define LIGHTCONV_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__)
#define LIGHTCONV_DYNAMIC_SHARED(T, name)                           \
  extern __shared__ __align__(16) unsigned char lightconv_shared[]; \
  T* name = reinterpret_cast<T*>(lightconv_shared)
#endif

#include <type_traits>

namespace lightconv {

constexpr unsigned kFullWarp = 0xffffffffu;
// The same on every device, so that the tiles of a launch are too; more would have to be asked for.
constexpr int kSharedBytes = 48 * 1024;
// Of W / (||W|| + epsilon): EPSILON in ops/normalize.py.
constexpr float kEpsilon = 1e-6f;

// ------------------------------------------------------------------------------------------------ numbers

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <class T>
__device__ __forceinline__ T from_float(float value) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(value);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(value);
  } else {
    return value;
  }
}

// exp2 and a product: relative error about 2^-22 (1 + |x|), far below a weight's own rounding where x <= 0 matters.
__device__ __forceinline__ float exponential(float x) { return __expf(x); }

// exp's overflow at very negative x gives the right limit, 0.
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

__host__ __device__ __forceinline__ int divide_up(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ __forceinline__ int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
__host__ __device__ __forceinline__ int round_up(int a, int to) { return (a + to - 1) / to * to; }

// ------------------------------------------------------------------------------------------------ vector accesses

// V elements of 16 bytes, or one element: what a thread moves at a time. A pointer to a Pack must be aligned to it.
template <class T, int V>
struct alignas(sizeof(T) * V) Pack {
  T value[V];
};

// Elements in 16 bytes.
template <class T>
constexpr int kWide = 16 / static_cast<int>(sizeof(T));

template <class T, int V>
__device__ __forceinline__ Pack<T, V> load_pack(const T* from) {
  Pack<T, V> pack;
  if constexpr (sizeof(pack) == 16) {
    *reinterpret_cast<uint4*>(&pack) = *reinterpret_cast<const uint4*>(from);
  } else {
    pack = *reinterpret_cast<const Pack<T, V>*>(from);
  }
  return pack;
}

template <class T, int V>
__device__ __forceinline__ void store_pack(T* to, const Pack<T, V>& pack) {
  if constexpr (sizeof(pack) == 16) {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(&pack);
  } else {
    *reinterpret_cast<Pack<T, V>*>(to) = pack;
  }
}

template <class T, int V>
__device__ __forceinline__ Pack<T, V> zero_pack() {
  Pack<T, V> pack;
#pragma unroll
  for (int v = 0; v < V; ++v) pack.value[v] = from_float<T>(0.0f);
  return pack;
}

template <class T, int V>
__device__ __forceinline__ void widen(const Pack<T, V>& pack, float (&values)[V]) {
#pragma unroll
  for (int v = 0; v < V; ++v) values[v] = to_float(pack.value[v]);
}

template <class T, int V>
__device__ __forceinline__ Pack<T, V> narrow(const float (&values)[V]) {
  Pack<T, V> pack;
#pragma unroll
  for (int v = 0; v < V; ++v) pack.value[v] = from_float<T>(values[v]);
  return pack;
}

// Row `row` of (T, B, C), from channel c on.
template <class T, int V>
__device__ __forceinline__ Pack<T, V> load_row(const Rows& rows, int64_t row, int64_t b, int c) {
  return load_pack<T, V>(static_cast<const T*>(rows.data) + row * rows.stride_t + b * rows.stride_b + c);
}

// Host: whether rows of (T, B, C) can be read `bytes` at a time from every channel that is a multiple of that.
inline bool aligned(const void* data, int64_t stride_t, int64_t stride_b, int element, int bytes) {
  return reinterpret_cast<uintptr_t>(data) % bytes == 0 && stride_t * element % bytes == 0 &&
         stride_b * element % bytes == 0;
}
inline bool aligned(const Rows& rows, int element, int bytes) {
  return aligned(rows.data, rows.stride_t, rows.stride_b, element, bytes);
}
inline bool aligned(const MutableRows& rows, int element, int bytes) {
  return aligned(rows.data, rows.stride_t, rows.stride_b, element, bytes);
}

// ------------------------------------------------------------------------------------------------ dropout

// Philox-4x32-10 (Salmon et al. 2011) with counter (index, 0, 0): ops/philox.py says which word belongs to which
// weight. `index` is the weight's row-major index div 4, word index mod 4.
__device__ __forceinline__ uint4 philox(uint64_t index, uint64_t seed) {
  uint32_t c0 = static_cast<uint32_t>(index), c1 = static_cast<uint32_t>(index >> 32), c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(c0) * 0xD2511F53u;
    const uint64_t product1 = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(product1);
    c3 = static_cast<uint32_t>(product0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return make_uint4(c0, c1, c2, c3);
}

// The factors of the four weights with row-major indices 4 * quad ... 4 * quad + 3.
__device__ __forceinline__ float4 dropout_factors(const ConvParams& p, uint64_t quad, uint64_t seed) {
  const uint4 word = philox(quad, seed);
  return make_float4(word.x >= p.drop_below ? p.keep_scale : 0.0f, word.y >= p.drop_below ? p.keep_scale : 0.0f,
                     word.z >= p.drop_below ? p.keep_scale : 0.0f, word.w >= p.drop_below ? p.keep_scale : 0.0f);
}

__device__ __forceinline__ float component(const float4& four, int index) {
  return index == 0 ? four.x : index == 1 ? four.y : index == 2 ? four.z : four.w;
}

// Row-major index of the first weight of (t, b, h) in (T, B, H, K), or in (H, K).
__device__ __forceinline__ uint64_t flat_index(const ConvParams& p, int64_t t, int64_t b, int h) {
  const int64_t position = p.dynamic ? t * p.batch + b : 0;
  return static_cast<uint64_t>((position * p.heads + h) * p.kernel_size);
}

// ------------------------------------------------------------------------------------------------ sequences

// The rows [begin, end) of a sequence that may be read.
struct Span {
  int64_t begin, end;
};

// The sequence that row t of batch element b belongs to. Whatever lengths and cu_seqlens hold, it lies within the data.
__device__ inline Span sequence_span(const Problem& p, int64_t b, int64_t t) {
  Span span{-static_cast<int64_t>(p.state_rows), p.steps};
  if (p.lengths != nullptr) {
    const int64_t at = b * p.lengths_stride;
    const int64_t length = p.lengths_int64 ? static_cast<const int64_t*>(p.lengths)[at]
                                           : static_cast<int64_t>(static_cast<const int32_t*>(p.lengths)[at]);
    span.end = length < 0 ? 0 : length < p.steps ? length : p.steps;
  } else if (p.cu_seqlens != nullptr) {
    // The last sequence that begins at or before t: empty ones hold no row.
    int64_t low = 0, high = p.sequences - 1;
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (p.cu_seqlens[middle * p.cu_seqlens_stride] <= t) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const int64_t begin = p.cu_seqlens[low * p.cu_seqlens_stride];
    const int64_t end = p.cu_seqlens[(low + 1) * p.cu_seqlens_stride];
    span.begin = begin < 0 ? 0 : begin;
    span.end = end < p.steps ? end : p.steps;
  }
  return span;
}

// u[s, b, c ... c + V - 1] for a row s that exists, -state_rows <= s < T; c a multiple of V.
template <class T, int V>
__device__ __forceinline__ Pack<T, V> load_input(const ConvParams& p, int64_t s, int64_t b, int c) {
  if (s < 0) {
    const T* row = static_cast<const T*>(p.state.data) + (s + p.state_rows) * p.state.stride_t + b * p.state.stride_b;
    return load_pack<T, V>(row + c);
  }
  const T* row = static_cast<const T*>(p.x.data) + s * p.x.stride_t + b * p.x.stride_b;
  Pack<T, V> value = load_pack<T, V>(row + c);
  if (p.glu) {
    const Pack<T, V> gate = load_pack<T, V>(row + p.channels + c);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      value.value[v] = from_float<T>(to_float(value.value[v]) * sigmoid(to_float(gate.value[v])));
    }
  }
  return value;
}

// Stores the gradient of u[s, b, c ...], through the GLU: dx of row s >= 0, dstate of a row s < 0. A row that is
// padding (`real` false) gets 0 without x being looked at.
template <class T, int V>
__device__ __forceinline__ void store_input_gradient(const ConvBackwardParams& p, int64_t s, int64_t b, int c,
                                                     const float (&gradient)[V], bool real) {
  const MutableRows& to = s < 0 ? p.dstate : p.dx;
  if (to.data == nullptr) return;
  T* row = static_cast<T*>(to.data) + (s < 0 ? s + p.state_rows : s) * to.stride_t + b * to.stride_b;
  const bool glu = p.glu && s >= 0;
  if (!real) {
    store_pack(row + c, zero_pack<T, V>());
    if (glu) store_pack(row + p.channels + c, zero_pack<T, V>());
  } else if (!glu) {
    store_pack(row + c, narrow<T, V>(gradient));
  } else {
    const T* x = static_cast<const T*>(p.x.data) + s * p.x.stride_t + b * p.x.stride_b;
    float value[V], gate[V];
    widen(load_pack<T, V>(x + c), value);
    widen(load_pack<T, V>(x + p.channels + c), gate);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      gate[v] = sigmoid(gate[v]);
      value[v] = gradient[v] * value[v] * gate[v] * (1.0f - gate[v]);
      gate[v] *= gradient[v];
    }
    store_pack(row + c, narrow<T, V>(gate));
    store_pack(row + p.channels + c, narrow<T, V>(value));
  }
}

// ------------------------------------------------------------------------------------------------ normalisation

// What normalising one filter needs to know of all its taps:
//   softmax     offset = max, scale = 1 / sum exp(w - max)
//   l2, abs_l2  scale = 1 / (||w|| + epsilon), norm = ||w||
//   l1          scale = 1 / (||w|| + epsilon)
struct FilterStats {
  float offset = 0.0f, scale = 1.0f, norm = 0.0f;
};

__device__ __forceinline__ bool needs_stats(Normalize kind) {
  return kind == Normalize::kSoftmax || kind == Normalize::kL2 || kind == Normalize::kAbsL2 || kind == Normalize::kL1;
}

// What a tap adds to the sum over taps that `scale` is made of.
__device__ __forceinline__ float stats_term(Normalize kind, float weight, float offset) {
  return kind == Normalize::kSoftmax ? exponential(weight - offset) : kind == Normalize::kL1 ? fabsf(weight)
                                                                                              : weight * weight;
}

// The sum, and for softmax the maximum, over all taps that count, made into stats. No tap at all: all weigh 0.
__device__ __forceinline__ FilterStats finish_stats(Normalize kind, float sum, float maximum) {
  if (kind == Normalize::kSoftmax) return {maximum, 1.0f / sum, 0.0f};
  const float norm = kind == Normalize::kL1 ? sum : sqrtf(sum);
  return {0.0f, 1.0f / (norm + kEpsilon), norm};
}

// One tap of normalize(); taps that do not count never come here.
__device__ __forceinline__ float normalized(Normalize kind, float weight, const FilterStats& stats) {
  switch (kind) {
    case Normalize::kSoftmax: return exponential(weight - stats.offset) * stats.scale;
    case Normalize::kNone: return weight;
    case Normalize::kL2: return weight * stats.scale;
    case Normalize::kAbsL2: return fabsf(weight) * stats.scale;
    case Normalize::kSigmoid: return sigmoid(weight);
    case Normalize::kTanh: return tanhf(weight);
    case Normalize::kL1: return weight * stats.scale;
    case Normalize::kAbs: return fabsf(weight);
    case Normalize::kSquare: return weight * weight;
  }
  return 0.0f;
}

// What a tap adds to the sum that its filter's backward needs (`along` below); `gradient` is that of the normalised
// weight. 0 for the ways without such a sum.
__device__ __forceinline__ float along_term(Normalize kind, float gradient, float weight, const FilterStats& stats) {
  switch (kind) {
    case Normalize::kSoftmax: return gradient * normalized(kind, weight, stats);
    case Normalize::kL2:
    case Normalize::kL1: return gradient * weight;
    case Normalize::kAbsL2: return gradient * fabsf(weight);
    default: return 0.0f;
  }
}

__device__ __forceinline__ float sign(float value) { return value > 0.0f ? 1.0f : value < 0.0f ? -1.0f : value; }

// normalize_backward() of ops/normalize.py for one tap, given `along`, the sum of along_term over the filter's taps.
__device__ __forceinline__ float normalize_backward(Normalize kind, float gradient, float weight,
                                                    const FilterStats& stats, float along) {
  switch (kind) {
    case Normalize::kSoftmax: return (gradient - along) * normalized(kind, weight, stats);
    case Normalize::kNone: return gradient;
    case Normalize::kL2:
    case Normalize::kAbsL2: {
      // The norm's direction is taken as 0 at w = 0, as torch does.
      const float direction = stats.norm > 0.0f ? weight / stats.norm : 0.0f;
      const float direct = kind == Normalize::kL2 ? gradient : gradient * sign(weight);
      return direct * stats.scale - direction * (along * stats.scale * stats.scale);
    }
    case Normalize::kSigmoid: {
      const float value = sigmoid(weight);
      return gradient * (value * (1.0f - value));
    }
    case Normalize::kTanh: {
      const float value = tanhf(weight);
      return gradient * (1.0f - value * value);
    }
    case Normalize::kL1: return gradient * stats.scale - sign(weight) * (along * stats.scale * stats.scale);
    case Normalize::kAbs: return gradient * sign(weight);
    case Normalize::kSquare: return gradient * weight * 2.0f;
  }
  return 0.0f;
}

// Sums and maxima over `width` neighbouring lanes (a power of two); every lane gets the same bits. All 32 lanes call.
__device__ __forceinline__ float group_sum(float value, int width) {
  for (int distance = width / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(kFullWarp, value, distance);
  return value;
}
__device__ __forceinline__ float group_max(float value, int width) {
  for (int distance = width / 2; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, distance));
  }
  return value;
}

}  // namespace lightconv
