// The forward pass in bfloat16 (a separate file, so that the types compile in parallel).
#include "convolution/forward.cuh"

namespace lightconv {

template cudaError_t forward_of<__nv_bfloat16>(const ConvParams&, cudaStream_t);
template std::string explain_forward<__nv_bfloat16>(const ConvParams&);

}  // namespace lightconv
