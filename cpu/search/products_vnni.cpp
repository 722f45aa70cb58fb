// 8-bit products with the instruction that sums four products of bytes (AVX-512 VNNI).
#include "search/product.h"

#if defined(__x86_64__) && defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace lightconv::decoding {

#if defined(__x86_64__) && defined(__AVX512F__)
namespace {

struct Vnni {
  using Sum = int32_t;
  static constexpr int kRows = 12;

  template <int R>
  __attribute__((target("avx512vnni"))) static void block(
      const char* x, int64_t x_pitch, const char* panel, int64_t steps, int32_t* out) {
    __m512i sums[R][2];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_si512();
    for (int64_t k = 0; k < steps; ++k, panel += 4 * kPanel) {
      const __m512i left = _mm512_loadu_si512(panel), right = _mm512_loadu_si512(panel + 64);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        int32_t four;
        std::memcpy(&four, x + r * x_pitch + 4 * k, 4);
        const __m512i value = _mm512_set1_epi32(four);
        sums[r][0] = _mm512_dpbusd_epi32(sums[r][0], value, left);
        sums[r][1] = _mm512_dpbusd_epi32(sums[r][1], value, right);
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      _mm512_storeu_si512(out + r * kPanel, sums[r][0]);
      _mm512_storeu_si512(out + r * kPanel + 16, sums[r][1]);
    }
  }
};

}  // namespace

Multiply vnni_product() { return &multiply<Vnni>; }
#else
Multiply vnni_product() { return nullptr; }
#endif

}  // namespace lightconv::decoding
