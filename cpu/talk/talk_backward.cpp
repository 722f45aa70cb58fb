// The gradients of rows and offsets, tile by tile. A tile owns its rows and the outputs at those rows.
//
//     dx[s]       = Σ_t coef(t, s) · grad[t], gathered by the owner of s: the transpose of the forward pass. A window's
//                   gradient is added, in the order of t, where the forward pass read its sums: at its first row, at
//                   the first row of each whole block, at its last row. Running sums in each block, forwards and
//                   backwards, then spread it over the window's rows.
//     doffset[t]  = max · Σ_r grad[t, r] · x[the row beyond, r] where a fraction of that row is in the window, else 0
//
// Both are multiplied by 1/(max_left + max_right + 1). Windows are computed again; nothing is kept from the forward
// pass.

#include "common/parallel.h"
#include "talk/problem.h"

namespace lightconv {
namespace {

// How far the windows of a sequence reach at most, computed once per call.
struct Reaches {
  int64_t left = 0, right = 0;                   // of windows that are not `far`
  std::vector<std::pair<int64_t, int64_t>> far;  // the `far` ones: (t, head), in the order of t
};

template <class T>
Reaches reaches(const TalkProblem<T>& p, const Sequence& s) {
  using S = Sum<T>;
  // The largest offsets have the widest windows. NaN is not larger than any offset, and reaches no row.
  S most_left = 0, most_right = 0;
  for (int64_t t = s.out_first; t < s.out_last; ++t) {
    for (int64_t h = 0; h < p.heads; ++h) {
      most_left = std::max(most_left, static_cast<S>(*p.left.at(t, s.batch, h)));
      if (p.right.data) most_right = std::max(most_right, static_cast<S>(*p.right.at(t, s.batch, h)));
    }
  }
  const Reach<S> back = reach(most_left, p.max_left), on = reach(most_right, p.max_right);
  Reaches found{std::min(back.whole, 2 * p.max_left) + 1, std::min(on.whole, 2 * p.max_right) + 1, {}};
  if (!p.few && back.whole <= 2 * p.max_left && on.whole <= 2 * p.max_right) return found;
  for (int64_t t = s.out_first; t < s.out_last; ++t) {
    for (int64_t h = 0; h < p.heads; ++h) {
      if (window(p, s, t, h).far) found.far.push_back({t, h});
    }
  }
  return found;
}

template <class T>
class TalkBackwardTile {
 public:
  using S = Sum<T>;

  TalkBackwardTile(const TalkProblem<T>& p, const Tile& tile, const Reaches& reaches, Arena& arena)
      : p_(p),
        tile_(tile),
        reaches_(reaches),
        arena_(arena),
        s_(*tile.sequence),
        channels_(tile.heads() * p.per_head),
        column_(tile.head * p.per_head),
        block_(p.block()),
        pitch_(round_up<S>(channels_) + 2 * kWidth<S>),
        scale_(p.scale()) {}

  void run() {
    const bool sources = p_.dx.data || p_.dstate.data;
    const bool offsets = p_.dleft.data || p_.dright.data;
    if (sources) clear();
    const int64_t own = tile_.begin - p_.seen, own_end = tile_.end - p_.seen;
    const int64_t begin = std::max(sources ? own - reaches_.right : own, s_.out_first);
    const int64_t end = std::min(sources ? own_end + reaches_.left : own_end, s_.out_last);
    // Head by head, so that the rows that the windows of one head reach stay in the first-level cache.
    for (int64_t h = 0; h < tile_.heads(); ++h) {
      for (int64_t t = begin; t < end; ++t) {
        const bool mine = t >= own && t < own_end;
        if (t + kAhead < end) fetch_ahead(grad(t + kAhead, h), p_.per_head);
        const int64_t beyond = t + p_.seen + p_.max_right + kAhead;
        if (offsets && mine && beyond < s_.in_last) fetch_ahead(source(beyond, h), p_.per_head);
        const Window<S> w = window(p_, s_, t, tile_.head + h);
        if (sources && !w.far && w.first() < tile_.end && w.last() >= tile_.begin) add(w, t, h);
        if (offsets && mine) write_offset_gradients(w, t, h);
      }
    }
    if (!sources) return;
    for (const auto& [t, head] : reaches_.far) {
      if (head >= tile_.head && head < tile_.last_head) add_one_by_one(window(p_, s_, t, head), t, head - tile_.head);
    }
    for (int64_t s = tile_.begin; s < tile_.end; s += block_) {
      run_sums(s);
      for (int64_t r = s; r < std::min(s + block_, tile_.end); ++r) write(r);
    }
  }

 private:
  const T* grad(int64_t t, int64_t head) const {
    return p_.grad.at(t, s_.batch) + column_ + head * p_.per_head;
  }
  S* at(S* plane, int64_t row, int64_t head) const {
    return plane + (row - tile_.begin) * pitch_ + head * p_.per_head;
  }
  bool mine(int64_t row) const { return row >= tile_.begin && row < last_; }

  // ---------------------------------------------------------------------------------------------- rows

  // Whole blocks of rows, also beyond the sequence's end, so that windows ending there need no special case.
  void clear() {
    const int64_t rows = (tile_.end - tile_.begin + block_ - 1) / block_ * block_, size = rows * pitch_;
    last_ = tile_.begin + rows;
    for (S** plane : {&single_, &forwards_, &backwards_}) {
      *plane = arena_.take<S>(size);
      std::fill(*plane, *plane + size, S(0));
    }
    const int64_t width = round_up<S>(p_.per_head);
    nowhere_ = arena_.take<S>(width);
    std::fill(nowhere_, nowhere_ + width, S(0));
  }

  // Beyond the head's last channel, zeros are added.
  void add_row(S* to, const T* from) const {
    for (int64_t i = 0; i < p_.per_head; i += kWidth<S>) {
      store(to + i, load(to + i) + load_row(from + i, p_.per_head - i));
    }
  }
  void add_part(S* to, const T* from, S part) const {
    for (int64_t i = 0; i < p_.per_head; i += kWidth<S>) {
      store(to + i, load(to + i) + load_row(from + i, p_.per_head - i) * part);
    }
  }

  // The row of the tile to add to, or a row that is never read if the tile does not own it.
  S* target(S* plane, int64_t row, int64_t head, bool wanted = true) const {
    return wanted && mine(row) ? at(plane, row, head) : nowhere_;
  }

  void add(const Window<S>& w, int64_t t, int64_t head) const {
    const T* from = grad(t, head);
    S *first = nowhere_, *last = nowhere_, *middle = nowhere_;
    int64_t count = 0, step = 0;  // the number of rows in the middle, and the distance between them
    const int64_t next = block_begin(s_, w.low, block_) + block_;
    if (w.high < next) {
      // Blocks begin and end with the tile, so it has all of these rows or none.
      middle = target(single_, w.low, head);
      count = mine(w.low) ? w.high + 1 - w.low : 0;
      step = pitch_;
    } else {
      first = target(forwards_, w.low, head);
      const int64_t begin = std::max(next, tile_.begin), end = std::min(block_begin(s_, w.high, block_), last_);
      count = std::max<int64_t>(end - begin, 0) / block_;
      if (count) middle = at(forwards_, begin, head);
      step = block_ * pitch_;
      last = target(backwards_, w.high, head);
    }
    S* const before = target(single_, w.low - 1, head, w.left > 0);
    S* const after = target(single_, w.high + 1, head, w.right > 0);
    const Targets to{first, middle, step, count, last, before, after, w.left, w.right};
    int64_t i = 0;
    for (; i + 4 * kWidth<S> <= p_.per_head; i += 4 * kWidth<S>) to.template add<4>(from, i, kWidth<S>);
    for (; i < p_.per_head; i += kWidth<S>) to.template add<1>(from, i, p_.per_head - i);
  }

  // Where the gradient of one output of one head is added.
  struct Targets {
    S *first, *middle;
    int64_t step, count;  // distance between the rows of the middle, and their number
    S *last, *before, *after;
    S left, right;

    // Several vectors of channels at a time, because the processor cannot predict the number of rows well.
    template <int kVectors>
    LIGHTCONV_INLINE void add(const T* from, int64_t at, int64_t n) const {
      Vector<S> row[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) row[v] = load_row(from + at + v * kWidth<S>, n);
      const auto to = [&](S* target, auto&& times) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          S* const where = target + at + v * kWidth<S>;
          store(where, load(where) + times(row[v]));
        }
      };
      const auto whole = [](Vector<S> x) { return x; };
      to(first, whole);
      for (int64_t j = 0; j < count; ++j) to(middle + j * step, whole);
      to(last, whole);
      to(before, [&](Vector<S> x) { return x * left; });
      to(after, [&](Vector<S> x) { return x * right; });
    }
  };

  void add_one_by_one(const Window<S>& w, int64_t t, int64_t head) const {
    const T* from = grad(t, head);
    const int64_t last = std::min(w.high, tile_.end - 1);
    for (int64_t r = std::max(w.low, tile_.begin); r <= last; ++r) add_row(at(single_, r, head), from);
    if (w.left > 0 && mine(w.low - 1)) add_part(at(single_, w.low - 1, head), from, w.left);
    if (w.right > 0 && mine(w.high + 1)) add_part(at(single_, w.high + 1, head), from, w.right);
  }

  // Turns the block's rows of single_ into the complete gradients.
  void run_sums(int64_t begin) const {
    const int64_t start = (begin - tile_.begin) * pitch_, pitch = pitch_, all = block_ * pitch;
    S *const rows = single_ + start, *const forwards = forwards_ + start, *const backwards = backwards_ + start;
    const S scale = scale_;
    for (int64_t i = 0; i < round_up<S>(channels_); i += kWidth<S>) {
      Vector<S> sum{};
      for (int64_t at = i; at < all; at += pitch) {
        sum += load(forwards + at);
        store(rows + at, load(rows + at) + sum);
      }
      sum = Vector<S>{};
      for (int64_t at = all - pitch + i; at >= 0; at -= pitch) {
        sum += load(backwards + at);
        store(rows + at, (load(rows + at) + sum) * scale);
      }
    }
  }

  void write(int64_t s) const {
    S* row = at(single_, s, 0);
    if (s < s_.in_first || s >= s_.in_last) std::fill(row, row + channels_, S(0));
    const int64_t kept = s - (p_.sources() - p_.next_rows);
    if (p_.grad_state.data && kept >= 0) {
      const T* add = p_.grad_state.at(kept, s_.batch) + column_;
      for (int64_t i = 0; i < channels_; ++i) row[i] += static_cast<S>(add[i]);
    }
    if (s < p_.seen) {
      if (p_.dstate.data) narrow_row(row, channels_, p_.dstate.at(s, s_.batch) + column_);
    } else if (p_.dx.data) {
      narrow_row(row, channels_, p_.dx.at(s - p_.seen, s_.batch) + column_);
    }
  }

  // ---------------------------------------------------------------------------------------------- offsets

  // Σ_r grad[t, r] · x[row, r] over the head's channels, for the row beyond each end of the window.
  void write_offset_gradients(const Window<S>& w, int64_t t, int64_t head) const {
    const bool left = p_.dleft.data && w.left > 0, right = p_.dright.data && w.right > 0;
    const T* from = grad(t, head);
    const T* before = left ? source(w.low - 1, head) : from;
    const T* after = right ? source(w.high + 1, head) : from;
    Vector<S> sum_left{}, sum_right{};
    for (int64_t i = 0; (left || right) && i < p_.per_head; i += kWidth<S>) {
      const Vector<S> row = load_row(from + i, p_.per_head - i);
      sum_left += row * load_row(before + i, p_.per_head - i);
      sum_right += row * load_row(after + i, p_.per_head - i);
    }
    const auto along = [&](Vector<S> sum, int64_t limit) { return sum_across<S>(sum)[0] * (S(limit) * scale_); };
    if (p_.dleft.data) {
      *p_.dleft.at(t, s_.batch, tile_.head + head) = static_cast<T>(left ? along(sum_left, p_.max_left) : S(0));
    }
    if (p_.dright.data) {
      *p_.dright.at(t, s_.batch, tile_.head + head) = static_cast<T>(right ? along(sum_right, p_.max_right) : S(0));
    }
  }

  const T* source(int64_t row, int64_t head) const {
    return p_.source(row, s_.batch) + column_ + head * p_.per_head;
  }

  const TalkProblem<T>& p_;
  const Tile& tile_;
  const Reaches& reaches_;
  Arena& arena_;
  const Sequence& s_;
  int64_t channels_, column_, block_, pitch_, last_ = 0;
  S scale_;
  // Planes of the tile's rows, for terms of one row only; of a row and all after it in its block; of a row and all
  // before it in its block.
  S *single_ = nullptr, *forwards_ = nullptr, *backwards_ = nullptr;
  S* nowhere_ = nullptr;  // a row of one head that is in no plane, for writes that are not needed
};

}  // namespace

template <class T>
void talk_backward(const TalkProblem<T>& p) {
  const int64_t count = p.sequences.size();
  std::vector<Reaches> found(count);
  if (p.dx.data || p.dstate.data) {
    const int64_t grain = std::max<int64_t>(1, 20'000 / std::max<int64_t>(1, p.steps * p.heads));
    parallel_for(0, count, grain, p.threads, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) found[i] = reaches(p, p.sequences[i]);
    });
  }
  const Cut work = talk_cut(p, /*planes=*/3);
  parallel_for(0, int64_t(work.tiles.size()), work.grain(), p.threads, [&](int64_t from, int64_t to) {
    with_scratch(from, to, [&](int64_t i, Arena& arena) {
      const Tile& tile = work.tiles[i];
      TalkBackwardTile<T>(p, tile, found[tile.sequence - p.sequences.data()], arena).run();
    });
  });
}

template void talk_backward(const TalkProblem<float>&);
template void talk_backward(const TalkProblem<double>&);
template void talk_backward(const TalkProblem<Float16>&);
template void talk_backward(const TalkProblem<BFloat16>&);

}  // namespace lightconv
