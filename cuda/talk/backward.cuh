// talkconv's gradients: three kernels. Where it is supported, the kernel of talk_band.cu replaces the second and third.
//
//   reaches   which rows the windows of each 16 outputs reach, so that the owner of a row of x finds far ones, too
//   dx        dx[s] = 1/(L+R+1) * sum over the outputs t, in order, of coef(t, s) * grad[t]. A thread owns S rows of a
//             vector of channels. Outputs come in chunks with their windows; most windows contain all S rows or none
//   offsets   da[t] = max/(L+R+1) * sum over a head's channels of grad[t] * x[the row that is partly in the window]
#pragma once

#include "talk/forward.cuh"

namespace lightconv {

constexpr int kDxThreads = 128;
constexpr int kDxRows = 8;    // of a thread
constexpr int kDxChunk = 32;  // outputs at a time
constexpr int kReachThreads = 256, kReachHeads = 4;
constexpr int kOffsetThreads = 256;  // `offset_lanes` of them for each output of a head

// ------------------------------------------------------------------------------------------------ reaches

// A block: kReachSegment outputs of some heads of one b; a thread: kReachRows of one head.
template <class T>
__global__ void __launch_bounds__(kReachThreads, 4)
    talk_reaches_kernel(const __grid_constant__ TalkParams p, const Reaches reaches) {
  LIGHTCONV_DYNAMIC_SHARED(Range, ranges);
  const int groups = divide_up(p.heads, kReachHeads);
  const int64_t block = blockIdx.x, rest = block / groups;
  const int64_t b = rest % p.batch;
  const int segment = static_cast<int>(rest / p.batch), thread = static_cast<int>(threadIdx.x);
  const int head = static_cast<int>(block % groups) * kReachHeads + thread % kReachHeads;
  const int chunk = segment * (kReachSegment / kReachRows) + thread / kReachHeads;
  const int steps = static_cast<int>(p.steps);
  Range range;
  if (head < p.heads && chunk < reaches.chunks) {
    const int t0 = chunk * kReachRows;
    Span span = sequence_span(p, b, t0);
    for (int t = t0; t < min(t0 + kReachRows, steps); ++t) {
      if (p.cu_seqlens != nullptr && t >= span.end) span = sequence_span(p, b, t);
      bool unknown;
      const Window window =
          window_of<T>(p, t, b, head, t, static_cast<int>(span.begin), static_cast<int>(span.end), unknown);
      range.add(window.least(), window.most());
    }
    reaches.of_head(p, b, head)[chunk] = range;
  }
  ranges[thread] = range;
  __syncthreads();
  if (thread >= kReachHeads || head >= p.heads) return;
  for (int at = thread + kReachHeads; at < kReachThreads; at += kReachHeads) range.add(ranges[at].low, ranges[at].high);
  reaches.of_head(p, b, head)[reaches.chunks + segment] = range;
}

template <class T>
cudaError_t find_reaches(const TalkBackwardParams& p, cudaStream_t stream) {
  static_assert(kReachSegment / kReachRows * kReachHeads == kReachThreads);
  const Reaches reaches = Reaches::of(p);
  const int64_t blocks = reaches.segments * p.batch * divide_up(p.heads, kReachHeads);
  return launch_blocks(talk_reaches_kernel<T>, blocks, kReachThreads, kReachThreads * sizeof(Range), stream, p,
                       reaches);
}

// ------------------------------------------------------------------------------------------------ dx

struct DxTile {
  int vectors = 0;   // channel vectors of a block
  int threads = 0;
  int rows = 0;      // of x, a multiple of kDxRows
  int heads = 0;     // the most heads that have channels among them
  int groups = 0;    // blocks along the channels
  int64_t blocks = 0;
  int shared_bytes = 0;
};

template <class T, int V>
__global__ void __launch_bounds__(kDxThreads, 4)
    talk_dx_kernel(const __grid_constant__ TalkBackwardParams p, const DxTile tile, const Reaches reaches) {
  constexpr int S = kDxRows;
  LIGHTCONV_DYNAMIC_SHARED(Window, windows);
  const int pitch = tile.vectors * V;
  T* grads = reinterpret_cast<T*>(windows + kDxChunk * tile.heads);
  Range* ranges = after<Range>(grads, kDxChunk * pitch);

  const int64_t block = blockIdx.x, rest = block / tile.groups;
  const int vector0 = static_cast<int>(block % tile.groups) * tile.vectors;
  const int vectors = min(tile.vectors, p.channels / V - vector0);
  const int64_t b = rest % p.batch;
  const int row0 = static_cast<int>(rest / p.batch) * tile.rows - p.state_rows, steps = static_cast<int>(p.steps);
  const int channels_of_head = p.channels / p.heads, head0 = vector0 * V / channels_of_head;
  const int heads = ((vector0 + vectors) * V - 1) / channels_of_head + 1 - head0;
  const int v = static_cast<int>(threadIdx.x) % tile.vectors, micro = static_cast<int>(threadIdx.x) / tile.vectors;
  const int s0 = row0 + micro * S, c = (vector0 + v) * V;
  const bool busy = v < vectors && micro * S < tile.rows && s0 < steps;
  const int head = busy ? c / channels_of_head - head0 : 0;

  float sums[S][V];
#pragma unroll
  for (int i = 0; i < S; ++i) {
#pragma unroll
    for (int e = 0; e < V; ++e) sums[i][e] = 0.0f;
  }
  Range outputs;
  if (p.grad.data != nullptr) {
    outputs = find_outputs(p, reaches, b, head0, heads, row0, min(row0 + tile.rows, steps), ranges);
  }
  for (int t0 = outputs.low; t0 < outputs.high; t0 += kDxChunk) {
    const int count = min(outputs.high - t0, kDxChunk);
    if (t0 > outputs.low) __syncthreads();
    stage_rows<T, V>(grads, pitch, count, t0, 0, steps, vectors, p.grad, b, vector0 * V);
    for (int at = threadIdx.x; at < count * heads; at += blockDim.x) {
      const int i = at / heads, h = at - i * heads, t = t0 + i;
      const Span span = sequence_span(p, b, t);
      bool unknown;
      windows[i * tile.heads + h] =
          window_of<T>(p, t, b, head0 + h, t, static_cast<int>(span.begin), static_cast<int>(span.end), unknown);
    }
    __syncthreads();
    if (!busy) continue;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const Window window = windows[i * tile.heads + head];
      // The position of the thread's rows in the window.
      const int at = s0 - window.first, whole = window.last - window.first;
      if (at < -S || at > whole) continue;
      float grad[V];
      widen(load_pack<T, V>(grads + i * pitch + v * V), grad);
      if (at >= 0 && at + S <= whole) {
#pragma unroll
        for (int row = 0; row < S; ++row) add_to(sums[row], grad);
        continue;
      }
#pragma unroll
      for (int row = 0; row < S; ++row) {
        const float coefficient = window.coefficient(s0 + row);
        if (coefficient == 0.0f) continue;
#pragma unroll
        for (int e = 0; e < V; ++e) sums[row][e] = fmaf(coefficient, grad[e], sums[row][e]);
      }
    }
  }
  if (!busy) return;

  const float scale = talk_scale(p);
  const int seen = steps + p.state_rows, kept = min(seen, p.max_left);
#pragma unroll
  for (int row = 0; row < S; ++row) {
    const int s = s0 + row;
    const MutableRows& to = s < 0 ? p.dstate : p.dx;
    if (s >= steps || to.data == nullptr) continue;
#pragma unroll
    for (int e = 0; e < V; ++e) sums[row][e] *= scale;
    if (p.grad_state.data != nullptr && s >= steps - kept) {
      float more[V];
      widen(load_row<T, V>(p.grad_state, s - steps + kept, b, c), more);
      add_to(sums[row], more);
    }
    T* data = static_cast<T*>(to.data) + static_cast<int64_t>(s < 0 ? s + p.state_rows : s) * to.stride_t;
    store_pack(data + b * to.stride_b + c, narrow<T, V>(sums[row]));
  }
}

template <class T, int V>
cudaError_t launch_talk_dx(const TalkBackwardParams& p, cudaStream_t stream) {
  DxTile tile;
  const int all = p.channels / V, widest = V == 1 ? 32 : 16;
  tile.vectors = all < widest ? all : widest;
  tile.heads = heads_touched(p, tile.vectors, V);
  tile.groups = divide_up(all, tile.vectors);
  const int64_t rows = p.steps + p.state_rows;
  int micros = kDxThreads / tile.vectors;
  while (micros > 1 && (micros + 1) / 2 * kDxRows >= rows) micros = (micros + 1) / 2;
  tile.rows = micros * kDxRows;
  tile.threads = round_up(micros * tile.vectors, 32);
  tile.blocks = divide_up(rows, static_cast<int64_t>(tile.rows)) * p.batch * tile.groups;
  tile.shared_bytes = kDxChunk * tile.heads * static_cast<int>(sizeof(Window)) +
                      round_up(kDxChunk * tile.vectors * V * static_cast<int>(sizeof(T)), 8) +
                      tile.threads / 32 * static_cast<int>(sizeof(Range));
  return launch_blocks(talk_dx_kernel<T, V>, tile.blocks, tile.threads, tile.shared_bytes, stream, p, tile,
                       Reaches::of(p));
}

// ------------------------------------------------------------------------------------------------ offsets

template <class T, int V>
__global__ void __launch_bounds__(kOffsetThreads)
    talk_offsets_kernel(const __grid_constant__ TalkBackwardParams p, const int width) {
  const int64_t item = (static_cast<int64_t>(blockIdx.x) * kOffsetThreads + threadIdx.x) / width;
  const int head = static_cast<int>(item % p.heads);
  const int64_t rest = item / p.heads, b = rest % p.batch, t = rest / p.batch;
  const int lane = static_cast<int>(threadIdx.x) % width, channels = p.channels / p.heads, channel0 = head * channels;
  Window window = empty_window();
  if (t < p.steps) {
    const Span span = sequence_span(p, b, t);
    window = offset_window<T>(p, t, b, head, static_cast<int>(t), static_cast<int>(span.begin),
                              static_cast<int>(span.end));
  }
  float sums[1];
  offset_sums<T, V>(
      sums, channels, lane, width, [&](int) { return window; },
      [&](int, int c) { return load_row<T, V>(p.grad, t, b, channel0 + c); },
      [&](int, int s, int c) { return talk_row<T, V>(p, s, b, channel0 + c); });
  if (t < p.steps) OffsetWriter<T>(p, b, head, lane, width).write(t, sums[0]);
}

template <class T, int V>
cudaError_t launch_talk_offsets(const TalkBackwardParams& p, cudaStream_t stream) {
  const int width = offset_lanes(p, V);
  const int64_t blocks = divide_up(p.steps * p.batch * p.heads, static_cast<int64_t>(kOffsetThreads / width));
  return launch_blocks(talk_offsets_kernel<T, V>, blocks, kOffsetThreads, 0, stream, p, width);
}

// ------------------------------------------------------------------------------------------------ launches

template <class T>
bool talk_backward_wide(const TalkBackwardParams& p) {
  constexpr int size = sizeof(T), bytes = kTalkVector * sizeof(T);
  return talk_wide<T>(p) && aligned(p.grad, size, bytes) && aligned(p.grad_state, size, bytes) &&
         aligned(p.dx, size, bytes) && aligned(p.dstate, size, bytes);
}

inline bool talk_band_backward_can_run(const TalkBackwardParams& p) {
  return p.state_rows == 0 && p.grad_state.data == nullptr && talk_band_backward_supported(p);
}

// dx, and the gradients of offsets where they are read in whole vectors.
template <class T>
cudaError_t talk_band_gradients(const TalkBackwardParams& p, cudaStream_t stream) {
  TalkBackwardParams call = p;
  if (!offsets_wide<T>(p)) call.dleft = call.dright = {};
  return talk_band_backward(call, stream);
}

template <class T>
cudaError_t talk_tiles_gradient(const TalkBackwardParams& p, cudaStream_t stream) {
  return talk_backward_wide<T>(p) ? launch_talk_dx<T, kTalkVector>(p, stream) : launch_talk_dx<T, 1>(p, stream);
}

template <class T>
constexpr Path<TalkBackwardParams> kTalkBackward[2] = {
    {"band", kTalkBandNeeds, talk_band_backward_can_run, talk_band_gradients<T>},
    {"tiles", "", always<TalkBackwardParams>, talk_tiles_gradient<T>},
};

template <class T>
cudaError_t talk_backward_of(const TalkBackwardParams& p, cudaStream_t stream) {
  const bool wide_offsets = offsets_wide<T>(p);
  bool offsets = p.dleft.data != nullptr || p.dright.data != nullptr;
  cudaError_t error = cudaSuccess;
  if (p.dx.data != nullptr || p.dstate.data != nullptr) {
    if (p.grad.data != nullptr) error = find_reaches<T>(p, stream);
    if (error != cudaSuccess) return error;
    const Path<TalkBackwardParams>& path = first_of(kTalkBackward<T>, p);
    error = path.run(p, stream);
    offsets = offsets && !(wide_offsets && path.run == talk_band_gradients<T>);
  }
  if (error != cudaSuccess || !offsets) return error;
  return wide_offsets ? launch_talk_offsets<T, kTalkVector>(p, stream) : launch_talk_offsets<T, 1>(p, stream);
}

template <class T>
std::string explain_talk(const TalkBackwardParams& p, bool backward) {
  return backward ? explained(kTalkBackward<T>, p) : explained(kTalkForward<T>, static_cast<const TalkParams&>(p));
}

}  // namespace lightconv
