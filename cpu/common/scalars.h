// The element types of tensors, and the conversion of rows to and from the type of the sums.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "common/vector.h"

namespace lightconv {

// The type in which sums of T run: float, or double for double.
template <class T>
using Sum = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Rows of half types are widened a vector at a time where the instruction set supports it.
inline void widen_row(const float* from, int64_t n, float* to) { std::memcpy(to, from, n * sizeof(float)); }
inline void widen_row(const double* from, int64_t n, double* to) { std::memcpy(to, from, n * sizeof(double)); }

inline void widen_row(const c10::BFloat16* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = uint32_t(from[i].x) << 16;
    std::memcpy(to + i, &bits, sizeof(bits));
  }
}

inline void widen_row(const c10::Half* from, int64_t n, float* to) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
#endif
  for (; i < n; ++i) to[i] = static_cast<float>(from[i]);
}

// The first n ≤ kWidth elements at `from` in a vector; the other lanes are unspecified but finite. Reads nothing
// beyond.
template <class T>
LIGHTCONV_INLINE Vector<Sum<T>> load_some(const T* from, int64_t n) {
  Sum<T> lanes[kWidth<Sum<T>>] = {};
  widen_row(from, n, lanes);
  return load(lanes);
}

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
LIGHTCONV_INLINE Vector<float> load_some(const float* from, int64_t n) {
  return (Vector<float>)_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), from);
}

LIGHTCONV_INLINE Vector<float> load_some(const c10::BFloat16* from, int64_t n) {
  const __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(__mmask16((1u << n) - 1), from));
  return (Vector<float>)_mm512_slli_epi32(bits, 16);
}

LIGHTCONV_INLINE Vector<float> load_some(const c10::Half* from, int64_t n) {
  return (Vector<float>)_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(__mmask16((1u << n) - 1), from));
}
#endif

inline void narrow_row(const float* from, int64_t n, float* to) { std::memcpy(to, from, n * sizeof(float)); }
inline void narrow_row(const double* from, int64_t n, double* to) { std::memcpy(to, from, n * sizeof(double)); }

inline void narrow_row(const float* from, int64_t n, c10::BFloat16* to) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + i, sizeof(bits));
    // To nearest, ties to even; a NaN must not be rounded into an infinity.
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    to[i].x = uint16_t((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
  }
}

inline void narrow_row(const float* from, int64_t n, c10::Half* to) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
  }
#endif
  for (; i < n; ++i) to[i] = c10::Half(from[i]);
}

// Stores the first n ≤ kWidth lanes to `to`; writes nothing beyond.
template <class T>
LIGHTCONV_INLINE void store_some(T* to, Vector<Sum<T>> v, int64_t n) {
  Sum<T> lanes[kWidth<Sum<T>>];
  store(lanes, v);
  narrow_row(lanes, n, to);
}

#if defined(__AVX512F__)
LIGHTCONV_INLINE void store_some(float* to, Vector<float> v, int64_t n) {
  _mm512_mask_storeu_ps(to, __mmask16((1u << n) - 1), (__m512)v);
}
#endif

}  // namespace lightconv
