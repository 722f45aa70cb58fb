// Factors of dropout, drawn where they are needed, and what both kernels ask of pointers.
#pragma once

#include "common/philox.cuh"
#include "dropout/launchers.h"

namespace lightconv {

// The mask of one launch, with the bits of its seed.
struct Factors {
  uint64_t seed, drop_below;
  float scale;

  __device__ __forceinline__ explicit Factors(const Mask& mask)
      : seed(mask.drop_below == 0 ? 0 : bits(mask.seed)), drop_below(mask.drop_below), scale(mask.keep_scale) {}

  // Those of elements index ... index + V - 1; `index` is a multiple of V.
  template <int V>
  __device__ __forceinline__ void draw(uint64_t index, float (&factors)[V]) const {
    if (drop_below == 0) {
#pragma unroll
      for (int v = 0; v < V; ++v) factors[v] = 1.0f;
      return;
    }
    constexpr int kCounters = V < 4 ? 1 : V / 4;
    uint64_t counters[kCounters];
#pragma unroll
    for (int n = 0; n < kCounters; ++n) counters[n] = index / 4 + n;
    uint4 words[kCounters];
    philox<kCounters>(counters, seed, words);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const uint4 four = words[v / 4];
      const int which = V < 4 ? static_cast<int>(index % 4) : v % 4;
      const uint32_t word = which == 0 ? four.x : which == 1 ? four.y : which == 2 ? four.z : four.w;
      factors[v] = word >= drop_below ? scale : 0.0f;
    }
  }
};

// Host: whether all of these can be read 16 bytes at a time; null pointers can.
template <class... Pointers>
inline bool wide_pointers(const Pointers*... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

}  // namespace lightconv
