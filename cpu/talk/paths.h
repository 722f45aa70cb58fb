// The paths of talkconv.
#pragma once

#include "common/paths.h"

namespace lightconv {

// Running sums are not worth it for few outputs: the rows of a window are added one by one.
inline constexpr Path kOneByOne{
    "one by one", "a step of at most 4 tokens", [](const Sizes& s) { return s.tokens > 0 && s.tokens <= 4; }};
inline constexpr Path kBlocks{"block sums", "", always};
inline constexpr const Path* kTalk[] = {&kOneByOne, &kBlocks};

}  // namespace lightconv
