// Registers the launchers of launchers.h as kernels of torch's operators; see convolution/binding.cpp.
#include <torch/library.h>

#include <cmath>
#include <tuple>

#include "boxed.h"
#include "common/binding.h"
#include "dropout/launchers.h"

namespace {

using lightconv::Mask;
using lightconv::NormParams;
using lightconv::ReluParams;
using namespace lightconv_binding;

// `seed` must live as long as the result.
Mask mask_of(const OptionalTensor& seed, double p) {
  if (!seed) return {};
  return {seed_of(*seed), static_cast<uint64_t>(std::ceil(p * 4294967296.0)),
          static_cast<float>(1 / (1 - p))};
}

// A gradient in the layout of `like`, which the kernels write contiguously.
class Gradient {
 public:
  Gradient(const Tensor& like, bool needed)
      : tensor_(gradient_of(like, needed)),
        written_(tensor_.is_contiguous() ? tensor_ : at::empty(tensor_.sizes(), tensor_.options())) {}

  void* data() const { return written_.numel() == 0 ? nullptr : written_.mutable_data_ptr(); }

  Tensor finish() {
    if (!written_.is_same(tensor_)) tensor_.copy_(written_);
    return tensor_;
  }

 private:
  Tensor tensor_, written_;
};

// The tensors of a call, made contiguous: they must live as long as the parameters.
struct Norm {
  Tensor x, residual, weight;
  NormParams params;

  Norm(const Tensor& any_x, const Tensor& any_residual, const Tensor& any_weight, const OptionalTensor& seed, double p,
       double epsilon)
      : x(any_x.contiguous()), residual(any_residual.contiguous()), weight(any_weight.contiguous()) {
    params.type = type_of(x);
    params.channels = x.size(-1);
    TORCH_CHECK_VALUE(params.channels <= lightconv::kMostNormChannels, "x must have at most ",
                      lightconv::kMostNormChannels, " channels on CUDA, got ", params.channels);
    params.rows = x.numel() / params.channels;
    params.epsilon = static_cast<float>(epsilon);
    params.mask = mask_of(seed, p);
    params.x = x.const_data_ptr();
    params.residual = residual.const_data_ptr();
    params.weight = weight.const_data_ptr();
  }
};

Tensor dropout_add_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, const Tensor& any_bias,
                        const OptionalTensor& seed, double p, double epsilon) {
  const c10::cuda::CUDAGuard guard(x.device());
  Norm norm(x, residual, weight, seed, p, epsilon);
  const Tensor bias = any_bias.contiguous(), out = at::empty(x.sizes(), x.options());
  norm.params.bias = bias.const_data_ptr();
  norm.params.out = out.mutable_data_ptr();
  check_launch(lightconv::dropout_add_norm(norm.params, c10::cuda::getCurrentCUDAStream()), "dropout_add_norm");
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> dropout_add_norm_backward(
    const Tensor& any_grad, const Tensor& x, const Tensor& residual, const Tensor& weight, const Tensor& bias,
    const OptionalTensor& seed, double p, double epsilon, bool need_x, bool need_residual, bool need_weight,
    bool need_bias) {
  const c10::cuda::CUDAGuard guard(x.device());
  Norm norm(x, residual, weight, seed, p, epsilon);
  const Tensor grad = any_grad.contiguous();
  norm.params.grad = grad.const_data_ptr();
  const bool sums = need_weight || need_bias;
  Gradient dx(x, need_x), dresidual(residual, need_residual), dweight(weight, sums), dbias(bias, sums);
  norm.params.dx = dx.data();
  norm.params.dresidual = dresidual.data();
  norm.params.dweight = dweight.data();
  norm.params.dbias = dbias.data();
  const auto bytes = static_cast<int64_t>(lightconv::norm_workspace_bytes(norm.params));
  const Tensor workspace = at::empty({bytes}, x.options().dtype(at::kByte));
  norm.params.workspace = workspace.mutable_data_ptr();
  check_launch(lightconv::dropout_add_norm_backward(norm.params, c10::cuda::getCurrentCUDAStream()),
               "dropout_add_norm_backward");
  return {dx.finish(), dresidual.finish(), need_weight ? dweight.finish() : weight.new_empty({0}),
          need_bias ? dbias.finish() : bias.new_empty({0})};
}

ReluParams relu_params(const Tensor& x, const OptionalTensor& seed, double p) {
  ReluParams params;
  params.type = type_of(x);
  params.elements = x.numel();
  params.mask = mask_of(seed, p);
  return params;
}

Tensor relu_dropout(const Tensor& any_x, const Tensor& seed, double p) {
  const c10::cuda::CUDAGuard guard(any_x.device());
  const Tensor x = any_x.contiguous(), out = at::empty(x.sizes(), x.options());
  ReluParams params = relu_params(x, seed, p);
  params.x = x.const_data_ptr();
  params.out = out.mutable_data_ptr();
  check_launch(lightconv::relu_dropout(params, c10::cuda::getCurrentCUDAStream()), "relu_dropout");
  return out;
}

Tensor relu_dropout_backward(const Tensor& any_grad, const Tensor& out, const Tensor& seed, double p) {
  const c10::cuda::CUDAGuard guard(out.device());
  const Tensor grad = any_grad.contiguous(), kept = out.contiguous(), dx = at::empty(out.sizes(), out.options());
  ReluParams params = relu_params(kept, seed, p);
  params.out = kept.data_ptr();
  params.grad = grad.const_data_ptr();
  params.dx = dx.mutable_data_ptr();
  check_launch(lightconv::relu_dropout_backward(params, c10::cuda::getCurrentCUDAStream()), "relu_dropout_backward");
  return dx;
}

}  // namespace

TORCH_LIBRARY_IMPL(lightconv, CUDA, m) {
  using lightconv::boxed;
  m.impl("dropout_add_norm", boxed<&dropout_add_norm>());
  m.impl("dropout_add_norm_backward", boxed<&dropout_add_norm_backward>());
  m.impl("relu_dropout", boxed<&relu_dropout>());
  m.impl("relu_dropout_backward", boxed<&relu_dropout_backward>());
}
