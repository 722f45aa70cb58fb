// The random words of dropout, as ops/philox.py defines them.
#pragma once

#include "common/device.cuh"

namespace lightconv {

__device__ __forceinline__ uint64_t bits(const Seed& seed) {
  return seed.at == nullptr ? seed.value : static_cast<uint64_t>(*seed.at);
}

// Philox-4x32-10 (Salmon et al. 2011) with counter (index, 0, 0): ops/philox.py says which word belongs to which
// element. `index` is the element's row-major index div 4, word index mod 4.
// N counters at a time share the keys of the rounds, which are a third of the instructions for one.
template <int N>
__device__ __forceinline__ void philox(const uint64_t (&index)[N], uint64_t seed, uint4 (&words)[N]) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int n = 0; n < N; ++n) {
    words[n] = make_uint4(static_cast<uint32_t>(index[n]), static_cast<uint32_t>(index[n] >> 32), 0, 0);
  }
#pragma unroll
  for (int round = 0; round < 10; ++round) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      uint4& c = words[n];
      const uint64_t product0 = static_cast<uint64_t>(c.x) * 0xD2511F53u;
      const uint64_t product1 = static_cast<uint64_t>(c.z) * 0xCD9E8D57u;
      c.x = static_cast<uint32_t>(product1 >> 32) ^ c.y ^ k0;
      c.z = static_cast<uint32_t>(product0 >> 32) ^ c.w ^ k1;
      c.y = static_cast<uint32_t>(product1);
      c.w = static_cast<uint32_t>(product0);
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

}  // namespace lightconv
