// The CUDA kernels of lightconv.h as kernels of torch's operators (lightconv_plugin/ops/library.py has the schemas).
// The only file of this folder that knows torch. Arguments have been checked before (lightconv_plugin/ops/checks.py);
// results are allocated as the operators' fake kernels say.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <string_view>
#include <tuple>

#include "lightconv.h"

namespace {

using at::Tensor;
using lightconv::ConvBackwardParams;
using lightconv::ConvParams;
using OptionalTensor = std::optional<Tensor>;

constexpr std::array<std::string_view, 9> kNormalizations = {"softmax", "none", "l2", "abs_l2", "sigmoid",
                                                             "tanh",    "l1",   "abs", "square"};

// ------------------------------------------------------------------------------------------------ parameters

lightconv::Rows rows(const Tensor& tensor) { return {tensor.const_data_ptr(), tensor.stride(0), tensor.stride(1)}; }

lightconv::Rows rows(const OptionalTensor& tensor) { return tensor.has_value() ? rows(*tensor) : lightconv::Rows{}; }

// A (T, B, channels) result that a kernel writes. Its layout is not the kernel's to choose: where the channels of
// `tensor` do not lie together, the kernel writes to memory of its own, and `finish` copies.
class Result {
 public:
  explicit Result(Tensor tensor) : tensor_(std::move(tensor)), written_(tensor_) {
    if (tensor_.dim() == 3 && tensor_.size(2) > 1 && tensor_.stride(2) != 1) {
      written_ = at::empty(tensor_.sizes(), tensor_.options());
    }
  }

  // No rows, or a gradient that is not wanted: nothing to write.
  lightconv::MutableRows rows() const {
    if (written_.numel() == 0) return {};
    return {written_.mutable_data_ptr(), written_.stride(0), written_.stride(1)};
  }

  Tensor finish() {
    if (!written_.is_same(tensor_)) tensor_.copy_(written_);
    return tensor_;
  }

 private:
  Tensor tensor_, written_;
};

Tensor gradient_of(const Tensor& tensor, bool needed) {
  return needed ? at::empty_like(tensor) : tensor.new_empty({0});
}

int checked_int(int64_t value, const char* name) {
  TORCH_CHECK_VALUE(value <= std::numeric_limits<int>::max() / 2, name, " must be below 2^30 on CUDA, got ", value);
  return static_cast<int>(value);
}

lightconv::Type type_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat: return lightconv::Type::kFloat32;
    case at::kHalf: return lightconv::Type::kFloat16;
    case at::kBFloat16: return lightconv::Type::kBFloat16;
    default:
      TORCH_CHECK_TYPE(false, "x must be float32, float16 or bfloat16 on CUDA, got ", x.scalar_type(),
                       " (float64 runs on the CPU, and on CUDA with LIGHTCONV_BACKEND=reference)");
  }
}

// Everything but the rows: of a full pass as of a step.
void set_common(ConvParams& p, const Tensor& x, const Tensor& weight, const OptionalTensor& seed,
                std::string_view normalize, double dropout, bool renorm_padding, bool glu) {
  p.type = type_of(x);
  p.dynamic = weight.dim() == 4;
  p.steps = x.size(0);
  p.batch = x.size(1);
  p.channels = checked_int(glu ? x.size(2) / 2 : x.size(2), "the number of channels C");
  p.heads = checked_int(weight.size(-2), "the number of heads H");
  p.kernel_size = checked_int(weight.size(-1), "the kernel size K");
  const auto* kind = std::find(kNormalizations.begin(), kNormalizations.end(), normalize);
  TORCH_CHECK_VALUE(kind != kNormalizations.end(), "normalize is unknown to the CUDA kernels: ", normalize);
  p.normalize = static_cast<lightconv::Normalize>(kind - kNormalizations.begin());
  p.glu = glu;
  p.renorm_padding = renorm_padding;
  p.x = rows(x);
  p.weight.data = weight.const_data_ptr();
  if (p.dynamic) {
    p.weight.stride_t = weight.stride(0);
    p.weight.stride_b = weight.stride(1);
  }
  p.weight.stride_h = weight.stride(-2);
  p.weight.stride_k = weight.stride(-1);
  if (dropout > 0) {
    TORCH_CHECK_VALUE(seed.has_value(), "dropout > 0 needs a seed");
    p.seed = seed->const_data_ptr<int64_t>();
    p.drop_below = static_cast<uint64_t>(std::ceil(dropout * 4294967296.0));
    p.keep_scale = static_cast<float>(1.0 / (1.0 - dropout));
  }
  int device = 0, major = 0, minor = 0;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  p.compute_capability = 10 * major + minor;
}

void set_sequences(ConvParams& p, int64_t padding_l, const OptionalTensor& lengths, const OptionalTensor& cu_seqlens) {
  p.padding_l = static_cast<int>(padding_l);
  if (lengths.has_value()) {
    p.lengths = lengths->const_data_ptr();
    p.lengths_int64 = lengths->scalar_type() == at::kLong;
    p.lengths_stride = lengths->stride(0);
  }
  if (cu_seqlens.has_value()) {
    p.cu_seqlens = cu_seqlens->const_data_ptr<int32_t>();
    p.cu_seqlens_stride = cu_seqlens->stride(0);
    p.sequences = cu_seqlens->size(0) - 1;
  }
}

void set_state(ConvParams& p, const Tensor& state) {
  p.padding_l = p.kernel_size - 1;
  p.state_rows = static_cast<int>(state.size(0));
  if (p.state_rows > 0) p.state = rows(state);
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

void check_launch(cudaError_t error, const char* operation) {
  TORCH_CHECK(error == cudaSuccess, "lightconv::", operation, ": ", cudaGetErrorString(error));
}

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

Tensor full_forward(const char* operation, const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                    const OptionalTensor& lengths, const OptionalTensor& cu_seqlens, const OptionalTensor& seed,
                    int64_t padding_l, std::string_view normalize, double dropout, bool renorm_padding, bool glu) {
  const c10::cuda::CUDAGuard guard(x.device());
  ConvParams p;
  set_common(p, x, weight, seed, normalize, dropout, renorm_padding, glu);
  set_sequences(p, padding_l, lengths, cu_seqlens);
  const Tensor all_bias = bias.has_value() ? bias->contiguous() : Tensor();
  if (bias.has_value()) p.bias = all_bias.const_data_ptr();
  Result out(at::empty_like(x.narrow(2, 0, p.channels)));
  p.out = out.rows();
  run_forward(p, operation);
  return out.finish();
}

std::tuple<Tensor, Tensor> full_backward(const char* operation, const Tensor& grad, const Tensor& x,
                                         const Tensor& weight, const OptionalTensor& lengths,
                                         const OptionalTensor& cu_seqlens, const OptionalTensor& seed,
                                         int64_t padding_l, std::string_view normalize, double dropout,
                                         bool renorm_padding, bool glu, bool need_x, bool need_weight) {
  const c10::cuda::CUDAGuard guard(x.device());
  ConvBackwardParams p;
  set_common(p, x, weight, seed, normalize, dropout, renorm_padding, glu);
  set_sequences(p, padding_l, lengths, cu_seqlens);
  p.grad = rows(grad);
  Result dx(gradient_of(x, need_x));
  Tensor dweight = gradient_of(weight, need_weight);
  p.dx = dx.rows();
  if (need_weight) set_dweight(p, dweight);
  run_backward(p, x, operation);
  return {dx.finish(), dweight};
}

std::tuple<Tensor, Tensor> step_forward(const char* operation, const Tensor& x, const Tensor& state,
                                        const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& seed,
                                        std::string_view normalize, double dropout, bool renorm_padding, bool glu) {
  const c10::cuda::CUDAGuard guard(x.device());
  ConvParams p;
  set_common(p, x, weight, seed, normalize, dropout, renorm_padding, glu);
  set_state(p, state);
  const Tensor all_bias = bias.has_value() ? bias->contiguous() : Tensor();
  if (bias.has_value()) p.bias = all_bias.const_data_ptr();
  Result out(at::empty_like(x.narrow(2, 0, p.channels)));
  const int64_t kept = std::min<int64_t>(p.state_rows + p.steps, p.kernel_size - 1);
  Result next(state.new_empty({kept, p.batch, p.channels}));
  p.out = out.rows();
  p.next_state = next.rows();
  run_forward(p, operation);
  return {out.finish(), next.finish()};
}

std::tuple<Tensor, Tensor, Tensor> step_backward(const char* operation, const OptionalTensor& grad,
                                                 const OptionalTensor& grad_state, const Tensor& x,
                                                 const Tensor& state, const Tensor& weight, const OptionalTensor& seed,
                                                 std::string_view normalize, double dropout, bool renorm_padding,
                                                 bool glu, bool need_x, bool need_state, bool need_weight) {
  const c10::cuda::CUDAGuard guard(x.device());
  ConvBackwardParams p;
  set_common(p, x, weight, seed, normalize, dropout, renorm_padding, glu);
  set_state(p, state);
  p.grad = rows(grad);
  p.grad_state = rows(grad_state);
  Result dx(gradient_of(x, need_x)), dstate(gradient_of(state, need_state));
  Tensor dweight = gradient_of(weight, need_weight);
  p.dx = dx.rows();
  p.dstate = dstate.rows();
  if (need_weight) set_dweight(p, dweight);
  run_backward(p, x, operation);
  return {dx.finish(), dstate.finish(), dweight};
}

// ------------------------------------------------------------------------------------------------ the operators

Tensor lightconv_forward(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                         const OptionalTensor& lengths, const OptionalTensor& cu_seqlens, const OptionalTensor& seed,
                         int64_t padding_l, std::string_view normalize, double dropout, bool glu) {
  return full_forward("lightconv", x, weight, bias, lengths, cu_seqlens, seed, padding_l, normalize, dropout, false,
                      glu);
}

Tensor dynamicconv_forward(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                           const OptionalTensor& lengths, const OptionalTensor& cu_seqlens, const OptionalTensor& seed,
                           int64_t padding_l, std::string_view normalize, double dropout, bool renorm_padding,
                           bool glu) {
  return full_forward("dynamicconv", x, weight, bias, lengths, cu_seqlens, seed, padding_l, normalize, dropout,
                      renorm_padding, glu);
}

std::tuple<Tensor, Tensor> lightconv_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                              const OptionalTensor& lengths, const OptionalTensor& cu_seqlens,
                                              const OptionalTensor& seed, int64_t padding_l,
                                              std::string_view normalize, double dropout, bool glu, bool need_x,
                                              bool need_weight) {
  return full_backward("lightconv_backward", grad, x, weight, lengths, cu_seqlens, seed, padding_l, normalize, dropout,
                       false, glu, need_x, need_weight);
}

std::tuple<Tensor, Tensor> dynamicconv_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                                const OptionalTensor& lengths, const OptionalTensor& cu_seqlens,
                                                const OptionalTensor& seed, int64_t padding_l,
                                                std::string_view normalize, double dropout, bool renorm_padding,
                                                bool glu, bool need_x, bool need_weight) {
  return full_backward("dynamicconv_backward", grad, x, weight, lengths, cu_seqlens, seed, padding_l, normalize,
                       dropout, renorm_padding, glu, need_x, need_weight);
}

std::tuple<Tensor, Tensor> lightconv_step(const Tensor& x, const Tensor& state, const Tensor& weight,
                                          const OptionalTensor& bias, const OptionalTensor& seed,
                                          std::string_view normalize, double dropout, bool glu) {
  return step_forward("lightconv_step", x, state, weight, bias, seed, normalize, dropout, false, glu);
}

std::tuple<Tensor, Tensor> dynamicconv_step(const Tensor& x, const Tensor& state, const Tensor& weight,
                                            const OptionalTensor& bias, const OptionalTensor& seed,
                                            std::string_view normalize, double dropout, bool renorm_padding,
                                            bool glu) {
  return step_forward("dynamicconv_step", x, state, weight, bias, seed, normalize, dropout, renorm_padding, glu);
}

std::tuple<Tensor, Tensor, Tensor> lightconv_step_backward(const OptionalTensor& grad, const OptionalTensor& grad_state,
                                                           const Tensor& x, const Tensor& state, const Tensor& weight,
                                                           const OptionalTensor& seed, std::string_view normalize,
                                                           double dropout, bool glu, bool need_x, bool need_state,
                                                           bool need_weight) {
  return step_backward("lightconv_step_backward", grad, grad_state, x, state, weight, seed, normalize, dropout, false,
                       glu, need_x, need_state, need_weight);
}

std::tuple<Tensor, Tensor, Tensor> dynamicconv_step_backward(
    const OptionalTensor& grad, const OptionalTensor& grad_state, const Tensor& x, const Tensor& state,
    const Tensor& weight, const OptionalTensor& seed, std::string_view normalize, double dropout, bool renorm_padding,
    bool glu, bool need_x, bool need_state, bool need_weight) {
  return step_backward("dynamicconv_step_backward", grad, grad_state, x, state, weight, seed, normalize, dropout,
                       renorm_padding, glu, need_x, need_state, need_weight);
}

}  // namespace

TORCH_LIBRARY_IMPL(lightconv, CUDA, m) {
  m.impl("lightconv", &lightconv_forward);
  m.impl("dynamicconv", &dynamicconv_forward);
  m.impl("lightconv_backward", &lightconv_backward);
  m.impl("dynamicconv_backward", &dynamicconv_backward);
  m.impl("lightconv_step", &lightconv_step);
  m.impl("dynamicconv_step", &dynamicconv_step);
  m.impl("lightconv_step_backward", &lightconv_step_backward);
  m.impl("dynamicconv_step_backward", &dynamicconv_step_backward);
}
