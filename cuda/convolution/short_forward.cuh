// The forward pass and the step for short filters (short.cuh).
#pragma once

#include "convolution/short.cuh"

namespace lightconv {

// Writes the last K-1 rows of x and the state as the next state; the threads of the first steps do this.
template <class T, int V, int K>
__device__ __forceinline__ void write_next_state(const ConvParams& p, const ShortPlace& place, int c) {
  if (p.next_state.data == nullptr || place.t != 0) return;
  const int64_t exist = p.steps + p.state_rows, kept = exist < K - 1 ? exist : K - 1;
  T* next = static_cast<T*>(p.next_state.data) + place.b * p.next_state.stride_b + c;
  for (int64_t row = 0; row < kept; ++row) {
    store_pack(next + row * p.next_state.stride_t, load_input<T, V>(p, p.steps - kept + row, place.b, c));
  }
}

// A thread's kShortRows steps, whose taps all meet rows of their sequence; `x`: the first of these.
template <class T, bool kDynamic, int N, int K, bool kSoftmax>
__device__ __forceinline__ void forward_rows(const ConvParams& p, const ShortPlace& place, bool packed_weights,
                                             const T* x, int c, int head) {
  constexpr int R = kShortRows<K>, V = kWide<T>;
  uint4 rows[R + K - 1];
#pragma unroll
  for (int i = 0; i < R + K - 1; ++i, x += p.x.stride_t) rows[i] = *reinterpret_cast<const uint4*>(x);
  T read[kDynamic ? R : 1][N * K];
  const T* from = weights_at<T>(p, place.t, place.b, head);
#pragma unroll
  for (int i = 0; i < (kDynamic ? R : 1); ++i, from += p.weight.stride_t) {
    read_weights<T, N, K>(p, packed_weights, from, read[i]);
  }
  float bias[V] = {};
  if (p.bias != nullptr) widen(load_pack<T, V>(static_cast<const T*>(p.bias) + c), bias);
  T* out = static_cast<T*>(p.out.data) + place.t * p.out.stride_t + place.b * p.out.stride_b + c;

  float weights[N][K], window[K][V];
  if constexpr (!kDynamic) normalize_short<T, true, N, K>(kSoftmax, {0, K, K}, read[0], weights);
#pragma unroll
  for (int k = 0; k < K - 1; ++k) widen<T>(rows[k], window[k]);
#pragma unroll
  for (int i = 0; i < R; ++i, out += p.out.stride_t) {
    widen<T>(rows[i + K - 1], window[(i + K - 1) % K]);
    if constexpr (kDynamic) normalize_short<T, true, N, K>(kSoftmax, {0, K, K}, read[i], weights);
    float sums[V];
#pragma unroll
    for (int e = 0; e < V; ++e) sums[e] = bias[e];
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
      for (int e = 0; e < V; ++e) sums[e] = fmaf(weights[e * N / V][k], window[(i + k) % K][e], sums[e]);
    }
    store_pack(out, narrow<T, V>(sums));
  }
}

template <class T, bool kDynamic, int V, int N, int K>
__global__ void __launch_bounds__(kShortThreads, K == 7 ? 2 : N == 1 ? 4 : 3)
    short_forward_kernel(const __grid_constant__ ConvParams p, const ShortWalk walk) {
  const ShortPlace place = ShortPlace::of<V>(p, walk);
  if (!place.active) return;
  const int c = place.vector * V, head = c / (p.channels / p.heads);
  const bool packed = p.cu_seqlens != nullptr;
  Span span = sequence_span(p, place.b, place.t);
  const int64_t left = p.steps - place.t;
  const int count = left < walk.length ? static_cast<int>(left) : walk.length, seen = count + K - 1;
  WalkRows<T> rows(p, packed ? Span{0, p.steps} : span, place.t - p.padding_l, place.b, c, seen);
  int low = rows.cut(span.begin, seen), high = rows.cut(span.end, seen);  // the rows of the step's sequence

  if constexpr (kReadsFirst<N>) {
    if (reads_first<N>(p) && left >= walk.length && low == 0 && high == seen) {
      if (p.normalize == Normalize::kSoftmax) {
        forward_rows<T, kDynamic, N, K, true>(p, place, walk.packed_weights, rows.at, c, head);
      } else {
        forward_rows<T, kDynamic, N, K, false>(p, place, walk.packed_weights, rows.at, c, head);
      }
      write_next_state<T, V, K>(p, place, c);
      return;
    }
  }
  float bias[V] = {};
  if (p.bias != nullptr) widen(load_pack<T, V>(static_cast<const T*>(p.bias) + c), bias);
  float weights[N][K];
  // What the next step needs is loaded while this one is computed.
  T next_weights[N * K];
  const T* from = weights_at<T>(p, place.t, place.b, head);
  read_weights<T, N, K>(p, walk.packed_weights, from, next_weights);
  if constexpr (!kDynamic) make_weights<T, N, K>(p, next_weights, true, {0, K, K}, 0, place.b, head, weights);
  float window[K][V];
#pragma unroll
  for (int k = 0; k < K - 1; ++k) widen<T>(rows.load(), window[k]);
  uint4 next_row = rows.load();
  T* out = static_cast<T*>(p.out.data) + place.t * p.out.stride_t + place.b * p.out.stride_b + c;
#pragma unroll 1
  for (int n = 0; n < count; ++n) {
    if (packed && place.t + n >= span.end) {
      span = sequence_span(p, place.b, place.t + n);
      low = rows.cut(span.begin, seen), high = rows.cut(span.end, seen);
    }
    const TapRange taps(low - n, high - n, K);
    const bool whole = n >= low && n + K <= high;
    widen<T>(next_row, window[K - 1]);
    if constexpr (kDynamic) {
      make_weights<T, N, K>(p, next_weights, whole || !p.renorm_padding, taps, place.t + n, place.b, head, weights);
    }
    if (n + 1 < count) {
      next_row = rows.load();
      from += p.weight.stride_t;
      if constexpr (kDynamic) read_weights<T, N, K>(p, walk.packed_weights, from, next_weights);
    }
    float sums[V];
#pragma unroll
    for (int e = 0; e < V; ++e) sums[e] = bias[e];
    if (whole) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
#pragma unroll
        for (int e = 0; e < V; ++e) sums[e] = fmaf(weights[e * N / V][k], window[k][e], sums[e]);
      }
    } else {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (!taps.holds(k)) continue;
#pragma unroll
        for (int e = 0; e < V; ++e) sums[e] = fmaf(weights[e * N / V][k], window[k][e], sums[e]);
      }
    }
    store_pack(out, narrow<T, V>(sums));
    out += p.out.stride_t;
#pragma unroll
    for (int k = 0; k < K - 1; ++k) {
#pragma unroll
      for (int e = 0; e < V; ++e) window[k][e] = window[k + 1][e];
    }
  }
  write_next_state<T, V, K>(p, place, c);
}

// ------------------------------------------------------------------------------------------------ launches

template <class T>
bool short_forward_supported(const ConvParams& p) {
  constexpr int size = sizeof(T);
  const int heads = heads_of_vector<T>(p);
  return short_options(p) && (heads == 1 || (heads > 1 && p.dynamic && p.kernel_size == 4 && p.drop_below == 0)) &&
         aligned(p.x, size, 16) && aligned(p.state, size, 16) && aligned(p.out, size, 16) &&
         aligned(p.next_state, size, 16) && reinterpret_cast<uintptr_t>(p.bias) % 16 == 0;
}

template <class T, bool kDynamic, int N, int K>
cudaError_t launch_short_forward(const ConvParams& p, cudaStream_t stream) {
  ShortWalk walk = short_walk<T, N, K>(p, p.steps);
  walk.packed_weights = packed_filters<T>(p, N, p.weight.data, p.weight.stride_t, p.weight.stride_b,
                                          p.weight.stride_h, p.weight.stride_k);
  return launch_blocks(short_forward_kernel<T, kDynamic, kWide<T>, N, K>,
                       divide_up(walk.threads, int64_t{kShortThreads}), kShortThreads, 0, stream, p, walk);
}

template <class T>
cudaError_t short_forward(const ConvParams& p, cudaStream_t stream) {
  switch (heads_of_vector<T>(p)) {
    case 2: return launch_short_forward<T, true, 2, 4>(p, stream);
    case 4: return launch_short_forward<T, true, 4, 4>(p, stream);
    case 8:
      if constexpr (kWide<T> == 8) return launch_short_forward<T, true, 8, 4>(p, stream);
      break;
    case 1:
      switch (p.kernel_size) {
        case 3:
          return p.dynamic ? launch_short_forward<T, true, 1, 3>(p, stream)
                           : launch_short_forward<T, false, 1, 3>(p, stream);
        case 4:
          return p.dynamic ? launch_short_forward<T, true, 1, 4>(p, stream)
                           : launch_short_forward<T, false, 1, 4>(p, stream);
        case 7:
          return p.dynamic ? launch_short_forward<T, true, 1, 7>(p, stream)
                           : launch_short_forward<T, false, 1, 7>(p, stream);
      }
  }
  return cudaErrorInvalidValue;
}

}  // namespace lightconv
