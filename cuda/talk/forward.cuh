// talkconv's forward pass and step on any device and for any type: one launch.
//
// The rows of x are grouped in blocks of 4 (quads) and 16 (sixteens), counted from row 0 of the data. A window is the
// sum, in this order, of rows up to the next quad, of quads up to the next 16, of sixteens, quads, rows: for L = R = 31
// about nine numbers instead of 32. A block of threads stages the rows that its windows reach, computes their quads and
// sixteens once, and then each thread sums its windows. A window that reaches beyond the staged rows is summed from
// memory, in the same order. So the bits of an output depend only on the rows in its window and on their positions.
//
// Shared memory per row and channel: an element of x's type, a quarter and a sixteenth of a float.
#pragma once

#include "talk/windows.cuh"

namespace lightconv {

constexpr int kTalkThreads = 256;
constexpr int kTalkRows = 4;  // of a thread
// With this few steps, there is nothing to share.
constexpr int kTalkFewSteps = 8;

struct TalkTile {
  int vectors = 0;      // channel vectors of a block
  int lanes = 0;        // threads for each of them
  int rows = 0;         // lanes * kTalkRows time steps
  int groups = 0;       // blocks along the channels
  int staged = 0;       // rows that fit into shared memory, a multiple of 16; 0: everything is read from memory
  int before = 0;       // the most staged rows before the block's first step
  int64_t blocks = 0;
  int shared_bytes = 0;
};

template <int V>
__device__ __forceinline__ void add_to(float (&sum)[V], const float (&values)[V]) {
#pragma unroll
  for (int v = 0; v < V; ++v) sum[v] += values[v];
}

// Sources of rows, of the quad that begins with row s, and of the sixteen that begins with row s.
template <class T, int V>
struct MemorySource {
  const TalkParams& p;
  int64_t b;
  int c;

  __device__ __forceinline__ void row(int s, float (&values)[V]) const {
    widen(talk_row<T, V>(p, s, b, c), values);
  }
  __device__ __forceinline__ void quad(int s, float (&values)[V]) const {
    row(s, values);
#pragma unroll
    for (int i = 1; i < 4; ++i) {
      float next[V];
      row(s + i, next);
      add_to(values, next);
    }
  }
  __device__ __forceinline__ void sixteen(int s, float (&values)[V]) const {
    quad(s, values);
#pragma unroll 1
    for (int i = 4; i < 16; i += 4) {
      float next[V];
      quad(s + i, next);
      add_to(values, next);
    }
  }
};

template <class T, int V>
struct SharedSource {
  const T* rows;         // of this thread's vector, row `start` first
  const float* quads;
  const float* sixteens;
  int start, pitch;

  __device__ __forceinline__ void row(int s, float (&values)[V]) const {
    widen(load_pack<T, V>(rows + (s - start) * pitch), values);
  }
  __device__ __forceinline__ void quad(int s, float (&values)[V]) const {
    widen(load_pack<float, V>(quads + (s - start) / 4 * pitch), values);
  }
  __device__ __forceinline__ void sixteen(int s, float (&values)[V]) const {
    widen(load_pack<float, V>(sixteens + (s - start) / 16 * pitch), values);
  }
};

template <int V, class Source>
__device__ __forceinline__ void window_sum(const Source& source, const Window& window, float (&sum)[V]) {
#pragma unroll
  for (int v = 0; v < V; ++v) sum[v] = 0.0f;
  float values[V];
  int s = window.first;
  const auto add_rows = [&](bool up_to_quad) {
#pragma unroll 1
    for (; s < window.last && !(up_to_quad && (s & 3) == 0); ++s) {
      source.row(s, values);
      add_to(sum, values);
    }
  };
  const auto add_quads = [&](bool up_to_sixteen) {
#pragma unroll 1
    for (; s + 4 <= window.last && !(up_to_sixteen && (s & 15) == 0); s += 4) {
      source.quad(s, values);
      add_to(sum, values);
    }
  };
  add_rows(true);
  add_quads(true);
#pragma unroll 1
  for (; s + 16 <= window.last; s += 16) {
    source.sixteen(s, values);
    add_to(sum, values);
  }
  add_quads(false);
  add_rows(false);
  if (window.before != 0.0f) {
    source.row(window.first - 1, values);
#pragma unroll
    for (int v = 0; v < V; ++v) sum[v] = fmaf(window.before, values[v], sum[v]);
  }
  if (window.after != 0.0f) {
    source.row(window.last, values);
#pragma unroll
    for (int v = 0; v < V; ++v) sum[v] = fmaf(window.after, values[v], sum[v]);
  }
}

template <class T, int V>
__global__ void __launch_bounds__(kTalkThreads, 3)
    talk_forward_kernel(const __grid_constant__ TalkParams p, const TalkTile tile) {
  LIGHTCONV_DYNAMIC_SHARED(float, shared);
  const int pitch = tile.vectors * V;
  float* quads = shared;
  float* sixteens = quads + tile.staged / 4 * pitch;
  T* rows = reinterpret_cast<T*>(sixteens + tile.staged / 16 * pitch);
  Range* ranges = after<Range>(rows, tile.staged * pitch);

  const int64_t block = blockIdx.x, rest = block / tile.groups;
  const int vector0 = static_cast<int>(block % tile.groups) * tile.vectors;
  const int vectors = min(tile.vectors, p.channels / V - vector0);
  const int64_t b = rest % p.batch;
  const int row0 = static_cast<int>(rest / p.batch) * tile.rows, steps = static_cast<int>(p.steps);
  const int v = static_cast<int>(threadIdx.x) % tile.vectors, lane = static_cast<int>(threadIdx.x) / tile.vectors;
  const bool busy = v < vectors && lane < tile.lanes;
  const int c = (vector0 + v) * V;

  Window windows[kTalkRows];
  Range range;
#pragma unroll
  for (int k = 0; k < kTalkRows; ++k) {
    const int t = row0 + lane + k * tile.lanes;
    windows[k] = empty_window();
    if (!busy || t >= steps) continue;
    const Span span = sequence_span(p, b, t);
    windows[k] = forward_window<T>(p, t, b, c / (p.channels / p.heads), t, static_cast<int>(span.begin),
                                   static_cast<int>(span.end));
    range.add(windows[k].least(), windows[k].most());
  }
  int start = 0, stop = 0;
  if (tile.staged > 0) {
    range = block_range(range, ranges);
    if (range.low < range.high) {
      start = max(range.low, row0 - tile.before) & ~15;
      stop = range.high < start + tile.staged ? (range.high + 15) & ~15 : start + tile.staged;
    }
    stage_rows<T, V>(rows, pitch, stop - start, start, -p.state_rows, steps, vectors,
                     [&](int row, int v) { return talk_row<T, V>(p, start + row, b, (vector0 + v) * V); });
    // Sums of four rows, and of four quads.
    const auto sum_fours = [&](auto* from, float* to, int count) {
      __syncthreads();
      for (int at = threadIdx.x; at < count * vectors; at += blockDim.x) {
        const int four = at / vectors, offset = (at - four * vectors) * V;
        float sum[V], next[V];
        widen(load_pack<std::remove_reference_t<decltype(*from)>, V>(from + four * 4 * pitch + offset), sum);
#pragma unroll
        for (int i = 1; i < 4; ++i) {
          widen(load_pack<std::remove_reference_t<decltype(*from)>, V>(from + (four * 4 + i) * pitch + offset), next);
          add_to(sum, next);
        }
        store_pack(to + four * pitch + offset, narrow<float, V>(sum));
      }
    };
    sum_fours(rows, quads, (stop - start) / 4);
    sum_fours(quads, sixteens, (stop - start) / 16);
    __syncthreads();
  }

  const float scale = talk_scale(p);
  T* out = static_cast<T*>(p.out.data) + b * p.out.stride_b + c;
  const SharedSource<T, V> staged{rows + v * V, quads + v * V, sixteens + v * V, start, pitch};
  const MemorySource<T, V> memory{p, b, c};
#pragma unroll 1
  for (int k = 0; k < kTalkRows; ++k) {
    const int t = row0 + lane + k * tile.lanes;
    if (!busy || t >= steps) break;
    Window window = windows[0];
#pragma unroll
    for (int i = 1; i < kTalkRows; ++i) {
      if (k == i) window = windows[i];  // registers cannot be indexed
    }
    float sum[V];
    if (window.least() >= start && window.most() <= stop) {
      window_sum(staged, window, sum);
    } else {
      window_sum(memory, window, sum);
    }
#pragma unroll
    for (int e = 0; e < V; ++e) sum[e] *= scale;
    store_pack(out + t * p.out.stride_t, narrow<T, V>(sum));
  }

  if (p.next_state.data == nullptr || row0 != 0 || !busy) return;
  const int seen = steps + p.state_rows, kept = min(seen, p.max_left);
  T* next = static_cast<T*>(p.next_state.data) + b * p.next_state.stride_b + c;
  for (int row = lane; row < kept; row += tile.lanes) {
    store_pack(next + row * p.next_state.stride_t, talk_row<T, V>(p, steps - kept + row, b, c));
  }
}

// ------------------------------------------------------------------------------------------------ launches

// Host: few vectors, so that tiles are long, but enough for neighbouring threads to read neighbouring bytes. Calls of
// few steps use more vectors. The choice does not change the output.
template <class T, int V>
TalkTile talk_tile(const TalkParams& p) {
  TalkTile tile;
  const int all = p.channels / V;
  tile.vectors = V == 1 ? 32 : 8;
  while (tile.vectors < kTalkThreads && kTalkThreads / tile.vectors * kTalkRows / 2 >= p.steps) tile.vectors *= 2;
  tile.vectors = all < tile.vectors ? all : tile.vectors;
  tile.lanes = kTalkThreads / tile.vectors;
  tile.rows = tile.lanes * kTalkRows;
  tile.groups = divide_up(all, tile.vectors);
  tile.blocks = divide_up(p.steps, static_cast<int64_t>(tile.rows)) * p.batch * tile.groups;
  const auto bytes = [&](int64_t rows) {
    const int64_t pitch = tile.vectors * V;
    return rows * pitch * static_cast<int64_t>(sizeof(T)) + rows / 4 * pitch * 4 + rows / 16 * pitch * 4 + 8 +
           kTalkThreads / 32 * static_cast<int64_t>(sizeof(Range));
  };
  // Room for windows of twice the usual reach, of the usual reach, or as much as fits. (2 * 16: both ends are rounded.)
  const int64_t steps = p.steps < tile.rows ? p.steps : tile.rows;
  int64_t left = p.max_left, right = p.max_right;
  const auto wanted = [&] { return (steps + left + right + 2 * 16) / 16 * 16; };
  left *= 2, right *= 2;
  while (left + right > 0 && bytes(wanted()) > kSharedBytes) left /= 2, right /= 2;
  if (p.steps > kTalkFewSteps && bytes(wanted()) <= kSharedBytes) {
    tile.staged = static_cast<int>(wanted());
    tile.before = static_cast<int>(left);
    tile.shared_bytes = static_cast<int>(bytes(wanted()));
  }
  return tile;
}

template <class T, int V>
cudaError_t launch_talk_forward(const TalkParams& p, cudaStream_t stream) {
  const TalkTile tile = talk_tile<T, V>(p);
  return launch_blocks(talk_forward_kernel<T, V>, tile.blocks, round_up(tile.vectors * tile.lanes, 32),
                       tile.shared_bytes, stream, p, tile);
}

// Whether channels can be moved four at a time, with all four in one head.
template <class T>
bool talk_wide(const TalkParams& p) {
  constexpr int size = sizeof(T), bytes = kTalkVector * sizeof(T);
  return p.channels / p.heads % kTalkVector == 0 && aligned(p.x, size, bytes) && aligned(p.state, size, bytes) &&
         aligned(p.out, size, bytes) && aligned(p.next_state, size, bytes);
}

inline bool talk_band_forward_can_run(const TalkParams& p) {
  return p.state_rows == 0 && p.next_state.data == nullptr && talk_band_forward_supported(p);
}

template <class T>
cudaError_t talk_tiles_forward(const TalkParams& p, cudaStream_t stream) {
  return talk_wide<T>(p) ? launch_talk_forward<T, kTalkVector>(p, stream) : launch_talk_forward<T, 1>(p, stream);
}

template <class T>
constexpr Path<TalkParams> kTalkForward[2] = {
    {"band", kTalkBandNeeds, talk_band_forward_can_run, talk_band_forward},
    {"tiles", "", always<TalkParams>, talk_tiles_forward<T>},
};

template <class T>
cudaError_t talk_forward_of(const TalkParams& p, cudaStream_t stream) {
  return first_of(kTalkForward<T>, p).run(p, stream);
}

}  // namespace lightconv
