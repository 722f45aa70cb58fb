// The inner loops of heads at least a vector wide, compiled once for all passes.
#pragma once

#include "convolution/band.h"

namespace lightconv {

// Filters up to this size are short: their weights stay in registers (taps.h). Longer ones are computed in blocks of
// outputs (band.h).
constexpr int kShort = 8;

// Rows `begin` … `end` − 1 of outputs of one head, for S float or double. Output t meets the sources t + shift …
// t + shift + K − 1, of which valid_first … valid_last − 1 exist; `weights` are those of output `begin`. The last vector
// of channels, of which there is at least one, may overlap the one before. `bias` may be null.
template <class S>
void convolve_rows(
    Rows<S> out, int64_t begin, int64_t end, Rows<const S> source, int64_t valid_first, int64_t valid_last,
    Weights<S> weights, int64_t kernel_size, int64_t shift, int64_t channels, const S* bias);

// sums[(t − begin)·time + k·step], a vector, = Σ grad[t, c] · source[t + offset + k, c] over the channels c = lane + i·W of
// a head, for the rows `begin` … `end` − 1 and all taps. Without a source it is 0. kAdd: all rows are added to the
// existing sums.
template <class S, bool kAdd>
void correlate_taps(
    Rows<const S> grad, int64_t begin, int64_t end, Rows<const S> source, int64_t valid_first, int64_t valid_last,
    int64_t kernel_size, int64_t offset, int64_t channels, S* sums, int64_t time, int64_t step);

}  // namespace lightconv
