// Tiles in shared memory: the building blocks of the forward and backward kernels.
//
// A block owns one batch element b, `rows` time steps and `vectors` neighbouring channel vectors (V channels each: 16
// bytes, or one). It keeps in shared memory
//   the rows of u (or of the gradient) that its steps see: (rows + taps - 1) x vectors x V, in the tensor's type
//   the filters of its steps and heads, normalised and dropped, in float: `taps` of them; a larger K comes in chunks
// and each of its threads keeps S steps of one vector in registers. A row of shared memory contributes to up to S
// outputs of a thread: per row and vector, 16 bytes of data, S floats of weights, and S * V multiply-adds.
// What must not be read (padding, another sequence, rows that do not exist) is zero, or left out of the sums.
#pragma once

#include "convolution/filters.cuh"

namespace lightconv {

// Taps of a chunk where K is not a constant of the kernel.
constexpr int kChunkTaps = 64;

// Steps of a thread; in calls of few steps, a thread has one.
constexpr int kSteps = 8, kFewSteps = 4;
// What the host decides about a launch.
struct Tile {
  int rows = 0;        // time steps of a block, a multiple of S
  int vectors = 0;     // channel vectors of a block
  int heads = 0;       // the most heads that have channels among them
  int taps = 0;        // of a chunk
  int pitch = 0;       // floats of one filter in shared memory (each kernel says what that means)
  int groups = 0;      // blocks along the channels
  int threads = 0;     // of a block, a multiple of 32
  int64_t blocks = 0;
  int shared_bytes = 0;
};

// Neighbouring blocks differ in their channels, then in b, then in time, as rows lie in memory.
template <int V>
__device__ inline Place block_place(const ConvParams& p, const Tile& tile, int64_t first_row) {
  // Division of unsigned 32-bit numbers takes the fewest instructions. (There are no blocks if the batch is empty, and
  // fewer than 2^31 otherwise, each for one b.)
  const unsigned groups = static_cast<unsigned>(tile.groups), batch = static_cast<unsigned>(p.batch);
  const unsigned rest = blockIdx.x / groups, tile_of_b = rest / batch;
  const unsigned channels_of_head = static_cast<unsigned>(p.channels) / static_cast<unsigned>(p.heads);
  Place place;
  place.vector = static_cast<int>(blockIdx.x - rest * groups) * tile.vectors;
  place.vectors = min(tile.vectors, p.channels / V - place.vector);
  place.b = rest - tile_of_b * batch;
  place.row = first_row + static_cast<int64_t>(tile_of_b) * tile.rows;
  place.head = static_cast<int>(static_cast<unsigned>(place.vector * V) / channels_of_head);
  const int last = static_cast<int>(static_cast<unsigned>((place.vector + place.vectors) * V - 1) / channels_of_head);
  place.heads = last + 1 - place.head;
  return place;
}

// Host: bytes of `floats` floats, `elements` of type T and `spans` spans, in this order.
template <class T>
int tile_bytes(int floats, int elements, int spans) {
  return floats * 4 + round_up(elements * static_cast<int>(sizeof(T)), 8) + spans * 8;
}

// ------------------------------------------------------------------------------------------------ rows

// Rows of u into shared memory, from channel c of b on: see stage_rows.
template <class T, int V>
__device__ __forceinline__ void stage_inputs(T* shared, int pitch, int count, int64_t first, const Span& span,
                                             int vectors, const ConvParams& p, int64_t b, int c) {
  if (p.state_rows == 0 && !p.glu) {
    stage_rows<T, V>(shared, pitch, count, first, span.begin, span.end, vectors, p.x, b, c);
  } else {
    stage_rows<T, V>(shared, pitch, count, first, span.begin, span.end, vectors,
                     [&](int row, int v) { return load_input<T, V>(p, first + row, b, c + v * V); });
  }
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
      span = clipped(full.begin, full.end, origin, limit);
    }
    spans[row] = span;
  }
}

// ------------------------------------------------------------------------------------------------ launches

// Host: the largest tile that fits, with S steps per thread. The taps are halved only if even the smallest tile does
// not fit; with `taps_fixed` (a kernel for one K) there is then no tile (0 blocks). There are `rows` outputs in total.
// `Layout` describes the filters that a kernel keeps in shared memory: pitch(taps) floats for each of filter_rows(rows,
// taps) rows and each head.
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

// Host: launches a kernel of tiles for `rows` outputs: kernel(K) if there is separate code for this K, else kernel(0);
// the argument is a std::integral_constant. The larger K of the paper have separate code in float32 (half types use the
// tensor cores for them).
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

// Host: calls run(dynamic, V) with std::integral_constants for the operator, and for rows moved by vectors or by single
// channels.
template <class T, class Run>
cudaError_t with_constants(const ConvParams& p, bool wide, Run run) {
  using Wide = std::integral_constant<int, kWide<T>>;
  using One = std::integral_constant<int, 1>;
  if (p.dynamic) return wide ? run(std::true_type{}, Wide{}) : run(std::true_type{}, One{});
  return wide ? run(std::false_type{}, Wide{}) : run(std::false_type{}, One{});
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
  // The first and last S - 1 rows reach only some of the outputs.
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
