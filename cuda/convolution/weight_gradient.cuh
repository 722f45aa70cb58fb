// The gradient for the weight.
//
//     dtap[t, k] = sum over the C/H channels of grad[t] * u[t - padding_l + k]
//
// is a narrow band of the product grad[rows x C/H] * u[rows + K-1 x C/H]^T. A unit of work is kUnitRows gradient rows
// times kUnitColumns rows of u, both in shared memory, with all sums in the registers of one thread: per channel, 12
// numbers are read for 32 multiply-adds, and there are no sums across threads.
//
// dynamicconv: one launch. dtap of a tile is kept in shared memory, and then goes through dropout and the
// normalisation. The normalisation needs a sum over all K taps. If K is processed in chunks, a first pass computes
// these sums, and a second pass computes dtap again.
// lightconv: dtap is also summed over t and b. Each block adds up a share of the tiles into a slab (slabs.h). Further
// launches, the same for all paths, add up the slabs in a fixed order and finish.
#pragma once

#include "convolution/slabs.h"
#include "convolution/tile.cuh"

namespace lightconv {

constexpr int kUnitRows = 4, kUnitColumns = 8;
constexpr int kUnitTaps = kUnitRows + kUnitColumns - 1;  // distinct taps in a unit
constexpr int kGradientThreads = 128;
constexpr int kMostSlabBlocks = 1024;

// sums[i][j] += sum over the channels of grad row i times u row j; `columns` rows of u may be read. Neighbouring
// threads begin at different vectors (`rotation`, below `vectors`), which avoids bank conflicts.
template <class T, int V>
__device__ __forceinline__ void correlate_unit(float (&sums)[kUnitRows][kUnitColumns], const T* grad, const T* u,
                                               int pitch, int vectors, int rotation) {
#pragma unroll 1
  for (int n = 0; n < vectors; ++n) {
    const int v = n + rotation < vectors ? n + rotation : n + rotation - vectors;
    float g[kUnitRows][V];
#pragma unroll
    for (int i = 0; i < kUnitRows; ++i) widen(load_pack<T, V>(grad + i * pitch + v * V), g[i]);
#pragma unroll
    for (int j = 0; j < kUnitColumns; ++j) {
      float x[V];
      widen(load_pack<T, V>(u + j * pitch + v * V), x);
#pragma unroll
      for (int i = 0; i < kUnitRows; ++i) {
#pragma unroll
        for (int e = 0; e < V; ++e) sums[i][j] = fmaf(g[i][e], x[e], sums[i][j]);
      }
    }
  }
}

// The sizes of a launch of either kernel below. A block processes `heads` heads at a time, or some channels of one.
struct GradientTile {
  int rows = 0;      // gradient rows of a tile, a multiple of kUnitRows
  int heads = 0;     // of a block
  int channels = 0;  // in shared memory at a time
  int taps = 0;      // of a chunk
  int columns = 0;   // units along the taps
  int groups = 0;    // blocks along the heads
  int slabs = 0;     // lightconv only
  int64_t blocks = 0;
  int shared_bytes = 0;
};

// The rows of a tile in shared memory.
template <class T>
struct GradientRows {
  T* grad;
  T* u;
  int2* spans;
  __device__ GradientRows(float* floats, const GradientTile& tile)
      : grad(reinterpret_cast<T*>(floats)),
        u(grad + tile.rows * tile.channels),
        spans(after<int2>(grad, (2 * tile.rows - kUnitRows + tile.columns * kUnitColumns) * tile.channels)) {}
};

// Rows of the gradient and of u for taps [begin, begin + taps), channels [channel, channel + width).
template <class T, int V>
__device__ __forceinline__ void stage_gradient(const ConvBackwardParams& p, const GradientTile& tile,
                                               const GradientRows<T>& shared, int64_t b, int64_t row, int begin,
                                               int taps, int channel, int width) {
  const bool packed = p.cu_seqlens != nullptr;
  const Span span = packed ? Span{0, p.steps} : sequence_span(p, b, 0);
  const int64_t origin = row - p.padding_l + begin;
  stage_rows<T, V>(shared.grad, tile.channels, tile.rows, row, 0, p.grad.data != nullptr ? p.steps : 0, width / V,
                   p.grad, b, channel);
  stage_inputs<T, V>(shared.u, tile.channels, tile.rows + taps - 1, origin, span, width / V, p, b, channel);
  stage_spans(shared.spans, p, b, row, tile.rows, origin, tile.rows + taps - 1);
}

// Host: the part of the tile that both kernels have in common.
template <class T, int V>
GradientTile gradient_tile(const ConvBackwardParams& p) {
  GradientTile tile;
  const int channels_of_head = p.channels / p.heads;
  // 128 bytes of a row at a time: each row is then read in whole sectors, without bank conflicts (see rotation).
  constexpr int kWidth = V == 1 ? 32 : 8 * V;
  tile.rows = 64;
  tile.taps = p.kernel_size < kChunkTaps ? p.kernel_size : kChunkTaps;
  tile.columns = divide_up(tile.taps + kUnitRows - 1, kUnitColumns);
  tile.heads = channels_of_head >= kWidth ? 1 : kWidth / channels_of_head;
  if (tile.heads > p.heads) tile.heads = p.heads;
  // In lightconv's kernel every thread keeps the sums of one head and one column of units.
  if (!p.dynamic && tile.heads * tile.columns > kGradientThreads) tile.heads = kGradientThreads / tile.columns;
  tile.channels = tile.heads * channels_of_head;
  if (tile.channels > kWidth) tile.channels = kWidth;
  tile.groups = divide_up(p.heads, tile.heads);
  return tile;
}

// Bytes of what GradientRows holds.
template <class T>
int gradient_rows_bytes(const GradientTile& tile) {
  return tile_bytes<T>(0, (2 * tile.rows - kUnitRows + tile.columns * kUnitColumns) * tile.channels, tile.rows);
}

// ------------------------------------------------------------------------------------------------ dynamicconv

template <class T, int V>
__global__ void __launch_bounds__(kGradientThreads, 3)
    dynamic_weight_gradient_kernel(const __grid_constant__ ConvBackwardParams p, const GradientTile tile) {
  LIGHTCONV_DYNAMIC_SHARED(float, dtaps);
  const int stride = tile.taps | 1;  // odd: neighbouring rows begin in different banks
  const int filters = tile.rows * tile.heads;
  float* along_of = dtaps + filters * stride;
  const GradientRows<T> shared(dtaps + round_up(filters * (stride + 1), 4), tile);

  const int64_t rest = static_cast<int64_t>(blockIdx.x) / tile.groups;
  const int64_t b = rest % p.batch, first = rest / p.batch * tile.rows;
  const int head = static_cast<int>(blockIdx.x % tile.groups) * tile.heads;
  const int heads = min(tile.heads, p.heads - head), channels_of_head = p.channels / p.heads;
  const int micros = tile.rows / kUnitRows, units = micros * heads * tile.columns;
  const int lane = threadIdx.x % kFilterLanes;
  const bool chunked = tile.taps < p.kernel_size;

  for (int pass = chunked ? 0 : 1; pass < 2; ++pass) {
    for (int begin = 0; begin < p.kernel_size; begin += tile.taps) {
      const int taps = min(tile.taps, p.kernel_size - begin);
      const int all = heads * channels_of_head;
      for (int channel = 0; channel < all; channel += tile.channels) {
        const int width = min(tile.channels, all - channel);
        const int vectors = (heads == 1 ? width : channels_of_head) / V;
        __syncthreads();
        stage_gradient<T, V>(p, tile, shared, b, first, begin, taps, head * channels_of_head + channel, width);
        __syncthreads();
        for (int unit = threadIdx.x; unit < units; unit += blockDim.x) {
          const int column = unit % tile.columns, micro = unit / tile.columns % micros;
          const int h = unit / tile.columns / micros;
          // Does not depend on T, so that the sums of a row always have the same order.
          const int rotation = (column + (micro & 1) * tile.columns) % vectors;
          float sums[kUnitRows][kUnitColumns] = {};
          const int row = micro * kUnitRows, c = h * channels_of_head;
          correlate_unit<T, V>(sums, shared.grad + row * tile.channels + c,
                               shared.u + (row + column * kUnitColumns) * tile.channels + c, tile.channels, vectors,
                               rotation);
#pragma unroll
          for (int i = 0; i < kUnitRows; ++i) {
            const int2 span = shared.spans[row + i];
            float* dtap = dtaps + ((row + i) * heads + h) * stride;
#pragma unroll
            for (int j = 0; j < kUnitColumns; ++j) {
              const int at = row + column * kUnitColumns + j, k = at - row - i;
              if (k < 0 || k >= taps) continue;
              const float sum = at >= span.x && at < span.y ? sums[i][j] : 0.0f;
              dtap[k] = channel == 0 ? sum : dtap[k] + sum;
            }
          }
        }
      }
      __syncthreads();

      // From the taps to the weights, one filter for each group of lanes.
      const int total = tile.rows * heads, groups = blockDim.x / kFilterLanes;
      for (int start = 0; start < total; start += groups) {
        const int at = start + threadIdx.x / kFilterLanes;
        const int row = at / heads, h = at - row * heads;
        const int64_t t = first + row;
        const bool active = at < total && t < p.steps;
        FilterReader<T> filter(p, active ? t : 0, b, head + (active ? h : 0));
        filter.read_stats(lane, active);
        float* dtap = dtaps + (active ? at : 0) * stride - begin;
        float along = 0.0f;
        if (active) {
          for_taps(p, flat_index(p, t, b, head + h), begin, begin + taps, lane, [&](int k, float factor) {
            const float gradient = factor == 0.0f || !filter.counts(k) ? 0.0f : dtap[k] * factor;
            dtap[k] = gradient;
            if (filter.counts(k)) along += along_term(filter.kind, gradient, filter.at(k), filter.stats);
          });
        }
        along = group_sum(along, kFilterLanes);
        if (chunked && active) {
          if (pass == 0) {
            if (lane == 0) along_of[at] = begin == 0 ? along : along_of[at] + along;
          } else {
            along = along_of[at];
          }
        }
        __syncwarp();
        if (pass == 0 || !active) continue;
        T* to = static_cast<T*>(p.dweight) + t * p.dweight_stride_t + b * p.dweight_stride_b +
                (head + h) * p.dweight_stride_h;
        for (int k = begin + lane; k < begin + taps; k += kFilterLanes) {
          const float gradient =
              filter.counts(k) ? normalize_backward(filter.kind, dtap[k], filter.at(k), filter.stats, along) : 0.0f;
          to[k * p.dweight_stride_k] = from_float<T>(gradient);
        }
      }
    }
  }
}

template <class T, int V>
GradientTile dynamic_gradient_tile(const ConvBackwardParams& p) {
  GradientTile tile = gradient_tile<T, V>(p);
  const auto bytes = [&] {
    return round_up(tile.rows * tile.heads * ((tile.taps | 1) + 1), 4) * 4 + gradient_rows_bytes<T>(tile);
  };
  while (tile.rows > 8 && (tile.rows / 2 >= p.steps || bytes() > kSharedBytes)) tile.rows /= 2;
  // Many narrow heads: 8 rows of 32 heads and 64 taps do not fit.
  while (bytes() > kSharedBytes) {
    tile.taps = divide_up(tile.taps, 2);
    tile.columns = divide_up(tile.taps + kUnitRows - 1, kUnitColumns);
  }
  tile.shared_bytes = bytes();
  tile.blocks = divide_up(p.steps, static_cast<int64_t>(tile.rows)) * p.batch * tile.groups;
  return tile;
}

// ------------------------------------------------------------------------------------------------ lightconv

// Blocks: chunks of taps * slabs * groups of heads. Thread: head h, column of units, and every micros-th micro-tile.
template <class T, int V>
__global__ void __launch_bounds__(kGradientThreads, 3)
    light_weight_gradient_kernel(const __grid_constant__ ConvBackwardParams p, const GradientTile tile) {
  LIGHTCONV_DYNAMIC_SHARED(float, scratch);
  const GradientRows<T> shared(scratch, tile);
  const int group = blockIdx.x % tile.groups, slab = blockIdx.x / tile.groups % tile.slabs;
  const int head = group * tile.heads, heads = min(tile.heads, p.heads - head);
  const int channels_of_head = p.channels / p.heads, all = heads * channels_of_head;
  const int begin = blockIdx.x / tile.groups / tile.slabs * tile.taps, taps = min(tile.taps, p.kernel_size - begin);
  const int column = threadIdx.x % tile.columns, h = threadIdx.x / tile.columns % heads;
  const int first_micro = threadIdx.x / tile.columns / heads;
  const int micros = blockDim.x / (tile.columns * heads);  // processed at the same time

  float sums_of_tap[kUnitTaps] = {};
  const int64_t tiles = divide_up(p.steps, static_cast<int64_t>(tile.rows)) * p.batch;
  for (int64_t at_tile = slab; at_tile < tiles; at_tile += tile.slabs) {
    const int64_t b = at_tile % p.batch, row = at_tile / p.batch * tile.rows;
    for (int channel = 0; channel < all; channel += tile.channels) {
      const int width = min(tile.channels, all - channel);
      const int vectors = (heads == 1 ? width : channels_of_head) / V;
      __syncthreads();
      stage_gradient<T, V>(p, tile, shared, b, row, begin, taps, head * channels_of_head + channel, width);
      __syncthreads();
      if (first_micro >= micros) continue;
      for (int micro = first_micro; micro * kUnitRows < tile.rows; micro += micros) {
        const int unit_row = micro * kUnitRows, c = h * channels_of_head;
        float sums[kUnitRows][kUnitColumns] = {};
        correlate_unit<T, V>(sums, shared.grad + unit_row * tile.channels + c,
                             shared.u + (unit_row + column * kUnitColumns) * tile.channels + c, tile.channels, vectors,
                             threadIdx.x % vectors);
#pragma unroll
        for (int i = 0; i < kUnitRows; ++i) {
          const int2 span = shared.spans[unit_row + i];
#pragma unroll
          for (int j = 0; j < kUnitColumns; ++j) {
            const int at = unit_row + column * kUnitColumns + j;
            if (at >= span.x && at < span.y) sums_of_tap[j - i + kUnitRows - 1] += sums[i][j];
          }
        }
      }
    }
  }

  // Adds up the sums of each column's and head's threads, in the order of their micro-tiles.
  __syncthreads();
#pragma unroll
  for (int d = 0; d < kUnitTaps; ++d) scratch[threadIdx.x * kUnitTaps + d] = sums_of_tap[d];
  __syncthreads();
  float* to = static_cast<float*>(p.workspace) + (static_cast<int64_t>(slab) * p.heads + head) * p.kernel_size + begin;
  for (int at = threadIdx.x; at < heads * taps; at += blockDim.x) {
    const int of_head = at / taps, k = at - of_head * taps;
    float total = 0.0f;
    for (int unit = 0; unit < tile.columns; ++unit) {
      const int d = k - unit * kUnitColumns + kUnitRows - 1;
      if (d < 0 || d >= kUnitTaps) continue;
      for (int micro = 0; micro < micros; ++micro) {
        total += scratch[((micro * heads + of_head) * tile.columns + unit) * kUnitTaps + d];
      }
    }
    to[static_cast<int64_t>(of_head) * p.kernel_size + k] = total;
  }
}

template <class T, int V>
GradientTile light_gradient_tile(const ConvBackwardParams& p) {
  GradientTile tile = gradient_tile<T, V>(p);
  const int chunks = divide_up(p.kernel_size, tile.taps);
  const auto bytes = [&] {
    const int rows = gradient_rows_bytes<T>(tile), sums = kGradientThreads * kUnitTaps * 4;
    return rows > sums ? rows : sums;
  };
  while (tile.rows > 8 && (tile.rows / 2 >= p.steps || bytes() > kSharedBytes)) tile.rows /= 2;
  tile.shared_bytes = bytes();
  const int64_t tiles = divide_up(p.steps, static_cast<int64_t>(tile.rows)) * p.batch;
  int64_t slabs = kMostSlabBlocks / (static_cast<int64_t>(tile.groups) * chunks);
  slabs = slabs < 1 ? 1 : slabs;
  tile.slabs = static_cast<int>(slabs < tiles ? slabs : tiles);
  tile.blocks = static_cast<int64_t>(tile.slabs) * tile.groups * chunks;
  return tile;
}

// One block of 256 threads for each head: adds the `count` slabs, which are `distance` floats apart, and computes the
// gradient of the weights from that of the taps.
constexpr int kFinishThreads = 256, kFinishTaps = 32;

// Requests two blocks per multiprocessor, because ptxas otherwise limits itself to 48 registers for sm_100, and spills.
template <class T>
__global__ void __launch_bounds__(kFinishThreads, 2)
    finish_light_weight_gradient_kernel(const __grid_constant__ ConvBackwardParams p, const int64_t count,
                                        const int64_t distance) {
  LIGHTCONV_DYNAMIC_SHARED(float, parts);
  constexpr int kParts = kFinishThreads / kFinishTaps;
  const int h = blockIdx.x, part = threadIdx.x / kFinishTaps, tap = threadIdx.x % kFinishTaps;
  // The totals overwrite the first slab.
  float* dtap = static_cast<float*>(p.workspace) + static_cast<int64_t>(h) * p.kernel_size;
  for (int begin = 0; begin < p.kernel_size; begin += kFinishTaps) {
    const int k = begin + tap;
    float sum = 0.0f;
    if (k < p.kernel_size) {
#pragma unroll 8
      for (int64_t slab = part; slab < count; slab += kParts) sum += dtap[slab * distance + k];
    }
    parts[threadIdx.x] = sum;
    __syncthreads();
    if (part == 0 && k < p.kernel_size) {
#pragma unroll
      for (int other = 1; other < kParts; ++other) sum += parts[other * kFinishTaps + tap];
      dtap[k] = sum;
    }
    __syncthreads();
  }
  if (threadIdx.x >= 32) return;

  const int lane = threadIdx.x % kFilterLanes;
  const bool first_group = threadIdx.x < kFilterLanes;
  FilterReader<T> filter(p, 0, 0, h);
  filter.read_stats(lane, true);
  float along = 0.0f;
  if (first_group) {
    for_taps(p, flat_index(p, 0, 0, h), 0, p.kernel_size, lane, [&](int k, float factor) {
      dtap[k] = factor == 0.0f ? 0.0f : dtap[k] * factor;
      along += along_term(filter.kind, dtap[k], filter.at(k), filter.stats);
    });
  }
  along = group_sum(along, kFilterLanes);
  __syncwarp();
  if (!first_group) return;
  T* to = static_cast<T*>(p.dweight) + h * p.dweight_stride_h;
  for (int k = lane; k < p.kernel_size; k += kFilterLanes) {
    to[k * p.dweight_stride_k] =
        from_float<T>(normalize_backward(filter.kind, dtap[k], filter.at(k), filter.stats, along));
  }
}

// ------------------------------------------------------------------------------------------------ launches

// lightconv's gradient from the slabs in the workspace. An empty batch has no slabs; its gradient is zero.
template <class T>
cudaError_t finish_light_weight_gradient(const ConvBackwardParams& p, int64_t slabs, cudaStream_t stream) {
  int64_t distance = static_cast<int64_t>(p.heads) * p.kernel_size;
  if (slabs > kSlabsOfPart) {
    const cudaError_t error = add_slabs(static_cast<float*>(p.workspace), slabs, distance, stream);
    if (error != cudaSuccess) return error;
    distance *= kSlabsOfPart, slabs = divide_up(slabs, int64_t{kSlabsOfPart});
  }
  return launch_blocks(finish_light_weight_gradient_kernel<T>, p.heads, kFinishThreads, kFinishThreads * sizeof(float),
                       stream, p, slabs, distance);
}

template <class T, bool kDynamic, int V>
cudaError_t tiled_weight_gradient(const ConvBackwardParams& p, cudaStream_t stream) {
  const auto launch = [&](auto* kernel, const GradientTile& tile) {
    return launch_blocks(kernel, tile.blocks, kGradientThreads, tile.shared_bytes, stream, p, tile);
  };
  if constexpr (kDynamic) {
    return launch(dynamic_weight_gradient_kernel<T, V>, dynamic_gradient_tile<T, V>(p));
  } else {
    return launch(light_weight_gradient_kernel<T, V>, light_gradient_tile<T, V>(p));
  }
}

}  // namespace lightconv
