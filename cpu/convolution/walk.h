// How a call is divided if its heads are at least a vector wide, and what its passes keep while they walk through time.
//
// A unit is a few neighbouring sentences × a segment of time × all heads. A row of it, the sentences at one time, is
// contiguous in memory (4 to 8 KB). Units are walked row by row, so memory is read and written linearly, and rows that
// are needed again are still in the second-level cache. Rows are read in place if they have the type of the sums, need
// no GLU and do not evict one another; otherwise from a sliding buffer.
#pragma once

#include <optional>

#include "convolution/filters.h"
#include "convolution/inner.h"
#include "convolution/tile.h"

namespace lightconv {

// A long filter comes back to rows that are a power of two apart in memory. In a small second-level cache these rows
// evict one another, the sooner the more filters are read in between. So they are copied, and each sentence is walked
// alone. Measured: faster on an AMD CPU of family 25 with AVX2 (512 KB; for a shared filter only where it reads both x
// and grad), slower on one of family 26 with AVX-512 (1 MB).
template <class T>
bool copies_rows(const Problem<T>& p) {
  if (kVectorRegisters == 32 || p.kernel_size <= kShort) return false;
  return p.shared ? p.grad.data != nullptr : p.heads >= 2 * kWidth<Sum<T>>;
}

// The division depends only on sizes, never on the number of threads, and so do the results.
template <class T>
std::vector<Unit> cut_into_units(const Problem<T>& p) {
  constexpr int64_t kBytes = 8192, kWanted = 16;
  int64_t together = 1;
  // If the rows of a sentence are neighbours in memory, it is walked alone.
  const bool several = !p.sequences.empty() && p.sequences.front().batch != p.sequences.back().batch;
  if (several && !copies_rows(p) && p.x.batch < p.x.time) {
    together = std::clamp<int64_t>(kBytes / (p.channels() * int64_t(sizeof(Sum<T>))), 1, p.batch);
  }
  // As many sentences as it takes to fill the lanes with filters.
  const bool in_lanes = !p.shared && p.kernel_size <= kMostInLanes;
  const int64_t least = in_lanes ? std::min(together, (kWidth<Sum<T>> + p.heads - 1) / p.heads) : 1;
  int64_t rows = 128;
  const auto few = [&] {
    const int64_t groups = (int64_t(p.sequences.size()) + together - 1) / together;
    return groups * ((p.sources() + rows - 1) / rows) < kWanted;
  };
  if (few() && p.kernel_size <= kShort) rows /= 2;
  while (few() && together > least) together = std::max(together / 2, least);
  while (few() && rows > 32 && rows / 2 >= 4 * (p.kernel_size - 1)) rows /= 2;
  std::vector<Unit> cut;
  for (size_t i = 0; i < p.sequences.size(); i += together) {
    const Sequence* s = &p.sequences[i];
    const int64_t count = std::min<int64_t>(together, p.sequences.size() - i);
    // Rows that nothing reads or writes are in no unit.
    int64_t first = s->out_first + p.seen, last = s->out_last + p.seen;
    for (int64_t j = 0; j < count; ++j) {
      first = std::min(first, s[j].in_first);
      last = std::max(last, s[j].in_last);
    }
    for (int64_t begin = first; begin < last; begin += rows) {
      cut.push_back({s, count, begin, std::min(begin + rows, last)});
    }
  }
  return cut;
}

// How many rows of a head are computed at a time. With more rows its filter is looked up less often. Where only two
// outputs of a short filter fit into the registers, the lookups cost less than leaving the order of memory.
template <class T>
int64_t chunk_rows(const Problem<T>& p) {
  return p.kernel_size <= kShort && kVectorRegisters < 32 ? 4 : 16;
}

// A buffer for the latest rows of a plane whose rows are computed once, in the order of time.
template <class S>
class Sliding {
 public:
  // Up to `most` rows are held at once, of `all` that there are.
  Sliding(int64_t pitch, int64_t most, int64_t all, Arena& arena)
      : rows_{nullptr, pitch, 0}, capacity_(std::min(most + std::max<int64_t>(most, 32), all)) {
    rows_.data = arena.take<S>(pitch * capacity_);
  }

  // Returns rows first … last − 1, after calling make(row, where) for the new ones. Neither bound may decrease.
  template <class F>
  Rows<S> hold(int64_t first, int64_t last, F make) {
    if (made_ < first) rows_.first = made_ = first;
    if (last - rows_.first > capacity_) {
      std::memmove(rows_.data, rows_.at(first), (made_ - first) * rows_.pitch * sizeof(S));
      rows_.first = first;
    }
    for (; made_ < last; ++made_) make(made_, rows_.at(made_));
    return rows_;
  }

 private:
  Rows<S> rows_;
  int64_t capacity_, made_ = std::numeric_limits<int64_t>::min();
};

// Source row s of a sentence (state, then x; after the GLU).
template <class T>
void read_source_row(const Problem<T>& p, int64_t s, int64_t b, Sum<T>* row) {
  const int64_t n = p.channels();
  if (s < p.seen) return widen_row(p.state.at(s, b), n, row);
  const T* x = p.x.at(s - p.seen, b);
  widen_row(x, n, row);
  if (p.glu) gate_row<T>(row, x + n, n);
}

// The sources of a unit's sentences, in the type of the sums.
template <class T>
class Sources {
 public:
  using S = Sum<T>;

  Sources(const Problem<T>& p, const Unit& unit, int64_t most, Arena& arena)
      : p_(p), unit_(unit), in_place_(std::is_same_v<T, S> && !p.glu && p.seen == 0 && !copies_rows(p)) {
    if (!in_place_) sliding_.emplace(unit.count * p.channels() + kWidth<S>, most, p.sources(), arena);
  }

  // Makes rows first … last − 1 readable, as far as the sentences have them.
  void hold(int64_t first, int64_t last) {
    if (in_place_) return;
    const int64_t begin = std::max<int64_t>(first, 0), end = std::min(last, p_.sources());
    held_ = sliding_->hold(begin, std::max(begin, end), [&](int64_t s, S* row) {
      for (int64_t i = 0; i < unit_.count; ++i, row += p_.channels()) {
        const Sequence& sequence = unit_.sequences[i];
        if (s >= sequence.in_first && s < sequence.in_last) read_source_row(p_, s, sequence.batch, row);
      }
    });
  }

  // The sources of sentence i.
  Rows<const S> at(int64_t i, int64_t channel) const {
    if constexpr (std::is_same_v<T, S>) {
      if (in_place_) return {p_.x.at(0, unit_.batch() + i) + channel, p_.x.time, 0};
    }
    return {held_.data + i * p_.channels() + channel, held_.pitch, held_.first};
  }

 private:
  const Problem<T>& p_;
  const Unit& unit_;
  bool in_place_;
  std::optional<Sliding<S>> sliding_;
  Rows<S> held_;
};

// The weights of the outputs from `t` on: for each output, of the sources that it reads.
template <class S>
Weights<S> forward_weights(Rows<const S> taps, int64_t tap, int64_t t, int64_t filter) {
  return {taps.at(t) + filter, taps.pitch, tap};
}

// The weights for the sources whose first output is `t`: for source i and the m-th output that reads it, row t + i + m
// and tap K − 1 − m.
template <class S>
Weights<S> backward_weights(Rows<const S> taps, int64_t tap, int64_t t, int64_t filter, int64_t kernel_size) {
  return {taps.at(t) + filter + (kernel_size - 1) * tap, taps.pitch, taps.pitch - tap};
}

}  // namespace lightconv
