// The paths of lightconv and dynamicconv. The normalisation does not matter, and the element type only by its lanes.
// Within a path, inner.h splits by the length of the filter (kShort).
#pragma once

#include "common/paths.h"

namespace lightconv {

// Filters up to this length are normalised with one filter in each lane (lanes.h). Longer ones fill vectors by
// themselves and have their taps in the lanes (normalize.h); the blocks of band.h read contiguous taps.
constexpr int64_t kMostInLanes = 16;

// Heads at least as wide as a vector have channels in the lanes; narrower heads have time steps there (band.h).
inline bool wide(const Sizes& s) { return s.per_head >= s.lanes; }

// walk.h
inline constexpr Path kWalk{"walk", "C/H >= W", wide};
// The gradients of long filters are blocks of products. Larger blocks are faster, so these use tiles of one sentence.
inline constexpr Path kWalkBack{
    "walk", "C/H >= W, and K <= 16 for dynamicconv",
    [](const Sizes& s) { return wide(s) && (s.shared || s.kernel_size <= kMostInLanes); }};
// tile.h, with channels in the lanes
inline constexpr Path kRowTiles{"tiles of rows", "C/H >= W", wide};
// depthwise.h
inline constexpr Path kDepthwise{
    "depthwise", "lightconv, C/H = 1", [](const Sizes& s) { return s.shared && s.per_head == 1; }};
// tile.h, with time in the lanes (band.h)
inline constexpr Path kBand{"band", "", always};

inline constexpr const Path* kForward[] = {&kWalk, &kDepthwise, &kBand};
inline constexpr const Path* kBackward[] = {&kWalkBack, &kRowTiles, &kDepthwise, &kBand};

}  // namespace lightconv
