// The element types of tensors, and the conversion of rows to and from the type of the sums.
#pragma once

#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "common/vector.h"

namespace lightconv {

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

struct Float16 {
  uint16_t bits = 0;

  Float16() = default;
  explicit Float16(float value) {
    const uint32_t all = bits_of(value), size = all & 0x7FFFFFFF;
    uint32_t half;
    if (size >= 0x47800000) {  // 65536 and more, infinity, NaN
      half = size > 0x7F800000 ? 0x7E00 : 0x7C00;
    } else if (size < 0x38800000) {  // below 2⁻¹⁴: multiples of 2⁻²⁴, as the numbers from 0.5 on are
      half = bits_of(float_of(size) + 0.5f) - bits_of(0.5f);
    } else {
      half = (size - (112u << 23) + 0xFFF + ((size >> 13) & 1)) >> 13;  // to nearest, ties to even
    }
    bits = uint16_t(all >> 16 & 0x8000) | uint16_t(half);
  }
  explicit operator float() const {
    const uint32_t size = bits & 0x7FFF, sign = uint32_t(bits & 0x8000) << 16;
    if (size >= 0x7C00) return float_of(sign | 0x7F800000 | size << 13);
    if (size < 0x400) return float_of(sign | bits_of(float_of(bits_of(0.5f) | size) - 0.5f));
    return float_of(sign | ((size << 13) + (112u << 23)));
  }
};

struct BFloat16 {
  uint16_t bits = 0;

  BFloat16() = default;
  explicit BFloat16(float value) {
    // To nearest, ties to even; a NaN must not be rounded into an infinity.
    const uint32_t all = bits_of(value), rounded = (all + 0x7FFF + ((all >> 16) & 1)) >> 16;
    bits = uint16_t((all & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
  }
  explicit operator float() const { return float_of(uint32_t(bits) << 16); }
};

// The type in which sums of T run: float, or double for double.
template <class T>
using Sum = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Rows of half types are widened a vector at a time where the instruction set supports it.
inline void widen_row(const float* from, int64_t n, float* to) { std::memcpy(to, from, n * sizeof(float)); }
inline void widen_row(const double* from, int64_t n, double* to) { std::memcpy(to, from, n * sizeof(double)); }

inline void widen_row(const BFloat16* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = float(from[i]);
}

inline void widen_row(const Float16* from, int64_t n, float* to) {
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
  constexpr int w = kWidth<Sum<T>>;
  Sum<T> lanes[w] = {};
  if (n == w) {
    widen_row(from, w, lanes);  // with a constant size the lanes stay in registers
  } else {
    widen_row(from, n, lanes);
  }
  return load(lanes);
}

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
LIGHTCONV_INLINE Vector<float> load_some(const float* from, int64_t n) {
  return (Vector<float>)_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), from);
}

LIGHTCONV_INLINE Vector<float> load_some(const BFloat16* from, int64_t n) {
  const __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(__mmask16((1u << n) - 1), from));
  return (Vector<float>)_mm512_slli_epi32(bits, 16);
}

LIGHTCONV_INLINE Vector<float> load_some(const Float16* from, int64_t n) {
  return (Vector<float>)_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(__mmask16((1u << n) - 1), from));
}
#elif defined(__AVX2__)
LIGHTCONV_INLINE __m256i first_of(int64_t n) { return (__m256i)(lane_numbers<float>() < int32_t(n)); }

LIGHTCONV_INLINE Vector<float> load_some(const float* from, int64_t n) {
  return n == kWidth<float> ? load(from) : (Vector<float>)_mm256_maskload_ps(from, first_of(n));
}
#endif

inline void narrow_row(const float* from, int64_t n, float* to) { std::memcpy(to, from, n * sizeof(float)); }
inline void narrow_row(const double* from, int64_t n, double* to) { std::memcpy(to, from, n * sizeof(double)); }

inline void narrow_row(const float* from, int64_t n, BFloat16* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = BFloat16(from[i]);
}

inline void narrow_row(const float* from, int64_t n, Float16* to) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
  }
#endif
  for (; i < n; ++i) to[i] = Float16(from[i]);
}

// Stores the first n ≤ kWidth lanes to `to`; writes nothing beyond.
template <class T>
LIGHTCONV_INLINE void store_some(T* to, Vector<Sum<T>> v, int64_t n) {
  constexpr int w = kWidth<Sum<T>>;
  Sum<T> lanes[w];
  store(lanes, v);
  if (n == w) return narrow_row(lanes, w, to);
  narrow_row(lanes, n, to);
}

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
// BFloat16(float) in every lane.
LIGHTCONV_INLINE void store_some(BFloat16* to, Vector<float> v, int64_t n) {
  const __m512i bits = (__m512i)v, last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), last);
  const __m512i nan = _mm512_set1_epi32(0x7FC00000);
  const __mmask16 is_nan = _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q);
  const __m512i result = _mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, is_nan, nan), 16);
  _mm256_mask_storeu_epi16(to, __mmask16((1u << n) - 1), _mm512_cvtepi32_epi16(result));
}
#endif

#if defined(__AVX512F__)
LIGHTCONV_INLINE void store_some(float* to, Vector<float> v, int64_t n) {
  _mm512_mask_storeu_ps(to, __mmask16((1u << n) - 1), (__m512)v);
}
#elif defined(__AVX2__)
// Masked stores are slow on AMD processors: with them, the gradient of a loss took up to five times as long.
LIGHTCONV_INLINE void store_some(float* to, Vector<float> v, int64_t n) {
  if (n == kWidth<float>) return store(to, v);
  _mm256_maskstore_ps(to, first_of(n), (__m256)v);
}
#endif

// Lanes below n: those of a vector that has n elements of a row.
template <class S>
LIGHTCONV_INLINE Lanes<S> lanes_below(int64_t n) {
  using I = std::conditional_t<sizeof(S) == 4, int32_t, int64_t>;
  return lane_numbers<S>() < I(n);
}

// Calls f(first element, how many) for each vector of a row of n elements.
template <class S, class F>
LIGHTCONV_INLINE void each_vector(int64_t elements, F f) {
  constexpr int64_t w = kWidth<S>;
  int64_t at = 0;
  for (; at + w <= elements; at += w) f(at, w);
  if (at < elements) f(at, elements - at);
}

}  // namespace lightconv
