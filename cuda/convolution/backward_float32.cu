// The backward pass in float32 (a separate file, so that the types compile in parallel).
#include "convolution/backward.cuh"

namespace lightconv {

template cudaError_t backward_of<float>(const ConvBackwardParams&, cudaStream_t);
template size_t workspace_bytes_of<float>(const ConvBackwardParams&);
template std::string explain_backward<float>(const ConvBackwardParams&);

}  // namespace lightconv
