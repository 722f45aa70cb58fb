// Tiles in shared memory: the parts that the kernels of the forward and the backward pass are made of.
//
// A block owns one batch element b, `rows` time steps and `vectors` neighbouring channel vectors (V channels each: 16
// bytes, or one). It keeps in shared memory
//   the rows of u (or of the gradient) that its steps see: (rows + taps - 1) x vectors x V, in the tensor's type
//   the filters of its steps and heads, normalised and dropped, in float: `taps` of them; a larger K comes in chunks
// and each of its threads S steps of one vector in registers. From one row of shared memory a thread feeds up to S
// outputs: per row and vector 16 bytes of data, S floats of weights, S * V multiply-adds.
// What must not be read (padding, another sequence, rows that do not exist) is zero, or left out of the sums.
#pragma once

#include "convolution/arithmetic.cuh"

namespace lightconv {

// Lanes that share the work on one filter. The order of its sums depends on this and K only.
constexpr int kFilterLanes = 8;
// Taps of a chunk where K is not a constant of the kernel.
constexpr int kChunkTaps = 64;

// Steps of a thread; one each in calls of few steps.
constexpr int kSteps = 8, kFewSteps = 4;
// What the host decides about a launch.
struct Tile {
  int rows = 0;        // time steps of a block, a multiple of S
  int vectors = 0;     // channel vectors of a block
  int heads = 0;       // the most heads that have channels among them
  int taps = 0;        // of a chunk
  int pitch = 0;       // floats of one filter in shared memory (what that means: see each kernel)
  int groups = 0;      // blocks along the channels
  int threads = 0;     // of a block, a multiple of 32
  int64_t blocks = 0;
  int shared_bytes = 0;
};

// Where a block is: batch element, first row, first channel vector, and the heads those channels belong to.
struct Place {
  int64_t b, row;
  int vector, vectors, head, heads;
};

// Neighbouring blocks differ in their channels, then in b, then in time, as rows lie in memory.
template <int V>
__device__ inline Place block_place(const ConvParams& p, const Tile& tile, int64_t first_row) {
  const int64_t block = blockIdx.x;
  const int64_t rest = block / tile.groups;
  const int channels_of_head = p.channels / p.heads;
  Place place;
  place.vector = static_cast<int>(block % tile.groups) * tile.vectors;
  place.vectors = min(tile.vectors, p.channels / V - place.vector);
  place.b = rest % p.batch;
  place.row = first_row + rest / p.batch * tile.rows;
  place.head = place.vector * V / channels_of_head;
  place.heads = ((place.vector + place.vectors) * V - 1) / channels_of_head + 1 - place.head;
  return place;
}

// Host: bytes of `floats` floats, `elements` of type T and `spans` spans, in this order.
template <class T>
int tile_bytes(int floats, int elements, int spans) {
  return floats * 4 + round_up(elements * static_cast<int>(sizeof(T)), 8) + spans * 8;
}

// ------------------------------------------------------------------------------------------------ rows

template <class T, int V>
__device__ __forceinline__ Pack<T, V> load_gradient(const ConvBackwardParams& p, int64_t t, int64_t b, int c) {
  return load_row<T, V>(p.grad, t, b, c);
}

// For each row of a tile, the rows [x, y) of its sequence counted from `origin`, cut to 0 ... limit; none for rows
// that do not exist.
__device__ inline void stage_spans(int2* spans, const ConvParams& p, int64_t b, int64_t first, int rows,
                                   int64_t origin, int limit) {
  for (int row = threadIdx.x; row < rows; row += blockDim.x) {
    const int64_t t = first + row;
    int2 span = make_int2(0, 0);
    if (t < p.steps) {
      const Span full = sequence_span(p, b, t);
      const int64_t x = full.begin - origin, y = full.end - origin;
      span = make_int2(static_cast<int>(x < 0 ? 0 : x < limit ? x : limit),
                       static_cast<int>(y < 0 ? 0 : y < limit ? y : limit));
    }
    spans[row] = span;
  }
}

// ------------------------------------------------------------------------------------------------ launches

// Host: the largest tile of S steps a thread that fits; the taps are halved only when even the smallest does not. With
// `taps_fixed` (a kernel for one K) there is no tile (blocks 0) then. `rows` outputs in all; `Layout` says what filters
// a kernel keeps in shared memory: pitch(taps) floats for each of filter_rows(rows, taps) rows and each head.
template <class T, int V, int S, class Layout>
Tile choose_tile(const ConvParams& p, int64_t rows, bool taps_fixed, Layout layout) {
  Tile tile;
  const int all = p.channels / V;
  const int widest = V == 1 || S == 1 ? 32 : 16;
  tile.vectors = all < widest ? all : widest;
  tile.heads = heads_touched(p, tile.vectors, V);
  tile.groups = divide_up(all, tile.vectors);
  tile.taps = taps_fixed || p.kernel_size < kChunkTaps ? p.kernel_size : kChunkTaps;
  for (;; tile.taps = divide_up(tile.taps, 2)) {
    tile.pitch = p.dynamic ? layout.pitch(tile.taps) : tile.taps;
    for (tile.rows = 128 / widest * S; tile.rows >= S; tile.rows /= 2) {
      if (tile.rows > S && tile.rows / 2 >= rows) continue;
      const int filter_rows = p.dynamic ? layout.filter_rows(tile.rows, tile.taps) : 1;
      tile.shared_bytes = tile_bytes<T>(round_up(filter_rows * tile.heads * tile.pitch, 4),
                                        (tile.rows + tile.taps - 1) * tile.vectors * V,
                                        p.cu_seqlens != nullptr ? tile.rows : 0);
      if (tile.shared_bytes > kSharedBytes) continue;
      tile.threads = round_up(tile.vectors * (tile.rows / S), 32);
      tile.blocks = divide_up(rows, static_cast<int64_t>(tile.rows)) * p.batch * tile.groups;
      return tile;
    }
    if (taps_fixed) return Tile{};
  }
}

// Host: launches a kernel of tiles for `rows` outputs: kernel(K) for a K that has code of its own, else kernel(0), each
// a std::integral_constant. The paper's larger kernels have it in float32 (half types have the tensor cores for them).
template <class T, int V, int S, class Params, class Layout, class KernelOf>
cudaError_t launch_tiles(const Params& p, int64_t rows, Layout layout, KernelOf kernel_of, cudaStream_t stream) {
  const auto launch = [&](auto size, const Tile& tile) {
    return launch_blocks(kernel_of(size), tile.blocks, tile.threads, tile.shared_bytes, stream, p, tile);
  };
  if constexpr (V > 1 && S > 1 && std::is_same_v<T, float>) {
    const Tile tile = choose_tile<T, V, S>(p, rows, true, layout);
    if (tile.blocks > 0) {
      switch (p.kernel_size) {
        case 15: return launch(std::integral_constant<int, 15>{}, tile);
        case 31: return launch(std::integral_constant<int, 31>{}, tile);
        case 63: return launch(std::integral_constant<int, 63>{}, tile);
      }
    }
  }
  return launch(std::integral_constant<int, 0>{}, choose_tile<T, V, S>(p, rows, false, layout));
}

// Host: run(dynamic, V), std::integral_constants: for the operator, and with rows moved a vector at a time or one
// channel.
template <class T, class Run>
cudaError_t with_constants(const ConvParams& p, bool wide, Run run) {
  using Wide = std::integral_constant<int, kWide<T>>;
  using One = std::integral_constant<int, 1>;
  if (p.dynamic) return wide ? run(std::true_type{}, Wide{}) : run(std::true_type{}, One{});
  return wide ? run(std::false_type{}, Wide{}) : run(std::false_type{}, One{});
}

// ------------------------------------------------------------------------------------------------ filters

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
  if (p.seed == nullptr) {
    for (int k = begin + lane; k < end; k += kFilterLanes) each(k, 1.0f);
    return;
  }
  const uint64_t seed = static_cast<uint64_t>(*p.seed);
  for (uint64_t quad = (flat + begin) / 4 + lane; quad * 4 < flat + end; quad += kFilterLanes) {
    const float4 factors = dropout_factors(p, quad, seed);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int64_t k = static_cast<int64_t>(quad * 4 + e) - static_cast<int64_t>(flat);
      if (k >= begin && k < end) each(static_cast<int>(k), component(factors, e));
    }
  }
}

// Filters of `rows` x `heads` (of one row where the operator is lightconv), taps [begin, end), into shared memory:
// put(row, head, k, value). Those of rows outside [0, T) are 0. `row` counts from `first`, `head` from place.head.
template <class T, class Put>
__device__ __forceinline__ void stage_filters(const ConvParams& p, const Place& place, int64_t first, int rows,
                                              int begin, int end, Put put) {
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
      for_taps(p, flat_index(p, t, place.b, place.head + h), begin, end, lane,
               [&](int k, float factor) { put(row, h, k, factor == 0.0f ? 0.0f : filter.value(k) * factor); });
    } else if (at < total) {
      for (int k = begin + lane; k < end; k += kFilterLanes) put(row, h, k, 0.0f);
    }
  }
}

// ------------------------------------------------------------------------------------------------ sums over taps

// acc[i] += sum over rows m with i <= m < i + taps of weights(m, i) * rows[m]: a correlation of S neighbouring outputs
// with taps + S - 1 rows. `rows` points at the thread's vector in its first row. `spans`, if not null, limits output
// i to rows [spans[i].x, spans[i].y), counted from `rows` + row_of_spans.
template <class T, int V, int S, int K, class Weights>
__device__ __forceinline__ void correlate(float (&acc)[S][V], const T* rows, int pitch, int runtime_taps,
                                          const Weights& weights, const int2* spans, int row_of_spans) {
  const int taps = K > 0 ? K : runtime_taps;
  if (spans != nullptr) {
    bool whole = true;
#pragma unroll
    for (int i = 0; i < S; ++i) whole &= spans[i].x <= row_of_spans && spans[i].y >= row_of_spans + taps + S - 1;
    if (!whole) {
#pragma unroll 1
      for (int m = 0; m < taps + S - 1; ++m) {
        float x[V];
        widen(load_pack<T, V>(rows + m * pitch), x);
#pragma unroll
        for (int i = 0; i < S; ++i) {
          const int at = row_of_spans + m;
          if (i <= m && m - i < taps && at >= spans[i].x && at < spans[i].y) {
            const float w = weights.at(m, i);
#pragma unroll
            for (int v = 0; v < V; ++v) acc[i][v] = fmaf(w, x[v], acc[i][v]);
          }
        }
      }
      return;
    }
  }
  // The first and last S - 1 rows reach some of the outputs only.
  const auto partial = [&](int m) {
    float x[V];
    widen(load_pack<T, V>(rows + m * pitch), x);
#pragma unroll
    for (int i = 0; i < S; ++i) {
      if (i <= m && m - i < taps) {
        const float w = weights.at(m, i);
#pragma unroll
        for (int v = 0; v < V; ++v) acc[i][v] = fmaf(w, x[v], acc[i][v]);
      }
    }
  };
  constexpr int kEdge = S - 1;
  // Unrolled only where K is known, because it makes the code long.
  [[maybe_unused]] constexpr int kUnrollEdge = K > 0 ? S : 1;
#pragma unroll(kUnrollEdge)
  for (int m = 0; m < kEdge; ++m) {
    if (m < taps + S - 1) partial(m);
  }
#pragma unroll(K > 0 && K <= 15 ? 8 : 4)
  for (int m = kEdge; m < taps; ++m) {
    float x[V], w[S];
    widen(load_pack<T, V>(rows + m * pitch), x);
    weights.all(m, w);
#pragma unroll
    for (int i = 0; i < S; ++i) {
#pragma unroll
      for (int v = 0; v < V; ++v) acc[i][v] = fmaf(w[i], x[v], acc[i][v]);
    }
  }
  const int edge = taps > kEdge ? taps : kEdge;
#pragma unroll(kUnrollEdge)
  for (int d = 0; d < kEdge; ++d) {
    if (edge + d < taps + S - 1) partial(edge + d);
  }
}

// One filter for all outputs: output i and row m meet at tap m - i.
template <int S>
struct SharedWeights {
  const float* filter;
  __device__ __forceinline__ float at(int m, int i) const { return filter[m - i]; }
  __device__ __forceinline__ void all(int m, float (&w)[S]) const {
#pragma unroll
    for (int i = 0; i < S; ++i) w[i] = filter[m - i];
  }
};

// S neighbouring floats; `from` is aligned to 16 bytes where S is a multiple of 4.
template <int S>
__device__ __forceinline__ void load_floats(const float* from, float (&to)[S]) {
  if constexpr (S % 4 == 0) {
#pragma unroll
    for (int i = 0; i < S; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + i);
      to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < S; ++i) to[i] = from[i];
  }
}

}  // namespace lightconv
