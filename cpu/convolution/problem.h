// One call of lightconv or dynamicconv, in plain pointers and sizes.
//
// Output row t and tap k meet source row t + offset + k (common/tiles.h): a full pass has seen = 0 and
// offset = −padding_l, a step offset = seen − (K − 1).
#pragma once

#include "common/philox.h"
#include "common/scalars.h"
#include "common/tiles.h"
#include "common/normalize.h"
#include "convolution/paths.h"

namespace lightconv {

template <class T>
struct Problem {
  using S = Sum<T>;

  int64_t steps = 0, seen = 0, batch = 0, heads = 0, per_head = 0, kernel_size = 0, offset = 0;
  bool glu = false, renorm = false;
  int threads = 1;
  Normalize normalize = Normalize::kSoftmax;
  Dropout dropout;
  View<const T> x, state, grad, grad_state;
  View<T> out, next, dx, dstate;
  int64_t next_rows = 0;  // of `next`, the state after this step; grad_state is its gradient
  FilterView<const T> weight;
  FilterView<T> dweight;
  bool shared = false;         // one filter (H, K) for all positions, with the taps `taps`
  const S* taps = nullptr;     // (H, filter_pitch)
  const S* bias = nullptr;     // (H, channel_pitch) or null
  std::vector<S>* partial = nullptr;  // shared: sums of the taps' gradients, (bundle, H, filter_pitch)
  std::vector<Sequence> sequences;
  const Path* path = nullptr;  // set by run_forward and run_backward

  int64_t sources() const { return seen + steps; }
  int64_t channels() const { return heads * per_head; }
  int64_t filter_pitch() const { return round_up<S>(kernel_size); }
  Sizes sizes() const { return {per_head, kernel_size, kWidth<S>, shared}; }
  int64_t channel_pitch() const { return wide(sizes()) ? round_up<S>(per_head) : per_head; }

  // Taps with which any of the outputs `begin` … `end` − 1 meets any of the sources `first` … `last` − 1.
  Inside meeting(int64_t begin, int64_t end, int64_t first, int64_t last) const {
    const auto clamp = [&](int64_t k) { return std::clamp<int64_t>(k, 0, kernel_size); };
    return {clamp(first - (end - 1) - offset), clamp(last - begin - offset)};
  }
  // Taps of output t that meet a source of the sequence.
  Inside meeting(const Sequence& sequence, int64_t t) const {
    return meeting(t, t + 1, sequence.in_first, sequence.in_last);
  }
  Inside taking_part(const Sequence& sequence, int64_t t) const {
    return renorm ? meeting(sequence, t) : Inside{0, kernel_size};
  }
};

template <class T>
Cut cut(const Problem<T>& p, int planes, int tables) {
  constexpr int64_t kRows = 128;
  const int64_t longest = std::min(kRows, p.sources()), halo = std::min(p.kernel_size - 1, p.sources());
  const int64_t of_row =
      (planes * p.channel_pitch() + (p.shared ? 0 : tables * p.filter_pitch())) * int64_t(sizeof(Sum<T>));
  return cut_into_tiles(
      p.sequences, p.seen, kRows, p.heads, (longest + halo) * of_row, longest * p.per_head * p.kernel_size);
}

}  // namespace lightconv
