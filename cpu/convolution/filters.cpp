#include "convolution/filters.h"

namespace lightconv {

template <class T>
FilterTable<T>::FilterTable(const Problem<T>& p, const Unit& unit, Arena& arena)
    : p_(p),
      unit_(unit),
      long_(p.kernel_size > kMostInLanes),
      filters_(unit.count * p.heads),
      pitch_(long_ ? p.filter_pitch() : round_up<S>(filters_)) {
  offsets_ = arena.take<int64_t>(filters_);
  gradient_offsets_ = arena.take<int64_t>(filters_);
  row_offsets_ = arena.take<int64_t>(kWidth<S>);
  for (int64_t i = 0; i < kWidth<S>; ++i) row_offsets_[i] = i * p.kernel_size;
  for (int64_t f = 0; f < filters_; ++f) {
    const int64_t b = f / p.heads, h = f % p.heads;
    offsets_[f] = b * p.weight.batch + h * p.weight.head;
    gradient_offsets_[f] = b * p.dweight.batch + h * p.dweight.head;
  }
  if (p.dropout.active()) words_ = arena.take<uint32_t>(filters_ * p.kernel_size + 64);
  if (long_) return;
  if (p.dropout.active()) {
    factors_ = arena.take<S>(filters_ * p.kernel_size);
  }
}

template <class T>
void FilterTable<T>::read(int64_t t, S* table) const {
  const T* data = p_.weight.at(t, unit_.batch(), 0);
  if (long_) {
    return each_row(table, [&](int64_t f, S* row, const Sequence&) { read_filter(p_, data + offsets_[f], row); });
  }
  each_vector([&](int64_t f, int64_t count) {
    load_lanes(data, offsets_ + f, count, p_.kernel_size, table + f, pitch_);
  });
}

template <class T>
void FilterTable<T>::fetch(int64_t t) const {
  if (t >= p_.steps) return;
  for (int64_t i = 0; i < unit_.count; ++i) {
    fetch_filters(p_, t, unit_.batch() + i, 0, p_.heads);
  }
}

template <class T>
void FilterTable<T>::normalize(int64_t t, S* table) const {
  constexpr int64_t kRowsAhead = 8;
  fetch(t + kRowsAhead);
  if (long_ && p_.normalize == Normalize::kSoftmax && !p_.renorm) {
    const T* data = p_.weight.at(t, unit_.batch(), 0);
    return each_row(table, [&](int64_t f, S* row, const Sequence&) {
      const T* logits = data + offsets_[f];
      detail::softmax_row<S>(
          [&](int64_t i) { return load_some(logits + i, std::min<int64_t>(kWidth<S>, p_.kernel_size - i)); },
          p_.kernel_size, row);
    });
  }
  read(t, table);
  if (long_) {
    return each_row(table, [&](int64_t, S* row, const Sequence& sequence) {
      normalize_row<S>(p_.normalize, row, p_.kernel_size, p_.taking_part(sequence, t), row);
    });
  }
  each_vector([&](int64_t f, int64_t count) {
    normalize_lanes<S>(p_.normalize, table + f, pitch_, p_.kernel_size, inside(t, f, count, p_.renorm));
  });
}

template <class T>
void FilterTable<T>::draw(int64_t t, S* table) const {
  const int64_t k = p_.kernel_size;
  const uint64_t row = (uint64_t(t) * p_.batch + unit_.batch()) * p_.heads;
  const int64_t at = philox_words(p_.dropout.seed, row * k, filters_ * k, words_);
  if (long_) {
    return each_row(table, [&](int64_t f, S* to, const Sequence&) {
      dropout_factors(p_.dropout, words_ + at + f * k, k, to);
      std::fill(to + k, to + pitch_, S(0));
    });
  }
  dropout_factors(p_.dropout, words_ + at, filters_ * k, factors_);
  each_vector([&](int64_t f, int64_t count) {
    load_lanes(factors_ + f * k, row_offsets_, count, k, table + f, pitch_);
  });
}

template <class T>
void FilterTable<T>::take(int64_t t, const S* products, int64_t apart, S* table) const {
  int64_t offsets[kWidth<S>];
  for (int64_t i = 0; i < kWidth<S>; ++i) offsets[i] = i * apart;
  each_vector([&](int64_t f, int64_t count) {
    load_lanes(products + f * apart, offsets, count, p_.kernel_size, table + f, pitch_);
  });
  mask(t, table);
}

template <class T>
void FilterTable<T>::mask(int64_t t, S* table) const {
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

template <class T>
void FilterTable<T>::normalize_backward(int64_t t, const S* weights, S* grad, S* logits) const {
  if (p_.normalize != Normalize::kSoftmax) {
    read(t, logits);
    if (p_.renorm) mask(t, logits);
  }
  each_vector([&](int64_t f, int64_t) {
    normalize_backward_lanes<S>(p_.normalize, weights + f, logits + f, grad + f, pitch_, p_.kernel_size);
  });
}

template <class T>
void FilterTable<T>::write(int64_t t, const S* table) const {
  T* data = p_.dweight.at(t, unit_.batch(), 0);
  each_vector([&](int64_t f, int64_t count) {
    store_lanes(data, gradient_offsets_ + f, count, p_.kernel_size, table + f, pitch_);
  });
}

template <class T>
TakingPart<Sum<T>> FilterTable<T>::inside(int64_t t, int64_t f, int64_t count, bool some) const {
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

template class FilterTable<float>;
template class FilterTable<double>;
template class FilterTable<Float16>;
template class FilterTable<BFloat16>;

}  // namespace lightconv
