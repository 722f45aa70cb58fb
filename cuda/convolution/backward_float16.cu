// The backward pass in float16 (a file of its own, so that the types compile side by side).
#include "convolution/backward.cuh"

namespace lightconv {

template cudaError_t backward_of<__half>(const ConvBackwardParams&, cudaStream_t);
template size_t workspace_bytes_of<__half>(const ConvBackwardParams&);

}  // namespace lightconv
