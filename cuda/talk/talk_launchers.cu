// The entry points of launchers.h, by type. (forward.cuh and backward.cuh choose the kernels.)
#include "talk/windows.cuh"

namespace lightconv {

// forward.cuh and backward.cuh, instantiated in one file for each type.
template <class T>
cudaError_t talk_forward_of(const TalkParams& params, cudaStream_t stream);
template <class T>
cudaError_t talk_backward_of(const TalkBackwardParams& params, cudaStream_t stream);
template <class T>
std::string explain_talk(const TalkBackwardParams& params, bool backward);

cudaError_t talk_forward(const TalkParams& params, cudaStream_t stream) {
  if (params.batch == 0) return cudaSuccess;
  if (params.steps + params.state_rows > kMostTalkRows) return cudaErrorInvalidConfiguration;
  return by_type(params.type, [&](auto zero) { return talk_forward_of<decltype(zero)>(params, stream); });
}

cudaError_t talk_backward(const TalkBackwardParams& params, cudaStream_t stream) {
  if (params.batch == 0) return cudaSuccess;
  if (params.steps + params.state_rows > kMostTalkRows) return cudaErrorInvalidConfiguration;
  return by_type(params.type, [&](auto zero) { return talk_backward_of<decltype(zero)>(params, stream); });
}

std::string explain(const TalkBackwardParams& params, bool backward) {
  return by_type(params.type, [&](auto zero) { return explain_talk<decltype(zero)>(params, backward); });
}

size_t talk_workspace_bytes(const TalkBackwardParams& params) {
  if (params.dx.data == nullptr && params.dstate.data == nullptr) return 0;
  if (params.grad.data == nullptr) return 0;
  return Reaches::of(params).ranges_of_a_head() * params.batch * params.heads * sizeof(Range);
}

}  // namespace lightconv
