// Registers the launchers of launchers.h as kernels of torch's operators; see convolution/binding.cpp.
#include <torch/library.h>

#include <tuple>

#include "common/binding.h"
#include "loss/launchers.h"

namespace {

using lightconv::LossParams;
using namespace lightconv_binding;

// The rows of the logits, and everything else that both passes need; `target` must live as long as the result.
LossParams params_of(const Tensor& logits, const Tensor& target, double epsilon, int64_t ignore) {
  LossParams p;
  p.type = type_of(logits);
  p.rows = logits.size(0);
  p.words = logits.size(1);
  p.logits = logits.const_data_ptr();
  p.pitch = logits.stride(0);
  p.target = target.const_data_ptr<int64_t>();
  p.ignore = ignore;
  p.epsilon = epsilon;
  return p;
}

Tensor rows_of(const Tensor& logits) { return logits.stride(1) == 1 ? logits : logits.contiguous(); }

std::tuple<Tensor, Tensor, Tensor> label_smoothed_nll(const Tensor& any_logits, const Tensor& any_target,
                                                      double epsilon, int64_t ignore) {
  const c10::cuda::CUDAGuard guard(any_logits.device());
  const Tensor logits = rows_of(any_logits), target = any_target.contiguous();
  LossParams p = params_of(logits, target, epsilon, ignore);
  const auto options = logits.options().dtype(at::kFloat);
  Tensor loss = at::empty({p.rows}, options), nll = at::empty({p.rows}, options);
  Tensor normaliser = at::empty({p.rows}, options);
  p.loss = loss.mutable_data_ptr<float>();
  p.nll = nll.mutable_data_ptr<float>();
  p.normaliser = normaliser.mutable_data_ptr<float>();
  check_launch(lightconv::smoothed_loss(p, c10::cuda::getCurrentCUDAStream()), "label_smoothed_nll");
  return {loss, nll, normaliser};
}

Tensor label_smoothed_nll_backward(const OptionalTensor& grad_loss, const OptionalTensor& grad_nll,
                                   const Tensor& any_logits, const Tensor& any_target, const Tensor& any_normaliser,
                                   double epsilon, int64_t ignore) {
  const c10::cuda::CUDAGuard guard(any_logits.device());
  const Tensor logits = rows_of(any_logits), target = any_target.contiguous();
  Tensor normaliser = any_normaliser.contiguous();
  LossParams p = params_of(logits, target, epsilon, ignore);
  p.normaliser = normaliser.mutable_data_ptr<float>();
  if (grad_loss) p.grad_loss = grad_loss->const_data_ptr<float>(), p.grad_loss_stride = grad_loss->stride(0);
  if (grad_nll) p.grad_nll = grad_nll->const_data_ptr<float>(), p.grad_nll_stride = grad_nll->stride(0);
  Tensor gradient = at::empty_like(any_logits);
  Tensor written = gradient.stride(1) == 1 ? gradient : at::empty(gradient.sizes(), gradient.options());
  p.gradient = written.mutable_data_ptr();
  p.gradient_pitch = written.stride(0);
  check_launch(lightconv::smoothed_loss_backward(p, c10::cuda::getCurrentCUDAStream()), "label_smoothed_nll_backward");
  if (!written.is_same(gradient)) gradient.copy_(written);
  return gradient;
}

}  // namespace

TORCH_LIBRARY_IMPL(lightconv, CUDA, m) {
  m.impl("label_smoothed_nll", &label_smoothed_nll);
  m.impl("label_smoothed_nll_backward", &label_smoothed_nll_backward);
}
