// Slabs: the partial sums of lightconv's weight gradient, (slabs, H, K) floats in the workspace.
#pragma once

#include "common/problem.h"

namespace lightconv {

// Slabs that are added up together before the last kernel, which itself adds up at most this many, with H blocks.
constexpr int kSlabsOfPart = 64;

// Replaces every kSlabsOfPart-th of `count` slabs of `size` floats by the sum of kSlabsOfPart slabs from it on, in a
// fixed order. The other slabs are unchanged.
cudaError_t add_slabs(float* slabs, int64_t count, int64_t size, cudaStream_t stream);

}  // namespace lightconv
