// DropConnect's mask: Philox-4x32-10 as lightconv_plugin/ops/random.py defines it, sixteen counters at a time.
#pragma once

#include "vector.h"

namespace lightconv {

struct Dropout {
  uint64_t seed = 0;
  uint64_t threshold = 0;  // keep where word ≥ threshold; 2³² keeps none. 0: no dropout at all.
  double scale = 1;        // of what is kept

  bool active() const { return threshold != 0; }
};

// The words of the weights with flat indices first … first + n − 1. `words` has room for n + 128.
// Returns the position of `first` in it.
inline int64_t philox_words(uint64_t seed, uint64_t first, int64_t n, uint32_t* words) {
  constexpr int kBlock = 16;
  const uint64_t begin = first / 4, end = (first + n + 3) / 4;
  for (uint64_t counter = begin; counter < end; counter += kBlock) {
    uint32_t c0[kBlock], c1[kBlock], c2[kBlock] = {}, c3[kBlock] = {};
    for (int i = 0; i < kBlock; ++i) {
      c0[i] = uint32_t(counter + i);
      c1[i] = uint32_t((counter + i) >> 32);
    }
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    for (int round = 0; round < 10; ++round) {
      for (int i = 0; i < kBlock; ++i) {
        const uint64_t p0 = uint64_t(c0[i]) * 0xD2511F53u, p1 = uint64_t(c2[i]) * 0xCD9E8D57u;
        c0[i] = uint32_t(p1 >> 32) ^ c1[i] ^ k0;
        c2[i] = uint32_t(p0 >> 32) ^ c3[i] ^ k1;
        c1[i] = uint32_t(p1);
        c3[i] = uint32_t(p0);
      }
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    uint32_t* to = words + (counter - begin) * 4;
    for (int i = 0; i < kBlock; ++i) {
      to[4 * i] = c0[i];
      to[4 * i + 1] = c1[i];
      to[4 * i + 2] = c2[i];
      to[4 * i + 3] = c3[i];
    }
  }
  return int64_t(first - begin * 4);
}

}  // namespace lightconv
