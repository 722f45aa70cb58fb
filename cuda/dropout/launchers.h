// Dropout together with what is computed beside it: a residual connection and its layer norm, or a ReLU. The formulas
// are in lightconv_plugin/ops/residual.py.
#pragma once

#include "common/problem.h"

namespace lightconv {

struct Mask {
  Seed seed;
  uint64_t drop_below = 0;  // keep an element when its Philox word >= drop_below = ceil(p * 2^32); 0: no dropout
  float keep_scale = 1.0f;  // 1/(1-p)
};

constexpr int64_t kMostNormChannels = 4096;

// norm(residual + dropout(x)) over rows of C channels, all contiguous.
struct NormParams {
  Type type = Type::kFloat32;  // of every floating tensor
  int64_t rows = 0;            // N
  int64_t channels = 0;        // C, at most kMostNormChannels
  float epsilon = 0.0f;
  Mask mask;
  const void* x = nullptr;  // (N, C)
  const void* residual = nullptr;
  const void* weight = nullptr;  // (C,)
  const void* bias = nullptr;    // null in a backward pass
  void* out = nullptr;           // (N, C); null in a backward pass

  // Backward only. A gradient that is not needed is null; those of weight and bias come together.
  const void* grad = nullptr;  // (N, C)
  void* dx = nullptr;
  void* dresidual = nullptr;
  void* dweight = nullptr;      // (C,)
  void* dbias = nullptr;
  void* workspace = nullptr;  // norm_workspace_bytes(params) bytes, content undefined
};

cudaError_t dropout_add_norm(const NormParams& params, cudaStream_t stream);
size_t norm_workspace_bytes(const NormParams& params);
cudaError_t dropout_add_norm_backward(const NormParams& params, cudaStream_t stream);

// dropout(max(x, 0)) of n contiguous elements.
struct ReluParams {
  Type type = Type::kFloat32;
  int64_t elements = 0;
  Mask mask;
  const void* x = nullptr;  // null in a backward pass
  void* out = nullptr;      // in a backward pass only read

  // Backward only.
  const void* grad = nullptr;
  void* dx = nullptr;
};

cudaError_t relu_dropout(const ReluParams& params, cudaStream_t stream);
cudaError_t relu_dropout_backward(const ReluParams& params, cudaStream_t stream);

}  // namespace lightconv
