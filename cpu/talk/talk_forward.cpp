// out[t] = (x[low] + … + x[high] + left · x[low − 1] + right · x[high + 1]) / (max_left + max_right + 1), by tiles.
//
// A tile is up to 128 outputs (more for very wide windows) of one sentence for some heads. The rows that its windows
// reach are read once into the core's cache, with two running sums in each block, from its first and from its last row.
// A head narrower than a vector is also computed in whole vectors: the next head overwrites the elements beyond its
// channels.

#include "common/parallel.h"
#include "talk/problem.h"

namespace lightconv {
namespace {

template <class T>
class TalkForwardTile {
 public:
  using S = Sum<T>;

  TalkForwardTile(const TalkProblem<T>& p, const Tile& tile, Arena& arena)
      : p_(p),
        tile_(tile),
        arena_(arena),
        s_(*tile.sequence),
        channels_(tile.heads() * p.per_head),
        column_(tile.head * p.per_head),
        block_(p.block()),
        shift_(__builtin_ctzll(block_)),
        scale_(p.scale()),
        pitch_(round_up<S>(channels_) + 2 * kWidth<S>) {}

  void run() {
    if (p_.next.data) write_next_state();
    begin_ = std::max(tile_.begin - p_.seen, s_.out_first);
    end_ = std::min(tile_.end - p_.seen, s_.out_last);
    if (begin_ >= end_) return;
    find_windows();
    stage();
    const bool in_place = std::is_same_v<T, S> && p_.per_head % kWidth<S> == 0;
    S* row = arena_.take<S>(pitch_);
    zeros_ = arena_.take<S>(pitch_);
    std::fill(zeros_, zeros_ + pitch_, S(0));
    const Window<S>* w = windows_;
    for (int64_t t = begin_; t < end_; ++t) {
      T* out = p_.out.at(t, s_.batch) + column_;
      if constexpr (std::is_same_v<T, S>) {
        if (in_place) row = out;
      }
      for (int64_t h = 0; h < tile_.heads(); ++h, ++w) {
        S* to = row + h * p_.per_head;
        if (w->unknown) {
          std::fill(to, to + p_.per_head, std::numeric_limits<S>::quiet_NaN());
        } else if (w->far) {
          add_one_by_one(*w, h, to);
        } else {
          add_blocks(*w, h, to);
        }
      }
      if (!in_place) narrow_row(row, channels_, out);
    }
  }

 private:
  // The tile's part of the last rows of state and inputs, which the next step needs.
  void write_next_state() const {
    const int64_t first = p_.sources() - p_.next_rows;
    for (int64_t s = std::max(first, tile_.begin); s < tile_.end; ++s) {
      std::memcpy(
          p_.next.at(s - first, s_.batch) + column_, p_.source(s, s_.batch) + column_, channels_ * sizeof(T));
    }
  }

  // Finds each output's window, and the rows they reach, rounded to whole blocks.
  void find_windows() {
    Window<S>* w = windows_ = arena_.take<Window<S>>((end_ - begin_) * tile_.heads());
    int64_t first = s_.in_last, last = s_.in_first;
    for (int64_t t = begin_; t < end_; ++t) {
      for (int64_t h = 0; h < tile_.heads(); ++h, ++w) {
        *w = window(p_, s_, t, tile_.head + h);
        if (w->far) continue;
        first = std::min(first, w->first());
        last = std::max(last, w->last() + 1);
      }
    }
    first_ = block_begin(s_, first, block_);
    last_ = block_begin(s_, std::min(last, s_.in_last) + block_ - 1, block_);
  }

  // Rows first_ … last_ − 1, and their running sums from both ends of each block. Zeros after the sequence's last row.
  void stage() {
    const int64_t size = std::max<int64_t>(last_ - first_, 0) * pitch_;
    rows_ = arena_.take<S>(size);
    from_begin_ = arena_.take<S>(size);
    to_end_ = arena_.take<S>(size);
    for (int64_t begin = first_; begin < last_; begin += block_) {
      const int64_t at = (begin - first_) * pitch_;
      for (int64_t r = 0; r < block_; ++r) {
        S* row = rows_ + at + r * pitch_;
        if (begin + r >= s_.in_last) {
          std::fill(row, row + pitch_, S(0));
          continue;
        }
        if (begin + r + kAhead < s_.in_last) fetch_ahead(p_.source(begin + r + kAhead, s_.batch) + column_, channels_);
        widen_row(p_.source(begin + r, s_.batch) + column_, channels_, row);
        std::fill(row + channels_, row + pitch_, S(0));
      }
      run_sums(rows_ + at, from_begin_ + at, to_end_ + at);
    }
  }

  // The running sums of a block's rows, forwards and backwards.
  void run_sums(const S* rows, S* forwards, S* backwards) const {
    const int64_t pitch = pitch_, all = block_ * pitch;
    for (int64_t i = 0; i < pitch; i += kWidth<S>) {
      Vector<S> sum{};
      for (int64_t at = i; at < all; at += pitch) store(forwards + at, sum += load(rows + at));
      sum = Vector<S>{};
      for (int64_t at = all - pitch + i; at >= 0; at -= pitch) store(backwards + at, sum += load(rows + at));
    }
  }

  const S* staged(const S* plane, int64_t row, int64_t head) const {
    return plane + (row - first_) * pitch_ + head * p_.per_head;
  }

  void add_blocks(const Window<S>& w, int64_t head, S* to) const {
    const S *begin = zeros_, *middle = zeros_, *end = zeros_;
    int64_t count = 0, step = 0;
    if (w.low < last_) {
      const int64_t next = block_begin(s_, w.low, block_) + block_;
      if (w.high < next) {
        begin = staged(rows_, w.low, head);
        middle = begin + pitch_;
        step = pitch_;
        count = std::min(w.high, last_ - 1) - w.low;
      } else {
        begin = staged(to_end_, w.low, head);
        middle = staged(from_begin_, next + block_ - 1, head);
        step = block_ * pitch_;
        count = (std::min(block_begin(s_, w.high, block_), last_) - next) >> shift_;
        if (w.high < last_) end = staged(from_begin_, w.high, head);
      }
    }
    const Sums sums{
        begin, middle, step, count, end, w.left > 0 ? staged(rows_, w.low - 1, head) : zeros_,
        w.right > 0 ? staged(rows_, w.high + 1, head) : zeros_, w.left, w.right, scale_};
    const int64_t vectors = (p_.per_head + kWidth<S> - 1) / kWidth<S>;
    int64_t i = 0;
    for (; i + 4 <= vectors; i += 4) sums.template write<4>(i * kWidth<S>, to);
    if (i + 2 <= vectors) sums.template write<2>(i * kWidth<S>, to), i += 2;
    if (i < vectors) sums.template write<1>(i * kWidth<S>, to);
  }

  // The terms of one output of one head.
  struct Sums {
    const S *begin, *middle;
    int64_t step, count;  // distance between the rows of the middle, and their number
    const S *end, *left_row, *right_row;
    S left, right, scale;

    // Several vectors of channels at a time, because the processor cannot predict the number of rows well.
    template <int kVectors>
    LIGHTCONV_INLINE void write(int64_t at, S* to) const {
      Vector<S> sum[kVectors];
      const auto add = [&](const S* row, auto&& times) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sum[v] += times(load(row + at + v * kWidth<S>));
      };
      const auto whole = [](Vector<S> x) { return x; };
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[v] = load(begin + at + v * kWidth<S>);
      for (int64_t j = 0; j < count; ++j) add(middle + j * step, whole);
      add(end, whole);
      add(left_row, [&](Vector<S> x) { return x * left; });
      add(right_row, [&](Vector<S> x) { return x * right; });
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) store(to + at + v * kWidth<S>, sum[v] * scale);
    }
  };

  void add_one_by_one(const Window<S>& w, int64_t head, S* to) const {
    const int64_t channel = column_ + head * p_.per_head, last = std::min(w.high, s_.in_last - 1);
    const S scale = p_.scale();
    for (int64_t i = 0; i < p_.per_head; i += kWidth<S>) {
      const auto row = [&](int64_t r) { return load_row(p_.source(r, s_.batch) + channel + i, p_.per_head - i); };
      Vector<S> sum{};
      for (int64_t r = w.low; r <= last; ++r) sum += row(r);
      if (w.left > 0) sum += row(w.low - 1) * w.left;
      if (w.right > 0) sum += row(w.high + 1) * w.right;
      store(to + i, sum * scale);
    }
  }

  const TalkProblem<T>& p_;
  const Tile& tile_;
  Arena& arena_;
  const Sequence& s_;
  int64_t channels_, column_, block_;
  int shift_;
  S scale_;
  int64_t pitch_;
  int64_t begin_ = 0, end_ = 0, first_ = 0, last_ = 0;
  Window<S>* windows_ = nullptr;
  S *rows_ = nullptr, *from_begin_ = nullptr, *to_end_ = nullptr, *zeros_ = nullptr;
};

}  // namespace

template <class T>
void talk_forward(const TalkProblem<T>& p) {
  const Cut work = talk_cut(p, /*planes=*/3);
  parallel_for(0, int64_t(work.tiles.size()), work.grain(), p.threads, [&](int64_t from, int64_t to) {
    with_scratch(from, to, [&](int64_t i, Arena& arena) { TalkForwardTile<T>(p, work.tiles[i], arena).run(); });
  });
}

template void talk_forward(const TalkProblem<float>&);
template void talk_forward(const TalkProblem<double>&);
template void talk_forward(const TalkProblem<Float16>&);
template void talk_forward(const TalkProblem<BFloat16>&);

}  // namespace lightconv
