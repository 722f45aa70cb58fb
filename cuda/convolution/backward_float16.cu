// The backward pass in float16 (a separate file, so that the types compile in parallel).
#include "convolution/backward.cuh"

namespace lightconv {

template cudaError_t backward_of<__half>(const ConvBackwardParams&, cudaStream_t);
template size_t workspace_bytes_of<__half>(const ConvBackwardParams&);
template std::string explain_backward<__half>(const ConvBackwardParams&);

}  // namespace lightconv
