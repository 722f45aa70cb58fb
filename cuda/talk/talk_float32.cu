// talkconv in float32 (a separate file, so that the types compile in parallel).
#include "talk/backward.cuh"

namespace lightconv {

template cudaError_t talk_forward_of<float>(const TalkParams&, cudaStream_t);
template cudaError_t talk_backward_of<float>(const TalkBackwardParams&, cudaStream_t);
template std::string explain_talk<float>(const TalkBackwardParams&, bool);

}  // namespace lightconv
