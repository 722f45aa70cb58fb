// Linear layers of every shape and arithmetic beside sums in double precision: what cpu/search computes on the CPU that
// this is compiled for. Prints each mismatch, and exits with 1 if there are any.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "search/linear.h"

using namespace lightconv::decoding;

namespace {

int failures = 0;

void fail(const char* what, Arithmetic arithmetic, int64_t outputs, int64_t inputs, int64_t rows, double got, double want) {
  if (++failures < 20) {
    std::printf(
        "%s: arithmetic %d, %ld × %ld, %ld rows: %g, expected %g\n", what, int(arithmetic), long(outputs), long(inputs),
        long(rows), got, want);
  }
}

float largest_size(const std::vector<float>& values, int64_t from, int64_t n) {
  float most = 0;
  for (int64_t i = from; i < from + n; ++i) most = std::max(most, std::abs(values[i]));
  return most;
}

// How far a product of rounded inputs and weights may be from the exact one.
double allowed(Arithmetic arithmetic, int levels, double x, double w, double x_range, double w_range) {
  const double rounding = 1e-6 * x * w;
  if (arithmetic == Arithmetic::kFloat32) return rounding;
  if (arithmetic == Arithmetic::kBFloat16) return rounding + x * w / 128;  // 8 bits each, rounded to the nearest
  const double dx = 0.51 * x_range / levels, dw = 0.51 * w_range / 127;
  return rounding + dx * w + dw * x + dx * dw;
}

void check(Arithmetic arithmetic, bool instructions, int64_t outputs, int64_t inputs, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> weight(outputs * inputs), bias(outputs);
  for (float& value : weight) value = normal(random);
  for (float& value : bias) value = normal(random);
  if (outputs > 2) std::fill_n(weight.begin() + inputs, inputs, 0.0f);  // an output whose weights have no scale
  const Choice choice = choose(arithmetic, instructions);
  const Linear linear(weight.data(), bias.data(), outputs, inputs, arithmetic, choice);
  Team alone(1), team(3);
  Workshop shop(alone), shared(team);
  const int64_t most = 27, pitch = inputs + 3;
  std::vector<float> x(most * pitch), y(most * outputs), single(outputs), together(most * outputs);
  for (float& value : x) value = normal(random);
  for (int64_t c = 0; c < inputs; ++c) x[2 * pitch + c] = 0;                        // a row of zeros
  for (int64_t c = 0; c < inputs; ++c) x[3 * pitch + c] = std::abs(x[3 * pitch + c]);  // as after ReLU
  for (int64_t rows : {1, 2, 5, 6, 7, 12, 13, 27}) {
    linear(x.data(), pitch, rows, y.data(), outputs, shop);
    linear(x.data(), pitch, rows, together.data(), outputs, shared);
    for (int64_t row = 0; row < rows; ++row) {
      const float* from = &x[row * pitch];
      linear(from, pitch, 1, single.data(), outputs, shop);
      float low = 0, high = 0;
      for (int64_t k = 0; k < inputs; ++k) low = std::min(low, from[k]), high = std::max(high, from[k]);
      for (int64_t n = 0; n < outputs; ++n) {
        double want = bias[n], bound = 1e-6 * std::abs(bias[n]);
        const double w_range = largest_size(weight, n * inputs, inputs);
        for (int64_t k = 0; k < inputs; ++k) {
          const double a = from[k], b = weight[n * inputs + k];
          want += a * b;
          bound += allowed(arithmetic, choice.levels, std::abs(a), std::abs(b), high - low, w_range);
        }
        const float got = y[row * outputs + n];
        if (!(std::abs(got - want) <= bound)) fail("product", arithmetic, outputs, inputs, rows, got, want);
        if (single[n] != got) fail("a row alone", arithmetic, outputs, inputs, rows, single[n], got);
        if (together[row * outputs + n] != got) {
          fail("on three threads", arithmetic, outputs, inputs, rows, together[row * outputs + n], got);
        }
      }
    }
  }
  // Outputs in two parts.
  if (outputs > kPanel) {
    const Product product = linear.prepare(x.data(), pitch, most, shop);
    linear.compute(product, y.data(), kPanel, 0, kPanel, alone);
    for (int64_t row = 0; row < most; ++row) {
      if (y[row * kPanel + 1] != together[row * outputs + 1]) fail("in parts", arithmetic, outputs, inputs, most, 0, 0);
    }
    linear.compute(product, y.data(), outputs - kPanel, kPanel, outputs, alone);
    for (int64_t row = 0; row < most; ++row) {
      const float got = y[row * (outputs - kPanel)], want = together[row * outputs + kPanel];
      if (got != want) fail("in parts", arithmetic, outputs, inputs, most, got, want);
    }
  }
  // Some outputs, in another order: the same bits.
  std::vector<int64_t> some;
  for (int64_t n = outputs - 1; n >= 0; n -= 1 + n % 2) some.push_back(n);
  const int64_t count = static_cast<int64_t>(some.size());
  linear.select(some.data(), count)(x.data(), pitch, most, y.data(), count, shared);
  for (int64_t row = 0; row < most; ++row) {
    for (int64_t n = 0; n < count; ++n) {
      const float got = y[row * count + n], want = together[row * outputs + some[n]];
      if (got != want) fail("selected", arithmetic, outputs, inputs, most, got, want);
    }
  }
  // What is not a number makes its own row not a number, and no other.
  x[1 * pitch + inputs / 2] = NAN;
  linear(x.data(), pitch, 3, y.data(), outputs, shop);
  for (int64_t n = 0; n < outputs; ++n) {
    if (!std::isnan(y[outputs + n])) fail("NaN", arithmetic, outputs, inputs, 3, y[outputs + n], NAN);
    if (y[n] != together[n]) fail("beside NaN", arithmetic, outputs, inputs, 3, y[n], together[n]);
  }
}

}  // namespace

int main(int count, char** arguments) {
  const bool instructions = count > 1 && std::atoi(arguments[1]);
  std::mt19937 random(1);
  for (Arithmetic arithmetic : {Arithmetic::kFloat32, Arithmetic::kBFloat16, Arithmetic::kInt8}) {
    for (int64_t inputs : {1, 2, 3, 5, 20, 33, 128}) {
      for (int64_t outputs : {1, 3, 16, 31, 33, 64, 130}) check(arithmetic, instructions, outputs, inputs, random);
    }
    check(arithmetic, instructions, 96, 1024, random);
  }
  std::printf("%d mismatches, panels of %ld\n", failures, long(kPanel));
  return failures ? 1 : 0;
}
