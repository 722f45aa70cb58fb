#include "search/linear.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>

namespace lightconv::decoding {
namespace {

// Products of fewer multiplications than this take less time than waking the other threads for them.
constexpr int64_t kProductsWorthSharing = 1 << 19;

int64_t round_to(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

uint16_t as_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return uint16_t(bits >> 16) | 64;  // rounding could turn NaN into an infinity
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// u = x / scale + zero in 0 … levels, so that 0 is a whole number; NaN and infinities make the row's scale NaN.
void quantise(const float* x, int64_t n, int levels, uint8_t* u, float& scale, int32_t& zero) {
  constexpr int64_t lanes = kWidth<float>;
  V low{}, high{}, check{};
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const V value = load(x + i);
    low = value < low ? value : low;
    high = value > high ? value : high;
    check += value * 0.0f;
  }
  float least = -largest_across<float>(-low)[0], most = largest_across<float>(high)[0];
  float broken = sum_across<float>(check)[0];
  for (; i < n; ++i) {
    least = std::min(least, x[i]);
    most = std::max(most, x[i]);
    broken += x[i] * 0.0f;
  }
  if (broken != 0) {
    scale = std::numeric_limits<float>::quiet_NaN();
    zero = 0;
    std::memset(u, 0, n);
    return;
  }
  scale = std::max((most - least) / float(levels), std::numeric_limits<float>::min());
  const float factor = 1 / scale, shift = std::nearbyint(-least * factor);
  zero = int32_t(shift);
  const float top = float(levels);
  // Adding 1.5·2²³ rounds to the nearest integer and leaves it in the lowest bits.
  constexpr float kRound = 12582912.0f;
  for (i = 0; i < n; ++i) {
    const float value = std::min(std::max(x[i] * factor + shift, 0.0f), top) + kRound;
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    u[i] = uint8_t(bits);
  }
}

}  // namespace

Choice choose(Arithmetic arithmetic, bool instructions) {
  switch (arithmetic) {
    case Arithmetic::kBFloat16: return bfloat16_product(instructions);
    case Arithmetic::kInt8: return int8_product(instructions);
    default: return float32_product();
  }
}

Linear::Linear(
    const float* weight, const float* bias, int64_t outputs, int64_t inputs, Arithmetic arithmetic, Choice choice)
    : outputs_(outputs), inputs_(inputs), panels_(round_to(outputs, kPanel) / kPanel), arithmetic_(arithmetic),
      choice_(choice) {
  if (bias) bias_.assign(bias, bias + outputs);
  bias_.resize(bias ? panels_ * kPanel : 0);
  group_ = arithmetic == Arithmetic::kFloat32 ? 1 : arithmetic == Arithmetic::kBFloat16 ? 2 : 4;
  allocate();
  if (arithmetic == Arithmetic::kFloat32) pack_floats(weight);
  if (arithmetic == Arithmetic::kBFloat16) pack_bfloat16(weight);
  if (arithmetic == Arithmetic::kInt8) pack_int8(weight);
}

// Makes room for the panels, filled with zeros: a group of inputs takes four bytes of each output.
void Linear::allocate() {
  const int64_t bytes = panels_ * kPanel * round_to(inputs_, group_) / group_ * 4;
  char* memory = static_cast<char*>(::operator new[](bytes, std::align_val_t(64)));
  weights_.reset(memory, [](char* memory) { ::operator delete[](memory, std::align_val_t(64)); });
  std::memset(memory, 0, bytes);
}

Linear Linear::select(const int64_t* outputs, int64_t count) const {
  Linear some = *this;
  some.outputs_ = count;
  some.panels_ = round_to(count, kPanel) / kPanel;
  some.allocate();
  const int64_t steps = round_to(inputs_, group_) / group_;
  for (int64_t n = 0; n < count; ++n) {
    const int64_t output = outputs[n];
    const char* from = weights_.get() + (output / kPanel * kPanel * steps + output % kPanel) * 4;
    char* to = some.weights_.get() + (n / kPanel * kPanel * steps + n % kPanel) * 4;
    for (int64_t k = 0; k < steps; ++k) std::memcpy(to + k * kPanel * 4, from + k * kPanel * 4, 4);
  }
  const auto gather = [&](const auto& all, auto& chosen) {
    if (all.empty()) return;
    chosen.assign(some.panels_ * kPanel, 0);
    for (int64_t n = 0; n < count; ++n) chosen[n] = all[outputs[n]];
  };
  gather(bias_, some.bias_);
  gather(column_scales_, some.column_scales_);
  gather(column_sums_, some.column_sums_);
  return some;
}

void Linear::pack_floats(const float* weight) {
  float* panels = reinterpret_cast<float*>(weights_.get());
  for (int64_t n = 0; n < outputs_; ++n) {
    float* to = panels + n / kPanel * kPanel * inputs_ + n % kPanel;
    for (int64_t k = 0; k < inputs_; ++k) to[k * kPanel] = weight[n * inputs_ + k];
  }
}

void Linear::pack_bfloat16(const float* weight) {
  uint16_t* panels = reinterpret_cast<uint16_t*>(weights_.get());
  const int64_t pitch = round_to(inputs_, 2);
  for (int64_t n = 0; n < outputs_; ++n) {
    uint16_t* to = panels + n / kPanel * kPanel * pitch + n % kPanel * 2;
    for (int64_t k = 0; k < inputs_; ++k) to[k / 2 * 2 * kPanel + k % 2] = as_bfloat16(weight[n * inputs_ + k]);
  }
}

void Linear::pack_int8(const float* weight) {
  int8_t* panels = reinterpret_cast<int8_t*>(weights_.get());
  const int64_t pitch = round_to(inputs_, 4);
  column_scales_.resize(panels_ * kPanel);
  column_sums_.resize(panels_ * kPanel);
  for (int64_t n = 0; n < outputs_; ++n) {
    const float* from = weight + n * inputs_;
    float most = 0, broken = 0;
    for (int64_t k = 0; k < inputs_; ++k) {
      most = std::max(most, std::abs(from[k]));
      broken += from[k] * 0.0f;
    }
    // The largest weight of each output becomes 127; an output with only zeros may have any scale.
    const float scale = std::max(most / 127, std::numeric_limits<float>::min());
    column_scales_[n] = broken == 0 ? scale : std::numeric_limits<float>::quiet_NaN();
    int8_t* to = panels + n / kPanel * kPanel * pitch + n % kPanel * 4;
    int32_t sum = 0;
    for (int64_t k = 0; k < inputs_ && broken == 0; ++k) {
      const int32_t value = int32_t(std::nearbyint(from[k] / scale));
      to[k / 4 * 4 * kPanel + k % 4] = int8_t(value);
      sum += value;
    }
    column_sums_[n] = sum;
  }
}

Product Linear::prepare(const float* x, int64_t x_pitch, int64_t rows, Workshop& shop) const {
  const int64_t inputs = round_to(inputs_, group_);
  Product p{};
  p.rows = rows;
  p.steps = inputs / group_;
  p.panels = weights_.get();
  p.panel_bytes = p.steps * kPanel * 4;
  p.outputs = outputs_;
  p.bias = bias_.empty() ? nullptr : bias_.data();
  p.column_scales = column_scales_.data();
  p.column_sums = column_sums_.data();
  if (choice_.input == Input::kFloat) {
    p.x = reinterpret_cast<const char*>(x);
    p.x_pitch = x_pitch * 4;
    if (inputs == inputs_) return p;
    float* copy = reinterpret_cast<float*>(shop.inputs.get(rows * inputs * 4));
    for (int64_t row = 0; row < rows; ++row) {
      std::copy_n(x + row * x_pitch, inputs_, copy + row * inputs);
      copy[row * inputs + inputs_] = 0;
    }
    p.x = reinterpret_cast<const char*>(copy);
    p.x_pitch = inputs * 4;
    return p;
  }
  const int64_t bytes = choice_.input == Input::kBFloat16 ? inputs * 2 : inputs;
  char* to = shop.inputs.get(rows * bytes);
  p.x = to;
  p.x_pitch = bytes;
  if (choice_.input == Input::kBFloat16) {
    for (int64_t row = 0; row < rows; ++row) {
      uint16_t* values = reinterpret_cast<uint16_t*>(to + row * bytes);
      for (int64_t k = 0; k < inputs_; ++k) values[k] = as_bfloat16(x[row * x_pitch + k]);
      for (int64_t k = inputs_; k < inputs; ++k) values[k] = 0;
    }
    return p;
  }
  float* scales = shop.input_scales.get(rows);
  int32_t* zeros = shop.zeros.get(rows);
  for (int64_t row = 0; row < rows; ++row) {
    uint8_t* values = reinterpret_cast<uint8_t*>(to + row * bytes);
    quantise(x + row * x_pitch, inputs_, choice_.levels, values, scales[row], zeros[row]);
    std::memset(values + inputs_, 0, inputs - inputs_);
  }
  p.row_scales = scales;
  p.row_zeros = zeros;
  return p;
}

void Linear::operator()(const float* x, int64_t x_pitch, int64_t rows, float* y, int64_t y_pitch, Workshop& shop) const {
  if (rows > 0) compute(prepare(x, x_pitch, rows, shop), y, y_pitch, 0, outputs_, shop.team);
}

void Linear::compute(Product p, float* y, int64_t y_pitch, int64_t first, int64_t last, Team& team) const {
  p.y = y - first;
  p.y_pitch = y_pitch;
  const int64_t from = first / kPanel, to = (last + kPanel - 1) / kPanel;
  if (team.size() == 1 || p.rows * (last - first) * inputs_ < kProductsWorthSharing) {
    choice_.multiply(p, from, to);
  } else {
    team.share(to - from, [&](int64_t a, int64_t b) { choice_.multiply(p, from + a, from + b); });
  }
}

}  // namespace lightconv::decoding
