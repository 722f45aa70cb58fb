// The content of a tile: rows of sources and gradients in the type of the sums, and filters after normalisation and
// dropout.
#pragma once

#include "common/parallel.h"
#include "convolution/band.h"
#include "convolution/kernels.h"

namespace lightconv {

// value · sigmoid(gate), rounded to T, as the reference rounds it: `row` holds the value on entry.
template <class T>
inline void gate_row(Sum<T>* row, const T* gate, int64_t n) {
  using S = Sum<T>;
  constexpr int kStep = kWidth<S>;
  S gates[kStep];
  T rounded[kStep];
  for (int64_t i = 0; i < n; i += kStep) {
    const int64_t some = std::min<int64_t>(kStep, n - i);
    S values[kStep] = {};
    std::fill(gates, gates + kStep, S(0));
    widen_row(gate + i, some, gates);
    std::memcpy(values, row + i, some * sizeof(S));
    store(values, load(values) * sigmoid<S>(load(gates)));
    narrow_row(values, some, rounded);
    widen_row(rounded, some, row + i);
  }
}

// Computes the gradients of value and gate from du, which is in `row`. The gate is `apart` elements from the value.
template <class T>
inline void gate_gradient(const Sum<T>* row, int64_t n, const T* x, int64_t apart, T* to) {
  using S = Sum<T>;
  constexpr int kStep = kWidth<S>;
  for (int64_t i = 0; i < n; i += kStep) {
    const int64_t some = std::min<int64_t>(kStep, n - i);
    S grads[kStep] = {}, values[kStep] = {}, gates[kStep] = {};
    std::memcpy(grads, row + i, some * sizeof(S));
    widen_row(x + i, some, values);
    widen_row(x + apart + i, some, gates);
    const Vector<S> gate = sigmoid<S>(load(gates)), d = load(grads);
    const Vector<S> dgate = d * load(values) * gate * (S(1) - gate);
    store(values, d * gate);
    store(gates, dgate);
    narrow_row(values, some, to + i);
    narrow_row(gates, some, to + apart + i);
  }
}

// Moves the heads apart and pads each with zeros to the pitch of a head.
template <class S>
inline void spread_heads(S* row, int64_t heads, int64_t per_head, int64_t pitch) {
  if (pitch == per_head) return;
  for (int64_t h = heads - 1; h >= 0; --h) {
    std::memmove(row + h * pitch, row + h * per_head, per_head * sizeof(S));
    std::fill(row + h * pitch + per_head, row + (h + 1) * pitch, S(0));
  }
}

// The tile's channels of source row s (state, then x; after the GLU).
template <class T>
inline void read_source(const Problem<T>& p, const Tile& tile, int64_t s, Sum<T>* row) {
  const int64_t n = tile.heads() * p.per_head, c = tile.head * p.per_head, b = tile.sequence->batch;
  if (s < p.seen) {
    widen_row(p.state.at(s, b) + c, n, row);
  } else {
    const T* x = p.x.at(s - p.seen, b) + c;
    widen_row(x, n, row);
    if (p.glu) gate_row<T>(row, x + p.channels(), n);
  }
  spread_heads(row, tile.heads(), p.per_head, p.channel_pitch());
}

// The K logits of a filter, widened; the elements after them, up to the pitch, are finite.
template <class T>
inline void read_filter(const Problem<T>& p, const T* from, Sum<T>* row) {
  using S = Sum<T>;
  for (int64_t i = 0; i < p.kernel_size; i += kWidth<S>) {
    store(row + i, load_some(from + i, std::min<int64_t>(kWidth<S>, p.kernel_size - i)));
  }
}

// Prefetches the logits of `heads` filters from `head` on. Where each head is somewhere else in memory, nothing between
// them is fetched.
template <class T>
inline void fetch_filters(const Problem<T>& p, int64_t t, int64_t b, int64_t head, int64_t heads) {
  if (p.weight.head == p.kernel_size) return fetch_ahead(p.weight.at(t, b, head), heads * p.kernel_size);
  for (int64_t h = head; h < head + heads; ++h) fetch_ahead(p.weight.at(t, b, h), p.kernel_size);
}

// The softmax over all taps of `count` filters, written to contiguous rows. The taps of a filter are contiguous at
// logits(filter).
template <class T, class Logits>
inline void softmax_filters(Logits logits, int64_t count, int64_t kernel_size, Sum<T>* out) {
  using S = Sum<T>;
  constexpr int w = kWidth<S>;
  const int64_t pitch = round_up<S>(kernel_size);
  int64_t first = 0;
  for (; detail::together<S>(kernel_size) && first + w <= count; first += w) {
    const T* rows[w];
    for (int f = 0; f < w; ++f) rows[f] = logits(first + f);
    detail::softmax_together<S>(
        [&](int f, int i) { return load_some(rows[f] + i, i ? kernel_size - w : w); }, kernel_size, out + first * pitch);
  }
  for (; first < count; ++first) {
    const T* row = logits(first);
    detail::softmax_row(
        [&](int64_t i) { return load_some(row + i, std::min<int64_t>(w, kernel_size - i)); }, kernel_size,
        out + first * pitch);
  }
}

// The reverse: writes a filter's gradient.
template <class T>
inline void write_filter(const Problem<T>& p, const Sum<T>* row, T* to) {
  using S = Sum<T>;
  for (int64_t i = 0; i < p.kernel_size; i += kWidth<S>) {
    store_some(to + i, load(row + i), std::min<int64_t>(kWidth<S>, p.kernel_size - i));
  }
}

template <class T>
inline void fetch_source(const Problem<T>& p, const Tile& tile, int64_t s) {
  const int64_t n = tile.heads() * p.per_head, c = tile.head * p.per_head, b = tile.sequence->batch;
  if (s < p.seen) return fetch_ahead(p.state.at(s, b) + c, n);
  fetch_ahead(p.x.at(s - p.seen, b) + c, n);
  if (p.glu) fetch_ahead(p.x.at(s - p.seen, b) + c + p.channels(), n);
}

// Rows `begin` … `end` − 1 of a tile's plane; those outside `first` … `last` − 1 are zero. There is room for whole
// squares of vectors, as transpose needs it, and the pitch keeps the rows in different cache sets.
template <class T, class Fetch, class Read>
Rows<Sum<T>> stage(
    const Problem<T>& p, const Tile& tile, int64_t begin, int64_t end, int64_t first, int64_t last, Arena& arena,
    Fetch fetch, Read read) {
  using S = Sum<T>;
  const int64_t width = tile.heads() * p.channel_pitch();
  Rows<S> rows{nullptr, round_up<S>(width) + kWidth<S>, begin};
  rows.data = arena.take<S>(round_up<S>(std::max<int64_t>(end - begin, 1)) * rows.pitch);
  for (int64_t t = begin; t < end; ++t) {
    if (t < first || t >= last) {
      std::fill(rows.at(t), rows.at(t) + width, S(0));
    } else {
      if (t + kAhead < std::min(end, last)) fetch(t + kAhead);
      read(t, rows.at(t));
    }
  }
  return rows;
}

// The sources of a tile.
template <class T>
Rows<Sum<T>> stage_sources(const Problem<T>& p, const Tile& tile, int64_t begin, int64_t end, Arena& arena) {
  return stage(
      p, tile, begin, end, tile.sequence->in_first, tile.sequence->in_last, arena,
      [&](int64_t s) { fetch_source(p, tile, s); }, [&](int64_t s, Sum<T>* row) { read_source(p, tile, s, row); });
}

// The filters of output rows `begin` … `end` − 1 and the tile's heads, (row, head, filter_pitch).
template <class T>
class Filters {
 public:
  using S = Sum<T>;

  // With `for_backward`, `normalized` and `scales` are stored separately from the taps where dropout makes them differ.
  Filters(const Problem<T>& p, const Tile& tile, int64_t begin, int64_t end, bool for_backward, Arena& arena)
      : p_(p), tile_(tile), pitch_(p.filter_pitch()), begin_(begin) {
    if (p.shared) {
      taps_ = const_cast<S*>(p.taps) + tile.head * pitch_;
      return;
    }
    const int64_t row = tile.heads() * pitch_, size = std::max<int64_t>(end - begin, 0) * row;
    taps_ = normalized_ = arena.take<S>(size);
    const bool apart = for_backward && p.dropout.active();
    if (apart) {
      normalized_ = arena.take<S>(size);
      scales_ = arena.take<S>(size);
    }
    uint32_t* words = nullptr;
    if (p.dropout.active()) {
      words = arena.take<uint32_t>(tile.heads() * p.kernel_size + 64 + pitch_);
      factors_ = arena.take<S>(pitch_);
    }
    // Several rows at a time, so that there are at least as many filters as lanes even with few heads.
    for (int64_t t = begin; t < end; t += kAhead) {
      const int64_t last = std::min(t + kAhead, end);
      for (int64_t ahead = last; ahead < std::min(last + kAhead, end); ++ahead) {
        fetch_filters(p, ahead, tile.sequence->batch, tile.head, tile.heads());
      }
      normalize(t, last);
      for (int64_t row = t; words && row < last; ++row) drop(row, words);
    }
  }

  // Pitch between rows is 0 for a shared filter.
  Rows<S> taps(int64_t head) const {
    return {taps_ + head * pitch_, p_.shared ? 0 : tile_.heads() * pitch_, begin_};
  }
  S* normalized(int64_t t, int64_t head) const { return normalized_ + index(t, head); }
  // 0 or 1/(1 − p) of each tap; null without dropout.
  const S* scales(int64_t t, int64_t head) const { return scales_ ? scales_ + index(t, head) : nullptr; }

 private:
  int64_t index(int64_t t, int64_t head) const { return ((t - begin_) * tile_.heads() + head) * pitch_; }

  void normalize(int64_t begin, int64_t end) {
    const int64_t heads = tile_.heads();
    const auto logits = [&](int64_t t, int64_t h) { return p_.weight.at(t, tile_.sequence->batch, tile_.head + h); };
    if (p_.normalize == Normalize::kSoftmax && !p_.renorm) {
      return softmax_filters<T>(
          [&](int64_t i) { return logits(begin + i / heads, i % heads); }, (end - begin) * heads, p_.kernel_size,
          normalized_ + index(begin, 0));
    }
    for (int64_t t = begin; t < end; ++t) {
      const Inside inside = p_.taking_part(*tile_.sequence, t);
      for (int64_t h = 0; h < heads; ++h) {
        S* row = normalized_ + index(t, h);
        read_filter(p_, logits(t, h), row);
        normalize_row(p_.normalize, row, p_.kernel_size, inside, row);
      }
    }
  }

  void drop(int64_t t, uint32_t* words) {
    const int64_t k = p_.kernel_size;
    const uint64_t row = (uint64_t(t) * p_.batch + tile_.sequence->batch) * p_.heads + tile_.head;
    words += philox_words(p_.dropout.seed, row * k, tile_.heads() * k, words);
    for (int64_t h = 0; h < tile_.heads(); ++h, words += k) {
      const int64_t at = index(t, h);
      // Beyond K the factors come from the next head's words; the filter is 0 there.
      dropout_factors(p_.dropout, words, pitch_, factors_);
      if (scales_) std::memcpy(scales_ + at, factors_, pitch_ * sizeof(S));
      for (int64_t i = 0; i < pitch_; i += kWidth<S>) {
        store(taps_ + at + i, load(normalized_ + at + i) * load(factors_ + i));
      }
    }
  }

  const Problem<T>& p_;
  const Tile& tile_;
  int64_t pitch_, begin_;
  S *taps_ = nullptr, *normalized_ = nullptr, *scales_ = nullptr, *factors_ = nullptr;
};

// How many taps of a narrow head are computed at a time: their table stays in the cache, however long the filter is.
constexpr int64_t kTapsTogether = 256;

// Some taps of one head, transposed for convolve_columns: outputs `begin` … `end` − 1 (those of the sequence among
// them), zero where a tap meets no source.
template <class T>
Columns<Sum<T>> filter_columns(
    const Problem<T>& p, const Tile& tile, const Filters<T>& filters, int64_t head, int64_t begin, int64_t end,
    Inside some, Arena& arena) {
  using S = Sum<T>;
  const int64_t pitch = round_up<S>(some.last - some.first), rows = round_up<S>(std::max<int64_t>(end - begin, 1));
  S* masked = arena.take<S>(rows * pitch);
  const Rows<S> taps = filters.taps(head);
  const Sequence& s = *tile.sequence;
  const auto copy = [&](int64_t t, S* row) {
    const Inside inside = p.meeting(s, t);
    const int64_t from = std::max(inside.first, some.first), to = std::min(inside.last, some.last);
    const S* filter = taps.at(t);
    if (from == 0 && to == p.kernel_size) {
      for (int64_t k = 0; k < pitch; k += kWidth<S>) store(row + k, load(filter + k));
      return;
    }
    std::fill(row, row + pitch, S(0));
    for (int64_t k = from; k < to; ++k) row[k - some.first] = filter[k];
  };
  for (int64_t t = begin; t < begin + rows; ++t) {
    S* row = masked + (t - begin) * pitch;
    if (t >= s.out_first && t < std::min(end, s.out_last)) {
      copy(t, row);
    } else {
      std::fill(row, row + pitch, S(0));
    }
  }
  // Two more vectors, for the lanes beyond the last output.
  Columns<S> columns{nullptr, rows + 2 * kWidth<S>, begin};
  columns.data = arena.take<S>(pitch * columns.pitch);
  transpose(masked, pitch, columns.data, columns.pitch, rows, pitch);
  return columns;
}

// A plane of `width` channels, transposed. Up to `slack` columns after the last row may be read; their content is
// unspecified.
template <class S>
Columns<S> transposed(Rows<S> rows, int64_t end, int64_t width, int64_t slack, Arena& arena) {
  const int64_t count = round_up<S>(std::max<int64_t>(end - rows.first, 1));
  Columns<S> columns{nullptr, round_up<S>(count + slack) + kWidth<S>, rows.first};
  columns.data = arena.take<S>(round_up<S>(width) * columns.pitch);
  transpose(rows.data, rows.pitch, columns.data, columns.pitch, count, width);
  return columns;
}

// The outputs `begin` … `end` − 1 of one narrow head, from the sources (or, transposed, the reverse) that it meets with
// `taps`, in parts of them, in the order of the sources' time. Without any tap the outputs are `bias`, or 0.
template <bool kTransposed, class T>
void convolve_narrow(
    const Problem<T>& p, const Tile& tile, const Filters<T>& filters, int64_t head, Columns<Sum<T>> out, int64_t begin,
    int64_t end, Columns<Sum<T>> source, Inside taps, const Sum<T>* bias, Arena& arena) {
  using S = Sum<T>;
  const auto add = [&](auto more, Inside some) {
    const auto mark = arena.mark();
    const int64_t from = kTransposed ? begin - p.offset - (some.last - 1) : begin;
    const int64_t to = kTransposed ? end - p.offset - some.first : end;
    convolve_columns<S, kTransposed, decltype(more)::value>(
        out, begin, end, source, filter_columns(p, tile, filters, head, from, to, some, arena), some.first, some.last,
        p.offset, p.channel_pitch(), bias);
    arena.release(mark);
  };
  const auto part = [&](int64_t done) {
    const int64_t count = std::min(kTapsTogether, taps.last - taps.first - done);
    const int64_t from = kTransposed ? taps.last - done - count : taps.first + done;
    return Inside{from, from + count};
  };
  add(std::false_type{}, part(0));
  for (int64_t done = kTapsTogether; done < taps.last - taps.first; done += kTapsTogether) {
    add(std::true_type{}, part(done));
  }
}

// Runs a backward pass, run(i, partial, arena), over `count` tiles or units of about `work` multiply-adds each. If the
// gradient of a shared filter is needed, one thread adds up the gradients of a bundle in their order.
template <class T, class F>
void run_in_bundles(const Problem<T>& p, int64_t count, int64_t work, F run) {
  const auto some = [&](int64_t from, int64_t to, Sum<T>* partial) {
    with_scratch(from, to, [&](int64_t i, Arena& arena) { run(i, partial, arena); });
  };
  if (!p.partial) {
    parallel_for(0, count, grain_of(work), p.threads, [&](int64_t from, int64_t to) { some(from, to, nullptr); });
    return;
  }
  // The sums of all bundles take about as much memory as the rows, or as a few filters.
  const int64_t plane = p.heads * p.filter_pitch(), fit = p.steps * p.batch * p.channels() / plane;
  const int64_t bundles = std::min({count, kBundles, std::max<int64_t>(fit, 4)});
  p.partial->resize(bundles * plane);
  parallel_for(0, bundles, 1, p.threads, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) {
      some(count * i / bundles, count * (i + 1) / bundles, p.partial->data() + i * plane);
    }
  });
}

}  // namespace lightconv
