// The interface of lightconv's and dynamicconv's kernels: plain pointers and sizes, no torch.
//
//     out[t, b, c] = bias[c] + sum_k w[t, b, h, k] * u[t - padding_l + k, b, c],        h = c div (C/H)
//
// u is x, or x[..., :C] * sigmoid(x[..., C:]) rounded to x's type; w is the normalised, then dropped weight, computed
// in float. Both operators, and both ways to call them, use the same structs:
//   lightconv     weight (H, K): `dynamic` is false and stride_t, stride_b of the weight are 0
//   dynamicconv   weight (T, B, H, K)
//   a full pass   `state_rows` is 0; rows of u before 0 and from T (or the sequence's end) on read as zero
//   a step        padding_l = K-1, and rows -state_rows ... -1 of u exist: they are the rows of `state`
// So a step is a full pass over n rows that begins in the middle of a sequence.
//
// All launchers enqueue their work on `stream`, never wait for it, allocate nothing, and return the error of the
// launch.
#pragma once

#include "common/paths.h"

namespace lightconv {

// The order of NORMALIZATIONS in ops/normalize.py.
enum class Normalize : int { kSoftmax, kNone, kL2, kAbsL2, kSigmoid, kTanh, kL1, kAbs, kSquare };

// A (T, B, H, K) tensor with any strides, in elements; (H, K) with stride_t = stride_b = 0.
struct Filters {
  const void* data = nullptr;
  int64_t stride_t = 0;
  int64_t stride_b = 0;
  int64_t stride_h = 0;
  int64_t stride_k = 0;
};

struct ConvParams : Problem {
  bool dynamic = false;
  int kernel_size = 1;         // K; the next state has min(r + n, K-1) rows
  int padding_l = 0;
  Normalize normalize = Normalize::kSoftmax;
  bool glu = false;
  bool renorm_padding = false;  // normalise over the taps inside the sequence only (dynamic only)

  Seed seed;
  uint64_t drop_below = 0;         // keep a weight when its Philox word >= drop_below = ceil(p * 2^32); 0: no dropout
  float keep_scale = 1.0f;         // 1/(1-p)

  Filters weight;
  const void* bias = nullptr;  // (C,), contiguous
};

// The gradient of every tensor; a null pointer if it is not needed.
struct ConvBackwardParams : ConvParams {
  Rows grad;                   // (T, B, C): for out; null (a step whose output was not used): zero
  Rows grad_state;             // for next_state; null: zero
  MutableRows dx;              // (T, B, C or 2C)
  MutableRows dstate;          // (r, B, C)
  void* dweight = nullptr;     // strides below, in elements; t and b as in Filters
  int64_t dweight_stride_t = 0;
  int64_t dweight_stride_b = 0;
  int64_t dweight_stride_h = 0;
  int64_t dweight_stride_k = 0;
  void* workspace = nullptr;   // workspace_bytes(params) bytes, 16-byte aligned, content undefined
};

// Full passes and steps. An empty batch launches nothing.
cudaError_t forward(const ConvParams& params, cudaStream_t stream);
cudaError_t backward(const ConvBackwardParams& params, cudaStream_t stream);

// The size of the workspace of `backward`, for float partial sums of lightconv's dweight; 0 if it needs none. May be
// called before `workspace` is set; all other parameters must be set.
size_t workspace_bytes(const ConvBackwardParams& params);

// The paths of forward or backward, up to the one that runs (common/paths.h).
std::string explain(const ConvBackwardParams& params, bool backward);

// The tensor-core path (band_*.cu), chosen inside forward and backward. `supported` may only depend on types, sizes per
// row (C, H, K, padding_l), options, alignments and the compute capability, never on T, B or the content of a sequence.
// So the results for a sentence do not depend on its batch.
//   band_forward    writes out, with the bias. For full passes only (state_rows == 0, next_state null).
//   band_backward   writes dx and dweight, where not null; rows outside a sequence get dx = 0. For full passes only.
//                   Of lightconv's dweight it writes band_slabs slabs (slabs.h) into the workspace.
constexpr const char* kBandNeeds =
    "capability 8.0, a half type, C/H >= 16 and a multiple of 8, K >= 8 (K >= 3 for C/H >= 64), rows of 16 bytes";
bool band_forward_supported(const ConvParams& params);
bool band_backward_supported(const ConvBackwardParams& params);
cudaError_t band_forward(const ConvParams& params, cudaStream_t stream);
cudaError_t band_backward(const ConvBackwardParams& params, cudaStream_t stream);
int64_t band_slabs(const ConvBackwardParams& params);

}  // namespace lightconv
