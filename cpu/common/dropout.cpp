#include "common/dropout.h"

#include "common/parallel.h"
#include "common/scalars.h"

namespace lightconv {
namespace {

constexpr int64_t kBlock = 2048;

template <class T>
void drop_block(const T* x, T* out, int64_t from, int64_t n, const Dropout& dropout) {
  using S = Sum<T>;
  uint32_t words[kBlock + 64];
  S row[kBlock], factors[kBlock];
  const int64_t at = philox_words(dropout.seed, from, n, words);
  dropout_factors(dropout, words + at, n, factors);
  widen_row(x + from, n, row);
  for (int64_t i = 0; i < n; ++i) row[i] *= factors[i];
  narrow_row(row, n, out + from);
}

}  // namespace

template <class T>
void drop(const T* x, T* out, int64_t n, const Dropout& dropout, int threads) {
  parallel_for(0, (n + kBlock - 1) / kBlock, 8, threads, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      drop_block(x, out, block * kBlock, std::min(kBlock, n - block * kBlock), dropout);
    }
  });
}

template void drop(const float*, float*, int64_t, const Dropout&, int);
template void drop(const double*, double*, int64_t, const Dropout&, int);
template void drop(const Float16*, Float16*, int64_t, const Dropout&, int);
template void drop(const BFloat16*, BFloat16*, int64_t, const Dropout&, int);

}  // namespace lightconv
