// Registers the launchers of launchers.h as kernels of torch's operators; see convolution/binding.cpp.
#include <torch/library.h>

#include <algorithm>
#include <tuple>

#include "common/binding.h"
#include "talk/launchers.h"

namespace {

using lightconv::TalkBackwardParams;
using lightconv::TalkParams;
using namespace lightconv_binding;

// The kernels count rows in ints.
constexpr int64_t kMostSteps = int64_t{1} << 29;

// ------------------------------------------------------------------------------------------------ parameters

lightconv::Offsets offsets(const Tensor& tensor) {
  return {tensor.const_data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

// Null if the gradient is not needed.
lightconv::MutableOffsets written_offsets(const Tensor& tensor) {
  if (tensor.dim() != 3) return {};
  return {tensor.mutable_data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

void set_common(TalkParams& p, const Tensor& x, const Tensor& left, int64_t max_left) {
  set_problem(p, x, x.size(2), left.size(2));
  TORCH_CHECK_VALUE(x.size(0) < kMostSteps, "the number of steps T must be below 2^29 in talkconv on CUDA, got ",
                    x.size(0));
  p.max_left = checked_int(max_left, "max_left");
  p.left = offsets(left);
}

void set_right(TalkParams& p, const OptionalTensor& right, int64_t max_right) {
  p.max_right = checked_int(max_right, "max_right");
  if (right.has_value()) p.right = offsets(*right);
}

Tensor gradient_of(const OptionalTensor& tensor, bool needed, const Tensor& x) {
  return tensor.has_value() ? lightconv_binding::gradient_of(*tensor, needed) : x.new_empty({0});
}

// ------------------------------------------------------------------------------------------------ launches

void run_forward(const TalkParams& p, const char* operation) {
  check_launch(lightconv::talk_forward(p, c10::cuda::getCurrentCUDAStream()), operation);
}

void run_backward(TalkBackwardParams& p, const Tensor& x, const char* operation) {
  Tensor workspace;
  const auto bytes = lightconv::talk_workspace_bytes(p);
  if (bytes > 0) {
    workspace = at::empty({static_cast<int64_t>(bytes)}, x.options().dtype(at::kByte));
    p.workspace = workspace.mutable_data_ptr();
  }
  check_launch(lightconv::talk_backward(p, c10::cuda::getCurrentCUDAStream()), operation);
}

// ------------------------------------------------------------------------------------------------ the operators

Tensor talkconv(const Tensor& x, const Tensor& offset_left, const OptionalTensor& offset_right,
                const OptionalTensor& lengths, const OptionalTensor& cu_seqlens, int64_t max_left, int64_t max_right) {
  const c10::cuda::CUDAGuard guard(x.device());
  TalkParams p;
  set_common(p, x, offset_left, max_left);
  set_right(p, offset_right, max_right);
  set_sequences(p, lengths, cu_seqlens);
  Result out(at::empty_like(x));
  p.out = out.rows();
  run_forward(p, "talkconv");
  return out.finish();
}

std::tuple<Tensor, Tensor, Tensor> talkconv_backward(const Tensor& grad, const Tensor& x, const Tensor& offset_left,
                                                     const OptionalTensor& offset_right, const OptionalTensor& lengths,
                                                     const OptionalTensor& cu_seqlens, int64_t max_left,
                                                     int64_t max_right, bool need_x, bool need_left, bool need_right) {
  const c10::cuda::CUDAGuard guard(x.device());
  TalkBackwardParams p;
  set_common(p, x, offset_left, max_left);
  set_right(p, offset_right, max_right);
  set_sequences(p, lengths, cu_seqlens);
  p.grad = rows(grad);
  Result dx(lightconv_binding::gradient_of(x, need_x));
  Tensor dleft = lightconv_binding::gradient_of(offset_left, need_left);
  Tensor dright = gradient_of(offset_right, need_right, x);
  p.dx = dx.rows();
  p.dleft = written_offsets(dleft);
  p.dright = written_offsets(dright);
  run_backward(p, x, "talkconv_backward");
  return {dx.finish(), dleft, dright};
}

std::tuple<Tensor, Tensor> talkconv_step(const Tensor& x, const Tensor& state, const Tensor& offset_left,
                                         int64_t max_left) {
  const c10::cuda::CUDAGuard guard(x.device());
  TalkParams p;
  set_common(p, x, offset_left, max_left);
  set_state(p, state);
  Result out(at::empty_like(x));
  Result next(state.new_empty({std::min<int64_t>(p.state_rows + p.steps, max_left), p.batch, p.channels}));
  p.out = out.rows();
  p.next_state = next.rows();
  run_forward(p, "talkconv_step");
  return {out.finish(), next.finish()};
}

std::tuple<Tensor, Tensor, Tensor> talkconv_step_backward(const OptionalTensor& grad, const OptionalTensor& grad_state,
                                                          const Tensor& x, const Tensor& state,
                                                          const Tensor& offset_left, int64_t max_left, bool need_x,
                                                          bool need_state, bool need_left) {
  const c10::cuda::CUDAGuard guard(x.device());
  TalkBackwardParams p;
  set_common(p, x, offset_left, max_left);
  set_state(p, state);
  p.grad = rows(grad);
  p.grad_state = rows(grad_state);
  Result dx(lightconv_binding::gradient_of(x, need_x)), dstate(lightconv_binding::gradient_of(state, need_state));
  Tensor dleft = lightconv_binding::gradient_of(offset_left, need_left);
  p.dx = dx.rows();
  p.dstate = dstate.rows();
  p.dleft = written_offsets(dleft);
  run_backward(p, x, "talkconv_step_backward");
  return {dx.finish(), dstate.finish(), dleft};
}

}  // namespace

TORCH_LIBRARY_IMPL(lightconv, CUDA, m) {
  m.impl("talkconv", &talkconv);
  m.impl("talkconv_backward", &talkconv_backward);
  m.impl("talkconv_step", &talkconv_step);
  m.impl("talkconv_step_backward", &talkconv_step_backward);
}
