// SIMD vectors of float and double in the compiler's vector extension. The same code compiles for AVX-512, AVX2 and
// everything else, depending on the compiler flags.
//
// Everything computed lane by lane here gives the same bits in every lane and for every width, so that a result does
// not depend on its position in a row.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace lightconv {

#define LIGHTCONV_INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kVectorRegisters = 32;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kVectorRegisters = 16;
#else
constexpr int kVectorBytes = 16;
constexpr int kVectorRegisters = 16;
#endif

template <class S>
struct VectorOf {
  typedef S type __attribute__((vector_size(kVectorBytes)));
};
template <class S>
using Vector = typename VectorOf<S>::type;
template <class S>
using Lanes = Vector<std::conditional_t<sizeof(S) == 4, int32_t, int64_t>>;

template <class S>
constexpr int kWidth = kVectorBytes / sizeof(S);

template <class S>
constexpr int64_t round_up(int64_t n) {
  return (n + kWidth<S> - 1) / kWidth<S> * kWidth<S>;
}

template <class S>
LIGHTCONV_INLINE Vector<S> load(const S* from) {
  Vector<S> v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}

template <class S>
LIGHTCONV_INLINE void store(S* to, Vector<S> v) {
  std::memcpy(to, &v, sizeof(v));
}

template <class S>
LIGHTCONV_INLINE Vector<S> broadcast(S value) {
  return value - Vector<S>{};  // the compiler drops x − 0, but 0 + x would be an addition
}

template <class S>
LIGHTCONV_INLINE Vector<S> root(Vector<S> v) {
  for (int i = 0; i < kWidth<S>; ++i) v[i] = std::sqrt(v[i]);
  return v;
}

template <class S>
LIGHTCONV_INLINE Vector<S> larger(Vector<S> a, Vector<S> b) {
  return a > b ? a : b;
}

// e^x to about one unit in the last place for x in −87 … 88. Above, the value at the bound; below, 0: denormal numbers
// are slow, and no weight needs them. NaN for NaN.
LIGHTCONV_INLINE Vector<float> exponential(Vector<float> x) {
  using F = Vector<float>;
  const F lowest = broadcast(-87.0f), highest = broadcast(88.0f);
  const auto nothing = x < lowest;
  x = highest < x ? highest : x;  // in this order NaN remains
  // x = n·ln 2 + r with |r| ≤ ln 2 / 2. Adding 1.5·2²³ rounds to the nearest integer. Adding 127 more puts
  // n + 127, the exponent of 2ⁿ, into the lowest bits.
  const F shifted = x * 1.44269504088896341f + 12583039.0f;
  const F n = shifted - 12583039.0f;
  const F r = (x - n * 0.693359375f) - n * -2.1219444005471377e-4f;
  // (e^r − 1 − r)/r² as a polynomial, fitted at Chebyshev nodes: relative error of e^r below 1.1e-8.
  F p = broadcast(1.3933733215e-3f);
  p = p * r + 8.3632353846e-3f;
  p = p * r + 4.1666464167e-2f;
  p = p * r + 1.6666576644e-1f;
  p = p * r + 5.0000000135e-1f;
  p = p * (r * r) + (r + 1.0f);
  Lanes<float> exponent;
  std::memcpy(&exponent, &shifted, sizeof(exponent));
  exponent <<= 23;
  F power;
  std::memcpy(&power, &exponent, sizeof(power));
  return nothing ? F{} : p * power;
}

LIGHTCONV_INLINE Vector<double> exponential(Vector<double> x) {
  for (int i = 0; i < kWidth<double>; ++i) x[i] = std::exp(x[i]);
  return x;
}

// 1/(1 + e^−x).
template <class S>
LIGHTCONV_INLINE Vector<S> sigmoid(Vector<S> x) {
  return S(1) / (exponential(-x) + S(1));
}

// Index vectors, as constants in memory: f(lane) for each lane.
template <class S, class F>
constexpr auto lane_table(F f) {
  using I = std::conditional_t<sizeof(S) == 4, int32_t, int64_t>;
  struct alignas(kVectorBytes) Table {
    I lane[kWidth<S>];
  } table{};
  for (int i = 0; i < kWidth<S>; ++i) table.lane[i] = I(f(i));
  return table;
}

template <class S, class Table>
LIGHTCONV_INLINE Lanes<S> lanes_of(const Table& table) {
  Lanes<S> v;
  std::memcpy(&v, table.lane, sizeof(v));
  return v;
}

// 0, 1, 2, …
template <class S>
LIGHTCONV_INLINE Lanes<S> lane_numbers() {
  static constexpr auto table = lane_table<S>([](int lane) { return lane; });
  return lanes_of<S>(table);
}

// Lane i of the result is lane index[i] of the concatenation of a and b.
template <class S>
LIGHTCONV_INLINE Vector<S> shuffled(Vector<S> a, Vector<S> b, Lanes<S> index) {
#if defined(__clang__)
  Vector<S> out;
  for (int i = 0; i < kWidth<S>; ++i) out[i] = index[i] < kWidth<S> ? a[index[i]] : b[index[i] - kWidth<S>];
  return out;
#else
  return __builtin_shuffle(a, b, index);
#endif
}

// Every lane gets the sum (or the maximum) of all lanes, in a tree of fixed shape that starts with the two halves.
template <class S, int kStep = kWidth<S> / 2, class F>
LIGHTCONV_INLINE Vector<S> across(Vector<S> v, F combine) {
  if constexpr (kStep > 0) {
    static constexpr auto table = lane_table<S>([](int lane) { return lane ^ kStep; });
    return across<S, kStep / 2>(combine(v, shuffled<S>(v, v, lanes_of<S>(table))), combine);
  } else {
    return v;
  }
}

template <class S>
LIGHTCONV_INLINE Vector<S> sum_across(Vector<S> v) {
  return across<S>(v, [](Vector<S> a, Vector<S> b) { return a + b; });
}

template <class S>
LIGHTCONV_INLINE Vector<S> largest_across(Vector<S> v) {
  return across<S>(v, [](Vector<S> a, Vector<S> b) { return larger<S>(a, b); });
}

// Exchanges the off-diagonal quadrants of smaller and smaller squares.
template <class S, int kStep = kWidth<S> / 2>
LIGHTCONV_INLINE void exchange_halves(Vector<S> (&rows)[kWidth<S>]) {
  if constexpr (kStep > 0) {
    constexpr int n = kWidth<S>;
    static constexpr auto upper = lane_table<S>([](int lane) { return lane & kStep ? n + lane - kStep : lane; });
    static constexpr auto lower = lane_table<S>([](int lane) { return lane & kStep ? n + lane : lane + kStep; });
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) {
      if (i & kStep) continue;
      const Vector<S> a = rows[i], b = rows[i + kStep];
      rows[i] = shuffled<S>(a, b, lanes_of<S>(upper));
      rows[i + kStep] = shuffled<S>(a, b, lanes_of<S>(lower));
    }
    exchange_halves<S, kStep / 2>(rows);
  }
}

// Lane i of the result is the sum (or the maximum) of all lanes of rows[i], in the tree of `across`. Overwrites the rows.
template <class S, int kStep = kWidth<S> / 2, class F>
LIGHTCONV_INLINE Vector<S> each_across(Vector<S> (&rows)[kWidth<S>], F combine) {
  if constexpr (kStep > 0) {
    constexpr int n = kWidth<S>;
    static constexpr auto upper = lane_table<S>([](int lane) { return lane & kStep ? n + lane - kStep : lane; });
    static constexpr auto lower = lane_table<S>([](int lane) { return lane & kStep ? n + lane : lane + kStep; });
#pragma GCC unroll 8
    for (int i = 0; i < kStep; ++i) {
      const Vector<S> a = rows[i], b = rows[i + kStep];
      rows[i] = combine(shuffled<S>(a, b, lanes_of<S>(upper)), shuffled<S>(a, b, lanes_of<S>(lower)));
    }
    return each_across<S, kStep / 2>(rows, combine);
  } else {
    return rows[0];
  }
}

template <class S>
LIGHTCONV_INLINE Vector<S> sum_each(Vector<S> (&rows)[kWidth<S>]) {
  return each_across<S>(rows, [](Vector<S> a, Vector<S> b) { return a + b; });
}

template <class S>
LIGHTCONV_INLINE Vector<S> largest_each(Vector<S> (&rows)[kWidth<S>]) {
  return each_across<S>(rows, [](Vector<S> a, Vector<S> b) { return larger<S>(a, b); });
}

// to[j·to_pitch + i] = from[i·from_pitch + j] for a square of kWidth<S> rows and columns.
template <class S>
LIGHTCONV_INLINE void transpose_block(const S* from, int64_t from_pitch, S* to, int64_t to_pitch) {
  constexpr int n = kWidth<S>;
  Vector<S> rows[n];
#pragma GCC unroll 16
  for (int i = 0; i < n; ++i) rows[i] = load(from + i * from_pitch);
  exchange_halves<S>(rows);
#pragma GCC unroll 16
  for (int i = 0; i < n; ++i) store(to + i * to_pitch, rows[i]);
}

// The same for any number of rows and columns; both buffers must have room for whole squares of kWidth<S>.
template <class S>
inline void transpose(const S* from, int64_t from_pitch, S* to, int64_t to_pitch, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; i += kWidth<S>) {
    for (int64_t j = 0; j < columns; j += kWidth<S>) {
      transpose_block(from + i * from_pitch + j, from_pitch, to + j * to_pitch + i, to_pitch);
    }
  }
}

}  // namespace lightconv
