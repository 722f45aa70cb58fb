// DropConnect's mask: Philox-4x32-10 as lightconv_plugin/ops/philox.py defines it, a vector of counters at a time.
#pragma once

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "common/vector.h"

namespace lightconv {

struct Dropout {
  uint64_t seed = 0;
  uint64_t threshold = 0;  // keep where word ≥ threshold; 2³² keeps none. 0: no dropout at all.
  double scale = 1;        // of what is kept

  bool active() const { return threshold != 0; }
};

namespace detail {

// A 32-bit number in the lower half of each lane; the upper halves are unspecified.
typedef uint64_t Words __attribute__((vector_size(kVectorBytes)));
constexpr int kCounters = kVectorBytes / 8;

LIGHTCONV_INLINE Words multiply(Words a, uint32_t b) {
  const Words factor = Words{} + b;
#if defined(__AVX512F__)
  return (Words)_mm512_mul_epu32((__m512i)a, (__m512i)factor);
#elif defined(__AVX2__)
  return (Words)_mm256_mul_epu32((__m256i)a, (__m256i)factor);
#elif defined(__SSE2__)
  return (Words)_mm_mul_epu32((__m128i)a, (__m128i)factor);
#else
  return (a & 0xFFFFFFFFu) * factor;
#endif
}

}  // namespace detail

// Writes the words of the weights with flat indices first … first + n − 1 to `words`, which has room for n + 64.
// Returns the position of `first` in it.
inline int64_t philox_words(uint64_t seed, uint64_t first, int64_t n, uint32_t* words) {
  using detail::kCounters;
  using detail::Words;
  const uint64_t begin = first / 4, end = (first + n + 3) / 4;
  Words lane{};
  for (int i = 0; i < kCounters; ++i) lane[i] = i;
  for (uint64_t counter = begin; counter < end; counter += kCounters) {
    const Words index = lane + counter;
    Words c0 = index, c1 = index >> 32, c2{}, c3{};
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      const Words p0 = detail::multiply(c0, 0xD2511F53u), p1 = detail::multiply(c2, 0xCD9E8D57u);
      c0 = (p1 >> 32) ^ c1 ^ k0;
      c2 = (p0 >> 32) ^ c3 ^ k1;
      c1 = p1;
      c3 = p0;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    // Little-endian: the first word of a pair in the lower half.
    uint64_t low[kCounters], high[kCounters];
    const Words pairs0 = (c0 & 0xFFFFFFFFu) | (c1 << 32), pairs1 = (c2 & 0xFFFFFFFFu) | (c3 << 32);
    std::memcpy(low, &pairs0, sizeof(low));
    std::memcpy(high, &pairs1, sizeof(high));
    uint32_t* to = words + (counter - begin) * 4;
    for (int i = 0; i < kCounters; ++i) {
      std::memcpy(to + 4 * i, low + i, 8);
      std::memcpy(to + 4 * i + 2, high + i, 8);
    }
  }
  return int64_t(first - begin * 4);
}

// factors[i] is 0 or the scale, depending on the word of element i.
template <class S>
inline void dropout_factors(const Dropout& dropout, const uint32_t* words, int64_t n, S* factors) {
  const S scale = S(dropout.scale);
  if (dropout.threshold > 0xFFFFFFFFu) {
    for (int64_t i = 0; i < n; ++i) factors[i] = S(0);
    return;
  }
  const uint32_t threshold = uint32_t(dropout.threshold);
  for (int64_t i = 0; i < n; ++i) factors[i] = words[i] >= threshold ? scale : S(0);
}

}  // namespace lightconv
