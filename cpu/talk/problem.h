// One call of talkconv (lightconv_plugin/ops/reference_talk.py defines it), and its windows.
//
// The window of output t is the rows low … high around its source row t + seen (common/tiles.h), and a fraction of the
// next row on either side.
//
// A sequence is divided into blocks of `block` rows, counted from its beginning. A window within one block is the sum
// of its rows; a longer one is the sum of the rest of its first block, of whole blocks, and of the beginning of its
// last block. Running sums start again in each block and are never subtracted: nothing cancels, and NaN or ±inf affects
// only the windows that contain it. Results do not depend on where tiles begin, nor on the padding after a sequence.
#pragma once

#include "common/scalars.h"
#include "common/tiles.h"

namespace lightconv {

template <class T>
struct TalkProblem {
  int64_t steps = 0, seen = 0, batch = 0, heads = 0, per_head = 0, max_left = 0, max_right = 0;
  int threads = 1;
  View<const T> x, state, grad, grad_state;
  View<T> out, next, dx, dstate;
  int64_t next_rows = 0;             // of `next`, the state after this step; grad_state is its gradient
  FilterView<const T> left, right;   // offsets (T, B, H). Without `right`, windows end at their output
  FilterView<T> dleft, dright;
  bool few = false;                  // the path is kOneByOne
  std::vector<Sequence> sequences;

  int64_t sources() const { return seen + steps; }
  Sum<T> scale() const { return Sum<T>(1) / Sum<T>(max_left + max_right + 1); }

  // About the square root of the widest window, which then has about as many blocks as a block has rows.
  int64_t block() const {
    int64_t rows = 2;
    while (rows * rows < max_left + max_right + 1 && rows < 64) rows *= 2;
    return rows;
  }

  const T* source(int64_t s, int64_t b) const { return s < seen ? state.at(s, b) : x.at(s - seen, b); }
};

template <class S>
struct Window {
  int64_t low, high;  // rows; `low` is in the sequence, `high` may be beyond its end
  S left, right;      // the fractions of rows low − 1 and high + 1; 0 for a row outside the sequence
  bool unknown;       // an offset is NaN: the output is NaN, too; in gradients the offset counts as 0
  bool far;           // reaches beyond the rows that a tile stages, so its rows are added one by one

  int64_t first() const { return low - (left > 0); }
  int64_t last() const { return high + (right > 0); }
};

// How far a window reaches for an offset: whole rows, and a fraction of one more.
template <class S>
struct Reach {
  int64_t whole = 0;
  S part = 0;
};

template <class S>
inline Reach<S> reach(S offset, int64_t limit) {
  constexpr S kFar = S(int64_t(1) << 40);  // beyond any sequence
  if (!(offset > 0) || limit == 0) return {};
  // Both lines below use the rounded product, as in the reference: no fused multiply-subtract.
  const S rows = std::min(offset * S(limit), kFar);
  const int64_t whole = int64_t(rows);
  return {whole, rows - S(whole)};
}

// Sets all members at once from registers: reading back what was stored member by member would wait for the stores.
template <class T>
LIGHTCONV_INLINE Window<Sum<T>> window(const TalkProblem<T>& p, const Sequence& s, int64_t t, int64_t head) {
  using S = Sum<T>;
  const int64_t at = t + p.seen;
  const S left = static_cast<S>(*p.left.at(t, s.batch, head));
  const S right = p.right.data ? static_cast<S>(*p.right.at(t, s.batch, head)) : S(0);
  const Reach<S> back = reach(left, p.max_left), on = reach(right, p.max_right);
  const int64_t low = at - back.whole, high = at + on.whole;
  // Twice the limit: an offset of 1 after dropout with p = 0.5.
  const bool far = p.few || back.whole > 2 * p.max_left || on.whole > 2 * p.max_right;
  return {
      std::max(low, s.in_first),
      high,
      low - 1 < s.in_first || low - 1 >= s.in_last ? S(0) : back.part,
      high + 1 >= s.in_last ? S(0) : on.part,
      std::isnan(left) || std::isnan(right),
      far};
}

// The first row of the block that contains a row of the sequence.
inline int64_t block_begin(const Sequence& s, int64_t row, int64_t block) {
  return row - ((row - s.in_first) & (block - 1));
}

// The first n channels of a row, in the type of the sums, zeros after them.
template <class T>
LIGHTCONV_INLINE Vector<Sum<T>> load_row(const T* from, int64_t n) {
  constexpr int kAll = kWidth<Sum<T>>;
  return n >= kAll ? load_some(from, kAll) : load_some(from, n);
}

template <class T>
Cut talk_cut(const TalkProblem<T>& p, int64_t planes) {
  int64_t rows = 128;
  while (rows < p.max_left + p.max_right && rows < 1024) rows *= 2;
  const int64_t longest = std::min(rows, p.sources()), halo = p.max_left + p.max_right;
  const int64_t of_row = planes * p.per_head * int64_t(sizeof(Sum<T>)) + int64_t(sizeof(Window<Sum<T>>));
  return cut_into_tiles(p.sequences, p.seen, rows, p.heads, (longest + halo) * of_row, longest * p.per_head * 8);
}

// Computes p.out, and p.next unless it is null.
template <class T>
void talk_forward(const TalkProblem<T>& p);

// Computes p.dx, p.dstate, p.dleft and p.dright, where they are not null, from p.grad and p.grad_state.
template <class T>
void talk_backward(const TalkProblem<T>& p);

}  // namespace lightconv
