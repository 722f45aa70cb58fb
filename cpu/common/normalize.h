// The normalisations of lightconv_plugin/ops/normalize.py and their gradients, for one row of K logits. Rows have a
// pitch of whole vectors.
#pragma once

#include <string_view>

#include "common/vector.h"

namespace lightconv {

// In the order of lightconv_plugin.ops.NORMALIZATIONS.
enum class Normalize { kSoftmax, kNone, kL2, kAbsL2, kSigmoid, kTanh, kL1, kAbs, kSquare, kUnknown };

inline Normalize normalize_of(std::string_view name) {
  constexpr std::string_view names[] = {"softmax", "none", "l2", "abs_l2", "sigmoid", "tanh", "l1", "abs", "square"};
  for (int i = 0; i < 9; ++i) {
    if (name == names[i]) return Normalize(i);
  }
  return Normalize::kUnknown;
}

constexpr double kEpsilon = 1e-6;

// Taps first … last − 1 of K take part; the weight of the others is 0.
struct Inside {
  int64_t first, last;
};

namespace detail {

template <class S>
LIGHTCONV_INLINE Lanes<S> mask_of(int64_t at, Inside inside) {
  using I = std::conditional_t<sizeof(S) == 4, int32_t, int64_t>;
  const Lanes<S> index = lane_numbers<S>();
  return (index >= I(inside.first - at)) & (index < I(inside.last - at));
}

template <class S>
LIGHTCONV_INLINE Vector<S> absolute(Vector<S> v) {
  return v < S(0) ? -v : v;
}

template <class S>
LIGHTCONV_INLINE Vector<S> sign(Vector<S> v) {
  return v > S(0) ? broadcast(S(1)) : v < S(0) ? broadcast(S(-1)) : v * S(0);
}

// Σ f(vector at i) over the row.
template <class S, class F>
LIGHTCONV_INLINE S sum_row(int64_t pitch, F f) {
  Vector<S> total{};
  for (int64_t i = 0; i < pitch; i += kWidth<S>) total += f(i);
  return sum_across<S>(total)[0];
}

// Lanes below n.
template <class S>
LIGHTCONV_INLINE Lanes<S> first_lanes(int64_t n) {
  using I = std::conditional_t<sizeof(S) == 4, int32_t, int64_t>;
  return lane_numbers<S>() < I(n);
}

// Softmax over all K taps; logits(i) loads kWidth of them from i on. kVectors > 0: the number of vectors, which then
// stay in registers.
template <class S, int kVectors, class Logits>
LIGHTCONV_INLINE void softmax_all(Logits logits, int64_t kernel_size, S* out) {
  constexpr int w = kWidth<S>;
  const Vector<S> lowest = broadcast(-std::numeric_limits<S>::infinity());
  const int64_t vectors = kVectors ? kVectors : round_up<S>(kernel_size) / w;
  const Lanes<S> there = first_lanes<S>(kernel_size - (vectors - 1) * w);  // in the last vector
  Vector<S> held[kVectors ? kVectors : 1];
  Vector<S> top = lowest, total{};
#pragma GCC unroll 4
  for (int64_t i = 0; i < vectors; ++i) {
    Vector<S> v = logits(i * w);
    if (i == vectors - 1) v = there ? v : lowest;
    if (kVectors) {
      held[i] = v;
    } else {
      store(out + i * w, v);
    }
    top = larger<S>(v, top);
  }
  top = largest_across<S>(top);
#pragma GCC unroll 4
  for (int64_t i = 0; i < vectors; ++i) {
    Vector<S> power = exponential((kVectors ? held[i] : load(out + i * w)) - top);
    // Exactly 0 beyond K: tiny values would lead to denormal numbers, which are a hundred times slower.
    if (i == vectors - 1) power = there ? power : Vector<S>{};
    if (kVectors) {
      held[i] = power;
    } else {
      store(out + i * w, power);
    }
    total += power;
  }
  const Vector<S> scale = broadcast(S(1) / sum_across<S>(total)[0]);
#pragma GCC unroll 4
  for (int64_t i = 0; i < vectors; ++i) store(out + i * w, (kVectors ? held[i] : load(out + i * w)) * scale);
}

template <class S, class Logits>
LIGHTCONV_INLINE void softmax_row(Logits logits, int64_t kernel_size, S* out) {
  if (kernel_size <= kWidth<S>) {
    softmax_all<S, 1>(logits, kernel_size, out);
  } else if (kernel_size <= 2 * kWidth<S>) {
    softmax_all<S, 2>(logits, kernel_size, out);
  } else {
    softmax_all<S, 0>(logits, kernel_size, out);
  }
}

// Whether kWidth<S> filters can be normalised together: only filters of two vectors.
template <class S>
constexpr bool together(int64_t kernel_size) {
  return kernel_size > kWidth<S> && kernel_size <= 2 * kWidth<S>;
}

// softmax_row of kWidth<S> filters, with the same bits. Reductions across the lanes are done for all filters at once.
// logits(f, i) loads the logits of filter f from i on; the rows of `out` are contiguous.
template <class S, class Logits>
inline void softmax_together(Logits logits, int64_t kernel_size, S* out) {
  constexpr int w = kWidth<S>;
  const Lanes<S> there = first_lanes<S>(kernel_size - w);
  const Vector<S> lowest = broadcast(-std::numeric_limits<S>::infinity());
  Vector<S> rows[w];
  S each[w];
#pragma GCC unroll 16
  for (int f = 0; f < w; ++f) {
    const Vector<S> right = logits(f, w);
    rows[f] = larger<S>(there ? right : lowest, logits(f, 0));
  }
  store(each, largest_each<S>(rows));
#pragma GCC unroll 16
  for (int f = 0; f < w; ++f) {
    const Vector<S> left = exponential(logits(f, 0) - each[f]), right = exponential(logits(f, w) - each[f]);
    rows[f] = there ? right : Vector<S>{};
    store(out + 2 * w * f, left);
    store(out + 2 * w * f + w, rows[f]);
    rows[f] += left;
  }
  store(each, S(1) / sum_each<S>(rows));
#pragma GCC unroll 16
  for (int i = 0; i < 2 * w; ++i) store(out + i * w, load(out + i * w) * each[i / 2]);
}

// softmax_backward of kWidth<S> filters of two vectors, with the same bits. grad(f, i) loads the gradient of filter f;
// `normalized` are rows that are `pitch` apart.
template <class S, class Grad>
inline void softmax_backward_together(Grad grad, S* normalized, int64_t pitch) {
  constexpr int w = kWidth<S>;
  Vector<S> rows[w];
  S along[w];
#pragma GCC unroll 16
  for (int f = 0; f < w; ++f) {
    const S* row = normalized + f * pitch;
    rows[f] = Vector<S>{};  // the products are added to it in the order of softmax_backward
    rows[f] += grad(f, 0) * load(row);
    rows[f] += grad(f, w) * load(row + w);
  }
  store(along, sum_each<S>(rows));
#pragma GCC unroll 16
  for (int f = 0; f < w; ++f) {
    S* row = normalized + f * pitch;
    store(row, (grad(f, 0) - along[f]) * load(row));
    store(row + w, (grad(f, w) - along[f]) * load(row + w));
  }
}

// Softmax over the taps inside. If there is none, the row is 0, not 0/0.
template <class S>
inline void softmax_inside(const S* weight, int64_t pitch, Inside inside, S* out) {
  const Vector<S> lowest = broadcast(-std::numeric_limits<S>::infinity());
  Vector<S> top = lowest, total{};
  for (int64_t i = 0; i < pitch; i += kWidth<S>) {
    top = larger<S>(mask_of<S>(i, inside) ? load(weight + i) : lowest, top);
  }
  top = largest_across<S>(top);
  for (int64_t i = 0; i < pitch; i += kWidth<S>) {
    const Vector<S> power = mask_of<S>(i, inside) ? exponential(load(weight + i) - top) : Vector<S>{};
    store(out + i, power);
    total += power;
  }
  const S scale = inside.first < inside.last ? S(1) / sum_across<S>(total)[0] : S(0);
  for (int64_t i = 0; i < pitch; i += kWidth<S>) store(out + i, load(out + i) * scale);
}

template <class S, int kVectors, class Grad>
LIGHTCONV_INLINE void softmax_backward(Grad grad, S* normalized, int64_t pitch) {
  const int64_t vectors = kVectors ? kVectors : pitch / kWidth<S>;
  Vector<S> held[kVectors ? kVectors : 1];
  Vector<S> along{};
#pragma GCC unroll 4
  for (int64_t i = 0; i < vectors; ++i) {
    const Vector<S> g = grad(i * kWidth<S>);
    if (kVectors) held[i] = g;
    along += g * load(normalized + i * kWidth<S>);
  }
  along = sum_across<S>(along);
#pragma GCC unroll 4
  for (int64_t i = 0; i < vectors; ++i) {
    S* at = normalized + i * kWidth<S>;
    store(at, ((kVectors ? held[i] : grad(i * kWidth<S>)) - along) * load(at));
  }
}

}  // namespace detail

// `weight` and `out` are rows of `pitch` (whole vectors, ≥ K). Elements of `weight` that do not take part are ignored;
// elements written from K on are finite.
template <class S>
inline void normalize_row(Normalize kind, const S* weight, int64_t kernel_size, Inside inside, S* out) {
  using namespace detail;
  const int64_t pitch = round_up<S>(kernel_size);
  if (kind == Normalize::kSoftmax) {
    if (inside.first > 0 || inside.last < kernel_size) return softmax_inside(weight, pitch, inside, out);
    return softmax_row([&](int64_t i) { return load(weight + i); }, kernel_size, out);
  }
  const auto row = [&](int64_t i) { return mask_of<S>(i, inside) ? load(weight + i) : Vector<S>{}; };
  S scale = 1;
  if (kind == Normalize::kL2 || kind == Normalize::kAbsL2) {
    scale = 1 / (std::sqrt(sum_row<S>(pitch, [&](int64_t i) { return row(i) * row(i); })) + S(kEpsilon));
  } else if (kind == Normalize::kL1) {
    scale = 1 / (sum_row<S>(pitch, [&](int64_t i) { return absolute<S>(row(i)); }) + S(kEpsilon));
  }
  for (int64_t i = 0; i < pitch; i += kWidth<S>) {
    Vector<S> v = row(i);
    switch (kind) {
      case Normalize::kAbsL2:
      case Normalize::kAbs:
        v = absolute<S>(v) * scale;
        break;
      case Normalize::kSigmoid:
        // sigmoid(0) is not 0.
        v = mask_of<S>(i, inside) ? sigmoid<S>(v) : Vector<S>{};
        break;
      case Normalize::kTanh:
        for (int lane = 0; lane < kWidth<S>; ++lane) v[lane] = std::tanh(v[lane]);
        break;
      case Normalize::kSquare:
        v = v * v;
        break;
      default:
        v = v * scale;
    }
    store(out + i, v);
  }
}

// Overwrites `normalized` with the gradient of the logits; grad(i) loads kWidth elements, from i on, of the gradient of
// the normalised weights (0 outside). Softmax ignores `weight`.
template <class S, class Grad>
inline void normalize_backward_row(
    Normalize kind, Grad grad, const S* weight, S* normalized, int64_t pitch, Inside inside) {
  using namespace detail;
  const auto row = [&](int64_t i) { return mask_of<S>(i, inside) ? load(weight + i) : Vector<S>{}; };
  const auto each = [&](auto f) {
    for (int64_t i = 0; i < pitch; i += kWidth<S>) store(normalized + i, f(grad(i), load(normalized + i), row(i)));
  };
  switch (kind) {
    case Normalize::kSoftmax:
      if (pitch == kWidth<S>) return softmax_backward<S, 1>(grad, normalized, pitch);
      if (pitch == 2 * kWidth<S>) return softmax_backward<S, 2>(grad, normalized, pitch);
      return softmax_backward<S, 0>(grad, normalized, pitch);
    case Normalize::kNone:
    case Normalize::kUnknown:
      return each([](Vector<S> g, Vector<S>, Vector<S>) { return g; });
    case Normalize::kL2:
    case Normalize::kAbsL2: {
      const bool absolutes = kind == Normalize::kAbsL2;
      const S norm = std::sqrt(sum_row<S>(pitch, [&](int64_t i) { return row(i) * row(i); }));
      const S scale = 1 / (norm + S(kEpsilon));
      const S along = scale * scale * sum_row<S>(pitch, [&](int64_t i) {
        return grad(i) * (absolutes ? absolute<S>(row(i)) : row(i));
      });
      // ∂‖w‖/∂w = w/‖w‖, 0 at w = 0.
      const S direction = norm > 0 ? along / norm : S(0);
      return each([&](Vector<S> g, Vector<S>, Vector<S> w) {
        return (absolutes ? g * sign<S>(w) : g) * scale - w * direction;
      });
    }
    case Normalize::kSigmoid:
      return each([](Vector<S> g, Vector<S> n, Vector<S>) { return g * (n * (S(1) - n)); });
    case Normalize::kTanh:
      return each([](Vector<S> g, Vector<S> n, Vector<S>) { return g * (S(1) - n * n); });
    case Normalize::kL1: {
      const S scale = 1 / (sum_row<S>(pitch, [&](int64_t i) { return absolute<S>(row(i)); }) + S(kEpsilon));
      const S along = sum_row<S>(pitch, [&](int64_t i) { return grad(i) * row(i); }) * scale * scale;
      return each([&](Vector<S> g, Vector<S>, Vector<S> w) { return g * scale - sign<S>(w) * along; });
    }
    case Normalize::kAbs:
      return each([](Vector<S> g, Vector<S>, Vector<S> w) { return g * sign<S>(w); });
    case Normalize::kSquare:
      return each([](Vector<S> g, Vector<S>, Vector<S> w) { return g * w * S(2); });
  }
}

}  // namespace lightconv
