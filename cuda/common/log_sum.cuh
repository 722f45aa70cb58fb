// log Σ exp of numbers that are read once, in any order.
#pragma once

#include "common/device.cuh"

#include <cmath>

namespace lightconv {

// Of some numbers: the largest, and the sum of exp(number - top).
struct LogSum {
  float top = -INFINITY, powers = 0.0f;

  __device__ __forceinline__ void raise(float new_top) {
    if (new_top > top) {
      powers *= exponential(top - new_top);
      top = new_top;
    }
  }

  template <int V>
  __device__ __forceinline__ void add(const float (&values)[V]) {
    float highest = values[0];
#pragma unroll
    for (int v = 1; v < V; ++v) highest = fmaxf(highest, values[v]);
    raise(highest);
#pragma unroll
    // A number of -inf adds nothing, also before any other has been seen.
    for (int v = 0; v < V; ++v) powers += values[v] == -INFINITY ? 0.0f : exponential(values[v] - top);
  }

  __device__ __forceinline__ void add(LogSum other) {
    raise(other.top);
    other.raise(top);
    powers += other.powers;
  }

  // That of all lanes, in each of them.
  __device__ __forceinline__ void over_warp() {
    raise(group_max(top, 32));
    powers = group_sum(powers, 32);
  }

  __device__ __forceinline__ float value() const { return top + logf(powers); }
};

}  // namespace lightconv
