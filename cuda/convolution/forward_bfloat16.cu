// The forward pass in bfloat16 (a file of its own, so that the types compile side by side).
#include "convolution/forward.cuh"

namespace lightconv {

template cudaError_t forward_of<__nv_bfloat16>(const ConvParams&, cudaStream_t);

}  // namespace lightconv
