// The entry points of launchers.h, by type. (forward.cuh and backward.cuh choose the kernels.)
#include "convolution/arithmetic.cuh"

namespace lightconv {

// forward.cuh and backward.cuh, instantiated in one file for each type.
template <class T>
cudaError_t forward_of(const ConvParams& params, cudaStream_t stream);
template <class T>
cudaError_t backward_of(const ConvBackwardParams& params, cudaStream_t stream);
template <class T>
size_t workspace_bytes_of(const ConvBackwardParams& params);
template <class T>
std::string explain_forward(const ConvParams& params);
template <class T>
std::string explain_backward(const ConvBackwardParams& params);

cudaError_t forward(const ConvParams& params, cudaStream_t stream) {
  if (params.batch == 0) return cudaSuccess;
  return by_type(params.type, [&](auto zero) { return forward_of<decltype(zero)>(params, stream); });
}

cudaError_t backward(const ConvBackwardParams& params, cudaStream_t stream) {
  return by_type(params.type, [&](auto zero) { return backward_of<decltype(zero)>(params, stream); });
}

size_t workspace_bytes(const ConvBackwardParams& params) {
  return by_type(params.type, [&](auto zero) { return workspace_bytes_of<decltype(zero)>(params); });
}

std::string explain(const ConvBackwardParams& params, bool backward) {
  return by_type(params.type, [&](auto zero) {
    return backward ? explain_backward<decltype(zero)>(params) : explain_forward<decltype(zero)>(params);
  });
}

}  // namespace lightconv
