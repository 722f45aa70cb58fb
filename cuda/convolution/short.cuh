// Short filters (K = 3, 4, 7) entirely in registers: no shared memory, no barriers.
//
// A thread owns one vector of V channels (16 bytes) of one batch element and `length` time steps. The channels of the
// vector belong to `N` heads: V / (C/H) if C/H is below V, else 1. Every input is read directly from memory; K-1 rows
// are read twice, by the threads of the steps before and after.
//
// A thread must have many loads in flight, or it waits for one row after the other. It reads all rows first, and its
// steps are unrolled (forward_rows, backward_rows), if its steps see only rows of their own sequence (as nearly all
// do), a vector holds one or two heads, and there is no dropout, GLU or state. Otherwise it walks from step to step,
// with the last K rows of u in a window of registers, and loads the inputs of the next step while one is computed. With
// C/H = 1 and K = 4 the weights of one step are enough in flight: 64 bytes in a half type, in addition to 16 of x. They
// are read 16 bytes at a time along (H, K), and softmax runs on registers. Both ways compute the same bits.
//
// Supported: softmax and none; dropout if a vector is within one head; only K = 4 if it is not. The tiles do the rest.
#pragma once

#include "convolution/tile.cuh"

#include <cstring>

namespace lightconv {

constexpr int kShortThreads = 128;
// Steps of a thread that reads all rows first: as many as its registers hold.
template <int K>
constexpr int kShortRows = K < 7 ? 8 : 4;
// Whether threads may read all rows first with N heads in a vector; and whether the threads of a call do so if they see
// only rows of their sequence. Otherwise walks are longer, so that more steps share the K-1 rows and steps before them.
template <int N>
constexpr bool kReadsFirst = N <= 2;
template <int N>
__host__ __device__ __forceinline__ bool reads_first(const ConvParams& p) {
  return kReadsFirst<N> && !p.glu && p.state_rows == 0 && p.drop_below == 0;
}
// Enough walking threads for some hundreds on each multiprocessor of the largest devices.
constexpr int64_t kWantedThreads = 1 << 17;

struct ShortWalk {
  int length = 0;               // steps of a thread
  int64_t threads = 0;          // that have work
  bool packed_weights = false;  // (H, K) contiguous and aligned: read and written in vectors
};

// left / right, both not negative. Uses 32 bits if they fit, which takes a fifth of the instructions.
__device__ __forceinline__ int64_t quotient(int64_t left, int64_t right) {
  return (left | right) >> 32 == 0 ? static_cast<uint32_t>(left) / static_cast<uint32_t>(right) : left / right;
}

// The vector, batch element and first step of a thread. Vectors vary fastest, so neighbours read neighbouring bytes.
struct ShortPlace {
  int64_t b, t;
  int vector;
  bool active;
  template <int V>
  __device__ static ShortPlace of(const ConvParams& p, const ShortWalk& walk) {
    const int64_t index = static_cast<int64_t>(blockIdx.x) * kShortThreads + threadIdx.x;
    const int vectors = p.channels / V;
    const int64_t rest = quotient(index, vectors), tile = quotient(rest, p.batch);
    return {rest - tile * p.batch, tile * walk.length, static_cast<int>(index - rest * vectors), index < walk.threads};
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

// The K weights of each of N heads, from the first head's on, unchanged.
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
__device__ __forceinline__ void normalize_short(bool softmax, const TapRange& taps, const T (&read)[N * K],
                                                float (&weights)[N][K]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int k = 0; k < K; ++k) weights[n][k] = to_float(read[n * K + k]);
    if (softmax) {
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
      // Without any tap, all stay 0.
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
  if (p.drop_below == 0) return;
  // The taps begin at word `shift` of these quads. (Registers cannot be indexed, so every shift is written out.)
  constexpr int kQuads = K % 4 == 0 ? K / 4 : (K + 3 + 3) / 4;
  const int shift = K % 4 == 0 ? 0 : static_cast<int>(flat % 4);
  const uint64_t seed = bits(p.seed);
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
  bool plain;       // no GLU, no state: u is x
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

// The filters of a step, ready for use: normalised over the taps in `taps`, or over all, and dropped.
template <class T, int N, int K>
__device__ __forceinline__ void make_weights(const ConvParams& p, const T (&read)[N * K], bool all,
                                             const TapRange& taps, int64_t t, int64_t b, int head,
                                             float (&weights)[N][K]) {
  const bool softmax = p.normalize == Normalize::kSoftmax;
  if (all) {
    normalize_short<T, true, N, K>(softmax, taps, read, weights);
  } else {
    normalize_short<T, false, N, K>(softmax, taps, read, weights);
  }
  if constexpr (N == 1) {
    if (p.drop_below == 0) return;
    float factors[K];
    short_dropout<K>(p, flat_index(p, t, b, head), factors);
#pragma unroll
    for (int k = 0; k < K; ++k) weights[0][k] = dropped(weights[0][k], factors[k]);
  }
}

// ------------------------------------------------------------------------------------------------ launches

// Host: `rows` steps for every vector of N heads and batch element.
template <class T, int N, int K>
ShortWalk short_walk(const ConvParams& p, int64_t rows) {
  ShortWalk walk;
  const int64_t columns = p.channels / kWide<T> * p.batch;
  walk.length = reads_first<N>(p) ? kShortRows<K> : 256;
  while (!reads_first<N>(p) && walk.length > 8 && columns * divide_up(rows, static_cast<int64_t>(walk.length)) < kWantedThreads) {
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

// Host: how many heads a vector holds; 0 if vectors do not end with heads.
template <class T>
int heads_of_vector(const ConvParams& p) {
  const int channels_of_head = p.channels / p.heads;
  if (channels_of_head % kWide<T> == 0) return 1;
  return p.channels % kWide<T> == 0 && kWide<T> % channels_of_head == 0 ? kWide<T> / channels_of_head : 0;
}

constexpr const char* kShortNeeds =
    "K = 3, 4 or 7, and C/H whole vectors of 16 bytes (backward a power of two, at most 32); for dynamicconv with K = 4 "
    "vectors of whole heads too";

inline bool short_options(const ConvParams& p) {
  return (p.kernel_size == 3 || p.kernel_size == 4 || p.kernel_size == 7) &&
         (p.normalize == Normalize::kSoftmax || p.normalize == Normalize::kNone);
}

}  // namespace lightconv
