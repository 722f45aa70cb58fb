// The filters of the tensor-core path that band_registers.cuh does not support (long filters, other normalisations):
// from weights to a band of taps in shared memory, and from the gradients of the taps to those of the weights. A warp
// works on 16 filters. Two neighbouring lanes share a filter and take its taps (or quads of taps) in turn.
//
// Softmax has separate code: its exponentials replace the weights in place, negative where dropout removed them, so
// that nothing is computed twice.
#pragma once

#include "convolution/band.cuh"

namespace lightconv {
namespace band {

struct TapTile {
  int t;          // of filter 0, in the data
  int real;       // filters [0, real) exist
  int low, high;  // filter i's tap k meets a row of the sequence if low <= i + k < high

  __device__ __forceinline__ bool meets(int j) const { return j >= low && j < high; }
};

// Taps [begin, end) of a filter.
struct TapRange {
  int begin, end;

  __device__ __forceinline__ bool has(int k) const { return k >= begin && k < end; }
  // Calls use(k) for the lane's half of the taps. The half to which a tap belongs does not depend on the range.
  template <class Use>
  __device__ __forceinline__ void for_each(Use use) const {
    for (int k = begin + ((begin ^ lane_index()) & 1); k < end; k += 2) use(k);
  }
};

// The taps of filter i that meet the sequence.
__device__ __forceinline__ TapRange meeting(const ConvParams& p, const TapTile& tile, int i) {
  return {max(tile.low - i, 0), min(tile.high - i, p.kernel_size)};
}

// The taps of filter i that are normalised together.
__device__ __forceinline__ TapRange counting(const ConvParams& p, const TapTile& tile, int i) {
  return p.renorm_padding ? meeting(p, tile, i) : TapRange{0, p.kernel_size};
}

// Calls use(k, factor) with dropout's factors for the lane's quads of the taps in `range`.
template <class Use>
__device__ __forceinline__ void for_each_dropped(const ConvParams& p, const Place& place, const TapTile& tile, int i,
                                                 const TapRange& range, Use use) {
  if (range.begin >= range.end) return;
  const uint64_t flat = flat_index(p, int64_t{tile.t} + i, place.b, place.head), seed = bits(p.seed);
  const uint64_t last = (flat + range.end - 1) / 4;
  for (uint64_t quad = (flat + range.begin) / 4 + lane_index() % 2; quad <= last; quad += 2) {
    const float4 factors = dropout_factors(p, quad, seed);
    const int k = static_cast<int>(static_cast<int64_t>(4 * quad - flat));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (range.has(k + e)) use(k + e, component(factors, e));
    }
  }
}

// Zeroes one band tile; the taps that are written later are at the same places in every tile.
template <class T>
__device__ __forceinline__ void clear_band(T* band, int pitch) {
  for (int at = lane_index() * 8; at < kTile * pitch; at += 32 * 8) store_pack(band + at, zero_pack<T, 8>());
  __syncwarp();
}

// Loads the weights of 16 filters into `taps`; filters that do not exist are zeros.
template <class T>
__device__ __forceinline__ void load_taps(const ConvParams& p, const Place& place, const TapTile& tile, int pitch,
                                          float* taps) {
  const T* data = static_cast<const T*>(p.weight.data) + tile.t * p.weight.stride_t + place.b * p.weight.stride_b +
                  place.head * p.weight.stride_h;
  constexpr int kBatch = 8;  // loads in flight
  for (int k = lane_index(); k < p.kernel_size; k += 32) {
    const T* from = data + k * p.weight.stride_k;
    for (int first = 0; first < kTile; first += kBatch) {
      T value[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        value[i] = first + i < tile.real ? *from : from_float<T>(0.0f);
        from += p.weight.stride_t;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) taps[(first + i) * pitch + k] = to_float(value[i]);
    }
  }
  __syncwarp();
}

// ------------------------------------------------------------------------------------------------ softmax

// Overwrites `row` with exponentials, negative where dropped, and writes the taps that meet the sequence to `to` unless
// it is null.
template <class T>
__device__ __forceinline__ FilterStats softmax_taps(const ConvParams& p, const Place& place, const TapTile& tile, int i,
                                                    float* row, T* to) {
  constexpr Normalize kind = Normalize::kSoftmax;
  const TapRange counted = counting(p, tile, i), used = meeting(p, tile, i);
  float maximum = -INFINITY, sum = 0.0f;
  counted.for_each([&](int k) { maximum = fmaxf(maximum, row[k]); });
  maximum = group_max(maximum, 2);
  counted.for_each([&](int k) {
    row[k] = stats_term(kind, row[k], maximum);
    sum += row[k];
  });
  const FilterStats stats = finish_stats(kind, group_sum(sum, 2), maximum);
  if (p.drop_below == 0) {
    if (to != nullptr) used.for_each([&](int k) { to[k] = from_float<T>(row[k] * stats.scale); });
    return stats;
  }
  __syncwarp();  // the quad of a tap may belong to another lane than the tap
  for_each_dropped(p, place, tile, i, used, [&](int k, float factor) {
    const float value = row[k];
    if (to != nullptr) to[k] = from_float<T>(value * stats.scale * factor);
    if (factor == 0.0f) row[k] = -value;
  });
  return stats;
}

// Overwrites drow, the gradients of the dropped taps, with those of the weights.
__device__ __forceinline__ void softmax_backward(const ConvParams& p, const TapTile& tile, int i,
                                                 const FilterStats& stats, const float* row, float* drow) {
  const TapRange counted = counting(p, tile, i);
  const float keep = p.drop_below == 0 ? 1.0f : p.keep_scale;
  float along = 0.0f;
  counted.for_each([&](int k) {
    const float gradient = drow[k] * (__float_as_int(row[k]) < 0 ? 0.0f : keep);
    drow[k] = gradient;
    along += gradient * (fabsf(row[k]) * stats.scale);
  });
  along = group_sum(along, 2);
  TapRange{0, p.kernel_size}.for_each([&](int k) {
    drow[k] = counted.has(k) ? (drow[k] - along) * (fabsf(row[k]) * stats.scale) : 0.0f;
  });
}

// ------------------------------------------------------------------------------------------------ the others

// `row` is not changed.
template <class T>
__device__ __forceinline__ FilterStats other_taps(const ConvParams& p, const Place& place, const TapTile& tile, int i,
                                                  const float* row, T* to) {
  const Normalize kind = p.normalize;
  const TapRange counted = counting(p, tile, i), used = meeting(p, tile, i);
  FilterStats stats;
  if (needs_stats(kind)) {
    float sum = 0.0f;
    counted.for_each([&](int k) { sum += stats_term(kind, row[k], 0.0f); });
    stats = finish_stats(kind, group_sum(sum, 2), 0.0f);
  }
  if (to == nullptr) return stats;
  const auto put = [&](int k, float factor) { to[k] = from_float<T>(normalized(kind, row[k], stats) * factor); };
  if (p.drop_below == 0) {
    used.for_each([&](int k) { put(k, 1.0f); });
  } else {
    for_each_dropped(p, place, tile, i, used, put);
  }
  return stats;
}

__device__ __forceinline__ void other_backward(const ConvParams& p, const Place& place, const TapTile& tile, int i,
                                               const FilterStats& stats, const float* row, float* drow) {
  const Normalize kind = p.normalize;
  const TapRange counted = counting(p, tile, i), all{0, p.kernel_size};
  if (p.drop_below != 0) {
    for_each_dropped(p, place, tile, i, all, [&](int k, float factor) { drow[k] *= factor; });
    __syncwarp();
  }
  float along = 0.0f;
  counted.for_each([&](int k) { along += along_term(kind, drow[k], row[k], stats); });
  along = group_sum(along, 2);
  all.for_each([&](int k) {
    drow[k] = counted.has(k) ? normalize_backward(kind, drow[k], row[k], stats, along) : 0.0f;
  });
}

// ------------------------------------------------------------------------------------------------ 16 filters

// Loads 16 filters into `taps` and writes their normalised, dropped taps to `band`, unless it is null. Returns the
// stats of filter lane / 2; store_filters() needs them and `taps`.
template <class T>
__device__ __forceinline__ FilterStats make_band(const ConvParams& p, const Place& place, const TapTile& tile,
                                                 const Shape& shape, float* taps, T* band) {
  __syncwarp();
  if (band != nullptr) clear_band(band, shape.band_pitch);
  load_taps<T>(p, place, tile, shape.tap_pitch, taps);
  const int i = lane_index() / 2;
  float* row = taps + i * shape.tap_pitch;
  T* to = band == nullptr ? nullptr : band + i * shape.band_pitch + i;
  return p.normalize == Normalize::kSoftmax ? softmax_taps(p, place, tile, i, row, to)
                                            : other_taps(p, place, tile, i, row, to);
}

// Computes the gradients of the weights of 16 filters from those of their dropped taps, which are overwritten, and
// stores them.
template <class T>
__device__ __forceinline__ void store_filters(const ConvBackwardParams& p, const Place& place, const TapTile& tile,
                                              const Shape& shape, const FilterStats& stats, const float* taps,
                                              float* dtaps) {
  __syncwarp();
  const int i = lane_index() / 2, pitch = shape.tap_pitch;
  if (p.normalize == Normalize::kSoftmax) {
    softmax_backward(p, tile, i, stats, taps + i * pitch, dtaps + i * pitch);
  } else {
    other_backward(p, place, tile, i, stats, taps + i * pitch, dtaps + i * pitch);
  }
  __syncwarp();
  T* data = static_cast<T*>(p.dweight) + tile.t * p.dweight_stride_t + place.b * p.dweight_stride_b +
            place.head * p.dweight_stride_h;
  for (int k = lane_index(); k < p.kernel_size; k += 32) {
    T* to = data + k * p.dweight_stride_k;
    for (int row = 0; row < tile.real; ++row, to += p.dweight_stride_t) *to = from_float<T>(dtaps[row * pitch + k]);
  }
}

}  // namespace band
}  // namespace lightconv
