#include "common/residual.h"

#include <cmath>
#include <vector>

#include "common/parallel.h"

namespace lightconv {
namespace {

constexpr int64_t kNormRows = 8;
// Rows whose sums over channels are added up apart: the same for any number of threads.
constexpr int64_t kPartRows = 64;

// A row on its way through the norm, in a thread's own memory: it stays in the first-level cache.
template <class T>
class NormRow {
 public:
  using S = Sum<T>;

  explicit NormRow(const ResidualNorm<T>& norm)
      : norm_(norm),
        words_(norm.dropout.active() ? norm.channels + 64 : 0),
        factors_(norm.dropout.active() ? norm.channels : 0),
        normed_(norm.channels),
        grads_(norm.channels) {}

  // (residual + dropout(x) − mean) / deviation, from now on.
  void read(int64_t row) {
    const T *x = norm_.x + row * norm_.channels, *residual = norm_.residual + row * norm_.channels;
    if (norm_.dropout.active()) {
      const int64_t at = philox_words(norm_.dropout.seed, row * norm_.channels, norm_.channels, words_.data());
      dropout_factors(norm_.dropout, words_.data() + at, norm_.channels, factors_.data());
    }
    Vector<S> total{};
    each_vector<S>(norm_.channels, [&](int64_t at, int64_t n) {
      const Vector<S> sum = load_some(residual + at, n) + dropped(load_some(x + at, n), at, n);
      store_some(normed_.data() + at, sum, n);
      total += lanes_below<S>(n) ? sum : Vector<S>{};
    });
    const S mean = sum_across<S>(total)[0] / S(norm_.channels);
    Vector<S> squares{};
    each_vector<S>(norm_.channels, [&](int64_t at, int64_t n) {
      const Vector<S> centred = load_some(normed_.data() + at, n) - mean;
      store_some(normed_.data() + at, centred, n);
      squares += lanes_below<S>(n) ? centred * centred : Vector<S>{};
    });
    scale_ = 1 / std::sqrt(sum_across<S>(squares)[0] / S(norm_.channels) + S(norm_.epsilon));
    each_vector<S>(norm_.channels, [&](int64_t at, int64_t n) {
      store_some(normed_.data() + at, load_some(normed_.data() + at, n) * scale_, n);
    });
  }

  void write(const T* bias, T* out) const {
    each_vector<S>(norm_.channels, [&](int64_t at, int64_t n) {
      store_some(out + at, load_some(normed_.data() + at, n) * load_some(norm_.weight + at, n) + load_some(bias + at, n),
                 n);
    });
  }

  // With n as it is now and g the gradient times the weight, that of the sum is (g − mean(g) − n · mean(g n)) / deviation.
  void back(const T* grad, T* dx, T* dresidual, S* dweight, S* dbias) {
    Vector<S> total{}, along{};
    each_vector<S>(norm_.channels, [&](int64_t at, int64_t n) {
      const Vector<S> given = load_some(grad + at, n), normed = load_some(normed_.data() + at, n);
      const Vector<S> of_norm = given * load_some(norm_.weight + at, n);
      store_some(grads_.data() + at, of_norm, n);
      const Lanes<S> there = lanes_below<S>(n);
      total += there ? of_norm : Vector<S>{};
      along += there ? of_norm * normed : Vector<S>{};
      if (!dweight) return;
      store_some(dweight + at, load_some(dweight + at, n) + given * normed, n);
      store_some(dbias + at, load_some(dbias + at, n) + given, n);
    });
    const S mean = sum_across<S>(total)[0] / S(norm_.channels), slope = sum_across<S>(along)[0] / S(norm_.channels);
    each_vector<S>(norm_.channels, [&](int64_t at, int64_t n) {
      const Vector<S> of_sum =
          (load_some(grads_.data() + at, n) - mean - load_some(normed_.data() + at, n) * slope) * scale_;
      if (dresidual) store_some(dresidual + at, of_sum, n);
      if (dx) store_some(dx + at, dropped(of_sum, at, n), n);
    });
  }

 private:
  LIGHTCONV_INLINE Vector<S> dropped(Vector<S> v, int64_t at, int64_t n) const {
    return factors_.empty() ? v : v * load_some(factors_.data() + at, n);
  }

  const ResidualNorm<T>& norm_;
  std::vector<uint32_t> words_;
  std::vector<S> factors_, normed_, grads_;
  S scale_ = 0;
};

}  // namespace

template <class T>
void dropout_add_norm(const ResidualNorm<T>& norm, const T* bias, T* out, int threads) {
  parallel_for(0, norm.rows, kNormRows, threads, [&](int64_t first, int64_t last) {
    NormRow<T> row(norm);
    for (int64_t i = first; i < last; ++i) {
      row.read(i);
      row.write(bias, out + i * norm.channels);
    }
  });
}

template <class T>
void dropout_add_norm_backward(const ResidualNorm<T>& norm, const T* grad, T* dx, T* dresidual, T* dweight, T* dbias,
                               int threads) {
  using S = Sum<T>;
  const int64_t channels = norm.channels, parts = (norm.rows + kPartRows - 1) / kPartRows;
  std::vector<S> sums(dweight ? parts * 2 * channels : 0);
  parallel_for(0, parts, 1, threads, [&](int64_t first, int64_t last) {
    NormRow<T> row(norm);
    for (int64_t part = first; part < last; ++part) {
      S* of_part = dweight ? sums.data() + part * 2 * channels : nullptr;
      for (int64_t i = part * kPartRows; i < std::min(norm.rows, (part + 1) * kPartRows); ++i) {
        const int64_t at = i * channels;
        row.read(i);
        row.back(grad + at, dx ? dx + at : nullptr, dresidual ? dresidual + at : nullptr, of_part,
                 of_part ? of_part + channels : nullptr);
      }
    }
  });
  if (!dweight) return;
  for (int64_t c = 0; c < channels; ++c) {
    S of_weight = 0, of_bias = 0;
    for (int64_t part = 0; part < parts; ++part) {
      of_weight += sums[part * 2 * channels + c];
      of_bias += sums[(part * 2 + 1) * channels + c];
    }
    dweight[c] = T(of_weight);
    dbias[c] = T(of_bias);
  }
}

#define LIGHTCONV_RESIDUAL(T)                                                       \
  template void dropout_add_norm(const ResidualNorm<T>&, const T*, T*, int);        \
  template void dropout_add_norm_backward(const ResidualNorm<T>&, const T*, T*, T*, T*, T*, int);
LIGHTCONV_RESIDUAL(float)
LIGHTCONV_RESIDUAL(double)
LIGHTCONV_RESIDUAL(Float16)
LIGHTCONV_RESIDUAL(BFloat16)

}  // namespace lightconv
