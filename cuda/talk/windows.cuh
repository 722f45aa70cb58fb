// Shared by talkconv's kernels: the window of an output, and which windows reach a row (launchers.h has the
// definition).
//
// Sums of rows are never subtracted: a window is the sum of its own rows only. So nothing cancels, and NaN or infinity
// in a row affects only the windows that contain it.
#pragma once

#include "common/device.cuh"
#include "talk/launchers.h"

namespace lightconv {

// Row numbers, and sums of a few, are ints.
constexpr int kMostTalkRows = 1 << 29;
// Rows of the two levels of Reaches.
constexpr int kReachRows = 16, kReachSegment = 1024;
// Channels that are moved together where possible.
constexpr int kTalkVector = 4;

// ------------------------------------------------------------------------------------------------ windows

// The rows that output t sums: [first, last) whole, `before` times row first - 1, and `after` times row last. If
// `before` or `after` is not 0, its row is in the sequence.
struct alignas(16) Window {
  int first, last;
  float before, after;

  // Rows [least, most) are in the window, in part or whole.
  __device__ __forceinline__ int least() const { return before != 0.0f ? first - 1 : first; }
  __device__ __forceinline__ int most() const { return after != 0.0f ? last + 1 : last; }
  __device__ __forceinline__ float coefficient(int s) const {
    const int at = s - first, count = last - first;
    if (static_cast<unsigned>(at) < static_cast<unsigned>(count)) return 1.0f;
    return at == -1 ? before : at == count ? after : 0.0f;
  }
};

__device__ __forceinline__ Window empty_window() { return {kMostTalkRows, kMostTalkRows, 0.0f, 0.0f}; }

struct Reach {
  int rows;
  float part;
  bool unknown;
};

template <class T>
__device__ __forceinline__ Reach reach_of(const Offsets& offsets, int64_t t, int64_t b, int h, int most) {
  if (offsets.data == nullptr) return {0, 0.0f, false};
  const float offset = to_float(
      static_cast<const T*>(offsets.data)[t * offsets.stride_t + b * offsets.stride_b + h * offsets.stride_h]);
  const float reach = offset * static_cast<float>(most);
  if (!(reach > 0.0f)) return {0, 0.0f, offset != offset};
  if (reach >= static_cast<float>(kMostTalkRows)) return {kMostTalkRows, 0.0f, false};
  const int rows = static_cast<int>(reach);
  return {rows, reach - static_cast<float>(rows), false};
}

// The window of the output at row `row` of the data, which is row t of its sequence, whose rows are [begin, end).
// `unknown`: an offset is NaN.
template <class T>
__device__ __forceinline__ Window window_of(const TalkParams& p, int64_t row, int64_t b, int h, int t, int begin,
                                            int end, bool& unknown) {
  const Reach left = reach_of<T>(p.left, row, b, h, p.max_left), right = reach_of<T>(p.right, row, b, h, p.max_right);
  unknown = left.unknown || right.unknown;
  const int first = t - left.rows, last = t + right.rows + 1;
  return {min(max(first, begin), end), min(max(last, begin), end), first > begin && first <= end ? left.part : 0.0f,
          last >= begin && last < end ? right.part : 0.0f};
}

// The same, but if an offset is NaN, the window is the output's own row times NaN, which makes the output NaN.
template <class T>
__device__ __forceinline__ Window forward_window(const TalkParams& p, int64_t row, int64_t b, int h, int t, int begin,
                                                 int end) {
  bool unknown;
  const Window window = window_of<T>(p, row, b, h, t, begin, end, unknown);
  return unknown ? Window{t + 1, t + 1, NAN, 0.0f} : window;
}

__host__ __device__ __forceinline__ float talk_scale(const TalkParams& p) {
  return 1.0f / (static_cast<float>(p.max_left) + static_cast<float>(p.max_right) + 1.0f);
}

// Row s of x or of the state; it must exist.
template <class T, int V>
__device__ __forceinline__ Pack<T, V> talk_row(const TalkParams& p, int s, int64_t b, int c) {
  return s < 0 ? load_row<T, V>(p.state, s + p.state_rows, b, c) : load_row<T, V>(p.x, s, b, c);
}

// ------------------------------------------------------------------------------------------------ ranges of rows

// Rows [low, high); none if low >= high.
struct Range {
  int low = kMostTalkRows, high = -kMostTalkRows;

  __device__ __forceinline__ void add(int from, int to) {
    if (from >= to) return;
    low = min(low, from);
    high = max(high, to);
  }
  __device__ __forceinline__ bool meets(int from, int to) const { return low < to && high > from; }
};

__device__ __forceinline__ Range warp_range(Range range) {
  for (int distance = 16; distance > 0; distance /= 2) {
    range.low = min(range.low, __shfl_xor_sync(kFullWarp, range.low, distance));
    range.high = max(range.high, __shfl_xor_sync(kFullWarp, range.high, distance));
  }
  return range;
}

// The union of the ranges of a block's threads; `shared` has an entry for each warp. All threads call.
__device__ __forceinline__ Range block_range(Range range, Range* shared) {
  range = warp_range(range);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = range;
  __syncthreads();
  for (int warp = 0; warp < static_cast<int>(blockDim.x) / 32; ++warp) range.add(shared[warp].low, shared[warp].high);
  return range;
}

// Which rows the windows of outputs reach. With it, the owner of a row of x's gradient finds the outputs that reach the
// row. For each (b, h) there is a range for every kReachRows outputs, and one for every kReachSegment outputs. Outputs
// are counted in the data, packed or not.
struct Reaches {
  Range* data = nullptr;
  int chunks = 0, segments = 0;

  __host__ __device__ static Reaches of(const TalkBackwardParams& p) {
    return {static_cast<Range*>(p.workspace), static_cast<int>(divide_up(p.steps, int64_t{kReachRows})),
            static_cast<int>(divide_up(p.steps, int64_t{kReachSegment}))};
  }
  __host__ __device__ size_t ranges_of_a_head() const { return static_cast<size_t>(chunks) + segments; }
  __device__ __forceinline__ Range* of_head(const TalkParams& p, int64_t b, int h) const {
    return data + (b * p.heads + h) * static_cast<int64_t>(ranges_of_a_head());
  }
};

// The outputs of heads [head, head + heads) of b whose windows may reach rows [from, to), as a range whose low is a
// multiple of kReachRows. All threads of the block call, with whole warps.
__device__ inline Range find_outputs(const TalkParams& p, const Reaches& reaches, int64_t b, int head, int heads,
                                     int from, int to, Range* shared) {
  constexpr int kChunks = kReachSegment / kReachRows;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int warps = static_cast<int>(blockDim.x) / 32, per_head = divide_up(reaches.segments, 32);
  Range found;
  for (int turn = warp; turn < heads * per_head; turn += warps) {
    const Range* chunks = reaches.of_head(p, b, head + turn / per_head);
    const Range* segments = chunks + reaches.chunks;
    const int base = turn % per_head * 32, mine = base + lane;
    unsigned hits = __ballot_sync(kFullWarp, mine < reaches.segments && segments[mine].meets(from, to));
    for (; hits != 0; hits &= hits - 1) {
      const int first = (base + __ffs(static_cast<int>(hits)) - 1) * kChunks;
      for (int chunk = first + lane; chunk < min(first + kChunks, reaches.chunks); chunk += 32) {
        if (chunks[chunk].meets(from, to)) found.add(chunk * kReachRows, (chunk + 1) * kReachRows);
      }
    }
  }
  found = block_range(found, shared);
  found.high = min(found.high, static_cast<int>(p.steps));
  return found;
}

// ------------------------------------------------------------------------------------------------ offsets' gradients

// Lanes (a power of two, at least two) that share an output of a head, V channels each at a time.
__host__ __device__ inline int offset_lanes(const TalkParams& p, int V) {
  int width = 2;
  while (width < 32 && width * V < p.channels / p.heads) width *= 2;
  return width;
}

// Host: whether four channels of x and of the gradient can be read at a time.
template <class T>
bool offsets_wide(const TalkBackwardParams& p) {
  constexpr int size = sizeof(T), bytes = kTalkVector * sizeof(T);
  return p.channels / p.heads % kTalkVector == 0 && aligned(p.x, size, bytes) && aligned(p.state, size, bytes) &&
         aligned(p.grad, size, bytes);
}

//     da = max/(L+R+1) * sum over a head's channels of grad * x[the row that is partly in the window]
//
// The window of the output for this sum. Without a gradient of the output, there are no such rows.
template <class T>
__device__ __forceinline__ Window offset_window(const TalkBackwardParams& p, int64_t row, int64_t b, int h, int t,
                                                int begin, int end) {
  bool unknown;
  Window window = window_of<T>(p, row, b, h, t, begin, end, unknown);
  if (p.grad.data == nullptr) window.before = window.after = 0.0f;
  return window;
}

// The two sums for each of `kOutputs` outputs, shared by `width` neighbouring lanes: each lane sums its channels, then
// the lanes are added up. The lower half of the lanes gets the sum for the left offset, the upper half that for the
// right. Whole warps call. window_at(i) gives the window of output i. grad_at(i, c) and row_at(i, s, c) give V
// channels, from channel c of the head on, of its gradient and of row s of its window. All loads are issued before the
// first is used.
template <class T, int V, int kOutputs, class WindowAt, class Grad, class Row>
__device__ __forceinline__ void offset_sums(float (&sums)[kOutputs], int channels, int lane, int width,
                                            WindowAt window_at, Grad grad_at, Row row_at) {
  float left[kOutputs] = {}, right[kOutputs] = {};
#pragma unroll 1
  for (int c = lane * V; c < channels; c += width * V) {
    Pack<T, V> grads[kOutputs], lefts[kOutputs], rights[kOutputs];
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      const Window window = window_at(i);
      grads[i] = lefts[i] = rights[i] = zero_pack<T, V>();
      if (window.before != 0.0f || window.after != 0.0f) grads[i] = grad_at(i, c);
      if (window.before != 0.0f) lefts[i] = row_at(i, window.first - 1, c);
      if (window.after != 0.0f) rights[i] = row_at(i, window.last, c);
    }
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      float grad[V], x[V];
      widen(grads[i], grad);
      widen(lefts[i], x);
#pragma unroll
      for (int e = 0; e < V; ++e) left[i] = fmaf(grad[e], x[e], left[i]);
      widen(rights[i], x);
#pragma unroll
      for (int e = 0; e < V; ++e) right[i] = fmaf(grad[e], x[e], right[i]);
    }
  }
  const bool upper = lane >= width / 2;
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) {
    const Window window = window_at(i);  // a row outside it was read as 0, but its product with infinity is not 0
    if (window.before == 0.0f) left[i] = 0.0f;
    if (window.after == 0.0f) right[i] = 0.0f;
    float sum = upper ? right[i] : left[i];
    sum += __shfl_xor_sync(kFullWarp, upper ? left[i] : right[i], width / 2);
#pragma unroll
    for (int distance = 8; distance > 0; distance /= 2) {
      if (4 * distance <= width) sum += __shfl_xor_sync(kFullWarp, sum, distance);
    }
    sums[i] = sum;
  }
}

// Writes the sums: the first lane of each half writes the sum of its half, if that gradient is needed.
template <class T>
struct OffsetWriter {
  T* to = nullptr;
  int64_t stride_t = 0;
  float factor = 0.0f;

  __device__ __forceinline__ OffsetWriter(const TalkBackwardParams& p, int64_t b, int head, int lane, int width) {
    if (lane != 0 && lane != width / 2) return;
    const MutableOffsets& of = lane == 0 ? p.dleft : p.dright;
    if (of.data == nullptr) return;
    to = static_cast<T*>(of.data) + b * of.stride_b + head * of.stride_h;
    stride_t = of.stride_t;
    factor = static_cast<float>(lane == 0 ? p.max_left : p.max_right) * talk_scale(p);
  }
  __device__ __forceinline__ void write(int64_t t, float sum) const {
    if (to != nullptr) to[t * stride_t] = from_float<T>(sum * factor);
  }
};

}  // namespace lightconv
