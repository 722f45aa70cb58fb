// The interface of talkconv's kernels (Lioutas and Guo 2020): plain pointers and sizes, no torch.
//
//     out[t, b, c] = 1/(L+R+1) * sum_s coef(t, s) * x[s, b, c],        h = c div (C/H)
//     coef(t, s)   = clip(a_l * L - (t - s) + 1, 0, 1) for s <= t,  clip(a_r * R - (s - t) + 1, 0, 1) for s >= t
//
// with the offsets a_l[t, b, h], a_r[t, b, h]. In other words, with reach = a * max, n its integer part and f the rest:
// n rows to that side, and f times the next row. Rows outside the sequence are zero. Offsets below 0 count as 0.
// Offsets above 1 reach further, and infinite offsets reach to the end of the sequence. An offset that is NaN makes its
// outputs NaN. In all gradients it counts as 0, and its own gradient is 0.
#pragma once

#include "common/paths.h"

namespace lightconv {

// A (T, B, H) tensor with any strides, in elements.
struct Offsets {
  const void* data = nullptr;
  int64_t stride_t = 0;
  int64_t stride_b = 0;
  int64_t stride_h = 0;
};

struct MutableOffsets {
  void* data = nullptr;
  int64_t stride_t = 0;
  int64_t stride_b = 0;
  int64_t stride_h = 0;
};

struct TalkParams : Problem {
  int max_left = 0;   // L; the next state has min(r + n, L) rows
  int max_right = 0;  // R; 0 in a step
  Offsets left;
  Offsets right;      // null where R is 0
};

struct TalkBackwardParams : TalkParams {
  Rows grad;            // (T, B, C): for out; null (a step whose output was not used): zero
  Rows grad_state;      // for next_state; null: zero
  MutableRows dx;       // (T, B, C); null if not needed, as all below
  MutableRows dstate;   // (r, B, C)
  MutableOffsets dleft;
  MutableOffsets dright;
  void* workspace = nullptr;  // talk_workspace_bytes(params) bytes, 16-byte aligned, content undefined
};

// Like forward, backward and workspace_bytes in convolution/launchers.h. T + r must be at most 2^29.
cudaError_t talk_forward(const TalkParams& params, cudaStream_t stream);
cudaError_t talk_backward(const TalkBackwardParams& params, cudaStream_t stream);
size_t talk_workspace_bytes(const TalkBackwardParams& params);

std::string explain(const TalkBackwardParams& params, bool backward);

// The tensor-core path (talk_band.cu), chosen inside talk_forward and talk_backward for full passes. The rules for
// band_*_supported in convolution/launchers.h apply. talk_band_backward writes dx, and the gradients of the offsets
// that are not null; find_reaches must have filled the workspace.
constexpr const char* kTalkBandNeeds =
    "capability 8.0, a half type, C/H >= 16 and a multiple of 8, rows of 16 bytes, windows that fit into shared memory";
bool talk_band_forward_supported(const TalkParams& params);
bool talk_band_backward_supported(const TalkBackwardParams& params);
cudaError_t talk_band_forward(const TalkParams& params, cudaStream_t stream);
cudaError_t talk_band_backward(const TalkBackwardParams& params, cudaStream_t stream);

}  // namespace lightconv
