// A thread has V neighbouring channels of a hypothesis, a block as many as it has threads for. Each thread normalises
// its head's filter itself: the taps come from the cache, and nothing has to be shared or waited for.
#include "common/log_sum.cuh"
#include "decoding/launchers.h"

namespace lightconv {
namespace {

constexpr int kMostThreads = 256;
constexpr int kBlocksAtOnce = 4;  // on a multiprocessor; without this the compiler spills a register or two for more
constexpr int kAtOnce = 4;  // taps whose inputs are loaded together

// A head's filter in a row, the newest input's tap first.
template <class W>
struct Taps {
  const W* first;
  int64_t step;
  bool softmax;
  float top = 0.0f, scale = 1.0f;

  __device__ __forceinline__ Taps(const RingParams& p, int row, int head)
      : first(static_cast<const W*>(p.weight) + offset(row, p.weight_stride_n) + offset(head, p.weight_stride_h)),
        step(p.weight_stride_k),
        softmax(p.softmax) {
    if (!softmax) return;
    LogSum sum;
    for (int k = 0; k < p.taps; ++k) {
      const float tap[1] = {to_float(first[offset(k, step)])};
      sum.add(tap);
    }
    top = sum.top;
    scale = 1.0f / sum.powers;
  }

  __device__ __forceinline__ float operator[](int k) const {
    const float tap = to_float(first[offset(k, step)]);
    return softmax ? exponential(tap - top) * scale : tap;
  }
};

// Where the inputs of a row's ancestors lie.
struct Past {
  const int64_t* newest;  // the row's own place among the ancestors of this step
  int64_t step, sentence, sentences, width, channels;
  int slot, slots;

  __device__ __forceinline__ Past(const RingParams& p, int row, int64_t now)
      : step(p.ancestors_stride_t),
        sentence(row / p.beams),
        sentences(p.sentences),
        width(p.width),
        channels(p.channels),
        slot(static_cast<int>(now) % p.slots),
        slots(p.slots) {
    newest = p.ancestors + sentence * p.ancestors_stride_s + row % p.beams * p.ancestors_stride_b + now * step;
  }

  // The element at which the input `age` steps ago begins.
  __device__ __forceinline__ int64_t operator[](int age) const {
    const int at = slot >= age ? slot - age : slot - age + slots;
    return ((at * sentences + sentence) * width + newest[-age * step]) * channels;
  }
};

template <class T, class W, int V>
__global__ void __launch_bounds__(kMostThreads, kBlocksAtOnce) ring_kernel(const RingParams p, const int parts) {
  // In 32 bits: the compiler makes a call of a division in 64.
  const int block = static_cast<int>(blockIdx.x), row = block / parts, part = block % parts;
  const int c = (part * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * V;
  if (c >= p.channels) return;
  const int64_t now = *p.now;
  // Taps that reach before the beginning meet zeros.
  const int inside = now + 1 < p.taps ? static_cast<int>(now + 1) : p.taps;
  const Taps<W> taps(p, row, c / (p.channels / p.heads));
  const Past past(p, row, now);
  T* ring = static_cast<T*>(p.ring) + c;
  const Pack<T, V> newest = load_pack<T, V>(static_cast<const T*>(p.x) + offset(row, p.x_stride) + c);
  float sums[V] = {};
  const auto add = [&](const Pack<T, V>& pack, float tap) {
    float values[V];
    widen(pack, values);
#pragma unroll
    for (int v = 0; v < V; ++v) sums[v] = fmaf(tap, values[v], sums[v]);
  };
  add(newest, taps[0]);
  for (int age = 1; age < inside; age += kAtOnce) {
    Pack<T, V> packs[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (age + i < inside) packs[i] = load_pack<T, V>(ring + past[age + i]);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (age + i < inside) add(packs[i], taps[age + i]);
    }
  }
  store_pack(ring + past[0], newest);
  if (p.bias != nullptr) {
    float bias[V];
    widen(load_pack<T, V>(static_cast<const T*>(p.bias) + c), bias);
#pragma unroll
    for (int v = 0; v < V; ++v) sums[v] += bias[v];
  }
  store_pack(static_cast<T*>(p.out) + offset(row, p.channels) + c, narrow<T, V>(sums));
}

template <class T, class W, int V>
cudaError_t launch(const RingParams& p, cudaStream_t stream) {
  const int packs = p.channels / V, all = round_up(packs, 32), threads = all < kMostThreads ? all : kMostThreads;
  const int parts = divide_up(packs, threads);
  return launch_blocks(ring_kernel<T, W, V>, p.rows * parts, threads, 0, stream, p, parts);
}

// Whether all vectors of V channels begin at 16 bytes, each within one head.
bool wide(const RingParams& p, int element) {
  const auto begins = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
  return p.channels / p.heads * element % 16 == 0 && p.x_stride * element % 16 == 0 && begins(p.x) &&
         begins(p.ring) && begins(p.bias) && begins(p.out);
}

template <class T, class W>
cudaError_t launch(const RingParams& p, cudaStream_t stream) {
  return wide(p, sizeof(T)) ? launch<T, W, kWide<T>>(p, stream) : launch<T, W, 1>(p, stream);
}

}  // namespace

cudaError_t ring_step(const RingParams& params, cudaStream_t stream) {
  return by_type(params.type, [&](auto zero) {
    using T = decltype(zero);
    return params.float_weight ? launch<T, float>(params, stream) : launch<T, T>(params, stream);
  });
}

}  // namespace lightconv
