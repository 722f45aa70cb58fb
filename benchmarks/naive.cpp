// dynamicconv as one would write it first: a softmax and K multiply-adds a row, sentence by sentence, nothing blocked.
// A peer of the operators' benchmark (naive.py), which compiles it with -O3 -march=native -ffast-math -fopenmp.
//
// x, out and their gradients are (T, B, C), weights (T, B, H, K), all contiguous.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

struct Shape {
  int64_t steps, batch, channels, heads, kernel_size, padding_l;

  int64_t per_head() const { return channels / heads; }
  int64_t row(int64_t t, int64_t b) const { return (t * batch + b) * channels; }
  int64_t filter(int64_t t, int64_t b, int64_t h) const { return ((t * batch + b) * heads + h) * kernel_size; }
  int64_t first(int64_t t) const { return std::max<int64_t>(0, padding_l - t); }
  int64_t last(int64_t t) const { return std::min(kernel_size, steps + padding_l - t); }
};

void softmax(const float* logits, int64_t n, float* out) {
  float top = logits[0], sum = 0;
  for (int64_t k = 1; k < n; ++k) top = std::max(top, logits[k]);
  for (int64_t k = 0; k < n; ++k) sum += out[k] = std::exp(logits[k] - top);
  for (int64_t k = 0; k < n; ++k) out[k] /= sum;
}

}  // namespace

extern "C" void naive_forward(const Shape* shape, const float* x, const float* weight, float* out, int threads) {
  const Shape s = *shape;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> taps(s.kernel_size);
#pragma omp for
    for (int64_t b = 0; b < s.batch; ++b) {
      for (int64_t t = 0; t < s.steps; ++t) {
        for (int64_t h = 0; h < s.heads; ++h) {
          softmax(weight + s.filter(t, b, h), s.kernel_size, taps.data());
          float* to = out + s.row(t, b) + h * s.per_head();
          std::fill(to, to + s.per_head(), 0.0f);
          for (int64_t k = s.first(t); k < s.last(t); ++k) {
            const float* from = x + s.row(t + k - s.padding_l, b) + h * s.per_head();
            for (int64_t c = 0; c < s.per_head(); ++c) to[c] += taps[k] * from[c];
          }
        }
      }
    }
  }
}

extern "C" void naive_backward(
    const Shape* shape, const float* grad, const float* x, const float* weight, float* dx, float* dweight, int threads) {
  const Shape s = *shape;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> taps(s.kernel_size), dtaps(s.kernel_size);
#pragma omp for
    for (int64_t b = 0; b < s.batch; ++b) {
      for (int64_t t = 0; t < s.steps; ++t) std::fill(dx + s.row(t, b), dx + s.row(t, b) + s.channels, 0.0f);
      for (int64_t t = 0; t < s.steps; ++t) {
        for (int64_t h = 0; h < s.heads; ++h) {
          softmax(weight + s.filter(t, b, h), s.kernel_size, taps.data());
          std::fill(dtaps.begin(), dtaps.end(), 0.0f);
          const float* g = grad + s.row(t, b) + h * s.per_head();
          for (int64_t k = s.first(t); k < s.last(t); ++k) {
            const int64_t at = s.row(t + k - s.padding_l, b) + h * s.per_head();
            float sum = 0;
            for (int64_t c = 0; c < s.per_head(); ++c) {
              sum += g[c] * x[at + c];
              dx[at + c] += taps[k] * g[c];
            }
            dtaps[k] = sum;
          }
          float along = 0;
          for (int64_t k = 0; k < s.kernel_size; ++k) along += taps[k] * dtaps[k];
          float* to = dweight + s.filter(t, b, h);
          for (int64_t k = 0; k < s.kernel_size; ++k) to[k] = taps[k] * (dtaps[k] - along);
        }
      }
    }
  }
}
