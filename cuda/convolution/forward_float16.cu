// The forward pass in float16 (a separate file, so that the types compile in parallel).
#include "convolution/forward.cuh"

namespace lightconv {

template cudaError_t forward_of<__half>(const ConvParams&, cudaStream_t);
template std::string explain_forward<__half>(const ConvParams&);

}  // namespace lightconv
