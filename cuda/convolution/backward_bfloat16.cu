// The backward pass in bfloat16 (a separate file, so that the types compile in parallel).
#include "convolution/backward.cuh"

namespace lightconv {

template cudaError_t backward_of<__nv_bfloat16>(const ConvBackwardParams&, cudaStream_t);
template size_t workspace_bytes_of<__nv_bfloat16>(const ConvBackwardParams&);
template std::string explain_backward<__nv_bfloat16>(const ConvBackwardParams&);

}  // namespace lightconv
