// Shared by convolution/binding.cpp and talk/talk_binding.cpp: from torch's tensors to a launch's parameters, and back.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <limits>
#include <optional>
#include <utility>

#include "common/problem.h"

namespace lightconv_binding {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline lightconv::Rows rows(const Tensor& tensor) {
  return {tensor.const_data_ptr(), tensor.stride(0), tensor.stride(1)};
}

inline lightconv::Rows rows(const OptionalTensor& tensor) {
  return tensor.has_value() ? rows(*tensor) : lightconv::Rows{};
}

// A (T, B, channels) result that a kernel writes. The operator's fake kernel decides its layout: if the channels of
// `tensor` are not contiguous, the kernel writes to a temporary tensor, and `finish` copies it.
class Result {
 public:
  explicit Result(Tensor tensor) : tensor_(std::move(tensor)), written_(tensor_) {
    if (tensor_.dim() == 3 && tensor_.size(2) > 1 && tensor_.stride(2) != 1) {
      written_ = at::empty(tensor_.sizes(), tensor_.options());
    }
  }

  // No rows, or a gradient that is not needed: nothing to write.
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

inline Tensor gradient_of(const Tensor& tensor, bool needed) {
  return needed ? at::empty_like(tensor) : tensor.new_empty({0});
}

inline int checked_int(int64_t value, const char* name) {
  TORCH_CHECK_VALUE(value <= std::numeric_limits<int>::max() / 2, name, " must be below 2^30 on CUDA, got ", value);
  return static_cast<int>(value);
}

inline lightconv::Type type_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat: return lightconv::Type::kFloat32;
    case at::kHalf: return lightconv::Type::kFloat16;
    case at::kBFloat16: return lightconv::Type::kBFloat16;
    default:
      TORCH_CHECK_TYPE(false, "x must be float32, float16 or bfloat16 on CUDA, got ", x.scalar_type(),
                       " (float64 runs on the CPU, and on CUDA with LIGHTCONV_BACKEND=reference)");
  }
}

// Sets what describes x and the current device.
inline void set_problem(lightconv::Problem& p, const Tensor& x, int64_t channels, int64_t heads) {
  p.type = type_of(x);
  p.steps = x.size(0);
  p.batch = x.size(1);
  p.channels = checked_int(channels, "the number of channels C");
  p.heads = checked_int(heads, "the number of heads H");
  p.x = rows(x);
  int device = 0, major = 0, minor = 0;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  p.compute_capability = 10 * major + minor;
}

inline void set_sequences(lightconv::Problem& p, const OptionalTensor& lengths, const OptionalTensor& cu_seqlens) {
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

inline void set_state(lightconv::Problem& p, const Tensor& state) {
  p.state_rows = checked_int(state.size(0), "the number of rows of the state");
  if (p.state_rows > 0) p.state = rows(state);
}

// `seed` must live as long as the launch's parameters.
inline lightconv::Seed seed_of(const Tensor& seed) {
  const auto* at = seed.const_data_ptr<int64_t>();
  return seed.is_cpu() ? lightconv::Seed{nullptr, static_cast<uint64_t>(*at)} : lightconv::Seed{at, 0};
}

inline void check_launch(cudaError_t error, const char* operation) {
  TORCH_CHECK(error == cudaSuccess, "lightconv::", operation, ": ", cudaGetErrorString(error));
}

}  // namespace lightconv_binding
