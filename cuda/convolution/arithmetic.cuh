// Shared by all kernels of lightconv and dynamicconv: the dropout mask, inputs through the GLU, normalisations.
#pragma once

#include "common/device.cuh"
#include "common/philox.cuh"
#include "convolution/launchers.h"

namespace lightconv {

// The epsilon of W / (||W|| + epsilon): EPSILON in ops/normalize.py.
constexpr float kEpsilon = 1e-6f;

// ------------------------------------------------------------------------------------------------ dropout

// The factors of the four weights with row-major indices 4 * quad ... 4 * quad + 3.
__device__ __forceinline__ float4 dropout_factors(const ConvParams& p, uint64_t quad, uint64_t seed) {
  uint4 words[1];
  philox<1>({quad}, seed, words);
  const uint4 word = words[0];
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

// ------------------------------------------------------------------------------------------------ inputs

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

// Stores the gradient of u[s, b, c ...], through the GLU: dx of a row s >= 0, dstate of a row s < 0. Padding (`real` is
// false) gets 0, and x is not read for it.
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

// What the normalisation of a filter needs from all of its taps:
//   softmax     offset = max, scale = 1 / sum exp(w - max)
//   l2, abs_l2  scale = 1 / (||w|| + epsilon), norm = ||w||
//   l1          scale = 1 / (||w|| + epsilon)
struct FilterStats {
  float offset = 0.0f, scale = 1.0f, norm = 0.0f;
};

__device__ __forceinline__ bool needs_stats(Normalize kind) {
  return kind == Normalize::kSoftmax || kind == Normalize::kL2 || kind == Normalize::kAbsL2 || kind == Normalize::kL1;
}

// The term of a tap in the sum over taps from which `scale` is computed.
__device__ __forceinline__ float stats_term(Normalize kind, float weight, float offset) {
  return kind == Normalize::kSoftmax ? exponential(weight - offset) : kind == Normalize::kL1 ? fabsf(weight)
                                                                                              : weight * weight;
}

// The stats from the sum (for softmax, also the maximum) over all taps that count. Without any, all weights are 0.
__device__ __forceinline__ FilterStats finish_stats(Normalize kind, float sum, float maximum) {
  if (kind == Normalize::kSoftmax) return {maximum, 1.0f / sum, 0.0f};
  const float norm = kind == Normalize::kL1 ? sum : sqrtf(sum);
  return {0.0f, 1.0f / (norm + kEpsilon), norm};
}

// One tap of normalize(), which must count.
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

// The term of a tap in the sum that the backward pass of its filter needs (`along` below); `gradient` is that of the
// normalised weight. 0 for normalisations without such a sum.
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
      // The direction of the norm is 0 at w = 0, as in torch.
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

}  // namespace lightconv
