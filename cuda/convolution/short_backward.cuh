// The backward pass for short filters, in registers like the forward pass (short.cuh).
//
// One walk computes both gradients, so grad, x and the weight are read once. The window of u gives the gradients of the
// taps, and a second window collects du, whose row t - padding_l is complete after step t. A walk owns the weights of
// its `length` steps t and the rows t - padding_l of du. It begins K-1 steps earlier, because these also reach its
// rows.
//
// Threads that read all of their steps first have the same steps and rows. dynamicconv: one launch. lightconv: the
// steps of each thread give a share of dweight, which goes to the workspace as a slab (slabs.h).
#pragma once

#include "convolution/short.cuh"
#include "convolution/weight_gradient.cuh"

namespace lightconv {

template <class T, int N, int K>
__device__ __forceinline__ void write_weight_gradient(const ConvBackwardParams& p, bool packed, T* to,
                                                      const float (&gradient)[N][K]) {
  if (packed) {
    constexpr int kPiece = piece_bytes(N * K * sizeof(T)) / sizeof(T);
#pragma unroll
    for (int first = 0; first < N * K; first += kPiece) {
      Pack<T, kPiece> pack;
#pragma unroll
      for (int e = 0; e < kPiece; ++e) pack.value[e] = from_float<T>(gradient[(first + e) / K][(first + e) % K]);
      store_pack(to + first, pack);
    }
    return;
  }
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      to[n * p.dweight_stride_h + k * p.dweight_stride_k] = from_float<T>(gradient[n][k]);
    }
  }
}

// Like group_sum, the sums over a head's lanes, for all taps together.
template <int K>
__device__ __forceinline__ void sum_over_lanes(float (&gradient)[K], int lanes) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (int k = 0; k < K; ++k) gradient[k] += __shfl_xor_sync(kFullWarp, gradient[k], distance);
  }
}

// Computes the gradients of the weights from those of the taps.
template <int N, int K>
__device__ __forceinline__ void through_softmax(const float (&weights)[N][K], float (&gradient)[N][K]) {
#pragma unroll
  for (int h = 0; h < N; ++h) {
    float along = 0.0f;
#pragma unroll
    for (int k = 0; k < K; ++k) along = fmaf(gradient[h][k], weights[h][k], along);
#pragma unroll
    for (int k = 0; k < K; ++k) gradient[h][k] = (gradient[h][k] - along) * weights[h][k];
  }
}

// lightconv: a thread's share of the gradient of its head's filter.
template <int K>
__device__ __forceinline__ void write_slab(const ConvBackwardParams& p, const ShortPlace& place, int length, int head,
                                           const float (&gradient)[K], int lanes) {
  if (p.dweight == nullptr) return;
  const int64_t slab = place.t / length * p.batch + place.b;
  float* to = static_cast<float*>(p.workspace) + (slab * p.heads + head) * K;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const float sum = group_sum(gradient[k], lanes);
    if (place.active && threadIdx.x % lanes == 0) to[k] = sum;
  }
}

// A thread's kShortRows steps and the K-1 before them, whose taps all meet rows of their sequence. x, grad, from, dx and
// dweight are those of the first of these steps; a step's first tap meets x.
template <class T, bool kDynamic, int N, int K, bool kSoftmax>
__device__ __forceinline__ void backward_rows(const ConvBackwardParams& p, const ShortPlace& place,
                                              bool packed_weights, const T* x, const T* grad_at, const T* from, T* dx,
                                              T* dweight, int head, int lanes) {
  constexpr int R = kShortRows<K>, V = kWide<T>, kSteps = R + K - 1;
  uint4 rows[kSteps], grads[kSteps];
  T read[kDynamic ? kSteps : 1][N * K];
  x += (K - 1) * p.x.stride_t;  // none of the thread's own steps meets the rows before
#pragma unroll
  for (int n = 0; n < kSteps; ++n) {
    grads[n] = *reinterpret_cast<const uint4*>(grad_at);
    rows[n] = *reinterpret_cast<const uint4*>(x);
    grad_at += p.grad.stride_t, x += p.x.stride_t;
    if (n == 0 || kDynamic) read_weights<T, N, K>(p, packed_weights, from, read[n]);
    from += p.weight.stride_t;
  }
  float window[K][V], sums[K][V] = {}, weights[N][K], gradient[N][K] = {};
  if constexpr (!kDynamic) normalize_short<T, true, N, K>(kSoftmax, {0, K, K}, read[0], weights);
#pragma unroll
  for (int k = 0; k < K - 1; ++k) widen<T>(rows[k], window[k]);
#pragma unroll
  for (int n = 0; n < kSteps; ++n) {
    const bool own = n >= K - 1;
    float grad[V];
    widen<T>(grads[n], grad);
    if (own) widen<T>(rows[n], window[n % K]);
    if constexpr (kDynamic) {
      normalize_short<T, true, N, K>(kSoftmax, {0, K, K}, read[n], weights);
#pragma unroll
      for (int h = 0; h < N; ++h) {
#pragma unroll
        for (int k = 0; k < K; ++k) gradient[h][k] = 0.0f;
      }
    }
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
      for (int e = 0; e < V; ++e) {
        float& sum = sums[(n + k) % K][e];
        sum = fmaf(weights[e * N / V][k], grad[e], sum);
        // Tap k of step n meets row n + k of those from the first step's on, which is rows[n + k - (K - 1)].
        if (own) gradient[e * N / V][k] = fmaf(grad[e], window[(n + k + 1) % K][e], gradient[e * N / V][k]);
      }
    }
    if (own && kDynamic && p.dweight != nullptr) {
      if constexpr (N == 1) sum_over_lanes<K>(gradient[0], lanes);
      if (N > 1 || threadIdx.x % lanes == 0) {
        if constexpr (kSoftmax) through_softmax<N, K>(weights, gradient);
        write_weight_gradient<T, N, K>(p, packed_weights, dweight, gradient);
      }
    }
    if (own && p.dx.data != nullptr) store_pack(dx, narrow<T, V>(sums[n % K]));
    dx += p.dx.stride_t, dweight += p.dweight_stride_t;
#pragma unroll
    for (int e = 0; e < V; ++e) sums[n % K][e] = 0.0f;
  }
  if constexpr (!kDynamic) write_slab<K>(p, place, R, head, gradient[0], lanes);
}

// Blocks per multiprocessor. From sm_100 on, nvcc 13.0 uses a few more registers for the same code.
template <bool kDynamic, int N, int K>
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kShortBlocks = 2;
#else
constexpr int kShortBlocks = kDynamic && N == 1 && K < 7 ? 3 : 2;
#endif

// `lanes` neighbouring lanes share a head.
template <class T, bool kDynamic, int V, int N, int K>
__global__ void __launch_bounds__(kShortThreads, kShortBlocks<kDynamic, N, K>)
    short_backward_kernel(const __grid_constant__ ConvBackwardParams p, const ShortWalk walk, const int lanes) {
  const ShortPlace place = ShortPlace::of<V>(p, walk);
  const int c = place.vector * V, head = c / (p.channels / p.heads);
  const bool packed = p.cu_seqlens != nullptr;
  // Idle threads take part without rows, because the sums over lanes need whole warps.
  const int64_t b = place.active ? place.b : 0, begin = place.t - (K - 1);
  const int total = walk.length + K - 1, seen = total + K - 1;
  Span span = sequence_span(p, b, 0);
  const Span readable = !place.active ? Span{0, 0} : packed ? Span{0, p.steps} : span;
  // Step n of the walk is begin + n; the first row of u that it sees is row n of the walk, which it completes du of.
  WalkRows<T> rows(p, readable, begin - p.padding_l, b, c, seen);
  int low = rows.cut(span.begin, seen), high = rows.cut(span.end, seen);  // the rows of the step's sequence
  const int64_t after = p.steps - begin;
  const int real_low = begin < 0 ? static_cast<int>(-begin) : 0;
  const int real_high = place.active ? static_cast<int>(after < total ? after : total) : 0;
  const auto exists = [&](int n) { return n >= real_low && n < real_high; };
  const int du_low = rows.cut(0, seen), du_high = place.active ? rows.cut(p.steps, seen) : 0;

  const T* grad_at = static_cast<const T*>(p.grad.data) + begin * p.grad.stride_t + b * p.grad.stride_b + c;
  const T* from = weights_at<T>(p, kDynamic ? begin : 0, kDynamic ? b : 0, head);
  T* dx = static_cast<T*>(p.dx.data) + (begin - p.padding_l) * p.dx.stride_t + b * p.dx.stride_b + c;
  T* dweight = static_cast<T*>(p.dweight) + begin * p.dweight_stride_t + b * p.dweight_stride_b +
               head * p.dweight_stride_h;
  const bool softmax = p.normalize == Normalize::kSoftmax;
  if constexpr (kReadsFirst<N>) {
    const Span first = packed && begin > 0 ? sequence_span(p, b, begin) : span;
    const bool whole = reads_first<N>(p) && real_low == 0 && real_high == total && rows.cut(first.begin, seen) == 0 &&
                       rows.cut(first.end, seen) == seen;
    // All lanes decide alike, because they add up sums together.
    if (__all_sync(kFullWarp, whole)) {
      if (softmax) {
        backward_rows<T, kDynamic, N, K, true>(p, place, walk.packed_weights, rows.at, grad_at, from, dx, dweight, head,
                                               lanes);
      } else {
        backward_rows<T, kDynamic, N, K, false>(p, place, walk.packed_weights, rows.at, grad_at, from, dx, dweight,
                                                head, lanes);
      }
      return;
    }
  }

  // What the next step needs is loaded while this one is computed.
  T next_weights[N * K];
#pragma unroll
  for (int at = 0; at < N * K; ++at) next_weights[at] = from_float<T>(0.0f);
  uint4 next_row = {}, next_grad = {};
  const auto fetch = [&](int n) {
    next_row = rows.load();
    next_grad = exists(n) ? *reinterpret_cast<const uint4*>(grad_at) : make_uint4(0, 0, 0, 0);
    if (kDynamic && exists(n)) read_weights<T, N, K>(p, walk.packed_weights, from, next_weights);
    grad_at += p.grad.stride_t, from += p.weight.stride_t;
  };
  float window[K][V], sums[K][V] = {}, weights[N][K], factors[K], gradient[N][K] = {};
#pragma unroll
  for (int k = 0; k < K - 1; ++k) widen<T>(rows.load(), window[k]);
#pragma unroll
  for (int k = 0; k < K; ++k) factors[k] = 1.0f;
  if constexpr (!kDynamic) {
    read_weights<T, N, K>(p, walk.packed_weights, from, next_weights);
    normalize_short<T, true, N, K>(softmax, {0, K, K}, next_weights, weights);
    short_dropout<K>(p, flat_index(p, 0, 0, head), factors);
  }
  fetch(0);

#pragma unroll 1
  for (int n = 0; n < total; ++n) {
    const int64_t t = begin + n;
    if (packed && exists(n) && (t >= span.end || n == 0 || t == 0)) {
      span = sequence_span(p, b, t);
      low = rows.cut(span.begin, seen), high = rows.cut(span.end, seen);
    }
    TapRange taps(low - n, high - n, K);
    if (!exists(n)) taps.first = taps.last = 0;
    const bool whole = exists(n) && n >= low && n + K <= high;
    float grad[V];
    widen<T>(next_row, window[K - 1]);
    widen<T>(next_grad, grad);
    if constexpr (kDynamic) {
      if (whole || !p.renorm_padding) {
        normalize_short<T, true, N, K>(softmax, taps, next_weights, weights);
      } else {
        normalize_short<T, false, N, K>(softmax, taps, next_weights, weights);
      }
      if constexpr (N == 1) {
        if (p.drop_below != 0) short_dropout<K>(p, exists(n) ? flat_index(p, t, b, head) : 0, factors);
      }
#pragma unroll
      for (int h = 0; h < N; ++h) {
#pragma unroll
        for (int k = 0; k < K; ++k) gradient[h][k] = 0.0f;
      }
    }
    if (n + 1 < total) fetch(n + 1);
    // lightconv's gradient is a sum over the steps: the steps before the walk's own belong to another walk.
    const bool own = n >= K - 1;
    const auto add_tap = [&](int k) {
      const float one = N == 1 ? p.drop_below != 0 ? dropped(weights[0][k], factors[k]) : weights[0][k] : 0.0f;
#pragma unroll
      for (int e = 0; e < V; ++e) {
        sums[k][e] = fmaf(N == 1 ? one : weights[e * N / V][k], grad[e], sums[k][e]);
        if (kDynamic || own) gradient[e * N / V][k] = fmaf(grad[e], window[k][e], gradient[e * N / V][k]);
      }
    };
    if (whole) {
#pragma unroll
      for (int k = 0; k < K; ++k) add_tap(k);
    } else {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (taps.holds(k)) add_tap(k);
      }
    }
    if (kDynamic && p.dweight != nullptr && own) {
      if constexpr (N == 1) {
        sum_over_lanes<K>(gradient[0], lanes);
        if (p.drop_below != 0) {
#pragma unroll
          for (int k = 0; k < K; ++k) gradient[0][k] = dropped(gradient[0][k], factors[k]);
        }
      }
      if (exists(n) && (N > 1 || threadIdx.x % lanes == 0)) {
        if (softmax) through_softmax<N, K>(weights, gradient);
        if (p.renorm_padding && !whole) {
#pragma unroll
          for (int h = 0; h < N; ++h) {
#pragma unroll
            for (int k = 0; k < K; ++k) gradient[h][k] = taps.holds(k) ? gradient[h][k] : 0.0f;
          }
        }
        write_weight_gradient<T, N, K>(p, walk.packed_weights, dweight, gradient);
      }
    }
    dweight += p.dweight_stride_t;
    // Row n of the walk is complete.
    if (own && n >= du_low && n < du_high && p.dx.data != nullptr) {
      const bool real = n >= rows.low && n < rows.high;
      if (p.glu) {
        store_input_gradient<T, V>(p, rows.first + n, b, c, sums[0], real);
      } else {
        store_pack(dx, real ? narrow<T, V>(sums[0]) : zero_pack<T, V>());
      }
    }
    dx += p.dx.stride_t;
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
      for (int e = 0; e < V; ++e) {
        if (k < K - 1) window[k][e] = window[k + 1][e];
        sums[k][e] = k < K - 1 ? sums[k + 1][e] : 0.0f;
      }
    }
  }

  if constexpr (!kDynamic) write_slab<K>(p, place, walk.length, head, gradient[0], lanes);
}

// ------------------------------------------------------------------------------------------------ launches

// The backward pass of a step uses the tiles.
template <class T>
bool short_backward_supported(const ConvBackwardParams& p) {
  constexpr int size = sizeof(T);
  const int heads = heads_of_vector<T>(p), lanes = p.channels / p.heads / kWide<T>;
  const bool whole = heads > 1 ? p.kernel_size == 4 && p.drop_below == 0
                               : heads == 1 && lanes <= 32 && (lanes & (lanes - 1)) == 0;
  return short_options(p) && whole && (p.dynamic || heads == 1) && p.state_rows == 0 && p.grad_state.data == nullptr &&
         p.grad.data != nullptr && aligned(p.x, size, 16) && aligned(p.grad, size, 16) && aligned(p.dx, size, 16);
}

// Host: padding_l more steps than there are weights, so that the last rows of du are also complete.
template <class T, int N, int K>
ShortWalk short_backward_walk(const ConvBackwardParams& p) {
  return short_walk<T, N, K>(p, p.steps + p.padding_l);
}

// Host: the number of lightconv's partial sums; its heads have whole vectors.
template <class T>
int64_t short_slabs(const ConvBackwardParams& p) {
  static_assert(kShortRows<3> == kShortRows<4>);
  const int length = (p.kernel_size == 7 ? short_backward_walk<T, 1, 7>(p) : short_backward_walk<T, 1, 4>(p)).length;
  return p.batch * divide_up(p.steps + p.padding_l, static_cast<int64_t>(length));
}

template <class T, bool kDynamic, int N, int K>
cudaError_t launch_short_backward(const ConvBackwardParams& p, cudaStream_t stream) {
  ShortWalk walk = short_backward_walk<T, N, K>(p);
  walk.packed_weights =
      packed_filters<T>(p, N, p.weight.data, p.weight.stride_t, p.weight.stride_b, p.weight.stride_h,
                        p.weight.stride_k) &&
      (p.dweight == nullptr || packed_filters<T>(p, N, p.dweight, p.dweight_stride_t, p.dweight_stride_b,
                                                 p.dweight_stride_h, p.dweight_stride_k));
  const int lanes = N > 1 ? 1 : p.channels / p.heads / kWide<T>;
  return launch_blocks(short_backward_kernel<T, kDynamic, kWide<T>, N, K>,
                       divide_up(walk.threads, int64_t{kShortThreads}), kShortThreads, 0, stream, p, walk, lanes);
}

template <class T, int K>
cudaError_t short_backward_with(const ConvBackwardParams& p, cudaStream_t stream) {
  return p.dynamic ? launch_short_backward<T, true, 1, K>(p, stream) : launch_short_backward<T, false, 1, K>(p, stream);
}

template <class T>
cudaError_t short_backward(const ConvBackwardParams& p, cudaStream_t stream) {
  const int heads = heads_of_vector<T>(p);
  if (heads > 1) {
    switch (heads) {
      case 2: return launch_short_backward<T, true, 2, 4>(p, stream);
      case 4: return launch_short_backward<T, true, 4, 4>(p, stream);
      case 8:
        if constexpr (kWide<T> == 8) return launch_short_backward<T, true, 8, 4>(p, stream);
    }
    return cudaErrorInvalidValue;
  }
  switch (p.kernel_size) {
    case 3: return short_backward_with<T, 3>(p, stream);
    case 4: return short_backward_with<T, 4>(p, stream);
    case 7: return short_backward_with<T, 7>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace lightconv
