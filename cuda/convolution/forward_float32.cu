// The forward pass in float32 (a separate file, so that the types compile in parallel).
#include "convolution/forward.cuh"

namespace lightconv {

template cudaError_t forward_of<float>(const ConvParams&, cudaStream_t);
template std::string explain_forward<float>(const ConvParams&);

}  // namespace lightconv
