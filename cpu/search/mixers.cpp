// Convolutions of one row at a time: its filter, and the weighted sum of the rows around it. In an encoder these rows
// are neighbours in memory; in a beam search they are the inputs of a hypothesis's ancestors.

#include <cmath>

#include "search/model.h"
#include "search/rows.h"

namespace lightconv::decoding {
namespace {

// y[c] = Σ weights[k] · sources[k][c] over the `count` taps k, for kVectors vectors of channels from `offset` on.
template <int kVectors>
LIGHTCONV_INLINE void sum_vectors(
    const float* const* sources, const int64_t* taps, int64_t count, const float* weights, int64_t offset, float* y) {
  V sums[kVectors] = {};
  for (int64_t i = 0; i < count; ++i) {
    const V weight = broadcast(weights[taps[i]]);
    const float* source = sources[taps[i]] + offset;
    for (int v = 0; v < kVectors; ++v) sums[v] += weight * load(source + v * kLanes);
  }
  for (int v = 0; v < kVectors; ++v) store(y + offset + v * kLanes, sums[v]);
}

}  // namespace

// Filters are written in whole vectors, in order: what is beyond the end of one is overwritten by the next.
void Mixer::normalise(const float* logits, int64_t count, float* filters) const {
  const int64_t n = taps();
  for (int64_t i = 0; i < count; ++i) normalize_row<float>(normalize, logits + i * n, n, {0, n}, filters + i * n);
}

// TaLK: 1 for the rows inside a window and a fraction for the row at either end, divided by the length of the longest
// window. The offsets are (heads,) to the left, followed by (heads,) to the right if there is a right side.
void Mixer::windows(const float* offsets, float* filter) const {
  const float scale = 1 / float(taps());
  for (int64_t h = 0; h < heads; ++h) {
    float* weights = filter + h * taps();
    const float before = float(left) / (1 + std::exp(-offsets[h]));
    const float after = right ? float(right) / (1 + std::exp(-offsets[heads + h])) : 0;
    const auto inside = [](float reach, int64_t distance) {
      const float part = reach + 1 - float(distance);
      return part > 1 ? 1.0f : part < 0 ? 0.0f : part;  // NaN stays
    };
    for (int64_t k = 0; k < left; ++k) weights[k] = inside(before, left - k) * scale;
    weights[left] = scale;
    for (int64_t k = 1; k <= right; ++k) weights[left + k] = inside(after, k) * scale;
  }
}

const float* Mixer::filters_of(const float* x, int64_t rows, Workshop& shop) const {
  if (kind == Kind::kShared) return nullptr;
  const int64_t size = heads * taps();
  if (kind == Kind::kPredicted) {
    const int64_t rank = reduce.outputs(), all = rows * size + kLanes;  // with room beyond the last filter
    float* filters = shop.filters.get(2 * all + rows * rank);
    float *logits = filters + all, *reduced = logits + all;
    if (reduce) reduce(x, channels, rows, reduced, rank, shop);
    product(reduce ? reduced : x, product.inputs(), rows, logits, size, shop);
    normalise(logits, rows * heads, filters);
    return filters;
  }
  const int64_t offsets = product.outputs();
  float* filters = shop.filters.get(rows * (size + offsets));
  float* predicted = filters + rows * size;
  product(x, channels, rows, predicted, offsets, shop);
  for (int64_t row = 0; row < rows; ++row) windows(predicted + row * offsets, filters + row * size);
  return filters;
}

void Mixer::mix(const float* const* sources, const float* filter, float* y, Workshop& shop) const {
  const int64_t all = taps(), width = channels / heads;
  int64_t* inside = shop.taps.get(all);
  int64_t count = 0;
  for (int64_t k = 0; k < all; ++k) {
    if (sources[k]) inside[count++] = k;
  }
  if (narrow()) {
    const float* spread = filters.data();
    if (filter) {
      float* to = shop.spread.get(all * channels);
      for (int64_t i = 0; i < count; ++i) {
        for (int64_t c = 0; c < channels; ++c) to[inside[i] * channels + c] = filter[c / width * all + inside[i]];
      }
      spread = to;
    }
    for (int64_t c = 0; c < channels; ++c) y[c] = 0;
    for (int64_t i = 0; i < count; ++i) {
      const float *weights = spread + inside[i] * channels, *source = sources[inside[i]];
      for (int64_t c = 0; c < channels; ++c) y[c] += weights[c] * source[c];
    }
  } else {
    const float* weights = filter ? filter : filters.data();
    for (int64_t h = 0; h < heads; ++h, weights += all) {
      int64_t c = h * width;
      const int64_t end = c + width;
      for (; c + 4 * kLanes <= end; c += 4 * kLanes) sum_vectors<4>(sources, inside, count, weights, c, y);
      for (; c + 2 * kLanes <= end; c += 2 * kLanes) sum_vectors<2>(sources, inside, count, weights, c, y);
      for (; c + kLanes <= end; c += kLanes) sum_vectors<1>(sources, inside, count, weights, c, y);
      for (; c < end; ++c) {
        float sum = 0;
        for (int64_t i = 0; i < count; ++i) sum += weights[inside[i]] * sources[inside[i]][c];
        y[c] = sum;
      }
    }
  }
  for (size_t c = 0; c < bias.size(); ++c) y[c] += bias[c];
}

void Mixer::convolve(const float* const* sources, int64_t rows, float* y, Workshop& shop) const {
  const int64_t inputs = taps() * channels, outputs = product.outputs();
  float* gathered = shop.gathered.get(rows * (inputs + outputs));
  for (int64_t i = 0; i < rows * taps(); ++i) {
    float* to = gathered + i * channels;
    if (sources[i]) std::copy_n(sources[i], channels, to);
    else std::fill_n(to, channels, 0.0f);
  }
  const bool halves = outputs == 2 * channels;
  float* out = halves ? gathered + rows * inputs : y;
  product(gathered, inputs, rows, out, outputs, shop);
  if (halves) gate(out, rows, channels, y);
}

}  // namespace lightconv::decoding
