// The passes over a problem. lightconv's filter (H, K) is shared by all positions: it is normalised and dropped here,
// once per call, and its gradient is the sum over all tiles.

#include <vector>

#include "convolution/kernels.h"
#include "convolution/tile.h"

namespace lightconv {
namespace {

template <class T>
struct SharedFilter {
  using S = Sum<T>;

  explicit SharedFilter(const Problem<T>& p)
      : heads(p.heads),
        kernel_size(p.kernel_size),
        pitch(p.filter_pitch()),
        logits(heads * pitch),
        normalized(heads * pitch) {
    for (int64_t h = 0; h < heads; ++h) {
      read_filter(p, p.weight.at(0, 0, h), logits.data() + h * pitch);
      normalize_row(
          p.normalize, logits.data() + h * pitch, kernel_size, {0, kernel_size}, normalized.data() + h * pitch);
    }
    taps = normalized;
    if (!p.dropout.active()) return;
    scales.resize(heads * pitch);
    std::vector<uint32_t> words(heads * kernel_size + 64);
    const uint32_t* word = words.data() + philox_words(p.dropout.seed, 0, heads * kernel_size, words.data());
    for (int64_t h = 0; h < heads; ++h) {
      dropout_factors(p.dropout, word + h * kernel_size, kernel_size, scales.data() + h * pitch);
    }
    for (size_t i = 0; i < taps.size(); ++i) taps[i] *= scales[i];
  }

  // Adds up the sums of the bundles in their order, and computes the gradient of the weight from the total.
  void write_gradient(const Problem<T>& p, const std::vector<S>& partial) {
    std::vector<double> sum(heads * pitch);
    for (size_t i = 0; i < partial.size(); ++i) sum[i % sum.size()] += partial[i];
    std::vector<S> row(pitch);
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t i = 0; i < pitch; ++i) {
        row[i] = S(sum[h * pitch + i]) * (scales.empty() ? S(1) : scales[h * pitch + i]);
      }
      S* gradient = normalized.data() + h * pitch;
      normalize_backward_row<S>(
          p.normalize, [&](int64_t i) { return load(row.data() + i); }, logits.data() + h * pitch, gradient, pitch,
          {0, kernel_size});
      write_filter(p, gradient, p.dweight.at(0, 0, h));
    }
  }

  int64_t heads, kernel_size, pitch;
  std::vector<S> logits, normalized, taps, scales;
};

}  // namespace

template <class T>
void run_forward(Problem<T>& p) {
  p.path = take(kForward, p.sizes());
  if (!p.shared) return forward(p);
  const SharedFilter<T> filter(p);
  p.taps = filter.taps.data();
  forward(p);
}

template <class T>
void run_backward(Problem<T>& p) {
  p.path = take(kBackward, p.sizes());
  if (!p.shared) return backward(p);
  SharedFilter<T> filter(p);
  p.taps = filter.taps.data();
  std::vector<Sum<T>> partial;
  p.partial = p.dweight.data ? &partial : nullptr;
  backward(p);
  if (p.partial) filter.write_gradient(p, partial);
}

template void run_forward(Problem<float>&);
template void run_forward(Problem<double>&);
template void run_forward(Problem<Float16>&);
template void run_forward(Problem<BFloat16>&);
template void run_backward(Problem<float>&);
template void run_backward(Problem<double>&);
template void run_backward(Problem<Float16>&);
template void run_backward(Problem<BFloat16>&);

}  // namespace lightconv
