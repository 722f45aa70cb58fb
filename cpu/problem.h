// What one call asks for, in plain pointers and sizes, and how its work is cut into tiles.
//
// Time has one axis of sources: first the `seen` rows of a state (step functions only), then the rows of x. Output row t
// and tap k meet source row t + offset + k; a full pass has seen = 0 and offset = −padding_l, a step offset =
// seen − (K − 1).
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "normalize.h"
#include "philox.h"
#include "scalars.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace lightconv {

// A (time, batch, channels) tensor with contiguous channels.
template <class T>
struct View {
  T* data = nullptr;
  int64_t time = 0, batch = 0;

  T* at(int64_t t, int64_t b) const { return data + t * time + b * batch; }
};

// Filters (T, B, H, K), or (H, K) with the first two strides 0.
template <class T>
struct FilterView {
  T* data = nullptr;
  int64_t time = 0, batch = 0, head = 0, tap = 0;

  T* at(int64_t t, int64_t b, int64_t h) const { return data + t * time + b * batch + h * head; }
};

// Rows of one sentence (or packed sequence): which sources can be read and which outputs exist.
struct Sequence {
  int64_t batch;
  int64_t in_first, in_last;    // sources
  int64_t out_first, out_last;  // outputs
};

template <class T>
struct Problem {
  using S = Sum<T>;

  int64_t steps = 0, seen = 0, batch = 0, heads = 0, per_head = 0, kernel_size = 0, offset = 0;
  bool glu = false, renorm = false;
  Normalize normalize = Normalize::kSoftmax;
  Dropout dropout;
  View<const T> x, state, grad, grad_state;
  View<T> out, next, dx, dstate;
  int64_t next_rows = 0;  // of `next`, the state after this step, whose gradient grad_state is
  FilterView<const T> weight;
  FilterView<T> dweight;
  bool shared = false;         // one filter (H, K) for all positions, whose taps are `taps`
  const S* taps = nullptr;     // (H, filter_pitch)
  const S* bias = nullptr;     // (H, channel_pitch) or null
  S* partial = nullptr;        // shared: gradients of the taps, (bundle, H, filter_pitch)
  std::vector<Sequence> sequences;

  int64_t sources() const { return seen + steps; }
  int64_t channels() const { return heads * per_head; }
  int64_t filter_pitch() const { return round_up<S>(kernel_size); }
  // Heads as wide as a vector have channels in the lanes, narrower ones time (band.h).
  bool wide() const { return per_head >= kWidth<S>; }
  // One channel a head, with a filter for all positions: the depthwise convolution.
  bool each() const { return shared && per_head == 1; }
  int64_t channel_pitch() const { return wide() ? round_up<S>(per_head) : per_head; }

  // Taps of output t that meet a source of the sequence.
  Inside meeting(const Sequence& sequence, int64_t t) const {
    const auto clamp = [&](int64_t k) { return std::clamp<int64_t>(k, 0, kernel_size); };
    return {clamp(sequence.in_first - t - offset), clamp(sequence.in_last - t - offset)};
  }
  Inside taking_part(const Sequence& sequence, int64_t t) const {
    return renorm ? meeting(sequence, t) : Inside{0, kernel_size};
  }
};

// Source rows `begin` … `end` − 1 of a sequence, and the outputs t = row − seen, for heads `head` … `last_head` − 1.
struct Tile {
  const Sequence* sequence;
  int64_t begin, end;
  int64_t head, last_head;

  int64_t heads() const { return last_head - head; }
};

// The cut depends on the sizes alone, never on the number of threads: results do not either.
struct Cut {
  std::vector<Tile> tiles;
  int64_t work;  // multiply-adds of a tile, about

  // Tiles that are worth another thread.
  int64_t grain() const { return std::max<int64_t>(1, 100'000 / std::max<int64_t>(work, 1)); }
};

template <class T>
Cut cut(const Problem<T>& p, int planes, int tables) {
  // Tiles are to stay in a core's second cache with all that is made for them.
  constexpr int64_t kBytes = 512 * 1024, kRows = 128;
  const int64_t longest = std::min(kRows, p.sources());
  const int64_t halo = p.kernel_size - 1;
  const int64_t of_head =
      (planes * p.channel_pitch() + (p.shared ? 0 : tables * p.filter_pitch())) * int64_t(sizeof(Sum<T>));
  const int64_t group = std::clamp<int64_t>(kBytes / ((longest + halo) * of_head), 1, p.heads);
  // Groups of equal size.
  const int64_t groups = (p.heads + group - 1) / group, size = (p.heads + groups - 1) / groups;
  Cut cut{{}, longest * size * p.per_head * p.kernel_size};
  for (const Sequence& s : p.sequences) {
    // Rows that are neither read nor written by anything are in no tile.
    const int64_t first = std::min(s.in_first, s.out_first + p.seen);
    const int64_t last = std::max(s.in_last, s.out_last + p.seen);
    for (int64_t begin = first; begin < last; begin += kRows) {
      for (int64_t h = 0; h < p.heads; h += size) {
        cut.tiles.push_back({&s, begin, std::min(begin + kRows, last), h, std::min(h + size, p.heads)});
      }
    }
  }
  return cut;
}

// Memory of one thread for the tile it works on; kept for the next one.
class Arena {
 public:
  void reset() {
#if defined(__SANITIZE_ADDRESS__)
    blocks_.clear();
    size_ = 0;
#endif
    if (blocks_.size() > 1) {
      const int64_t total = size_;
      blocks_.clear();
      size_ = 0;
      add(total);
    }
    used_ = 0;
  }

  // Gives back what was taken since `mark`, unless a new block had to be added meanwhile (reset does then).
  struct Mark {
    size_t blocks;
    int64_t used;
  };
  Mark mark() const { return {blocks_.size(), used_}; }
  void release(Mark mark) {
    if (mark.blocks == blocks_.size()) used_ = mark.used;
  }

  // `n` elements that begin on a cache line and end on one; not initialised.
  template <class S>
  S* take(int64_t n) {
    const int64_t bytes = (n * int64_t(sizeof(S)) + kLine - 1) / kLine * kLine;
#if defined(__SANITIZE_ADDRESS__)
    // A block for each, so that the sanitizer sees its end; full of NaN, so that what is read unwritten shows.
    add(bytes);
    char *start = blocks_.back().start, *end = start + n * int64_t(sizeof(S));
    std::memset(start, 0xFF, bytes);
    __asan_poison_memory_region(end, blocks_.back().memory.get() + bytes + kLine - end);
    return reinterpret_cast<S*>(start);
#endif
    if (blocks_.empty() || used_ + bytes > blocks_.back().size) {
      add(std::max<int64_t>(bytes, int64_t(1) << 20));
      used_ = 0;
    }
    char* at = blocks_.back().start + used_;
    used_ += bytes;
    return reinterpret_cast<S*>(at);
  }

 private:
  static constexpr int64_t kLine = 64;
  struct Block {
    std::unique_ptr<char[]> memory;
    char* start;
    int64_t size;
  };

  void add(int64_t bytes) {
    std::unique_ptr<char[]> memory(new char[bytes + kLine]);
    char* start = memory.get() + (kLine - reinterpret_cast<uintptr_t>(memory.get()) % kLine) % kLine;
    blocks_.push_back({std::move(memory), start, bytes});
    size_ += bytes;
  }

  std::vector<Block> blocks_;
  int64_t used_ = 0, size_ = 0;
};

}  // namespace lightconv
