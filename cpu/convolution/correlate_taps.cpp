#include "convolution/inner.h"
#include "convolution/taps.h"

namespace lightconv {

template <class S, bool kAdd>
void correlate_taps(
    Rows<const S> grad, int64_t begin, int64_t end, Rows<const S> source, int64_t valid_first, int64_t valid_last,
    int64_t kernel_size, int64_t offset, int64_t channels, S* sums, int64_t time, int64_t step) {
  using Taps = std::make_index_sequence<kShort>;
  static constexpr auto several = detail::correlate_table<S, true, kAdd>(Taps{});
  static constexpr auto single = detail::correlate_table<S, false, kAdd>(Taps{});
  static constexpr auto times = detail::correlate_times_table<kAdd>(Taps{});
  for (int64_t k = 0; k < kernel_size; k += kShort) {
    const int64_t taps = std::min<int64_t>(kShort, kernel_size - k), count = times[taps - 1];
    for (int64_t t = begin; t < end;) {
      const int64_t top = t + offset + k;
      S* to = sums + (t - begin) * time + k * step;
      if (t + count <= end && top >= valid_first && top + taps - 1 + count <= valid_last) {
        several[taps - 1](
            grad.at(t), grad.pitch, source.at(top), source.pitch, channels, to, time, step);
        t += count;
        continue;
      }
      const int64_t from = std::clamp<int64_t>(valid_first - top, 0, taps);
      const int64_t last = std::clamp<int64_t>(valid_last - top, from, taps);
      if (!kAdd) {
        for (int64_t m = 0; m < taps; ++m) {
          if (m < from || m >= last) store(to + m * step, Vector<S>{});
        }
      }
      if (from < last) {
        single[last - from - 1](
            grad.at(t), grad.pitch, source.at(top + from), source.pitch, channels, to + from * step, time, step);
      }
      ++t;
    }
  }
}

template void correlate_taps<float, true>(
    Rows<const float>, int64_t, int64_t, Rows<const float>, int64_t, int64_t, int64_t, int64_t, int64_t, float*, int64_t, int64_t);
template void correlate_taps<float, false>(
    Rows<const float>, int64_t, int64_t, Rows<const float>, int64_t, int64_t, int64_t, int64_t, int64_t, float*, int64_t, int64_t);
template void correlate_taps<double, true>(
    Rows<const double>, int64_t, int64_t, Rows<const double>, int64_t, int64_t, int64_t, int64_t, int64_t, double*, int64_t, int64_t);
template void correlate_taps<double, false>(
    Rows<const double>, int64_t, int64_t, Rows<const double>, int64_t, int64_t, int64_t, int64_t, int64_t, double*, int64_t, int64_t);

}  // namespace lightconv
