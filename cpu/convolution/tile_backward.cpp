// The gradients of sources and filters for heads narrower than a vector and for long predicted filters, tile by tile, in
// one sweep: a tile reads its gradients, sources and filters once and computes from them
//
//     du[s] = Σ_k w[s − offset − k, k] · grad[s − offset − k]     gathered: every row has one owner
//     dw[t, k] = Σ_r grad[t, r] · u[t + offset + k, r]            then the normalisation's and the GLU's own gradients
//
// Nothing is kept from the forward pass. Normalised filters are computed again, for the rows of the tile and K − 1
// more.

#include "convolution/depthwise.h"
#include "convolution/kernels.h"
#include "convolution/walk.h"

namespace lightconv {
namespace {

template <class T>
class BackwardTile {
 public:
  using S = Sum<T>;

  BackwardTile(const Problem<T>& p, const Tile& tile, Arena& arena, S* partial)
      : p_(p),
        tile_(tile),
        arena_(arena),
        s_(*tile.sequence),
        partial_(partial),
        pitch_(p.channel_pitch()),
        begin_(std::max(tile.begin - p.seen, s_.out_first)),
        end_(std::min(tile.end - p.seen, s_.out_last)) {}

  void run() {
    const bool sources = p_.dx.data || p_.dstate.data;
    const bool weights = begin_ < end_ && (p_.dweight.data || partial_);
    // The outputs that this tile's sources contribute to, and the taps with which they do; its own outputs are among them.
    const Inside taps = p_.meeting(s_.out_first, s_.out_last, tile_.begin, tile_.end);
    const int64_t first = sources ? tile_.begin - p_.offset - (taps.last - 1) : begin_;
    const int64_t last = sources ? tile_.end - p_.offset - taps.first : end_;
    const int64_t filter_first = std::max(first, s_.out_first);
    const Filters<T> filters(p_, tile_, filter_first, std::min(last, s_.out_last), weights, arena_);
    const Rows<S> grad = stage(
        p_, tile_, first, last, s_.out_first, s_.out_last, arena_,
        [&](int64_t t) { fetch_ahead(grad_row(t), tile_.heads() * p_.per_head); },
        [&](int64_t t, S* row) {
          widen_row(grad_row(t), tile_.heads() * p_.per_head, row);
          spread_heads(row, tile_.heads(), p_.per_head, pitch_);
        });
    if (sources) source_gradients(grad, taps, last, filters);
    if (weights) weight_gradients(grad, filters);
  }

 private:
  static Rows<S> shifted(Rows<S> rows, int64_t by) { return {rows.data + by, rows.pitch, rows.first}; }
  static Columns<S> shifted(Columns<S> c, int64_t rows) { return {c.data + rows * c.pitch, c.pitch, c.first}; }

  const T* grad_row(int64_t t) const { return p_.grad.at(t, s_.batch) + tile_.head * p_.per_head; }

  // ---------------------------------------------------------------------------------------------- sources

  void source_gradients(Rows<S> grad, Inside taps, int64_t last, const Filters<T>& filters) {
    const int64_t width = tile_.heads() * pitch_;
    const int64_t begin = std::max(tile_.begin, s_.in_first), end = std::min(tile_.end, s_.in_last);
    Rows<S> out{nullptr, round_up<S>(width) + kWidth<S>, tile_.begin};
    out.data = arena_.take<S>(round_up<S>(tile_.end - tile_.begin) * out.pitch);
    if (p_.path == &kRowTiles) {
      const int64_t shift = -p_.offset - (p_.kernel_size - 1);
      for (int64_t h = 0; h < tile_.heads() && begin < end; ++h) {
        convolve_rows<S>(
            shifted(out, h * pitch_), begin, end, constant(shifted(grad, h * pitch_)), s_.out_first, s_.out_last,
            backward_weights(constant(filters.taps(h)), 1, begin + shift, 0, p_.kernel_size), p_.kernel_size, shift,
            pitch_, nullptr);
      }
    } else if (p_.path == &kDepthwise) {
      convolve_each<S, true>(
          out, begin, end, grad, s_.out_first, s_.out_last, channel_taps(p_, tile_, filters, arena_), p_.kernel_size,
          p_.offset, nullptr);
    } else {
      const Columns<S> grads = transposed(grad, last, width, kWidth<S>, arena_);
      const int64_t count = tile_.end - tile_.begin;
      Columns<S> results{nullptr, round_up<S>(count) + kWidth<S>, tile_.begin};
      results.data = arena_.take<S>(round_up<S>(width) * results.pitch);
      for (int64_t h = 0; h < tile_.heads(); ++h) {
        convolve_narrow<true>(
            p_, tile_, filters, h, shifted(results, h * pitch_), tile_.begin, tile_.end, shifted(grads, h * pitch_), taps,
            nullptr, arena_);
      }
      transpose(results.data, results.pitch, out.data, out.pitch, width, count);
    }
    for (int64_t s = tile_.begin; s < tile_.end; ++s) write_source_gradient(s, out.at(s));
  }

  void write_source_gradient(int64_t s, S* row) const {
    const int64_t n = tile_.heads() * p_.per_head, c = tile_.head * p_.per_head, b = s_.batch;
    const bool readable = s >= s_.in_first && s < s_.in_last;
    if (!readable) std::fill(row, row + tile_.heads() * pitch_, S(0));
    if (pitch_ != p_.per_head) {
      for (int64_t h = 1; h < tile_.heads(); ++h) {
        std::memmove(row + h * p_.per_head, row + h * pitch_, p_.per_head * sizeof(S));
      }
    }
    const int64_t kept = s - (p_.sources() - p_.next_rows);
    if (p_.grad_state.data && kept >= 0) {
      const T* add = p_.grad_state.at(kept, b) + c;
      for (int64_t i = 0; i < n; ++i) row[i] += static_cast<S>(add[i]);
    }
    if (s < p_.seen) {
      if (p_.dstate.data) narrow_row(row, n, p_.dstate.at(s, b) + c);
    } else if (p_.dx.data) {
      T* to = p_.dx.at(s - p_.seen, b) + c;
      if (!p_.glu) {
        narrow_row(row, n, to);
      } else if (readable) {
        gate_gradient<T>(row, n, p_.x.at(s - p_.seen, b) + c, p_.channels(), to);
      } else {
        std::fill(to, to + n, T(0));
        std::fill(to + p_.channels(), to + p_.channels() + n, T(0));
      }
    }
  }

  // ---------------------------------------------------------------------------------------------- filters

  void weight_gradients(Rows<S> grad, const Filters<T>& filters) {
    const int64_t k = p_.kernel_size;
    const Inside taps = p_.meeting(begin_, end_, s_.in_first, s_.in_last);
    const ProductColumns<S> wanted(taps.first, taps.last);
    const int64_t last = end_ + p_.offset + taps.last - 1;
    const Rows<S> source = stage_sources(p_, tile_, begin_ + p_.offset + wanted.first, last, arena_);
    if (p_.path == &kDepthwise) {
      correlate_each(
          grad, begin_, end_, source, s_.in_first, s_.in_last, k, p_.offset, tile_.heads(),
          partial_ + tile_.head * p_.filter_pitch(), p_.filter_pitch());
      return;
    }
    // Wide heads are transposed one by one, to stay in the first-level cache; narrow ones all at once.
    const int64_t together = p_.path == &kRowTiles ? 1 : tile_.heads();
    S* products = arena_.take<S>(kProductRows * correlation_pitch<S>(k) + kWidth<S>);  // the last row is read to its pitch
    S* logits = arena_.take<S>(p_.filter_pitch());
    for (int64_t h = 0; h < tile_.heads(); h += together) {
      const auto mark = arena_.mark();
      const Columns<S> columns =
          transposed(shifted(source, h * pitch_), last, together * pitch_, kDotRows + kWidth<S>, arena_);
      for (int64_t each = h; each < h + together; ++each) {
        for (int64_t t = begin_; t < end_; t += kProductRows) {
          const int64_t to = std::min(t + kProductRows, end_);
          correlate(
              constant(shifted(grad, each * pitch_)), t, to, shifted(columns, (each - h) * pitch_), wanted, k,
              p_.offset, p_.per_head, products);
          take(filters, t, to, each, products, logits);
        }
      }
      arena_.release(mark);
    }
    if (partial_) return;
    // In the order of time, as they are laid out in memory.
    for (int64_t t = begin_; t < end_; ++t) {
      for (int64_t h = 0; h < tile_.heads(); ++h) {
        write_filter(p_, filters.normalized(t, h), p_.dweight.at(t, s_.batch, tile_.head + h));
      }
    }
  }

  // Overwrites the normalised filters of the rows `begin` … `end` − 1, whose products are given, with their gradients.
  void take(const Filters<T>& filters, int64_t begin, int64_t end, int64_t head, const S* products, S* logits) {
    for (int64_t t = begin; t < end;) {
      if (take_together(filters, t, begin, end, head, products)) {
        t += kWidth<S>;
      } else {
        take_row(filters, t, head, products + correlation_at<S>(t - begin, p_.kernel_size), logits);
        ++t;
      }
    }
  }

  // The same as take_row for as many rows from t on as a vector has lanes; returns false if that is not possible.
  bool take_together(
      const Filters<T>& filters, int64_t t, int64_t begin, int64_t end, int64_t head, const S* products) {
    constexpr int w = kWidth<S>;
    const int64_t k = p_.kernel_size;
    if (partial_ || p_.normalize != Normalize::kSoftmax || p_.dropout.active() || !detail::together<S>(k)) return false;
    const Inside first = p_.meeting(s_, t), last = p_.meeting(s_, t + w - 1);
    if (t + w > end || first.first > 0 || last.last < k) return false;
    const Lanes<S> there = detail::first_lanes<S>(k - w);
    const S* rows[w];
    for (int i = 0; i < w; ++i) rows[i] = products + correlation_at<S>(t - begin + i, k);
    detail::softmax_backward_together<S>(
        [&](int f, int i) { return i == 0 ? load(rows[f]) : there ? load(rows[f] + i) : Vector<S>{}; },
        filters.normalized(t, head), tile_.heads() * p_.filter_pitch());
    return true;
  }

  // Overwrites one normalised filter with its gradient. Products with rows that are not a source are left out.
  void take_row(const Filters<T>& filters, int64_t t, int64_t head, const S* products, S* logits) {
    const int64_t pitch = p_.filter_pitch();
    const Inside met = p_.meeting(s_, t);
    const auto dot = [&](int64_t i) { return detail::mask_of<S>(i, met) ? load(products + i) : Vector<S>{}; };
    if (partial_) {
      S* sum = partial_ + (tile_.head + head) * pitch;
      for (int64_t i = 0; i < pitch; i += kWidth<S>) store(sum + i, load(sum + i) + dot(i));
      return;
    }
    S* row = filters.normalized(t, head);
    const Inside inside = p_.taking_part(s_, t);
    if (p_.normalize != Normalize::kSoftmax) {
      read_filter(p_, p_.weight.at(t, s_.batch, tile_.head + head), logits);
    }
    if (const S* scales = filters.scales(t, head)) {
      const auto dropped = [&](int64_t i) { return dot(i) * load(scales + i); };
      normalize_backward_row<S>(p_.normalize, dropped, logits, row, pitch, inside);
    } else {
      normalize_backward_row<S>(p_.normalize, dot, logits, row, pitch, inside);
    }
  }

  // Rows whose filters' gradients are computed together: blocks of kDotRows, and of take_together.
  static constexpr int64_t kProductRows = 32;

  const Problem<T>& p_;
  const Tile& tile_;
  Arena& arena_;
  const Sequence& s_;
  S* partial_;
  int64_t pitch_, begin_, end_;
};

}  // namespace

template <class T>
void tile_backward(const Problem<T>& p) {
  const Cut work = cut(p, /*planes=*/4, /*tables=*/p.dropout.active() ? 3 : 1);
  run_in_bundles(p, int64_t(work.tiles.size()), work.work, [&](int64_t i, Sum<T>* partial, Arena& arena) {
    BackwardTile<T>(p, work.tiles[i], arena, partial).run();
  });
}

template void tile_backward(const Problem<float>&);
template void tile_backward(const Problem<double>&);
template void tile_backward(const Problem<Float16>&);
template void tile_backward(const Problem<BFloat16>&);

}  // namespace lightconv
