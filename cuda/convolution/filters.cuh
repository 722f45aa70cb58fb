// The filters of a tile (tile.cuh), read, normalised and dropped. Several lanes share each filter.
#pragma once

#include "convolution/arithmetic.cuh"

namespace lightconv {

// Lanes that share the work on one filter. The order of its sums depends only on this and K.
constexpr int kFilterLanes = 8;

// The place of a block: batch element, first row, first channel vector, and the heads of these channels.
struct Place {
  int64_t b, row;
  int vector, vectors, head, heads;
};

// One filter (t, b, h), shared by kFilterLanes lanes.
template <class T>
struct FilterReader {
  const T* weight;
  int64_t stride;
  Normalize kind;
  int first, last;  // the taps that count are [first, last); the others weigh 0
  FilterStats stats;

  // t, b, h must exist.
  __device__ FilterReader(const ConvParams& p, int64_t t, int64_t b, int h)
      : weight(static_cast<const T*>(p.weight.data) + t * p.weight.stride_t + b * p.weight.stride_b +
               h * p.weight.stride_h),
        stride(p.weight.stride_k),
        kind(p.normalize),
        first(0),
        last(p.kernel_size) {
    if (!p.renorm_padding) return;
    const Span span = sequence_span(p, b, t);
    const int64_t begin = span.begin - t + p.padding_l, end = span.end - t + p.padding_l;
    first = static_cast<int>(begin < 0 ? 0 : begin < last ? begin : last);
    last = static_cast<int>(end < first ? first : end < last ? end : last);
  }

  __device__ __forceinline__ float at(int k) const { return to_float(weight[k * stride]); }
  __device__ __forceinline__ bool counts(int k) const { return k >= first && k < last; }

  // All 32 lanes call; lanes without a filter have `active` false.
  __device__ __forceinline__ void read_stats(int lane, bool active) {
    if (!needs_stats(kind)) return;
    const int end = active ? last : first;
    float maximum = -INFINITY, sum = 0.0f;
    if (kind == Normalize::kSoftmax) {
      for (int k = first + lane; k < end; k += kFilterLanes) maximum = fmaxf(maximum, at(k));
      maximum = group_max(maximum, kFilterLanes);
    }
    for (int k = first + lane; k < end; k += kFilterLanes) sum += stats_term(kind, at(k), maximum);
    stats = finish_stats(kind, group_sum(sum, kFilterLanes), maximum);
  }

  __device__ __forceinline__ float value(int k) const { return counts(k) ? normalized(kind, at(k), stats) : 0.0f; }
};

// Calls each(k, factor) for this lane's share of the taps [begin, end), with dropout's factor (1 without dropout). Four
// weights share one counter of the generator, so a lane takes four neighbours.
template <class Each>
__device__ __forceinline__ void for_taps(const ConvParams& p, uint64_t flat, int begin, int end, int lane, Each each) {
  if (p.drop_below == 0) {
    for (int k = begin + lane; k < end; k += kFilterLanes) each(k, 1.0f);
    return;
  }
  const uint64_t seed = bits(p.seed);
  for (uint64_t quad = (flat + begin) / 4 + lane; quad * 4 < flat + end; quad += kFilterLanes) {
    const float4 factors = dropout_factors(p, quad, seed);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int64_t k = static_cast<int64_t>(quad * 4 + e) - static_cast<int64_t>(flat);
      if (k >= begin && k < end) each(static_cast<int>(k), component(factors, e));
    }
  }
}

// stage_filters (below) for constant K, with softmax or none: a lane reads its taps once and keeps them in registers.
// The sums and their order are the same, so the bits are, too.
template <class T, int K, int kStep, class To>
__device__ __forceinline__ void stage_known_filters(const ConvParams& p, const Place& place, int64_t first, int rows,
                                                    To to) {
  constexpr int kTaps = (K + kFilterLanes - 1) / kFilterLanes;
  const int lane = static_cast<int>(threadIdx.x % kFilterLanes), groups = static_cast<int>(blockDim.x / kFilterLanes);
  const int total = rows * place.heads;
  const bool softmax = p.normalize == Normalize::kSoftmax;
  const int2 real = p.dynamic ? clipped(0, p.steps, first, rows) : make_int2(0, 1);
  const auto& weight = p.weight;
  const int64_t origin = (p.dynamic ? first * weight.stride_t + place.b * weight.stride_b : 0) +
                         place.head * weight.stride_h + lane * weight.stride_k;
  const int64_t step = kFilterLanes * weight.stride_k;
  const auto own_tap = [&](int i) { return lane + i * kFilterLanes < K; };
  Walk walk(static_cast<int>(threadIdx.x / kFilterLanes), groups, place.heads);
  // Whole warps loop together, because the sums over lanes need all of them.
  for (int start = 0; start < total; start += groups, walk.next()) {
    const int row = walk.row, h = walk.column;
    const bool active = row >= real.x && row < real.y;
    const T* from = static_cast<const T*>(weight.data) +
                    (active ? origin + offset(row, weight.stride_t) + offset(h, weight.stride_h) : 0);
    float own[kTaps];
#pragma unroll
    for (int i = 0; i < kTaps; ++i) {
      own[i] = own_tap(i) ? 0.0f : -INFINITY;
      if (active && own_tap(i)) own[i] = to_float(from[i * step]);
    }
    if (softmax) {
      float maximum = -INFINITY, sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kTaps; ++i) maximum = fmaxf(maximum, own[i]);
      maximum = group_max(maximum, kFilterLanes);
#pragma unroll
      for (int i = 0; i < kTaps; ++i) {
        own[i] = exponential(own[i] - maximum);
        sum += own[i];
      }
      const FilterStats stats = finish_stats(Normalize::kSoftmax, group_sum(sum, kFilterLanes), maximum);
      const float scale = active ? stats.scale : 0.0f;
#pragma unroll
      for (int i = 0; i < kTaps; ++i) own[i] *= scale;
    }
    float* taps = to(row, h);
    if (row < rows) {
#pragma unroll
      for (int i = 0; i < kTaps; ++i) {
        if (own_tap(i)) taps[(lane + i * kFilterLanes) * kStep] = own[i];
      }
    }
    if (p.drop_below == 0) continue;
    __syncwarp();
    if (!active) continue;
    for_taps(p, flat_index(p, first + row, place.b, place.head + h), 0, K, lane, [&](int k, float factor) {
      taps[k * kStep] = factor == 0.0f ? 0.0f : taps[k * kStep] * factor;
    });
  }
}

// Writes taps [begin, end) of `rows` x `heads` filters (for lightconv, of one row) into shared memory. The taps of a
// filter are kStep floats apart, from to(row, head) on; those of rows outside [0, T) are 0. `row` counts from `first`,
// `head` from place.head. K: for a kernel for one K only, else 0.
template <class T, int K, int kStep, class To>
__device__ __forceinline__ void stage_filters(const ConvParams& p, const Place& place, int64_t first, int rows,
                                              int begin, int end, To to) {
  if constexpr (K > 0) {
    if (!p.renorm_padding && (p.normalize == Normalize::kSoftmax || p.normalize == Normalize::kNone)) {
      stage_known_filters<T, K, kStep>(p, place, first, rows, to);
      return;
    }
  }
  const int lane = threadIdx.x % kFilterLanes, groups = blockDim.x / kFilterLanes;
  const int total = rows * place.heads;
  // Whole warps loop together, because the sums over lanes need all of them.
  for (int start = 0; start < total; start += groups) {
    const int at = start + threadIdx.x / kFilterLanes;
    const int row = at / place.heads, h = at - row * place.heads;
    const int64_t t = p.dynamic ? first + row : 0;
    const bool active = at < total && t >= 0 && t < p.steps;
    FilterReader<T> filter(p, active ? t : 0, place.b, place.head + (active ? h : 0));
    filter.read_stats(lane, active);
    if (active) {
      float* taps = to(row, h);
      for_taps(p, flat_index(p, t, place.b, place.head + h), begin, end, lane, [&](int k, float factor) {
        taps[(k - begin) * kStep] = factor == 0.0f ? 0.0f : filter.value(k) * factor;
      });
    } else if (at < total) {
      for (int k = lane; k < end - begin; k += kFilterLanes) to(row, h)[k * kStep] = 0.0f;
    }
  }
}

}  // namespace lightconv
