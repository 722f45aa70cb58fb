// The gradients of sources and filters for heads at least a vector wide, in one walk over a unit (walk.h):
//
//     du[s] = Σ_k w[s − offset − k, k] · grad[s − offset − k]     gathered: every row has one owner
//     dw[t, k] = Σ_r grad[t, r] · u[t + offset + k, r]            then the normalisation's and the GLU's own gradients
//
// Nothing is kept from the forward pass. Filters are normalised again, once for both gradients, for the rows of the
// unit and K − 1 more.

#include "convolution/kernels.h"
#include "convolution/walk.h"

namespace lightconv {
namespace {

template <class T>
class BackwardUnit {
 public:
  using S = Sum<T>;

  BackwardUnit(const Problem<T>& p, const Unit& unit, Arena& arena, S* partial)
      : p_(p),
        unit_(unit),
        arena_(arena),
        partial_(partial),
        k_(p.kernel_size),
        step_(chunk_rows(p)),
        // Transposing the sources for the gradients of filters is worth it for many rows.
        chunk_(p.kernel_size <= kShort || p.shared ? step_ : 32),
        own_(std::max(unit.begin - p.seen, unit.sequences->out_first)),
        own_end_(std::min(unit.end - p.seen, unit.sequences->out_last)),
        grads_in_place_(std::is_same_v<T, S> && !copies_rows(p)),
        sources_(p, unit, chunk_ + k_ - 1, arena) {}

  void run() {
    const bool sources = p_.dx.data || p_.dstate.data;
    const bool weights = own_ < own_end_ && (p_.dweight.data || partial_);
    // The outputs to which the unit's sources contribute; its own are among them.
    const int64_t first = std::max(sources ? unit_.begin - p_.offset - (k_ - 1) : own_, unit_.sequences->out_first);
    const int64_t last = std::min(sources ? unit_.end - p_.offset : own_end_, unit_.sequences->out_last);
    prepare(weights);
    int64_t s = unit_.begin;
    for (int64_t t = first; t < last; t += chunk_) {
      const int64_t end = std::min(t + chunk_, last);
      hold(std::max(first, sources ? s - p_.offset - (k_ - 1) : t), t, end);
      if (weights) weight_gradients(std::max(t, own_), std::min(end, own_end_));
      if (!sources) continue;
      // The rows to which no later output contributes.
      const int64_t ready = end < last ? std::min(unit_.end, end + p_.offset) : unit_.end;
      for (int64_t to; s < ready; s = to) source_gradients(s, to = std::min(s + step_, ready), end);
    }
    for (int64_t to; sources && s < unit_.end; s = to) source_gradients(s, to = std::min(s + step_, unit_.end), first);
    if (partial_ && weights) add_partial();
  }

 private:
  void prepare(bool weights) {
    const int64_t c = p_.channels(), width = unit_.count * c + kWidth<S>;
    const int64_t outputs = unit_.sequences->out_last - unit_.sequences->out_first;
    if (!grads_in_place_) grads_.emplace(width, chunk_ + k_ - 1, outputs, arena_);
    room_ = {arena_.take<S>(step_ * width), width, 0};
    if (p_.shared) {
      taps_ = {p_.taps, 0, 0};
      if (!weights) return;
      sums_ = arena_.take<S>(p_.heads * k_ * kWidth<S>);
      std::fill(sums_, sums_ + p_.heads * k_ * kWidth<S>, S(0));
      return;
    }
    filters_.emplace(p_, unit_, arena_);
    tap_ = filters_->tap();
    tables_.emplace(filters_->size(), chunk_ + k_ - 1, outputs, arena_);
    if (weights) {
      gradients_ = {arena_.take<S>(kTogether * filters_->size()), filters_->size(), 0};
      logits_ = arena_.take<S>(p_.normalize == Normalize::kSoftmax ? 0 : filters_->size());
      if (k_ <= kShort) {
        sums_ = arena_.take<S>(kTogether * kTime);
        std::fill(sums_, sums_ + kTogether * kTime, S(0));
      } else {
        prepare_products();
      }
    }
    if (p_.dropout.active()) {
      normalized_ = {arena_.take<S>(chunk_ * filters_->size()), filters_->size(), 0};
      scales_ = {arena_.take<S>(chunk_ * filters_->size()), filters_->size(), 0};
    }
  }

  void prepare_products() {
    const int64_t rows = (chunk_ + kDotRows - 1) / kDotRows * kDotRows, pitch = correlation_pitch<S>(k_);
    products_ = {arena_.take<S>(unit_.count * p_.heads * rows * pitch), rows * pitch, 0};
    columns_ = {nullptr, round_up<S>(chunk_ + pitch) + kWidth<S>, 0};
    columns_.data = arena_.take<S>(round_up<S>(p_.per_head) * columns_.pitch);
  }

  // Holds the filters and gradients of the outputs `from` … `end` − 1; those from `t` on are new.
  void hold(int64_t from, int64_t t, int64_t end) {
    normalized_.first = scales_.first = t;
    if (!p_.shared) {
      taps_ = constant(tables_->hold(from, end, [&](int64_t row, S* table) { make_filters(row, table); }));
    }
    if (grads_in_place_) return;
    held_ = grads_->hold(from, end, [&](int64_t row, S* to) {
      for (int64_t i = 0; i < unit_.count; ++i) {
        widen_row(p_.grad.at(row, unit_.batch() + i), p_.channels(), to + i * p_.channels());
      }
    });
  }

  void make_filters(int64_t t, S* table) {
    const int64_t size = filters_->size();
    S* normalized = p_.dropout.active() ? normalized_.at(t) : table;
    filters_->normalize(t, normalized);
    if (!p_.dropout.active()) return;
    S* scales = scales_.at(t);
    filters_->draw(t, scales);
    for (int64_t i = 0; i < size; i += kWidth<S>) store(table + i, load(normalized + i) * load(scales + i));
  }

  Rows<const S> grad(int64_t i, int64_t channel) const {
    if constexpr (std::is_same_v<T, S>) {
      if (grads_in_place_) return {p_.grad.at(0, unit_.batch() + i) + channel, p_.grad.time, 0};
    }
    return {held_.data + i * p_.channels() + channel, held_.pitch, held_.first};
  }

  // ---------------------------------------------------------------------------------------------- sources

  // The gradients of rows `s` … `end` − 1, from the outputs before `last`.
  void source_gradients(int64_t s, int64_t end, int64_t last) {
    const bool in_place = std::is_same_v<T, S> && !p_.glu && !p_.grad_state.data && p_.seen == 0;
    const int64_t c = p_.channels();
    for (int64_t i = 0; i < unit_.count; ++i) {
      const Sequence& sequence = unit_.sequences[i];
      Rows<S> out{room_.data + i * c, room_.pitch, s};
      if constexpr (std::is_same_v<T, S>) {
        if (in_place) out = {p_.dx.at(s, sequence.batch), p_.dx.time, s};
      }
      const int64_t from = std::max(s, sequence.in_first), to = std::min(end, sequence.in_last);
      for (int64_t row = s; row < end; ++row) {
        if (row < from || row >= to) std::fill(out.at(row), out.at(row) + c, S(0));
      }
      if (from >= to) continue;
      for (int64_t h = 0; h < p_.heads; ++h) {
        const int64_t channel = h * p_.per_head;
        const int64_t filter = p_.shared ? h * p_.filter_pitch() : i * p_.heads + h;
        const int64_t shift = -p_.offset - (k_ - 1);
        convolve_rows<S>(
            {out.data + channel, out.pitch, out.first}, from, to, grad(i, channel), sequence.out_first,
            std::min(last, sequence.out_last), backward_weights(taps_, tap_, from + shift, filter, k_), k_, shift,
            p_.per_head, nullptr);
      }
    }
    if (in_place) return;
    for (int64_t row = s; row < end; ++row) {
      for (int64_t i = 0; i < unit_.count; ++i) {
        write_source_gradient(unit_.sequences[i], row, room_.data + (row - s) * room_.pitch + i * c);
      }
    }
  }

  void write_source_gradient(const Sequence& sequence, int64_t s, S* row) const {
    const int64_t n = p_.channels(), b = sequence.batch, kept = s - (p_.sources() - p_.next_rows);
    if (p_.grad_state.data && kept >= 0) {
      const T* add = p_.grad_state.at(kept, b);
      for (int64_t i = 0; i < n; ++i) row[i] += static_cast<S>(add[i]);
    }
    if (s < p_.seen) {
      if (p_.dstate.data) narrow_row(row, n, p_.dstate.at(s, b));
    } else if (p_.dx.data) {
      T* to = p_.dx.at(s - p_.seen, b);
      if (!p_.glu) {
        narrow_row(row, n, to);
      } else if (s >= sequence.in_first && s < sequence.in_last) {
        gate_gradient<T>(row, n, p_.x.at(s - p_.seen, b), n, to);
      } else {
        std::fill(to, to + 2 * n, T());
      }
    }
  }

  // ---------------------------------------------------------------------------------------------- filters

  // The gradients of the filters of the outputs `begin` … `end` − 1, which are held.
  void weight_gradients(int64_t begin, int64_t end) {
    if (begin >= end) return;
    sources_.hold(begin + p_.offset, end + p_.offset + k_ - 1);
    if (p_.shared) {
      for (int64_t i = 0; i < unit_.count; ++i) {
        for (int64_t h = 0; h < p_.heads; ++h) {
          correlate<true>(i, h, begin, end, sums_ + h * k_ * kWidth<S>, 0, kWidth<S>);
        }
      }
      return;
    }
    if (k_ > kShort) return long_gradients(begin, end);
    for (int64_t t = begin; t < end; t += kTogether) short_gradients(t, std::min(t + kTogether, end));
  }

  template <bool kAdd>
  void correlate(int64_t i, int64_t h, int64_t begin, int64_t end, S* sums, int64_t time, int64_t step) const {
    const Sequence& s = unit_.sequences[i];
    const int64_t channel = h * p_.per_head;
    correlate_taps<S, kAdd>(
        grad(i, channel), begin, end, sources_.at(i, channel), s.in_first, s.in_last, k_, p_.offset, p_.per_head, sums,
        time, step);
  }

  // Sums lane by lane for as many filters as there are lanes, then across the lanes of all at once.
  void short_gradients(int64_t begin, int64_t end) {
    constexpr int64_t w = kWidth<S>, step = w * w;
    gradients_.first = begin;
    filters_->each_vector([&](int64_t f, int64_t count) {
      for (int64_t j = 0; j < count; ++j) {
        correlate<false>((f + j) / p_.heads, (f + j) % p_.heads, begin, end, sums_ + j * w, kTime, step);
      }
      for (int64_t t = begin; t < end; ++t) {
        for (int64_t k = 0; k < k_; ++k) {
          const S* sums = sums_ + (t - begin) * kTime + k * step;
          Vector<S> rows[w];
#pragma GCC unroll 16
          for (int j = 0; j < w; ++j) rows[j] = load(sums + j * w);
          store(gradients_.at(t) + k * tap_ + f, sum_each<S>(rows));
        }
      }
    });
    for (int64_t t = begin; t < end; ++t) finish(t, gradients_.at(t));
  }

  // Products of blocks of rows with the transposed sources (band.h), head by head.
  void long_gradients(int64_t begin, int64_t end) {
    // The part of a row that belongs to one head is short, so whole rows are prefetched.
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t i = 0; i < unit_.count; ++i) {
        const int64_t ahead = t + p_.offset + k_ - 1;
        if (ahead < unit_.sequences[i].in_last) fetch_ahead(sources_.at(i, 0).at(ahead), p_.channels());
        fetch_ahead(grad(i, 0).at(t), p_.channels());
      }
    }
    for (int64_t i = 0; i < unit_.count; ++i) {
      for (int64_t h = 0; h < p_.heads; ++h) {
        const int64_t channel = h * p_.per_head;
        transpose_sources(
            unit_.sequences[i], sources_.at(i, channel), begin + p_.offset, end + p_.offset + k_ - 1);
        lightconv::correlate(
            grad(i, channel), begin, end, columns_, ProductColumns<S>(0, k_), k_, p_.offset, p_.per_head,
            products_.at(i * p_.heads + h));
      }
    }
    for (int64_t t = begin; t < end; ++t) {
      S* gradient = gradients_.data;
      filters_->take(t, products_.data + correlation_at<S>(t - begin, k_), products_.pitch, gradient);
      finish(t, gradient);
    }
  }

  // Transposes rows `first` … `end` − 1, with time in the lanes. Products with rows that are not a source are masked,
  // whatever they hold.
  void transpose_sources(const Sequence& s, Rows<const S> source, int64_t first, int64_t end) {
    columns_.first = first;
    const int64_t lowest = std::max(first, s.in_first), highest = std::min(end, s.in_last) - 1;
    if (lowest > highest) return;
    for (int64_t t = first; t < end; t += kWidth<S>) {
      const S* rows[kWidth<S>];
      for (int i = 0; i < kWidth<S>; ++i) rows[i] = source.at(std::clamp(t + i, lowest, highest));
      for (int64_t c = 0; c < p_.per_head; c += kWidth<S>) {
        const int64_t n = p_.per_head - c;
        Vector<S> square[kWidth<S>];
#pragma GCC unroll 16
        for (int i = 0; i < kWidth<S>; ++i) {
          square[i] = n >= kWidth<S> ? load(rows[i] + c) : load_some(rows[i] + c, n);
        }
        exchange_halves<S>(square);
#pragma GCC unroll 16
        for (int i = 0; i < kWidth<S>; ++i) store(columns_.at(c + i, t), square[i]);
      }
    }
  }

  // Computes the gradient of the logits from that of the taps of time t.
  void finish(int64_t t, S* gradient) {
    const S* normalized = taps_.at(t);
    if (p_.dropout.active()) {
      normalized = normalized_.at(t);
      const S* scales = scales_.at(t);
      for (int64_t i = 0; i < filters_->size(); i += kWidth<S>) {
        store(gradient + i, load(gradient + i) * load(scales + i));
      }
    }
    filters_->normalize_backward(t, normalized, gradient, logits_);
    filters_->write(t, gradient);
  }

  void add_partial() {
    for (int64_t h = 0; h < p_.heads; ++h) {
      for (int64_t k = 0; k < k_; ++k) {
        partial_[h * p_.filter_pitch() + k] += sum_across<S>(load(sums_ + (h * k_ + k) * kWidth<S>))[0];
      }
    }
  }

  // Rows whose filters' gradients are computed together, and the sums of one of them: (tap, filter, lane).
  static constexpr int64_t kTogether = 4, kTime = kShort * kWidth<S> * kWidth<S>;

  const Problem<T>& p_;
  const Unit& unit_;
  Arena& arena_;
  S* partial_;
  int64_t k_, step_, chunk_, own_, own_end_;
  bool grads_in_place_;
  Sources<T> sources_;
  std::optional<FilterTable<T>> filters_;
  std::optional<Sliding<S>> tables_, grads_;
  Rows<const S> taps_;
  int64_t tap_ = 1;
  Rows<S> held_, room_, normalized_, scales_, gradients_;
  Rows<S> products_;  // a row for each filter
  Columns<S> columns_;
  S *logits_ = nullptr, *sums_ = nullptr;
};

}  // namespace

template <class T>
void backward(const Problem<T>& p) {
  if (p.path != &kWalkBack) return tile_backward(p);
  const std::vector<Unit> units = cut_into_units(p);
  const int64_t rows = units.empty() ? 1 : units[0].count * (units[0].end - units[0].begin);
  run_in_bundles(p, int64_t(units.size()), 2 * rows * p.channels() * p.kernel_size, [&](int64_t i, Sum<T>* partial, Arena& arena) {
    BackwardUnit<T>(p, units[i], arena, partial).run();
  });
}

template void backward(const Problem<float>&);
template void backward(const Problem<double>&);
template void backward(const Problem<Float16>&);
template void backward(const Problem<BFloat16>&);

}  // namespace lightconv
