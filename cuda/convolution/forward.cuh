// The forward pass and the step, for any K, in tiles (tile.cuh): one launch.
//
// dynamicconv's filters are skewed in shared memory: for S neighbouring outputs (a micro-tile) and a head, band[m][i]
// is the weight with which output i takes row m, tap m - i. The S weights of a row are then two 16-byte reads that
// all threads of the same micro-tile and head share.
#pragma once

#include "convolution/short_forward.cuh"
#include "convolution/tile.cuh"

namespace lightconv {

template <int S>
struct SkewedWeights {
  const float* band;
  __device__ __forceinline__ float at(int m, int i) const { return band[m * S + i]; }
  __device__ __forceinline__ void all(int m, float (&w)[S]) const { load_floats<S>(band + m * S, w); }
};

template <int S>
struct SkewedLayout {
  int pitch(int taps) const { return taps + S - 1; }
  int filter_rows(int rows, int) const { return rows; }
};

// The last rows of u become the next state.
template <class T, int V>
__device__ inline void write_next_state(const ConvParams& p, const Place& place) {
  if (p.next_state.data == nullptr || place.row != 0) return;
  const int64_t seen = p.steps + p.state_rows;
  const int count = static_cast<int>(seen < p.kernel_size - 1 ? seen : p.kernel_size - 1);
  for (int at = threadIdx.x; at < count * place.vectors; at += blockDim.x) {
    const int row = at / place.vectors, c = (place.vector + at - row * place.vectors) * V;
    T* to = static_cast<T*>(p.next_state.data) + row * p.next_state.stride_t + place.b * p.next_state.stride_b;
    store_pack(to + c, load_input<T, V>(p, p.steps - count + row, place.b, c));
  }
}

template <class T, bool kDynamic, int V, int S, int K>
__global__ void __launch_bounds__(128, K > 0 ? 4 : 3)
    forward_kernel(const __grid_constant__ ConvParams p, const Tile tile) {
  LIGHTCONV_DYNAMIC_SHARED(float, filters);
  const int pitch = tile.vectors * V;
  T* rows = reinterpret_cast<T*>(filters + round_up((kDynamic ? tile.rows : 1) * tile.heads * tile.pitch, 4));
  int2* spans = after<int2>(rows, (tile.rows + tile.taps - 1) * pitch);
  const bool packed = p.cu_seqlens != nullptr;

  const Place place = block_place<V>(p, tile, 0);
  const Span span = packed ? Span{0, p.steps} : sequence_span(p, place.b, 0);
  const int v = threadIdx.x % tile.vectors, micro = threadIdx.x / tile.vectors;
  const bool busy = v < place.vectors && micro * S < tile.rows && place.row + micro * S < p.steps;
  const int c = (place.vector + v) * V;
  const int head = busy ? c / (p.channels / p.heads) - place.head : 0;

  float acc[S][V];
#pragma unroll
  for (int i = 0; i < S; ++i) {
#pragma unroll
    for (int e = 0; e < V; ++e) acc[i][e] = 0.0f;
  }
  if (p.bias != nullptr && busy) {
    float bias[V];
    widen(load_pack<T, V>(static_cast<const T*>(p.bias) + c), bias);
#pragma unroll
    for (int i = 0; i < S; ++i) {
#pragma unroll
      for (int e = 0; e < V; ++e) acc[i][e] = bias[e];
    }
  }

  const int size = K > 0 ? K : p.kernel_size, chunk = K > 0 ? K : tile.taps;
  for (int begin = 0; begin < size; begin += chunk) {
    const int taps = min(chunk, size - begin);
    const int64_t origin = place.row - p.padding_l + begin;
    if (begin > 0) __syncthreads();
    stage_inputs<T, V>(rows, pitch, tile.rows + taps - 1, origin, span, place.vectors, p, place.b, place.vector * V);
    stage_filters<T, K, kDynamic ? S : 1>(p, place, place.row, kDynamic ? tile.rows : 1, begin, begin + taps,
                                          [&](int row, int h) {
                                            if constexpr (!kDynamic) return filters + h * tile.pitch;
                                            const int i = static_cast<unsigned>(row) % S, micro = (row - i) / S;
                                            return filters + ((micro * tile.heads + h) * tile.pitch + i) * S + i;
                                          });
    if (packed) stage_spans(spans, p, place.b, place.row, tile.rows, origin, tile.rows + taps - 1);
    __syncthreads();
    if (!busy) continue;
    const T* own = rows + micro * S * pitch + v * V;
    const int2* limits = packed ? spans + micro * S : nullptr;
    if constexpr (kDynamic) {
      const SkewedWeights<S> weights{filters + (micro * tile.heads + head) * tile.pitch * S};
      correlate<T, V, S, K>(acc, own, pitch, taps, weights, limits, micro * S);
    } else {
      const SharedWeights<S> weights{filters + head * tile.pitch};
      correlate<T, V, S, K>(acc, own, pitch, taps, weights, limits, micro * S);
    }
  }

  if (busy) {
    T* out = static_cast<T*>(p.out.data) + place.b * p.out.stride_b + c;
#pragma unroll
    for (int i = 0; i < S; ++i) {
      const int64_t t = place.row + micro * S + i;
      if (t < p.steps) store_pack(out + t * p.out.stride_t, narrow<T, V>(acc[i]));
    }
  }
  write_next_state<T, V>(p, place);
}

// With few rows (decoding), a block takes more channels, because micro-tiles would be almost empty. Every choice of
// tile gives the same bits: each output adds its taps in order.
template <class T, bool kDynamic, int V>
cudaError_t tiled_forward(const ConvParams& p, cudaStream_t stream) {
  if (p.steps <= kFewSteps) {
    return launch_tiles<T, V, 1>(
        p, p.steps, SkewedLayout<1>{}, [](auto) { return forward_kernel<T, kDynamic, V, 1, 0>; }, stream);
  }
  return launch_tiles<T, V, kSteps>(
      p, p.steps, SkewedLayout<kSteps>{},
      [](auto size) { return forward_kernel<T, kDynamic, V, kSteps, decltype(size)::value>; }, stream);
}

// Whether everything can be read and written a vector at a time.
template <class T>
bool forward_wide(const ConvParams& p) {
  constexpr int size = sizeof(T);
  return p.channels / p.heads % kWide<T> == 0 && aligned(p.x, size, 16) && aligned(p.state, size, 16) &&
         aligned(p.out, size, 16) && aligned(p.next_state, size, 16) && reinterpret_cast<uintptr_t>(p.bias) % 16 == 0;
}

inline bool band_forward_can_run(const ConvParams& p) {
  return p.state_rows == 0 && p.next_state.data == nullptr && band_forward_supported(p);
}

template <class T>
cudaError_t tiles_forward(const ConvParams& p, cudaStream_t stream) {
  return with_constants<T>(p, forward_wide<T>(p), [&](auto dynamic, auto V) {
    return tiled_forward<T, decltype(dynamic)::value, decltype(V)::value>(p, stream);
  });
}

// The tensor cores, where supported; the other short filters, which are limited by memory traffic, run in registers.
template <class T>
constexpr Path<ConvParams> kForward[3] = {
    {"band", kBandNeeds, band_forward_can_run, band_forward},
    {"short", kShortNeeds, short_forward_supported<T>, short_forward<T>},
    {"tiles", "", always<ConvParams>, tiles_forward<T>},
};

template <class T>
cudaError_t forward_of(const ConvParams& p, cudaStream_t stream) {
  return first_of(kForward<T>, p).run(p, stream);
}

template <class T>
std::string explain_forward(const ConvParams& p) {
  return explained(kForward<T>, p);
}

}  // namespace lightconv
