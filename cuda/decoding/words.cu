// A block goes over a row of logits once: each thread keeps its best words, and the block takes the best of all until
// it has k. Only if a thread has no more to give, the row is read again, for words that come after those found so far.
#include "common/log_sum.cuh"
#include "decoding/launchers.h"

#include <climits>

namespace lightconv {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kKept = 8;

struct Word {
  float value;
  int word;

  // Of equal values the first word comes first.
  __device__ __forceinline__ bool before(const Word& other) const {
    return value > other.value || (value == other.value && word < other.word);
  }
};

// Before all words, and after all.
__device__ __forceinline__ Word first_word() { return {INFINITY, -1}; }
__device__ __forceinline__ Word last_word() { return {-INFINITY, INT_MAX}; }

// A thread's best words, in order.
struct Best {
  Word kept[kKept];
  int taken = 0;

  __device__ __forceinline__ Best() {
#pragma unroll
    for (int i = 0; i < kKept; ++i) kept[i] = last_word();
  }

  __device__ __forceinline__ void offer(Word word) {
    if (!word.before(kept[kKept - 1])) return;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      if (word.before(kept[i])) {
        const Word worse = kept[i];
        kept[i] = word;
        word = worse;
      }
    }
  }

  // Remove the best. Once kKept have been taken, others may have been dropped: that is said by first_word().
  __device__ __forceinline__ void take() {
#pragma unroll
    for (int i = 1; i < kKept; ++i) kept[i - 1] = kept[i];
    kept[kKept - 1] = last_word();
    if (++taken == kKept) kept[0] = first_word();
  }
};

struct Shared {
  LogSum sums[kWarps];
  Word words[2][kWarps];  // in turn, so that one barrier is enough
};

// The first of all threads' words, in each of them.
__device__ __forceinline__ Word first_of_block(Word mine, Word* shared) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const Word other{__shfl_xor_sync(kFullWarp, mine.value, distance), __shfl_xor_sync(kFullWarp, mine.word, distance)};
    if (other.before(mine)) mine = other;
  }
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = mine;
  __syncthreads();
  Word first = shared[0];
  for (int warp = 1; warp < kWarps; ++warp) {
    if (shared[warp].before(first)) first = shared[warp];
  }
  return first;
}

// +inf if there are no probabilities: a logit is NaN or +inf, or all are -inf.
__device__ __forceinline__ float normaliser_of_block(LogSum sum, LogSum* shared) {
  sum.over_warp();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = sum;
  __syncthreads();
  LogSum all = shared[0];
  for (int warp = 1; warp < kWarps; ++warp) all.add(shared[warp]);
  const float normaliser = all.value();
  return normaliser > -INFINITY && normaliser < INFINITY ? normaliser : INFINITY;
}

// Subtracts the penalties of words first ... first + V - 1; NaN becomes -inf.
template <int V>
__device__ __forceinline__ void penalise(const BestParams& p, int first, float (&values)[V]) {
#pragma unroll
  for (int i = 0; i < kMostPenalties; ++i) {
    if (i >= p.penalties) break;
#pragma unroll
    for (int v = 0; v < V; ++v) values[v] -= p.penalised[i] == first + v ? p.penalty[i] : 0.0f;
  }
#pragma unroll
  for (int v = 0; v < V; ++v) values[v] = values[v] >= -INFINITY ? values[v] : -INFINITY;
}

// The thread's best words of a row that come after `last`; all logits are added to `sum`.
template <class T, int V>
__device__ __forceinline__ Best best_after(const BestParams& p, const T* logits, Word last, LogSum& sum) {
  Best best;
  for (int64_t at = static_cast<int64_t>(threadIdx.x) * V; at < p.words; at += kThreads * V) {
    const int first = static_cast<int>(at);
    float values[V];
    widen(load_pack<T, V>(logits + at), values);
    sum.add(values);
    penalise(p, first, values);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const Word word{values[v], first + v};
      if (last.before(word)) best.offer(word);
    }
  }
  return best;
}

__device__ __forceinline__ void write(const BestParams& p, int64_t row, int place, Word word, float normaliser) {
  const float difference = word.value - normaliser;
  const float score = p.scores == nullptr ? 0.0f : p.scores[row * p.score_stride];
  // inf - inf, in a row without probabilities
  p.log_probabilities[row * p.count + place] = (difference < INFINITY ? difference : -INFINITY) + score;
  p.best[row * p.count + place] = word.word;
}

template <class T, int V>
__global__ void __launch_bounds__(kThreads) best_kernel(const BestParams p) {
  LIGHTCONV_DYNAMIC_SHARED(Shared, shared);
  const int64_t row = blockIdx.x;
  const T* logits = static_cast<const T*>(p.logits) + row * p.pitch;
  float normaliser = p.normalisers == nullptr ? 0.0f : p.normalisers[row * p.normaliser_stride];
  Word last = first_word();
  int turn = 0;
  for (int found = 0; found < p.count;) {
    LogSum sum;
    Best best = best_after<T, V>(p, logits, last, sum);
    if (found == 0 && p.normalisers == nullptr) normaliser = normaliser_of_block(sum, shared->sums);
    while (found < p.count) {
      const Word next = first_of_block(best.kept[0], shared->words[turn ^= 1]);
      if (next.word < 0) break;
      if (next.word == best.kept[0].word) best.take();
      if (threadIdx.x == 0) write(p, row, found, next, normaliser);
      last = next;
      ++found;
    }
  }
}

template <class T>
cudaError_t launch(const BestParams& p, cudaStream_t stream) {
  constexpr int V = kWide<T>;
  const bool wide = p.words % V == 0 && reinterpret_cast<uintptr_t>(p.logits) % 16 == 0 && p.pitch % V == 0;
  return launch_blocks(wide ? best_kernel<T, V> : best_kernel<T, 1>, p.rows, kThreads, sizeof(Shared), stream, p);
}

}  // namespace

cudaError_t best_words(const BestParams& params, cudaStream_t stream) {
  if (params.count > params.words || params.penalties > kMostPenalties) return cudaErrorInvalidValue;
  return by_type(params.type, [&](auto zero) { return launch<decltype(zero)>(params, stream); });
}

}  // namespace lightconv
