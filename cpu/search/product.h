// y = x · weightᵀ for a weight in panels: two vectors of outputs side by side, input after input. A panel is read once,
// in memory order, for up to Kernel::kRows rows of x at a time.
//
// The sum of an output runs over the inputs in order, in one accumulator, so the result of a row depends neither on the
// number of rows nor on how outputs are divided among threads.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "common/vector.h"

namespace lightconv::decoding {

using V = Vector<float>;
constexpr int64_t kLanes = kWidth<float>, kPanel = 2 * kLanes;

// x and y are rows, `x_pitch` bytes and `y_pitch` floats apart. `steps` groups of inputs are read at a time: single
// floats, pairs of bfloat16, fours of 8-bit integers.
struct Product {
  const char* x;
  int64_t x_pitch, rows, steps;
  const char* panels;
  int64_t panel_bytes, outputs;
  const float* bias;  // of whole panels, like all that belongs to outputs; null for none
  float* y;
  int64_t y_pitch;
  // 8-bit products only: x = (u − row_zeros) · row_scales, weight = s · column_scales; column_sums are Σ s.
  const float* row_scales = nullptr;
  const int32_t* row_zeros = nullptr;
  const float* column_scales = nullptr;
  const int32_t* column_sums = nullptr;
};

// Computes panels `first` … `last` − 1 of outputs.
using Multiply = void (*)(const Product& product, int64_t first, int64_t last);

// A vector of outputs from `column` on, from their sums.
struct FinishFloats {
  V bias{};

  FinishFloats(const Product& p, int64_t column) {
    if (p.bias) bias = load(p.bias + column);
  }
  V operator()(const Product&, int64_t, const float* sums) const { return load(sums) + bias; }
};

struct FinishInt8 {
  V bias{}, scales;
  Lanes<float> column_sums;

  FinishInt8(const Product& p, int64_t column) : scales(load(p.column_scales + column)) {
    if (p.bias) bias = load(p.bias + column);
    std::memcpy(&column_sums, p.column_sums + column, sizeof(column_sums));
  }
  V operator()(const Product& p, int64_t row, const int32_t* sums) const {
    Lanes<float> sum;
    std::memcpy(&sum, sums, sizeof(sum));
    return __builtin_convertvector(sum - p.row_zeros[row] * column_sums, V) * (p.row_scales[row] * scales) + bias;
  }
};

template <class Sum>
using Finish = std::conditional_t<std::is_same_v<Sum, float>, FinishFloats, FinishInt8>;

// Writes the first `n` outputs of a panel for `rows` rows from `row` on, from sums[rows][kPanel].
template <class Sum>
inline void finish(const Product& p, int64_t row, int64_t rows, int64_t column, int64_t n, const Sum* sums) {
  const Finish<Sum> left(p, column), right(p, column + kLanes);
  alignas(64) float some[kPanel];
  for (const int64_t end = row + rows; row < end; ++row, sums += kPanel) {
    float* y = p.y + row * p.y_pitch + column;
    float* out = n == kPanel ? y : some;
    store(out, left(p, row, sums));
    store(out + kLanes, right(p, row, sums + kLanes));
    if (n < kPanel) std::copy_n(some, n, y);
  }
}

template <class Sum>
using Block = void (*)(const char* x, int64_t x_pitch, const char* panel, int64_t steps, Sum* sums);

template <class Kernel, size_t... R>
constexpr std::array<Block<typename Kernel::Sum>, sizeof...(R)> blocks_of(std::index_sequence<R...>) {
  return {&Kernel::template block<int(R) + 1>...};
}

// Kernel::block<R> computes R rows of a panel into sums[R][kPanel].
template <class Kernel>
void multiply(const Product& p, int64_t first, int64_t last) {
  static constexpr auto blocks = blocks_of<Kernel>(std::make_index_sequence<Kernel::kRows>());
  if (p.rows == 0) return;
  // Blocks of nearly equal size: a single last row would take as long as several rows.
  const int64_t count = (p.rows + Kernel::kRows - 1) / Kernel::kRows, size = p.rows / count, larger = p.rows % count;
  alignas(64) typename Kernel::Sum sums[Kernel::kRows * kPanel];
  for (int64_t panel = first; panel < last; ++panel) {
    const char* weights = p.panels + panel * p.panel_bytes;
    const int64_t column = panel * kPanel, n = std::min(kPanel, p.outputs - column);
    for (int64_t i = 0, row = 0; i < count; ++i) {
      const int64_t rows = size + (i < larger);
      blocks[rows - 1](p.x + row * p.x_pitch, p.x_pitch, weights, p.steps, sums);
      finish(p, row, rows, column, n, sums);
      row += rows;
    }
  }
}

// The type to which the input of a product must be converted.
enum class Input { kFloat, kBFloat16, kUnsigned8 };

struct Choice {
  Multiply multiply;
  Input input;
  int levels = 0;  // of 8-bit inputs: 255, or 127 where pairs of products are summed in 16 bits
};

// products.cpp
Choice float32_product();
Choice bfloat16_product(bool instructions);
Choice int8_product(bool instructions);
// Products with instructions beyond those that the whole library is compiled for; null if the compiler lacks them.
Multiply vnni_product();
Multiply bfloat16_instructions_product();

}  // namespace lightconv::decoding
