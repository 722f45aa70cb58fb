// Products of bfloat16 pairs, summed in float32 (AVX-512 BF16).
#include "search/product.h"

#if defined(__x86_64__) && defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace lightconv::decoding {

#if defined(__x86_64__) && defined(__AVX512F__)
namespace {

struct BFloat16 {
  using Sum = float;
  static constexpr int kRows = 12;

  template <int R>
  __attribute__((target("avx512bf16"))) static void block(
      const char* x, int64_t x_pitch, const char* panel, int64_t steps, float* out) {
    __m512 sums[R][2];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < steps; ++k, panel += 4 * kPanel) {
      const __m512bh left = pairs(_mm512_loadu_si512(panel)), right = pairs(_mm512_loadu_si512(panel + 64));
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        int32_t pair;
        std::memcpy(&pair, x + r * x_pitch + 4 * k, 4);
        const __m512bh value = pairs(_mm512_set1_epi32(pair));
        sums[r][0] = _mm512_dpbf16_ps(sums[r][0], value, left);
        sums[r][1] = _mm512_dpbf16_ps(sums[r][1], value, right);
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      _mm512_storeu_ps(out + r * kPanel, sums[r][0]);
      _mm512_storeu_ps(out + r * kPanel + 16, sums[r][1]);
    }
  }

  __attribute__((target("avx512bf16"), always_inline)) static inline __m512bh pairs(__m512i bits) {
    __m512bh values;
    std::memcpy(&values, &bits, sizeof(values));
    return values;
  }
};

}  // namespace

Multiply bfloat16_instructions_product() { return &multiply<BFloat16>; }
#else
Multiply bfloat16_instructions_product() { return nullptr; }
#endif

}  // namespace lightconv::decoding
