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
  switch (params.type) {
    case Type::kFloat32: return forward_of<float>(params, stream);
    case Type::kFloat16: return forward_of<__half>(params, stream);
    case Type::kBFloat16: return forward_of<__nv_bfloat16>(params, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t backward(const ConvBackwardParams& params, cudaStream_t stream) {
  switch (params.type) {
    case Type::kFloat32: return backward_of<float>(params, stream);
    case Type::kFloat16: return backward_of<__half>(params, stream);
    case Type::kBFloat16: return backward_of<__nv_bfloat16>(params, stream);
  }
  return cudaErrorInvalidValue;
}

size_t workspace_bytes(const ConvBackwardParams& params) {
  switch (params.type) {
    case Type::kFloat32: return workspace_bytes_of<float>(params);
    case Type::kFloat16: return workspace_bytes_of<__half>(params);
    case Type::kBFloat16: return workspace_bytes_of<__nv_bfloat16>(params);
  }
  return 0;
}

std::string explain(const ConvBackwardParams& params, bool backward) {
  switch (params.type) {
    case Type::kFloat32: return backward ? explain_backward<float>(params) : explain_forward<float>(params);
    case Type::kFloat16: return backward ? explain_backward<__half>(params) : explain_forward<__half>(params);
    case Type::kBFloat16:
      return backward ? explain_backward<__nv_bfloat16>(params) : explain_forward<__nv_bfloat16>(params);
  }
  return "";
}

}  // namespace lightconv
