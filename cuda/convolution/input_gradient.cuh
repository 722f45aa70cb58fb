// The gradient for x (and for a step's state), in tiles (tile.cuh): one launch.
//
//     du[s] = sum_k w[s + padding_l - k, k] * grad[s + padding_l - k],        dx = du through the GLU
//
// gathered, so that every row has one owner and its sum one order. If m counts gradient rows from the first row that a
// micro-tile of S outputs sees, output i meets row m at tap K-1 + i - m. For lightconv this is the forward pass with
// the filter reversed. For dynamicconv the K weights of gradient row m belong to that row, so filters are kept row by
// row (K-1 of them outside the tile). Each is shifted by 0 to 3 floats, so that the weights that S neighbouring outputs
// read begin at a multiple of 16 bytes.
#pragma once

#include "convolution/tile.cuh"

namespace lightconv {

// The shift of the filter of tile row `row` from a multiple of 4, in floats. (Micro-tiles begin at multiples of S.)
template <int S>
__device__ __forceinline__ int filter_shift(int row, int taps) {
  return S % 4 == 0 ? (row - taps + 1) & 3 : 0;
}

struct RowLayout {
  int pitch(int taps) const { return round_up(taps + 3, 4); }
  int filter_rows(int rows, int taps) const { return rows + taps - 1; }
};

template <int S>
struct RowWeights {
  const float* filters;  // of the micro-tile's first row, this head
  int stride;            // from row to row
  int taps;
  __device__ __forceinline__ const float* first(int m) const {
    return filters + m * stride + filter_shift<S>(m, taps) + taps - 1 - m;
  }
  __device__ __forceinline__ float at(int m, int i) const { return first(m)[i]; }
  __device__ __forceinline__ void all(int m, float (&w)[S]) const { load_floats<S>(first(m), w); }
};

template <class T, bool kDynamic, int V, int S, int K>
__global__ void __launch_bounds__(128, 3)
    input_gradient_kernel(const __grid_constant__ ConvBackwardParams p, const Tile tile) {
  LIGHTCONV_DYNAMIC_SHARED(float, filters);
  const int pitch = tile.vectors * V, count = tile.rows + tile.taps - 1;
  T* rows = reinterpret_cast<T*>(filters + round_up((kDynamic ? count : 1) * tile.heads * tile.pitch, 4));
  int2* spans = after<int2>(rows, count * pitch);
  const bool packed = p.cu_seqlens != nullptr;

  // Rows of the state come first, if their gradient is needed.
  const int64_t end = p.dx.data != nullptr ? p.steps : 0;
  const Place place = block_place<V>(p, tile, p.dstate.data != nullptr ? -p.state_rows : 0);
  const int v = threadIdx.x % tile.vectors, micro = threadIdx.x / tile.vectors;
  const bool busy = v < place.vectors && micro * S < tile.rows && place.row + micro * S < end;
  const int c = (place.vector + v) * V;
  const int head = busy ? c / (p.channels / p.heads) - place.head : 0;

  float acc[S][V];
#pragma unroll
  for (int i = 0; i < S; ++i) {
#pragma unroll
    for (int e = 0; e < V; ++e) acc[i][e] = 0.0f;
  }
  const int size = p.grad.data == nullptr ? 0 : K > 0 ? K : p.kernel_size, chunk = K > 0 ? K : tile.taps;
  for (int begin = 0; begin < size; begin += chunk) {
    const int taps = min(chunk, size - begin);
    const int64_t origin = place.row + p.padding_l - (begin + taps - 1);
    if (begin > 0) __syncthreads();
    stage_rows<T, V>(rows, pitch, tile.rows + taps - 1, origin, 0, p.steps, place.vectors, p.grad, place.b,
                     place.vector * V);
    stage_filters<T, K, kDynamic ? 1 : -1>(p, place, origin, kDynamic ? tile.rows + taps - 1 : 1, begin, begin + taps,
                                           [&](int row, int h) {
                                             if constexpr (!kDynamic) return filters + h * tile.pitch + taps - 1;
                                             return filters + (row * tile.heads + h) * tile.pitch +
                                                    filter_shift<S>(row, taps);
                                           });
    // A row's taps reach only rows of its sequence, and only those rows' taps reach it.
    if (packed) stage_spans(spans, p, place.b, place.row, tile.rows, origin, tile.rows + taps - 1);
    __syncthreads();
    if (!busy) continue;
    const T* own = rows + micro * S * pitch + v * V;
    const int2* limits = packed ? spans + micro * S : nullptr;
    if constexpr (kDynamic) {
      const float* first = filters + (micro * S * tile.heads + head) * tile.pitch;
      const RowWeights<S> weights{first, tile.heads * tile.pitch, taps};
      correlate<T, V, S, K>(acc, own, pitch, taps, weights, limits, micro * S);
    } else {
      const SharedWeights<S> weights{filters + head * tile.pitch};
      correlate<T, V, S, K>(acc, own, pitch, taps, weights, limits, micro * S);
    }
  }
  if (!busy) return;

  const Span span = packed ? Span{0, p.steps} : sequence_span(p, place.b, 0);
  const int64_t seen = p.steps + p.state_rows;
  const int64_t kept = seen < p.kernel_size - 1 ? seen : p.kernel_size - 1;  // rows of the next state
#pragma unroll
  for (int i = 0; i < S; ++i) {
    const int64_t s = place.row + micro * S + i, next = s - p.steps + kept;
    if (s >= end) break;
    if (p.grad_state.data != nullptr && next >= 0) {
      const T* row = static_cast<const T*>(p.grad_state.data) + next * p.grad_state.stride_t +
                     place.b * p.grad_state.stride_b;
      float more[V];
      widen(load_pack<T, V>(row + c), more);
#pragma unroll
      for (int e = 0; e < V; ++e) acc[i][e] += more[e];
    }
    store_input_gradient<T, V>(p, s, place.b, c, acc[i], s >= span.begin && s < span.end);
  }
}

template <class T, bool kDynamic, int V>
cudaError_t tiled_input_gradient(const ConvBackwardParams& p, cudaStream_t stream) {
  const int64_t rows = (p.dstate.data != nullptr ? p.state_rows : 0) + (p.dx.data != nullptr ? p.steps : 0);
  return launch_tiles<T, V, kSteps>(
      p, rows, RowLayout{},
      [](auto size) { return input_gradient_kernel<T, kDynamic, V, kSteps, decltype(size)::value>; }, stream);
}

}  // namespace lightconv
