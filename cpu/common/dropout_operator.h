// The operator `dropout`: from torch's tensors to plain pointers.
#pragma once

#include "common/arguments.h"
#include "common/dropout.h"

namespace lightconv {

inline Tensor dropout_op(const Tensor& any_x, const Tensor& seed, double p) {
  const Tensor x = any_x.contiguous(), out = x.new_empty(x.sizes());
  const Dropout mask = dropout_of(seed, p);
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    drop(elements<T>(x), writable_elements<T>(out), x.numel(), mask, threads());
  });
  return out;
}

}  // namespace lightconv
