#include "common/dropout.h"

#include "common/parallel.h"
#include "common/scalars.h"

namespace lightconv {
namespace {

constexpr int64_t kBlock = 2048;

// Calls f(first element, how many) for each block.
template <class F>
void each_block(int64_t n, int threads, F f) {
  parallel_for(0, (n + kBlock - 1) / kBlock, 8, threads, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) f(block * kBlock, std::min(kBlock, n - block * kBlock));
  });
}

// The factors of n elements, at most a block.
template <class S>
void draw_factors(const Dropout& dropout, int64_t from, int64_t n, S* factors) {
  uint32_t words[kBlock + 64];
  const int64_t at = philox_words(dropout.seed, from, n, words);
  dropout_factors(dropout, words + at, n, factors);
}

}  // namespace

template <class T>
void drop(const T* x, T* out, int64_t n, const Dropout& dropout, int threads) {
  each_block(n, threads, [&](int64_t from, int64_t count) {
    Sum<T> row[kBlock], factors[kBlock];
    draw_factors(dropout, from, count, factors);
    widen_row(x + from, count, row);
    for (int64_t i = 0; i < count; ++i) row[i] *= factors[i];
    narrow_row(row, count, out + from);
  });
}

template <class T>
void relu_drop(const T* x, T* out, int64_t n, const Dropout& dropout, int threads) {
  using S = Sum<T>;
  each_block(n, threads, [&](int64_t from, int64_t count) {
    S factors[kBlock];
    draw_factors(dropout, from, count, factors);
    each_vector<S>(count, [&](int64_t at, int64_t some) {
      const Vector<S> v = load_some(x + from + at, some), kept = load_some(factors + at, some), none{};
      // NaN is not ≤ 0: it remains, unless it is dropped.
      store_some(out + from + at, (v <= none) | (kept == none) ? none : v * kept, some);
    });
  });
}

template <class T>
void relu_drop_backward(const T* grad, const T* out, T* dx, int64_t n, double scale, int threads) {
  using S = Sum<T>;
  each_block(n, threads, [&](int64_t from, int64_t count) {
    each_vector<S>(count, [&](int64_t at, int64_t some) {
      const Vector<S> given = load_some(grad + from + at, some), none{};
      store_some(dx + from + at, load_some(out + from + at, some) <= none ? none : given * S(scale), some);
    });
  });
}

#define LIGHTCONV_DROPOUT(T)                                               \
  template void drop(const T*, T*, int64_t, const Dropout&, int);          \
  template void relu_drop(const T*, T*, int64_t, const Dropout&, int);     \
  template void relu_drop_backward(const T*, const T*, T*, int64_t, double, int);
LIGHTCONV_DROPOUT(float)
LIGHTCONV_DROPOUT(double)
LIGHTCONV_DROPOUT(Float16)
LIGHTCONV_DROPOUT(BFloat16)

}  // namespace lightconv
