// __half and __nv_bfloat16 on a CPU: storage of 16 bits, conversions rounded to nearest, ties to even.
#pragma once

#include "cuda_on_host.h"

struct alignas(2) __half {
  unsigned short x;
};
struct alignas(2) __nv_bfloat16 {
  unsigned short x;
};
struct alignas(4) __half2 {
  __half x, y;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
using half = __half;
using half2 = __half2;
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

namespace lightconv_host {

inline float half_to_float(std::uint16_t half) {
  const std::uint32_t sign = std::uint32_t{half & 0x8000u} << 16;
  const int exponent = half >> 10 & 31;
  const std::uint32_t fraction = half & 0x3ffu;
  if (exponent == 31) return bits<float>(sign | 0x7f800000u | fraction << 13);
  if (exponent == 0) return std::copysign(std::ldexp(static_cast<float>(fraction), -24), bits<float>(sign | 1u));
  return bits<float>(sign | static_cast<std::uint32_t>(exponent + 112) << 23 | fraction << 13);
}

inline std::uint16_t float_to_half(float value) {
  const std::uint32_t word = bits<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>(word >> 16 & 0x8000u);
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return 0x7fff;
  if (magnitude >= 65520.0f) return sign | 0x7c00u;  // half-way to 2^16 and beyond: infinity
  if (magnitude < 0x1p-14f) {                        // subnormal: multiples of 2^-24; nearbyint rounds ties to even
    return sign | static_cast<std::uint16_t>(std::nearbyint(std::ldexp(magnitude, 24)));
  }
  const std::uint32_t rounded = (word & 0x7fffffffu) + 0xfffu + (word >> 13 & 1u);
  return sign | static_cast<std::uint16_t>((rounded >> 13) - (112u << 10));
}

inline float bfloat16_to_float(std::uint16_t value) { return bits<float>(std::uint32_t{value} << 16); }

inline std::uint16_t float_to_bfloat16(float value) {
  if (std::isnan(value)) return 0x7fff;
  const std::uint32_t word = bits<std::uint32_t>(value);
  return static_cast<std::uint16_t>((word + 0x7fffu + (word >> 16 & 1u)) >> 16);
}

}  // namespace lightconv_host

inline float __half2float(__half a) { return lightconv_host::half_to_float(a.x); }
inline __half __float2half_rn(float a) { return {lightconv_host::float_to_half(a)}; }
inline __half __float2half(float a) { return __float2half_rn(a); }
inline float __bfloat162float(__nv_bfloat16 a) { return lightconv_host::bfloat16_to_float(a.x); }
inline __nv_bfloat16 __float2bfloat16_rn(float a) { return {lightconv_host::float_to_bfloat16(a)}; }
inline __nv_bfloat16 __float2bfloat16(float a) { return __float2bfloat16_rn(a); }

inline __half2 __halves2half2(__half low, __half high) { return {low, high}; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 low, __nv_bfloat16 high) { return {low, high}; }
inline __half2 __floats2half2_rn(float low, float high) { return {__float2half_rn(low), __float2half_rn(high)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
  return {__float2bfloat16_rn(low), __float2bfloat16_rn(high)};
}
inline float2 __half22float2(__half2 a) { return {__half2float(a.x), __half2float(a.y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 a) { return {__bfloat162float(a.x), __bfloat162float(a.y)}; }
inline float __low2float(__half2 a) { return __half2float(a.x); }
inline float __high2float(__half2 a) { return __half2float(a.y); }
inline float __low2float(__nv_bfloat162 a) { return __bfloat162float(a.x); }
inline float __high2float(__nv_bfloat162 a) { return __bfloat162float(a.y); }
