// How a call whose heads are at least a vector wide is cut, and what its passes keep while they walk in time.
//
// A unit is some neighbouring sentences × a segment of time × all heads. A row of it, the sentences at one time, is
// contiguous in memory (4 to 8 KB), and units are walked from row to row, so that memory is read and written linearly.
// What a row is needed for later is in the second-level cache. Rows are read where they are if they are in the type of the
// sums and need no GLU, else from a sliding buffer.
#pragma once

#include <optional>

#include "convolution/lanes.h"
#include "convolution/taps.h"
#include "convolution/tile.h"

namespace lightconv {

struct Unit {
  const Sequence* sequences;  // of neighbouring sentences, with the same outputs
  int64_t count;
  int64_t begin, end;  // source rows

  int64_t batch() const { return sequences->batch; }
};

// The cut depends on sizes only, never on the number of threads; so do the results.
template <class T>
std::vector<Unit> cut_into_units(const Problem<T>& p) {
  constexpr int64_t kBytes = 8192, kWanted = 16;
  int64_t together = 1;
  // Where a sentence's rows are neighbours in memory, it is walked alone.
  if (p.x.batch < p.x.time && !p.sequences.empty() && p.sequences.front().batch != p.sequences.back().batch) {
    together = std::clamp<int64_t>(kBytes / (p.channels() * int64_t(sizeof(Sum<T>))), 1, p.batch);
  }
  int64_t rows = 128;
  const auto units = [&] {
    return (int64_t(p.sequences.size()) + together - 1) / together * ((p.sources() + rows - 1) / rows);
  };
  if (units() < kWanted && p.kernel_size <= kShort) rows /= 2;
  while (units() < kWanted && together > 1 && together * p.channels() * int64_t(sizeof(T)) > kBytes / 4) together /= 2;
  while (units() < kWanted && rows > 32 && rows > 2 * p.kernel_size) rows /= 2;
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

// Rows at a time: few where the window is short, so that one after the other is read; enough for blocks otherwise.
template <class T>
int64_t chunk_rows(const Problem<T>& p) {
  return p.kernel_size <= kShort ? 4 : 8;
}

// The last rows of something that is made once, in the order of time.
template <class S>
class Sliding {
 public:
  // Of which up to `most` are held at once.
  Sliding(int64_t pitch, int64_t most, Arena& arena)
      : rows_{arena.take<S>(pitch * (most + std::max<int64_t>(most, 32))), pitch, 0},
        capacity_(most + std::max<int64_t>(most, 32)) {}

  // Rows first … last − 1, after make(row, where) of those that are new. Neither may go back.
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

// The filters of a unit's sentences at one time, after normalisation and dropout: a table (tap, filter), where filter
// (b − first b)·H + h is in a lane of its own.
template <class T>
class FilterTable {
 public:
  using S = Sum<T>;

  FilterTable(const Problem<T>& p, const Unit& unit, Arena& arena)
      : p_(p), unit_(unit), filters_(unit.count * p.heads), pitch_(round_up<S>(filters_)) {
    offsets_ = arena.take<int64_t>(filters_);
    gradient_offsets_ = arena.take<int64_t>(filters_);
    for (int64_t f = 0; f < filters_; ++f) {
      const int64_t b = f / p.heads, h = f % p.heads;
      offsets_[f] = b * p.weight.batch + h * p.weight.head;
      gradient_offsets_[f] = b * p.dweight.batch + h * p.dweight.head;
    }
    if (p.dropout.active()) {
      words_ = arena.take<uint32_t>(filters_ * p.kernel_size + 64);
      factors_ = arena.take<S>(filters_ * p.kernel_size);
    }
    if (p.weight.tap != 1 || (p.dweight.data && p.dweight.tap != 1)) rows_ = arena.take<T>(kWidth<S> * p.kernel_size);
  }

  int64_t pitch() const { return pitch_; }
  int64_t size() const { return p_.kernel_size * pitch_; }

  // The logits of time t.
  void read(int64_t t, S* table) const {
    const T* data = p_.weight.at(t, unit_.batch(), 0);
    each_vector([&](int64_t f, int64_t count) {
      if (p_.weight.tap == 1) {
        load_lanes<T>([&](int64_t i) { return data + offsets_[f + i]; }, count, p_.kernel_size, table + f, pitch_);
        return;
      }
      for (int64_t i = 0; i < count; ++i) {
        for (int64_t k = 0; k < p_.kernel_size; ++k) {
          rows_[i * p_.kernel_size + k] = data[offsets_[f + i] + k * p_.weight.tap];
        }
      }
      const T* rows = rows_;
      load_lanes<T>([&](int64_t i) { return rows + i * p_.kernel_size; }, count, p_.kernel_size, table + f, pitch_);
    });
  }

  // Fetches the logits of times first … last − 1 into the cache: a row of them is too short for the hardware to predict
  // the next one.
  void fetch(int64_t first, int64_t last) const {
    for (int64_t t = first; t < last; ++t) {
      for (int64_t i = 0; i < unit_.count; ++i) {
        fetch_ahead(p_.weight.at(t, unit_.batch() + i, 0), p_.heads * p_.kernel_size);
      }
    }
  }

  // Overwrites logits with normalised weights.
  void normalize(int64_t t, S* table) const {
    each_vector([&](int64_t f, int64_t count) {
      normalize_lanes<S>(p_.normalize, table + f, pitch_, p_.kernel_size, inside(t, f, count, p_.renorm));
    });
  }

  // The factors of dropout.
  void draw(int64_t t, S* table) const {
    const int64_t k = p_.kernel_size;
    const uint64_t row = (uint64_t(t) * p_.batch + unit_.batch()) * p_.heads;
    const int64_t at = philox_words(p_.dropout.seed, row * k, filters_ * k, words_);
    dropout_factors(p_.dropout, words_ + at, filters_ * k, factors_);
    const S* factors = factors_;
    each_vector([&](int64_t f, int64_t count) {
      load_lanes<S>([&](int64_t i) { return factors + (f + i) * k; }, count, k, table + f, pitch_);
    });
  }

  // Sets to 0 what belongs to taps without a source.
  void mask(int64_t t, S* table) const {
    using I = std::conditional_t<sizeof(S) == 4, int32_t, int64_t>;
    each_vector([&](int64_t f, int64_t count) {
      const TakingPart<S> taking = inside(t, f, count, true);
      if (taking.all) return;
      for (int64_t k = 0; k < p_.kernel_size; ++k) {
        S* at = table + k * pitch_ + f;
        store(at, (taking.first <= I(k)) & (taking.last > I(k)) ? load(at) : Vector<S>{});
      }
    });
  }

  // Overwrites the gradient of normalised weights with that of the logits; `logits` is room for a table.
  void normalize_backward(int64_t t, const S* weights, S* grad, S* logits) const {
    if (p_.normalize != Normalize::kSoftmax) {
      read(t, logits);
      if (p_.renorm) mask(t, logits);
    }
    each_vector([&](int64_t f, int64_t) {
      normalize_backward_lanes<S>(p_.normalize, weights + f, logits + f, grad + f, pitch_, p_.kernel_size);
    });
  }

  // Writes the gradients of time t.
  void write(int64_t t, const S* table) const {
    T* data = p_.dweight.at(t, unit_.batch(), 0);
    each_vector([&](int64_t f, int64_t count) {
      if (p_.dweight.tap == 1) {
        store_lanes<T>(
            [&](int64_t i) { return data + gradient_offsets_[f + i]; }, count, p_.kernel_size, table + f, pitch_);
        return;
      }
      T* rows = rows_;
      store_lanes<T>([&](int64_t i) { return rows + i * p_.kernel_size; }, count, p_.kernel_size, table + f, pitch_);
      for (int64_t i = 0; i < count; ++i) {
        for (int64_t k = 0; k < p_.kernel_size; ++k) {
          data[gradient_offsets_[f + i] + k * p_.dweight.tap] = rows_[i * p_.kernel_size + k];
        }
      }
    });
  }

  template <class F>
  void each_vector(F f) const {
    for (int64_t i = 0; i < filters_; i += kWidth<S>) f(i, std::min<int64_t>(kWidth<S>, filters_ - i));
  }

 private:
  // With `some`: the taps that meet a source.
  TakingPart<S> inside(int64_t t, int64_t f, int64_t count, bool some) const {
    TakingPart<S> taking{};
    if (!some) return taking;
    for (int64_t i = 0; i < count; ++i) {
      const Inside met = p_.meeting(unit_.sequences[(f + i) / p_.heads], t);
      taking.first[i] = met.first;
      taking.last[i] = met.last;
      taking.all = taking.all && met.first == 0 && met.last == p_.kernel_size;
    }
    return taking;
  }

  const Problem<T>& p_;
  const Unit& unit_;
  int64_t filters_, pitch_;
  int64_t *offsets_, *gradient_offsets_;
  uint32_t* words_ = nullptr;
  S* factors_ = nullptr;
  T* rows_ = nullptr;
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
      : p_(p), unit_(unit), in_place_(std::is_same_v<T, S> && !p.glu && p.seen == 0) {
    if (!in_place_) sliding_.emplace(unit.count * p.channels() + kWidth<S>, most, arena);
  }

  // Rows first … last − 1, as far as the sentences have them, can be read from now on.
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

  // Those of sentence i.
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

// Weights of the outputs from `t` on, for the sources that an output reads.
template <class S>
Weights<S> forward_weights(Rows<const S> taps, int64_t tap, int64_t t, int64_t filter) {
  return {taps.at(t) + filter, taps.pitch, tap};
}

// Of the sources whose first output is `t`, for the outputs that read them: row t + i + m, tap K − 1 − m.
template <class S>
Weights<S> backward_weights(Rows<const S> taps, int64_t tap, int64_t t, int64_t filter, int64_t kernel_size) {
  return {taps.at(t) + filter + (kernel_size - 1) * tap, taps.pitch, taps.pitch - tap};
}

template <class S>
void convolve_rows(
    Rows<S> out, int64_t begin, int64_t end, Rows<const S> source, int64_t valid_first, int64_t valid_last,
    Weights<S> weights, int64_t kernel_size, int64_t shift, int64_t channels, const S* bias) {
  const auto convolve = kernel_size <= kShort ? convolve_short<S> : convolve_band<S>;
  convolve(out, begin, end, source, valid_first, valid_last, weights, kernel_size, shift, channels, bias);
}

}  // namespace lightconv
