// Normalisation with a filter in each lane: row k of a table holds tap k of as many filters as a vector has lanes. The
// definitions are those of lightconv_plugin/ops/normalize.py.
#pragma once

#include "common/scalars.h"
#include "common/normalize.h"

namespace lightconv {

// Taps first … last − 1 of a lane's filter take part; the weights of the others are 0. `all`: every tap of every lane.
template <class S>
struct TakingPart {
  Lanes<S> first, last;
  bool all = true;
};

// table[k·pitch + lane] = element k of the row at data + offsets[lane] for lanes below `count`, and 0 in the others.
// Each row is contiguous.
template <class T>
void load_lanes(
    const T* data, const int64_t* offsets, int64_t count, int64_t kernel_size, Sum<T>* table, int64_t pitch) {
  using S = Sum<T>;
  constexpr int w = kWidth<S>;
  for (int64_t k = 0; k < kernel_size; k += w, table += w * pitch) {
    const int64_t n = std::min<int64_t>(w, kernel_size - k);
    Vector<S> rows[w];
#pragma GCC unroll 16
    for (int i = 0; i < w; ++i) rows[i] = i < count ? load_some(data + offsets[i] + k, n) : Vector<S>{};
    exchange_halves<S>(rows);
    const auto write = [&](auto most) {
#pragma GCC unroll 16
      for (int i = 0; i < decltype(most)::value; ++i) {
        if (i < n) store(table + i * pitch, rows[i]);
      }
    };
    // With a constant number of rows, the compiler drops the work for the others.
    if (n <= w / 4) {
      write(std::integral_constant<int, w / 4>{});
    } else if (n <= w / 2) {
      write(std::integral_constant<int, w / 2>{});
    } else {
      write(std::integral_constant<int, w>{});
    }
  }
}

// The reverse: writes the rows.
template <class T>
void store_lanes(
    T* data, const int64_t* offsets, int64_t count, int64_t kernel_size, const Sum<T>* table, int64_t pitch) {
  using S = Sum<T>;
  constexpr int w = kWidth<S>;
  for (int64_t k = 0; k < kernel_size; k += w, table += w * pitch) {
    const int64_t n = std::min<int64_t>(w, kernel_size - k);
    Vector<S> rows[w];
#pragma GCC unroll 16
    for (int i = 0; i < w; ++i) rows[i] = i < n ? load(table + i * pitch) : Vector<S>{};
    exchange_halves<S>(rows);
#pragma GCC unroll 16
    for (int i = 0; i < w; ++i) {
      if (i < count) store_some(data + offsets[i] + k, rows[i], n);
    }
  }
}

namespace detail {

template <class S, bool kAll>
inline void normalize_taps(
    Normalize kind, S* table, int64_t pitch, int64_t kernel_size, const TakingPart<S>& taking) {
  using I = std::conditional_t<sizeof(S) == 4, int32_t, int64_t>;
  const auto inside = [&](int64_t k, Vector<S> v, Vector<S> otherwise) {
    return kAll ? v : (taking.first <= I(k)) & (taking.last > I(k)) ? v : otherwise;
  };
  const auto tap = [&](int64_t k) { return inside(k, load(table + k * pitch), Vector<S>{}); };
  const auto each = [&](auto f) {
    for (int64_t k = 0; k < kernel_size; ++k) store(table + k * pitch, f(tap(k), k));
  };
  Vector<S> total{};
  switch (kind) {
    case Normalize::kSoftmax: {
      const Vector<S> lowest = broadcast(-std::numeric_limits<S>::infinity());
      Vector<S> top = lowest;
      for (int64_t k = 0; k < kernel_size; ++k) top = larger<S>(inside(k, load(table + k * pitch), lowest), top);
      for (int64_t k = 0; k < kernel_size; ++k) {
        const Vector<S> power = inside(k, exponential(load(table + k * pitch) - top), Vector<S>{});
        store(table + k * pitch, power);
        total += power;
      }
      Vector<S> scale = S(1) / total;
      if (!kAll) scale = taking.first < taking.last ? scale : Vector<S>{};  // without any tap: 0, not 0/0
      return each([&](Vector<S> v, int64_t) { return v * scale; });
    }
    case Normalize::kL2:
    case Normalize::kAbsL2: {
      for (int64_t k = 0; k < kernel_size; ++k) total += tap(k) * tap(k);
      const Vector<S> scale = S(1) / (root<S>(total) + S(kEpsilon));
      if (kind == Normalize::kL2) return each([&](Vector<S> v, int64_t) { return v * scale; });
      return each([&](Vector<S> v, int64_t) { return absolute<S>(v) * scale; });
    }
    case Normalize::kL1: {
      for (int64_t k = 0; k < kernel_size; ++k) total += absolute<S>(tap(k));
      const Vector<S> scale = S(1) / (total + S(kEpsilon));
      return each([&](Vector<S> v, int64_t) { return v * scale; });
    }
    case Normalize::kSigmoid:  // sigmoid(0) is not 0
      return each([&](Vector<S> v, int64_t k) { return inside(k, sigmoid<S>(v), Vector<S>{}); });
    case Normalize::kTanh:
      return each([](Vector<S> v, int64_t) {
        for (int lane = 0; lane < kWidth<S>; ++lane) v[lane] = std::tanh(v[lane]);
        return v;
      });
    case Normalize::kAbs:
      return each([](Vector<S> v, int64_t) { return absolute<S>(v); });
    case Normalize::kSquare:
      return each([](Vector<S> v, int64_t) { return v * v; });
    case Normalize::kNone:
    case Normalize::kUnknown:
      return each([](Vector<S> v, int64_t) { return v; });
  }
}

}  // namespace detail

// Overwrites logits with weights.
template <class S>
inline void normalize_lanes(
    Normalize kind, S* table, int64_t pitch, int64_t kernel_size, const TakingPart<S>& taking) {
  if (taking.all) {
    detail::normalize_taps<S, true>(kind, table, pitch, kernel_size, taking);
  } else {
    detail::normalize_taps<S, false>(kind, table, pitch, kernel_size, taking);
  }
}

// Overwrites `grad`, the gradient of the weights, with the gradient of the logits. For taps that do not take part,
// `grad` and `logits` are 0. Softmax ignores `logits`. All tables have the same pitch.
template <class S>
inline void normalize_backward_lanes(
    Normalize kind, const S* weights, const S* logits, S* grad, int64_t pitch, int64_t kernel_size) {
  using namespace detail;
  const auto sum = [&](auto f) {
    Vector<S> total{};
    for (int64_t k = 0; k < kernel_size; ++k) total += f(load(grad + k * pitch), load(weights + k * pitch), k);
    return total;
  };
  const auto each = [&](auto f) {
    for (int64_t k = 0; k < kernel_size; ++k) {
      store(grad + k * pitch, f(load(grad + k * pitch), load(weights + k * pitch), k));
    }
  };
  const auto logit = [&](int64_t k) { return load(logits + k * pitch); };
  switch (kind) {
    case Normalize::kSoftmax: {
      const Vector<S> along = sum([](Vector<S> g, Vector<S> n, int64_t) { return g * n; });
      return each([&](Vector<S> g, Vector<S> n, int64_t) { return (g - along) * n; });
    }
    case Normalize::kNone:
    case Normalize::kUnknown:
      return;
    case Normalize::kL2:
    case Normalize::kAbsL2: {
      const bool absolutes = kind == Normalize::kAbsL2;
      const Vector<S> norm = root<S>(sum([&](Vector<S>, Vector<S>, int64_t k) { return logit(k) * logit(k); }));
      const Vector<S> scale = S(1) / (norm + S(kEpsilon));
      const Vector<S> along = scale * scale * sum([&](Vector<S> g, Vector<S>, int64_t k) {
        return g * (absolutes ? absolute<S>(logit(k)) : logit(k));
      });
      // ∂‖w‖/∂w = w/‖w‖, 0 at w = 0.
      const Vector<S> direction = norm > S(0) ? along / norm : Vector<S>{};
      return each([&](Vector<S> g, Vector<S>, int64_t k) {
        return (absolutes ? g * sign<S>(logit(k)) : g) * scale - logit(k) * direction;
      });
    }
    case Normalize::kSigmoid:
      return each([](Vector<S> g, Vector<S> n, int64_t) { return g * (n * (S(1) - n)); });
    case Normalize::kTanh:
      return each([](Vector<S> g, Vector<S> n, int64_t) { return g * (S(1) - n * n); });
    case Normalize::kL1: {
      const Vector<S> total = sum([&](Vector<S>, Vector<S>, int64_t k) { return absolute<S>(logit(k)); });
      const Vector<S> scale = S(1) / (total + S(kEpsilon));
      const Vector<S> along =
          sum([&](Vector<S> g, Vector<S>, int64_t k) { return g * logit(k); }) * scale * scale;
      return each([&](Vector<S> g, Vector<S>, int64_t k) { return g * scale - sign<S>(logit(k)) * along; });
    }
    case Normalize::kAbs:
      return each([&](Vector<S> g, Vector<S>, int64_t k) { return g * sign<S>(logit(k)); });
    case Normalize::kSquare:
      return each([&](Vector<S> g, Vector<S>, int64_t k) { return g * logit(k) * S(2); });
  }
}

}  // namespace lightconv
