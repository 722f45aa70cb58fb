// talkconv in float16 (a file of its own, so that the types compile side by side).
#include "talk/backward.cuh"

namespace lightconv {

template cudaError_t talk_forward_of<__half>(const TalkParams&, cudaStream_t);
template cudaError_t talk_backward_of<__half>(const TalkBackwardParams&, cudaStream_t);

}  // namespace lightconv
