// Registers the launchers of launchers.h as kernels of torch's operators (lightconv_plugin/ops/registration.py has the
// schemas). Only this file, talk/talk_binding.cpp and common/binding.h include torch. Arguments have already been
// checked (lightconv_plugin/ops/checks.py); results are allocated like those of the operators' fake kernels. The
// derivatives of all operators are registered here, too (autograd.h).
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <tuple>

#include "autograd.h"
#include "boxed.h"
#include "common/binding.h"
#include "convolution/launchers.h"
#include "talk/launchers.h"

namespace {

using lightconv::ConvBackwardParams;
using lightconv::ConvParams;
using namespace lightconv_binding;

constexpr std::array<std::string_view, 9> kNormalizations = {"softmax", "none", "l2", "abs_l2", "sigmoid",
                                                             "tanh",    "l1",   "abs", "square"};

// ------------------------------------------------------------------------------------------------ parameters

// Everything except the rows, for full passes and steps.
void set_common(ConvParams& p, const Tensor& x, const Tensor& weight, const OptionalTensor& seed,
                std::string_view normalize, double dropout, bool renorm_padding, bool glu) {
  set_problem(p, x, glu ? x.size(2) / 2 : x.size(2), weight.size(-2));
  p.dynamic = weight.dim() == 4;
  p.kernel_size = checked_int(weight.size(-1), "the kernel size K");
  const auto* kind = std::find(kNormalizations.begin(), kNormalizations.end(), normalize);
  TORCH_CHECK_VALUE(kind != kNormalizations.end(), "normalize is not supported by the CUDA kernels: ", normalize);
  p.normalize = static_cast<lightconv::Normalize>(kind - kNormalizations.begin());
  p.glu = glu;
  p.renorm_padding = renorm_padding;
  p.weight.data = weight.const_data_ptr();
  if (p.dynamic) {
    p.weight.stride_t = weight.stride(0);
    p.weight.stride_b = weight.stride(1);
  }
  p.weight.stride_h = weight.stride(-2);
  p.weight.stride_k = weight.stride(-1);
  if (dropout > 0) {
    TORCH_CHECK_VALUE(seed.has_value(), "dropout > 0 needs a seed");
    p.seed = seed_of(*seed);
    p.drop_below = static_cast<uint64_t>(std::ceil(dropout * 4294967296.0));
    p.keep_scale = static_cast<float>(1.0 / (1.0 - dropout));
  }
}

void set_kernel_state(ConvParams& p, const Tensor& state) {
  p.padding_l = p.kernel_size - 1;
  set_state(p, state);
}

void set_dweight(ConvBackwardParams& p, const Tensor& dweight) {
  p.dweight = dweight.mutable_data_ptr();
  if (p.dynamic) {
    p.dweight_stride_t = dweight.stride(0);
    p.dweight_stride_b = dweight.stride(1);
  }
  p.dweight_stride_h = dweight.stride(-2);
  p.dweight_stride_k = dweight.stride(-1);
}

// ------------------------------------------------------------------------------------------------ launches

void run_forward(const ConvParams& p, const char* operation) {
  check_launch(lightconv::forward(p, c10::cuda::getCurrentCUDAStream()), operation);
}

void run_backward(ConvBackwardParams& p, const Tensor& x, const char* operation) {
  Tensor workspace;
  const auto bytes = lightconv::workspace_bytes(p);
  if (bytes > 0) {
    workspace = at::empty({static_cast<int64_t>(bytes)}, x.options().dtype(at::kByte));
    p.workspace = workspace.mutable_data_ptr();
  }
  check_launch(lightconv::backward(p, c10::cuda::getCurrentCUDAStream()), operation);
}

// ------------------------------------------------------------------------------------------------ the operators

Tensor conv(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& lengths,
            const OptionalTensor& cu_seqlens, const OptionalTensor& seed, int64_t padding_l, std::string_view normalize,
            double dropout, bool renorm_padding, bool glu) {
  const c10::cuda::CUDAGuard guard(x.device());
  ConvParams p;
  set_common(p, x, weight, seed, normalize, dropout, renorm_padding, glu);
  p.padding_l = static_cast<int>(padding_l);
  set_sequences(p, lengths, cu_seqlens);
  const Tensor all_bias = bias.has_value() ? bias->contiguous() : Tensor();
  if (bias.has_value()) p.bias = all_bias.const_data_ptr();
  Result out(at::empty_like(x.narrow(2, 0, p.channels)));
  p.out = out.rows();
  run_forward(p, p.dynamic ? "dynamicconv" : "lightconv");
  return out.finish();
}

std::tuple<Tensor, Tensor> conv_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                         const OptionalTensor& lengths, const OptionalTensor& cu_seqlens,
                                         const OptionalTensor& seed, int64_t padding_l, std::string_view normalize,
                                         double dropout, bool renorm_padding, bool glu, bool need_x, bool need_weight) {
  const c10::cuda::CUDAGuard guard(x.device());
  ConvBackwardParams p;
  set_common(p, x, weight, seed, normalize, dropout, renorm_padding, glu);
  p.padding_l = static_cast<int>(padding_l);
  set_sequences(p, lengths, cu_seqlens);
  p.grad = rows(grad);
  Result dx(gradient_of(x, need_x));
  Tensor dweight = gradient_of(weight, need_weight);
  p.dx = dx.rows();
  if (need_weight) set_dweight(p, dweight);
  run_backward(p, x, p.dynamic ? "dynamicconv_backward" : "lightconv_backward");
  return {dx.finish(), dweight};
}

std::tuple<Tensor, Tensor> conv_step(const Tensor& x, const Tensor& state, const Tensor& weight,
                                     const OptionalTensor& bias, const OptionalTensor& seed, std::string_view normalize,
                                     double dropout, bool renorm_padding, bool glu) {
  const c10::cuda::CUDAGuard guard(x.device());
  ConvParams p;
  set_common(p, x, weight, seed, normalize, dropout, renorm_padding, glu);
  set_kernel_state(p, state);
  const Tensor all_bias = bias.has_value() ? bias->contiguous() : Tensor();
  if (bias.has_value()) p.bias = all_bias.const_data_ptr();
  Result out(at::empty_like(x.narrow(2, 0, p.channels)));
  const int64_t kept = std::min<int64_t>(p.state_rows + p.steps, p.kernel_size - 1);
  Result next(state.new_empty({kept, p.batch, p.channels}));
  p.out = out.rows();
  p.next_state = next.rows();
  run_forward(p, p.dynamic ? "dynamicconv_step" : "lightconv_step");
  return {out.finish(), next.finish()};
}

std::tuple<Tensor, Tensor, Tensor> conv_step_backward(const OptionalTensor& grad, const OptionalTensor& grad_state,
                                                      const Tensor& x, const Tensor& state, const Tensor& weight,
                                                      const OptionalTensor& seed, std::string_view normalize,
                                                      double dropout, bool renorm_padding, bool glu, bool need_x,
                                                      bool need_state, bool need_weight) {
  const c10::cuda::CUDAGuard guard(x.device());
  ConvBackwardParams p;
  set_common(p, x, weight, seed, normalize, dropout, renorm_padding, glu);
  set_kernel_state(p, state);
  p.grad = rows(grad);
  p.grad_state = rows(grad_state);
  Result dx(gradient_of(x, need_x)), dstate(gradient_of(state, need_state));
  Tensor dweight = gradient_of(weight, need_weight);
  p.dx = dx.rows();
  p.dstate = dstate.rows();
  if (need_weight) set_dweight(p, dweight);
  run_backward(p, x, p.dynamic ? "dynamicconv_step_backward" : "lightconv_step_backward");
  return {dx.finish(), dstate.finish(), dweight};
}

// Of a full pass on the current device, all of whose rows are aligned; backward for every gradient. Reads no memory.
std::string explain_op(const Tensor& like, std::string_view op, bool backward, int64_t channels, int64_t heads,
                       int64_t kernel_size) {
  const c10::cuda::CUDAGuard guard(like.device());
  const auto describe = [&](auto& p) {
    set_problem(p, like.new_empty({1, 1, channels}), channels, heads);
    p.grad = p.x;
    p.dx = {const_cast<void*>(p.x.data), p.x.stride_t, p.x.stride_b};
  };
  if (op == "talkconv") {
    lightconv::TalkBackwardParams p;
    describe(p);
    p.max_left = checked_int(kernel_size - 1, "K");
    return lightconv::explain(p, backward);
  }
  ConvBackwardParams p;
  describe(p);
  p.dynamic = op == "dynamicconv";
  p.kernel_size = checked_int(kernel_size, "the kernel size K");
  p.padding_l = p.kernel_size - 1;
  p.weight.stride_k = 1;
  p.dweight = p.dx.data;
  return lightconv::explain(p, backward);
}

}  // namespace

TORCH_LIBRARY_IMPL(lightconv, CUDA, m) {
  lightconv::register_convolutions<&conv, &conv_backward, &conv_step, &conv_step_backward>(m);
  m.impl("explain", lightconv::boxed<&explain_op>());
}
