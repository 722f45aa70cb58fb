#include "convolution/inner.h"
#include "convolution/taps.h"

namespace lightconv {
namespace {

template <class S>
void convolve_short(
    Rows<S> out, int64_t begin, int64_t end, Rows<const S> source, int64_t valid_first, int64_t valid_last,
    Weights<S> weights, int64_t kernel_size, int64_t shift, int64_t channels, const S* bias) {
  using Taps = std::make_index_sequence<kShort + 1>;
  static constexpr auto several = detail::weigh_table<S, true>(Taps{}), single = detail::weigh_table<S, false>(Taps{});
  static constexpr auto times = detail::times_table(Taps{});
  for (int64_t t = begin; t < end;) {
    const int64_t top = t + shift, count = times[kernel_size];
    const S* w = weights.data + (t - begin) * weights.time;
    if (t + count <= end && top >= valid_first && top + kernel_size - 1 + count <= valid_last) {
      several[kernel_size](
          source.at(top), source.pitch, {w, weights.time, weights.step}, bias, out.at(t), out.pitch, channels);
      t += count;
      continue;
    }
    const int64_t from = std::clamp<int64_t>(valid_first - top, 0, kernel_size);
    const int64_t to = std::clamp<int64_t>(valid_last - top, from, kernel_size);
    single[to - from](
        source.at(top + from), source.pitch, {w + from * weights.step, 0, weights.step}, bias, out.at(t), out.pitch,
        channels);
    ++t;
  }
}

template <class S>
void convolve_band(
    Rows<S> out, int64_t begin, int64_t end, Rows<const S> source, int64_t valid_first, int64_t valid_last,
    Weights<S> weights, int64_t kernel_size, int64_t shift, int64_t channels, const S* bias) {
  constexpr int w = kWidth<S>;
  for (int64_t c = 0; c < channels;) {
    const int64_t left = (channels - c) / w;
    const int vectors = left >= kBandVectors ? kBandVectors : left >= 2 ? 2 : 1;
    if (left == 0) c = channels - w;
    for (int64_t t = begin; t < end;) {
      const int64_t top = t + shift;
      BandBlock<S> block{
          source.at(top) + c,
          source.pitch,
          {weights.data + (t - begin) * weights.time, weights.time, weights.step},
          kernel_size,
          valid_first - top,
          valid_last - top,
          bias ? bias + c : nullptr,
          out.at(t) + c,
          out.pitch};
      t += detail::band_vectors<S>(block, end - t, vectors);
    }
    c += vectors * w;
  }
}

}  // namespace

template <class S>
void convolve_rows(
    Rows<S> out, int64_t begin, int64_t end, Rows<const S> source, int64_t valid_first, int64_t valid_last,
    Weights<S> weights, int64_t kernel_size, int64_t shift, int64_t channels, const S* bias) {
  const auto convolve = kernel_size <= kShort ? convolve_short<S> : convolve_band<S>;
  convolve(out, begin, end, source, valid_first, valid_last, weights, kernel_size, shift, channels, bias);
}

template void convolve_rows(
    Rows<float>, int64_t, int64_t, Rows<const float>, int64_t, int64_t, Weights<float>, int64_t, int64_t, int64_t, const float*);
template void convolve_rows(
    Rows<double>, int64_t, int64_t, Rows<const double>, int64_t, int64_t, Weights<double>, int64_t, int64_t, int64_t, const double*);

}  // namespace lightconv
