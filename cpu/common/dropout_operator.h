// The operators dropout, relu_dropout and relu_dropout_backward: from torch's tensors to plain pointers.
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

inline Tensor relu_dropout_op(const Tensor& any_x, const Tensor& seed, double p) {
  const Tensor x = any_x.contiguous(), out = x.new_empty(x.sizes());
  const Dropout mask = dropout_of(seed, p);
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    relu_drop(elements<T>(x), writable_elements<T>(out), x.numel(), mask, threads());
  });
  return out;
}

inline Tensor relu_dropout_backward_op(const Tensor& any_grad, const Tensor& any_out, const Tensor&, double p) {
  const Tensor grad = any_grad.contiguous(), out = any_out.contiguous(), dx = out.new_empty(out.sizes());
  dispatch(out, [&](auto zero) {
    using T = decltype(zero);
    relu_drop_backward(elements<T>(grad), elements<T>(out), writable_elements<T>(dx), out.numel(), 1 / (1 - p),
                       threads());
  });
  return dx;
}

}  // namespace lightconv
