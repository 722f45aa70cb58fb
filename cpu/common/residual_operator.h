// The operators dropout_add_norm and dropout_add_norm_backward: from torch's tensors to plain pointers.
#pragma once

#include <tuple>

#include "common/arguments.h"
#include "common/residual.h"

namespace lightconv {

template <class T>
ResidualNorm<T> residual_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, const OptionalTensor& seed,
                              double p, double epsilon) {
  return {elements<T>(x),
          elements<T>(residual),
          elements<T>(weight),
          x.numel() / x.size(-1),
          x.size(-1),
          seed ? dropout_of(*seed, p) : Dropout(),
          epsilon};
}

inline Tensor dropout_add_norm_op(const Tensor& any_x, const Tensor& any_residual, const Tensor& any_weight,
                                  const Tensor& any_bias, const OptionalTensor& seed, double p, double epsilon) {
  const Tensor x = any_x.contiguous(), residual = any_residual.contiguous(), weight = any_weight.contiguous();
  const Tensor bias = any_bias.contiguous(), out = x.new_empty(x.sizes());
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    dropout_add_norm(residual_norm<T>(x, residual, weight, seed, p, epsilon), elements<T>(bias),
                     writable_elements<T>(out), threads());
  });
  return out;
}

// A gradient in the layout of at::empty_like(like), which the kernels write contiguously; empty if it is not needed.
class Gradient {
 public:
  Gradient(const Tensor& like, bool needed)
      : tensor_(needed ? new_like(like) : like.new_empty({0})),
        written_(tensor_.is_contiguous() ? tensor_ : tensor_.new_empty(tensor_.sizes())) {}

  template <class T>
  T* data() const {
    return written_.numel() == 0 ? nullptr : writable_elements<T>(written_);
  }

  Tensor finish() const {
    if (!written_.is_same(tensor_)) tensor_.copy_(written_);
    return tensor_;
  }

 private:
  Tensor tensor_, written_;
};

inline std::tuple<Tensor, Tensor, Tensor, Tensor> dropout_add_norm_backward_op(
    const Tensor& any_grad, const Tensor& any_x, const Tensor& any_residual, const Tensor& any_weight,
    const Tensor& bias, const OptionalTensor& seed, double p, double epsilon, bool need_x, bool need_residual,
    bool need_weight, bool need_bias) {
  const Tensor x = any_x.contiguous(), residual = any_residual.contiguous(), weight = any_weight.contiguous();
  const Tensor grad = any_grad.contiguous();
  const bool sums = need_weight || need_bias;
  const Gradient dx(any_x, need_x), dresidual(any_residual, need_residual);
  const Gradient dweight(any_weight, sums), dbias(bias, sums);
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    dropout_add_norm_backward(residual_norm<T>(x, residual, weight, seed, p, epsilon), elements<T>(grad), dx.data<T>(),
                              dresidual.data<T>(), dweight.data<T>(), dbias.data<T>(), threads());
  });
  return {dx.finish(), dresidual.finish(), need_weight ? dweight.finish() : weight.new_empty({0}),
          need_bias ? dbias.finish() : bias.new_empty({0})};
}

}  // namespace lightconv
