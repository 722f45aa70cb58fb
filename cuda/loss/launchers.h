// The loss of label smoothing and its gradient; the formula is in lightconv_plugin/ops/loss.py.
#pragma once

#include "common/problem.h"

namespace lightconv {

struct LossParams {
  Type type = Type::kFloat32;  // of the logits and their gradient
  int64_t rows = 0;            // N
  int64_t words = 0;           // V
  const void* logits = nullptr;  // (N, V), rows `pitch` elements apart
  int64_t pitch = 0;
  const int64_t* target = nullptr;  // (N,)
  int64_t ignore = 0;               // rows with this target have no loss, and are not read
  double epsilon = 0;
  float* loss = nullptr;        // (N,) each; null in a backward pass
  float* nll = nullptr;
  float* normaliser = nullptr;  // log Σ exp(logits); read in a backward pass

  // Backward only. A gradient of the losses may be null, for zeros; autograd's have stride 0 after a sum.
  const float* grad_loss = nullptr;
  const float* grad_nll = nullptr;
  int64_t grad_loss_stride = 0;
  int64_t grad_nll_stride = 0;
  void* gradient = nullptr;  // (N, V)
  int64_t gradient_pitch = 0;
};

// A target that is neither `ignore` nor in 0 … V − 1 gives NaN, and nothing outside the logits is accessed.
cudaError_t smoothed_loss(const LossParams& params, cudaStream_t stream);
cudaError_t smoothed_loss_backward(const LossParams& params, cudaStream_t stream);

}  // namespace lightconv
