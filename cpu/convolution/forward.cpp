// out[t, b, c] = bias[c] + Σ_k w[t, b, h, k] · u[t + offset + k, b, c], for heads at least a vector wide (walk.h).

#include "common/parallel.h"
#include "convolution/kernels.h"
#include "convolution/walk.h"

namespace lightconv {
namespace {

template <class T>
class ForwardUnit {
 public:
  using S = Sum<T>;

  ForwardUnit(const Problem<T>& p, const Unit& unit, Arena& arena)
      : p_(p),
        unit_(unit),
        arena_(arena),
        chunk_(chunk_rows(p)),
        begin_(std::max(unit.begin - p.seen, unit.sequences->out_first)),
        end_(std::min(unit.end - p.seen, unit.sequences->out_last)),
        sources_(p, unit, chunk_ + p.kernel_size - 1, arena) {}

  void run() {
    if (p_.next.data) write_next_state();
    if (begin_ >= end_) return;
    if (p_.shared) {
      taps_ = {p_.taps, 0, 0};
      convolve([](int64_t, int64_t) {});
      return;
    }
    const FilterTable<T>& filters = filters_.emplace(p_, unit_, arena_);
    tap_ = filters.tap();
    apart_ = filters.apart();
    Sliding<S> tables(filters.size(), chunk_, end_ - begin_, arena_);
    S* factors = p_.dropout.active() ? arena_.take<S>(filters.size()) : nullptr;
    convolve([&](int64_t first, int64_t last) {
      taps_ = constant(tables.hold(first, last, [&](int64_t t, S* table) {
        filters.normalize(t, table);
        if (!factors) return;
        filters.draw(t, factors);
        for (int64_t i = 0; i < filters.size(); i += kWidth<S>) store(table + i, load(table + i) * load(factors + i));
      }));
    });
  }

 private:
  // prepare(first, last) makes sure that taps_ has the taps of these outputs.
  template <class F>
  void convolve(F prepare) {
    const int64_t c = p_.channels();
    Rows<S> room{nullptr, unit_.count * c + kWidth<S>, 0};
    if (!std::is_same_v<T, S>) room.data = arena_.take<S>(chunk_ * room.pitch);
    for (int64_t t = begin_; t < end_; t += chunk_) {
      const int64_t last = std::min(t + chunk_, end_);
      prepare(t, last);
      sources_.hold(t + p_.offset, last + p_.offset + p_.kernel_size - 1);
      room.first = t;
      for (int64_t i = 0; i < unit_.count; ++i) convolve_sentence(i, t, last, {room.data + i * c, room.pitch, t});
      if (std::is_same_v<T, S>) continue;
      for (int64_t row = t; row < last; ++row) {
        for (int64_t i = 0; i < unit_.count; ++i) {
          narrow_row(room.at(row) + i * c, c, p_.out.at(row, unit_.batch() + i));
        }
      }
    }
  }

  void convolve_sentence(int64_t i, int64_t t, int64_t last, Rows<S> out) {
    if constexpr (std::is_same_v<T, S>) out = {p_.out.at(t, unit_.batch() + i), p_.out.time, t};
    const Sequence& s = unit_.sequences[i];
    for (int64_t h = 0; h < p_.heads; ++h) {
      const int64_t channel = h * p_.per_head;
      const int64_t filter = p_.shared ? h * p_.filter_pitch() : (i * p_.heads + h) * apart_;
      convolve_rows<S>(
          {out.data + channel, out.pitch, out.first}, t, last, sources_.at(i, channel), s.in_first, s.in_last,
          forward_weights(taps_, tap_, t, filter), p_.kernel_size, p_.offset, p_.per_head,
          p_.bias ? p_.bias + h * p_.channel_pitch() : nullptr);
    }
  }

  // The unit's part of the last rows of state and inputs, which the next step needs.
  void write_next_state() const {
    const int64_t first = p_.sources() - p_.next_rows;
    S* row = arena_.take<S>(p_.channels());
    for (int64_t s = std::max(first, unit_.begin); s < unit_.end; ++s) {
      for (int64_t b = unit_.batch(); b < unit_.batch() + unit_.count; ++b) {
        read_source_row(p_, s, b, row);
        narrow_row(row, p_.channels(), p_.next.at(s - first, b));
      }
    }
  }

  const Problem<T>& p_;
  const Unit& unit_;
  Arena& arena_;
  int64_t chunk_, begin_, end_;
  Sources<T> sources_;
  std::optional<FilterTable<T>> filters_;
  Rows<const S> taps_;
  int64_t tap_ = 1, apart_ = 1;
};

}  // namespace

template <class T>
void forward(const Problem<T>& p) {
  if (p.path != &kWalk) return tile_forward(p);
  const std::vector<Unit> units = cut_into_units(p);
  const int64_t rows = units.empty() ? 1 : units[0].count * (units[0].end - units[0].begin);
  parallel_for(0, units.size(), grain_of(rows * p.channels() * p.kernel_size), p.threads, [&](int64_t from, int64_t to) {
    with_scratch(from, to, [&](int64_t i, Arena& arena) { ForwardUnit<T>(p, units[i], arena).run(); });
  });
}

template void forward(const Problem<float>&);
template void forward(const Problem<double>&);
template void forward(const Problem<Float16>&);
template void forward(const Problem<BFloat16>&);

}  // namespace lightconv
