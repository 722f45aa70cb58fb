// The forward pass in float32 (a file of its own, so that the types compile side by side).
#include "convolution/forward.cuh"

namespace lightconv {

template cudaError_t forward_of<float>(const ConvParams&, cudaStream_t);

}  // namespace lightconv
