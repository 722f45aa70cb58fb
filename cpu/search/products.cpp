// Products with the instructions that the whole library is compiled for.
#include "search/product.h"

#include <algorithm>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace lightconv::decoding {
namespace {

using I = Lanes<float>;
// With two vectors of outputs, there are registers for the sums of this many rows.
constexpr int kFloatRows = kVectorRegisters == 32 ? 12 : 6;

template <int R>
LIGHTCONV_INLINE void store_sums(const V (&sums)[R][2], float* out) {
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    store(out + r * kPanel, sums[r][0]);
    store(out + r * kPanel + kLanes, sums[r][1]);
  }
}

struct Float32 {
  using Sum = float;
  static constexpr int kRows = kFloatRows;

  template <int R>
  static void block(const char* x, int64_t x_pitch, const char* panel, int64_t steps, float* out) {
    V sums[R][2] = {};
    const float* weights = reinterpret_cast<const float*>(panel);
    for (int64_t k = 0; k < steps; ++k, weights += kPanel) {
      const V left = load(weights), right = load(weights + kLanes);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const V value = broadcast(reinterpret_cast<const float*>(x + r * x_pitch)[k]);
        sums[r][0] += value * left;
        sums[r][1] += value * right;
      }
    }
    store_sums<R>(sums, out);
  }
};

// Two bfloat16 are the two halves of 32 bits. Each is a float if the other half is set to zero.
struct Widened {
  using Sum = float;
  static constexpr int kRows = kVectorRegisters == 32 ? 12 : 4;

  static LIGHTCONV_INLINE V as_floats(I bits) {
    V floats;
    std::memcpy(&floats, &bits, sizeof(floats));
    return floats;
  }

  template <int R>
  static void block(const char* x, int64_t x_pitch, const char* panel, int64_t steps, float* out) {
    V sums[R][2] = {};
    const float* weights = reinterpret_cast<const float*>(panel);
    for (int64_t k = 0; k < steps; ++k, weights += kPanel) {
      I left, right;  // two variables: an array would go through memory
      std::memcpy(&left, weights, sizeof(left));
      std::memcpy(&right, weights + kLanes, sizeof(right));
      const V even[2] = {as_floats(left << 16), as_floats(right << 16)};
      const V odd[2] = {as_floats(left & -65536), as_floats(right & -65536)};
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const float* pair = reinterpret_cast<const float*>(x + r * x_pitch) + 2 * k;
        const V first = broadcast(pair[0]), second = broadcast(pair[1]);
        sums[r][0] += first * even[0];
        sums[r][1] += first * even[1];
        sums[r][0] += second * odd[0];
        sums[r][1] += second * odd[1];
      }
    }
    store_sums<R>(sums, out);
  }
};

// Sums of four products of bytes, in 32 bits. Where no single instruction does this, x has 7 bits, so that the sum of
// two products fits into 16 bits.
#if defined(__AVX512BW__)
using Bytes = __m512i;
LIGHTCONV_INLINE Bytes load_bytes(const char* from) { return _mm512_loadu_si512(from); }
LIGHTCONV_INLINE Bytes four_times(const char* from) {
  int32_t four;
  std::memcpy(&four, from, 4);
  return _mm512_set1_epi32(four);
}
LIGHTCONV_INLINE Bytes add_products(Bytes sum, Bytes x, Bytes weight) {
  return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(x, weight), _mm512_set1_epi16(1)));
}
LIGHTCONV_INLINE void store_bytes(int32_t* to, Bytes bytes) { _mm512_storeu_si512(to, bytes); }
constexpr int kByteRows = 12;
#elif defined(__AVX2__)
using Bytes = __m256i;
LIGHTCONV_INLINE Bytes load_bytes(const char* from) { return _mm256_loadu_si256(reinterpret_cast<const Bytes*>(from)); }
LIGHTCONV_INLINE Bytes four_times(const char* from) {
  int32_t four;
  std::memcpy(&four, from, 4);
  return _mm256_set1_epi32(four);
}
LIGHTCONV_INLINE Bytes add_products(Bytes sum, Bytes x, Bytes weight) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(x, weight), _mm256_set1_epi16(1)));
}
LIGHTCONV_INLINE void store_bytes(int32_t* to, Bytes bytes) {
  _mm256_storeu_si256(reinterpret_cast<Bytes*>(to), bytes);
}
constexpr int kByteRows = 5;
#else
struct Bytes {
  int32_t lanes[kLanes];
};
LIGHTCONV_INLINE Bytes load_bytes(const char* from) {
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  return bytes;
}
LIGHTCONV_INLINE Bytes four_times(const char* from) {
  Bytes bytes;
  for (int32_t& lane : bytes.lanes) std::memcpy(&lane, from, 4);
  return bytes;
}
LIGHTCONV_INLINE Bytes add_products(Bytes sum, Bytes x, Bytes weight) {
  for (int i = 0; i < kLanes; ++i) {
    uint8_t left[4];
    int8_t right[4];
    std::memcpy(left, &x.lanes[i], 4);
    std::memcpy(right, &weight.lanes[i], 4);
    for (int j = 0; j < 4; ++j) sum.lanes[i] += left[j] * right[j];
  }
  return sum;
}
LIGHTCONV_INLINE void store_bytes(int32_t* to, Bytes bytes) { std::memcpy(to, &bytes, sizeof(bytes)); }
constexpr int kByteRows = 4;
#endif

struct Int8 {
  using Sum = int32_t;
  static constexpr int kRows = kByteRows;

  template <int R>
  static void block(const char* x, int64_t x_pitch, const char* panel, int64_t steps, int32_t* out) {
    Bytes sums[R][2] = {};
    for (int64_t k = 0; k < steps; ++k, panel += 2 * sizeof(Bytes)) {
      const Bytes left = load_bytes(panel), right = load_bytes(panel + sizeof(Bytes));
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const Bytes value = four_times(x + r * x_pitch + 4 * k);
        sums[r][0] = add_products(sums[r][0], value, left);
        sums[r][1] = add_products(sums[r][1], value, right);
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      store_bytes(out + r * kPanel, sums[r][0]);
      store_bytes(out + r * kPanel + kLanes, sums[r][1]);
    }
  }
};

}  // namespace

Choice float32_product() { return {&multiply<Float32>, Input::kFloat}; }

Choice bfloat16_product(bool instructions) {
  const Multiply native = instructions ? bfloat16_instructions_product() : nullptr;
  if (native) return {native, Input::kBFloat16};
  return {&multiply<Widened>, Input::kFloat};
}

Choice int8_product(bool instructions) {
  const Multiply native = instructions ? vnni_product() : nullptr;
  if (native) return {native, Input::kUnsigned8, 255};
#if defined(__AVX2__)
  return {&multiply<Int8>, Input::kUnsigned8, 127};
#else
  return {&multiply<Int8>, Input::kUnsigned8, 255};
#endif
}

}  // namespace lightconv::decoding
