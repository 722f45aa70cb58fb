// Short filters (K = 3, 4, 7) entirely in registers: no shared memory, no barriers.
//
// A thread owns one vector of V channels (16 bytes) of one batch element and walks through `length` time steps with
// the last K rows of u in a window of registers; every input is read once (K-1 rows twice at the seams), directly from
// its place. The vector's channels belong to `N` heads: V / (C/H) where C/H is below V, else 1. With C/H = 1 and
// K = 4 the weights are two thirds of a dynamicconv's bytes (per step and vector: 16 of x, 64 of weights, 16 of out in
// a half type), so they are read 16 bytes at a time along (H, K) too, and softmax runs on registers.
// While a step is computed, those of the next kStepsAhead are being loaded. Addresses advance by a stride a step, and
// what depends on a step's place in its sequence is counted in ints from the walk's first row.
//
// Only softmax and none; dropout where a vector is within one head; K = 4 where it is not. The tiles serve the rest.
#pragma once

#include "convolution/tile.cuh"

#include <cstring>

namespace lightconv {

constexpr int kShortThreads = 128;
// Enough threads for each multiprocessor of the largest devices to have some hundreds.
constexpr int64_t kWantedThreads = 1 << 18;

// Steps whose inputs are on their way: a multiprocessor needs some 20 KB of them to keep its share of the memory busy,
// and has 12 to 16 warps here. With several heads in a vector the weights of one step are enough.
template <int kHeads>
constexpr int kStepsAhead = kHeads <= 2 ? 2 : 1;

// Steps in a row in the code, so that the windows move by other names for their registers. With several heads in a
// vector a step is long, and the moves cost less than instructions that do not fit into their cache.
template <int kHeads, int K>
constexpr int kStepsUnrolled = kHeads == 1 ? K : 1;

struct ShortWalk {
  int length = 0;               // steps of a thread
  int64_t threads = 0;          // that have work
  bool packed_weights = false;  // (H, K) contiguous and aligned: read and written in vectors
};

// The vector, batch element and first step of a thread; vectors go first, so neighbours read neighbouring bytes.
struct ShortPlace {
  int64_t b, t;
  int vector;
  bool active;
  template <int V>
  __device__ static ShortPlace of(const ConvParams& p, const ShortWalk& walk) {
    const int64_t index = static_cast<int64_t>(blockIdx.x) * kShortThreads + threadIdx.x;
    const int vectors = p.channels / V;
    const int64_t rest = index / vectors;
    return {rest % p.batch, rest / p.batch * walk.length, static_cast<int>(index % vectors), index < walk.threads};
  }
};

// The largest power of two that divides `bytes`, at most 16: what a thread may move of its weights at a time.
__host__ __device__ constexpr int piece_bytes(int bytes) {
  return (bytes & -bytes) < 16 ? (bytes & -bytes) : 16;
}

// The weights of head `head` at (t, b).
template <class T>
__device__ __forceinline__ const T* weights_at(const ConvParams& p, int64_t t, int64_t b, int head) {
  return static_cast<const T*>(p.weight.data) + t * p.weight.stride_t + b * p.weight.stride_b +
         head * p.weight.stride_h;
}

// The K weights each of N heads from the first one's, as they are.
template <class T, int N, int K>
__device__ __forceinline__ void read_weights(const ConvParams& p, bool packed, const T* from, T (&weights)[N * K]) {
  if (packed) {
    constexpr int kPiece = piece_bytes(N * K * sizeof(T)) / sizeof(T);
#pragma unroll
    for (int first = 0; first < N * K; first += kPiece) {
      const Pack<T, kPiece> pack = load_pack<T, kPiece>(from + first);
#pragma unroll
      for (int e = 0; e < kPiece; ++e) weights[first + e] = pack.value[e];
    }
    return;
  }
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int k = 0; k < K; ++k) weights[n * K + k] = from[n * p.weight.stride_h + k * p.weight.stride_k];
  }
}

// The taps [first, last) of a step that meet rows of its own sequence.
struct TapRange {
  int first, last;
  // Rows count from the one that the first tap meets; the sequence has [low, high) of them.
  __device__ __forceinline__ TapRange(int low, int high, int taps)
      : first(min(max(low, 0), taps)), last(min(max(high, 0), taps)) {}
  __device__ __forceinline__ bool holds(int k) const { return k >= first && k < last; }
};

// Softmax or nothing, over the taps in `taps` only; the others become 0. kAll: over all.
template <class T, bool kAll, int N, int K>
__device__ __forceinline__ void normalize_short(const ConvParams& p, const TapRange& taps, const T (&read)[N * K],
                                                float (&weights)[N][K]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int k = 0; k < K; ++k) weights[n][k] = to_float(read[n * K + k]);
    if (p.normalize == Normalize::kSoftmax) {
      float maximum = -INFINITY, sum = 0.0f;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (kAll || taps.holds(k)) maximum = fmaxf(maximum, weights[n][k]);
      }
#pragma unroll
      for (int k = 0; k < K; ++k) {
        weights[n][k] = kAll || taps.holds(k) ? exponential(weights[n][k] - maximum) : 0.0f;
        sum += weights[n][k];
      }
      // No tap at all: they stay 0.
      const float scale = kAll || taps.last > taps.first ? 1.0f / sum : 0.0f;
#pragma unroll
      for (int k = 0; k < K; ++k) weights[n][k] *= scale;
    } else if (!kAll) {
#pragma unroll
      for (int k = 0; k < K; ++k) weights[n][k] = taps.holds(k) ? weights[n][k] : 0.0f;
    }
  }
}

// Dropout's factors of the K taps from row-major index `flat` on; all 1 without dropout.
template <int K>
__device__ __forceinline__ void short_dropout(const ConvParams& p, uint64_t flat, float (&factors)[K]) {
#pragma unroll
  for (int k = 0; k < K; ++k) factors[k] = 1.0f;
  if (p.seed == nullptr) return;
  // The taps begin at word `shift` of these quads. (Registers have no index, so every shift is written out.)
  constexpr int kQuads = K % 4 == 0 ? K / 4 : (K + 3 + 3) / 4;
  const int shift = K % 4 == 0 ? 0 : static_cast<int>(flat % 4);
  const uint64_t seed = static_cast<uint64_t>(*p.seed);
  float words[4 * kQuads];
#pragma unroll
  for (int quad = 0; quad < kQuads; ++quad) {
    const float4 four = dropout_factors(p, flat / 4 + quad, seed);
    words[4 * quad] = four.x, words[4 * quad + 1] = four.y, words[4 * quad + 2] = four.z, words[4 * quad + 3] = four.w;
  }
#pragma unroll
  for (int k = 0; k < K; ++k) {
    factors[k] = words[k];
#pragma unroll
    for (int from = 1; from < 4; ++from) {
      if (k + from < 4 * kQuads && shift == from) factors[k] = words[k + from];
    }
  }
}

__device__ __forceinline__ float dropped(float value, float factor) { return factor == 0.0f ? 0.0f : value * factor; }

// A vector of 8 halves or 4 floats as it lies in memory: kept between steps, it takes half the registers.
template <class T>
__device__ __forceinline__ void widen(const uint4& words, float (&values)[kWide<T>]) {
  const uint32_t all[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      values[2 * i] = __uint_as_float(all[i] << 16);
      values[2 * i + 1] = __uint_as_float(all[i] & 0xffff0000u);
    } else if constexpr (std::is_same_v<T, __half>) {
      __half2 pair;
      memcpy(&pair, &all[i], sizeof pair);
      values[2 * i] = __low2float(pair), values[2 * i + 1] = __high2float(pair);
    } else {
      values[i] = __uint_as_float(all[i]);
    }
  }
}
template <class T>
__device__ __forceinline__ uint4 words_of(const Pack<T, kWide<T>>& pack) {
  uint4 words;
  memcpy(&words, &pack, sizeof words);
  return words;
}

// The rows of u that a walk reads, one after the other. Rows count from the first that its first step sees; those
// outside [low, high) are zeros (TapRange leaves out what is not in the sequence).
template <class T>
struct WalkRows {
  const ConvParams& p;
  int64_t first, b;
  int c, low, high, next = 0;
  bool plain;       // no GLU, no state: x as it is
  const T* at;      // row `next` of x

  __device__ __forceinline__ WalkRows(const ConvParams& params, const Span& rows, int64_t start, int64_t batch,
                                      int channel, int count)
      : p(params), first(start), b(batch), c(channel), low(cut(rows.begin, count)), high(cut(rows.end, count)),
        plain(!params.glu && params.state_rows == 0),
        at(static_cast<const T*>(params.x.data) + start * params.x.stride_t + batch * params.x.stride_b + channel) {}

  // Row `row` of the data, cut to [0, count].
  __device__ __forceinline__ int cut(int64_t row, int count) const {
    return static_cast<int>(row < first ? 0 : row - first < count ? row - first : count);
  }

  __device__ __forceinline__ uint4 load() {
    uint4 words = make_uint4(0, 0, 0, 0);
    if (next >= low && next < high) {
      words = plain ? *reinterpret_cast<const uint4*>(at) : words_of(load_input<T, kWide<T>>(p, first + next, b, c));
    }
    ++next, at += p.x.stride_t;
    return words;
  }
};

// The inputs of the steps to come, a step each: the first is used up, and the last one's place becomes free.
template <class T, int kAhead>
__device__ __forceinline__ void advance(T (&ahead)[kAhead]) {
#pragma unroll
  for (int step = 0; step + 1 < kAhead; ++step) ahead[step] = ahead[step + 1];
}
template <class T, int kAhead, int kCount>
__device__ __forceinline__ void advance(T (&ahead)[kAhead][kCount]) {
#pragma unroll
  for (int step = 0; step + 1 < kAhead; ++step) {
#pragma unroll
    for (int at = 0; at < kCount; ++at) ahead[step][at] = ahead[step + 1][at];
  }
}

template <class T, bool kDynamic, int V, int N, int K>
__global__ void __launch_bounds__(kShortThreads, K < 7 && N < 8 ? 4 : 3)
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

  float bias[V] = {};
  if (p.bias != nullptr) widen(load_pack<T, V>(static_cast<const T*>(p.bias) + c), bias);
  float weights[N][K];
  const auto make_weights = [&](const T(&read)[N * K], bool all, const TapRange& taps, int64_t t) {
    if (all) {
      normalize_short<T, true, N, K>(p, taps, read, weights);
    } else {
      normalize_short<T, false, N, K>(p, taps, read, weights);
    }
    if constexpr (N == 1) {
      if (p.seed != nullptr) {
        float factors[K];
        short_dropout<K>(p, flat_index(p, t, place.b, head), factors);
#pragma unroll
        for (int k = 0; k < K; ++k) weights[0][k] = dropped(weights[0][k], factors[k]);
      }
    }
  };
  // What the next steps need is loaded while this one is computed.
  constexpr int kAhead = kStepsAhead<N>;
  T weights_ahead[kAhead][N * K];
  uint4 rows_ahead[kAhead];
  const T* from = weights_at<T>(p, place.t, place.b, head);
  if constexpr (!kDynamic) {
    read_weights<T, N, K>(p, walk.packed_weights, from, weights_ahead[0]);
    make_weights(weights_ahead[0], true, {0, K, K}, 0);
  }
  const auto fetch = [&](int n, int step) {
    rows_ahead[step] = rows.load();
    if (kDynamic && n < count) read_weights<T, N, K>(p, walk.packed_weights, from, weights_ahead[step]);
    from += p.weight.stride_t;
  };
  float window[K][V];
#pragma unroll
  for (int k = 0; k < K - 1; ++k) widen<T>(rows.load(), window[k]);
#pragma unroll
  for (int n = 0; n < kAhead; ++n) fetch(n, n);
  T* out = static_cast<T*>(p.out.data) + place.t * p.out.stride_t + place.b * p.out.stride_b + c;
#pragma unroll(kStepsUnrolled<N, K>)
  for (int n = 0; n < count; ++n) {
    if (packed && place.t + n >= span.end) {
      span = sequence_span(p, place.b, place.t + n);
      low = rows.cut(span.begin, seen), high = rows.cut(span.end, seen);
    }
    const TapRange taps(low - n, high - n, K);
    const bool whole = n >= low && n + K <= high;
    widen<T>(rows_ahead[0], window[K - 1]);
    if constexpr (kDynamic) make_weights(weights_ahead[0], whole || !p.renorm_padding, taps, place.t + n);
    advance(rows_ahead);
    if constexpr (kDynamic) advance(weights_ahead);
    fetch(n + kAhead, kAhead - 1);
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
  if (p.next_state.data == nullptr || place.t != 0) return;
  const int64_t exist = p.steps + p.state_rows, kept = exist < K - 1 ? exist : K - 1;
  T* next = static_cast<T*>(p.next_state.data) + place.b * p.next_state.stride_b + c;
  for (int64_t row = 0; row < kept; ++row) {
    store_pack(next + row * p.next_state.stride_t, load_input<T, V>(p, p.steps - kept + row, place.b, c));
  }
}

// ------------------------------------------------------------------------------------------------ launches

// Host: `rows` steps for every vector and batch element.
template <class T>
ShortWalk short_walk(const ConvParams& p, int64_t rows) {
  ShortWalk walk;
  const int64_t columns = p.channels / kWide<T> * p.batch;
  walk.length = 256;
  while (walk.length > 8 && columns * divide_up(rows, static_cast<int64_t>(walk.length)) < kWantedThreads) {
    walk.length /= 2;
  }
  walk.threads = columns * divide_up(rows, static_cast<int64_t>(walk.length));
  return walk;
}

// Host: whether (H, K) filters at these strides can be moved in the pieces of read_weights.
template <class T>
bool packed_filters(const ConvParams& p, int heads, const void* data, int64_t stride_t, int64_t stride_b,
                    int64_t stride_h, int64_t stride_k) {
  const int bytes = piece_bytes(heads * p.kernel_size * static_cast<int>(sizeof(T)));
  return stride_k == 1 && stride_h == p.kernel_size && aligned(data, stride_t, stride_b, sizeof(T), bytes);
}

// Host: how many heads a vector holds: 0 where the vectors do not end with heads.
template <class T>
int heads_of_vector(const ConvParams& p) {
  const int channels_of_head = p.channels / p.heads;
  if (channels_of_head % kWide<T> == 0) return 1;
  return p.channels % kWide<T> == 0 && kWide<T> % channels_of_head == 0 ? kWide<T> / channels_of_head : 0;
}

inline bool short_options(const ConvParams& p) {
  return (p.kernel_size == 3 || p.kernel_size == 4 || p.kernel_size == 7) &&
         (p.normalize == Normalize::kSoftmax || p.normalize == Normalize::kNone);
}

template <class T>
bool short_forward_supported(const ConvParams& p) {
  constexpr int size = sizeof(T);
  const int heads = heads_of_vector<T>(p);
  return short_options(p) && (heads == 1 || (heads > 1 && p.dynamic && p.kernel_size == 4 && p.seed == nullptr)) &&
         aligned(p.x, size, 16) && aligned(p.state, size, 16) && aligned(p.out, size, 16) &&
         aligned(p.next_state, size, 16) && reinterpret_cast<uintptr_t>(p.bias) % 16 == 0;
}

template <class T, bool kDynamic, int N, int K>
cudaError_t launch_short_forward(const ConvParams& p, cudaStream_t stream) {
  ShortWalk walk = short_walk<T>(p, p.steps);
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
