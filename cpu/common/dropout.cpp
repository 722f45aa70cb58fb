// Dropout of any tensor with the mask of philox.h. The backward pass draws the mask again, so none is stored. A call
// costs a fraction of torch's on a CPU, which asks a generator for every element.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <cmath>

#include "common/philox.h"
#include "common/scalars.h"

namespace lightconv {
namespace {

constexpr int64_t kBlock = 2048;

template <class T>
void drop(const T* x, T* out, int64_t from, int64_t n, const Dropout& dropout) {
  using S = Sum<T>;
  uint32_t words[kBlock + 64];
  S row[kBlock], factors[kBlock];
  const int64_t at = philox_words(dropout.seed, from, n, words);
  dropout_factors(dropout, words + at, n, factors);
  widen_row(x + from, n, row);
  for (int64_t i = 0; i < n; ++i) row[i] *= factors[i];
  narrow_row(row, n, out + from);
}

at::Tensor dropout(const at::Tensor& any_x, const at::Tensor& seed, double p) {
  const at::Tensor x = any_x.contiguous();
  at::Tensor out = at::empty_like(x);
  Dropout dropout;
  dropout.seed = uint64_t(seed.item<int64_t>());
  dropout.threshold = uint64_t(std::ceil(p * 4294967296.0));
  dropout.scale = 1 / (1 - p);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "lightconv::dropout", [&] {
    const scalar_t* from = x.const_data_ptr<scalar_t>();
    scalar_t* to = out.mutable_data_ptr<scalar_t>();
    const int64_t n = x.numel();
    at::parallel_for(0, (n + kBlock - 1) / kBlock, 8, [&](int64_t first, int64_t last) {
      for (int64_t block = first; block < last; ++block) {
        drop(from, to, block * kBlock, std::min(kBlock, n - block * kBlock), dropout);
      }
    });
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(lightconv, CPU, m) { m.impl("dropout", &dropout); }

}  // namespace lightconv
