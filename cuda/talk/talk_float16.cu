// talkconv in float16 (a separate file, so that the types compile in parallel).
#include "talk/backward.cuh"

namespace lightconv {

template cudaError_t talk_forward_of<__half>(const TalkParams&, cudaStream_t);
template cudaError_t talk_backward_of<__half>(const TalkBackwardParams&, cudaStream_t);
template std::string explain_talk<__half>(const TalkBackwardParams&, bool);

}  // namespace lightconv
