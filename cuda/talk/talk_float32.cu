// talkconv in float32 (a file of its own, so that the types compile side by side).
#include "talk/backward.cuh"

namespace lightconv {

template cudaError_t talk_forward_of<float>(const TalkParams&, cudaStream_t);
template cudaError_t talk_backward_of<float>(const TalkBackwardParams&, cudaStream_t);

}  // namespace lightconv
