// talkconv on the tensor cores (common/band.cuh): the forward pass, and the gradients.
//
// The R = C/H channels of a head share their windows, so 16 rows of the result are a product
//
//     out[16, R] = 1/(L+R+1) * sum over chunks of 16 rows of  band[16, 16] * from[16, R]
//
// where the band holds coefficients: of the windows of the result's rows (forward: `from` is x), or of the windows of
// the rows of `from` (gradient of x: `from` is the gradient of the output). They are computed in the registers from
// which the tensor cores read them, ten instructions each for an eighth of R products. The windows tell which chunks
// are needed: a block stages the rows from the first to the last that its rows need, as many at a time as fit, and a
// warp multiplies the chunks that its 16 rows need, in the order of their rows. Everything else contributes zeros. So
// the bits depend neither on what is staged nor on how many rows a block has, and windows may reach any distance. The
// gradients of the offsets of a block's rows are computed right after these rows, while their part of the gradient is
// in the cache.
//
// Bytes per row for R = 64: 128 in (L = R = 31, 8 warps: 192 rows for 128, most of the others from L2), 128 out, 4 of
// offsets. Shared memory at 8 warps: 224 rows of 144 bytes.
#include "common/band_product.cuh"
#include "talk/windows.cuh"

namespace lightconv {
namespace band {
namespace {

constexpr int kTalkWarps = 8;
constexpr int kOffsetOutputs = 4;  // outputs of a lane whose offset gradients are computed together

// A call: its parameters, the rows to read and the rows to write.
struct TalkCall {
  TalkBackwardParams p;  // forward: of a TalkParams
  Rows from;
  MutableRows to;
  Reaches reaches;  // gradient of x only
};

// The layout of a block's shared memory: the staged rows are at source_at, their windows (forward: the windows of the
// block's rows) at taps_at, the ranges of block_range at bands_at. shape.chunks is how many chunks fit.
inline Shape talk_shape(const TalkParams& p, int warps, bool backward) {
  Shape shape = rows_shape(p, warps);
  const int64_t reach = static_cast<int64_t>(p.max_left) + p.max_right;
  shape.chunks = warps + 2 + static_cast<int>(reach < 128 ? divide_up(reach, int64_t{kTile}) : 8);
  shape.taps_at = row_bytes(shape, shape.chunks);
  shape.bands_at = shape.taps_at + (backward ? shape.chunks : warps) * kTile * static_cast<int>(sizeof(Window));
  shape.bytes = shape.bands_at + warps * static_cast<int>(sizeof(Range));
  return shape;
}

// The window of row `row` of the block's sequence, by window_of or forward_window; an empty window if there is no such
// row.
template <class T, bool kForward>
__device__ __forceinline__ Window sequence_window(const TalkParams& p, const Place& place, int t) {
  if (t < 0 || t >= place.rows) return empty_window();
  if constexpr (kForward) return forward_window<T>(p, place.begin + t, place.b, place.head, t, 0, place.readable);
  bool unknown;
  return window_of<T>(p, place.begin + t, place.b, place.head, t, 0, place.readable, unknown);
}

// The fragment of the band in which the outputs with windows rows[0] and rows[8] meet rows s, s + 1, s + 8, s + 9.
template <class T>
__device__ __forceinline__ void forward_fragment(const Window* rows, int s, uint32_t (&a)[4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Window window = rows[8 * half];
    a[half] = pair_of<T>(window.coefficient(s), window.coefficient(s + 1));
    a[half + 2] = pair_of<T>(window.coefficient(s + 8), window.coefficient(s + 9));
  }
}

// The same where columns are outputs, `columns` their windows, and s, s + 8 rows of x.
template <class T>
__device__ __forceinline__ void gradient_fragment(const Window* columns, int s, uint32_t (&a)[4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Window first = columns[8 * half], second = columns[8 * half + 1];
    a[2 * half] = pair_of<T>(first.coefficient(s), second.coefficient(s));
    a[2 * half + 1] = pair_of<T>(first.coefficient(s + 8), second.coefficient(s + 8));
  }
}

template <class T, bool kForward>
__global__ void __launch_bounds__(32 * kTalkWarps, 3)
    talk_kernel(const __grid_constant__ TalkCall call, const Shape shape) {
#ifdef LIGHTCONV_HAS_MATRIX_UNITS
  LIGHTCONV_DYNAMIC_SHARED(unsigned char, shared);
  T* source = reinterpret_cast<T*>(shared + shape.source_at);
  Window* windows = reinterpret_cast<Window*>(shared + shape.taps_at);
  Range* ranges = reinterpret_cast<Range*>(shared + shape.bands_at);
  const TalkBackwardParams& p = call.p;

  const Place place = find_place(p, shape);
  if (place.t0 >= place.rows) return;
  const int warp = warp_index(), lane = lane_index();
  const int channels = p.channels / p.heads, row0 = place.t0 + kTile * warp;
  const int rows = clip(place.rows - row0, kTile);
  // Rows of `from` that exist; those that the warp's windows reach, and those that the block needs.
  const int limit = kForward ? place.readable : place.rows;
  Range mine, all;
  if constexpr (kForward) {
    if (lane < kTile) {
      const Window window = sequence_window<T, true>(p, place, row0 + lane);
      windows[kTile * warp + lane] = window;
      mine.add(window.least(), window.most());
    }
    mine = warp_range(mine);
    all = block_range(mine, ranges);
  } else {
    all = find_outputs(p, call.reaches, place.b, place.head, 1, place.begin + place.t0,
                       place.begin + min(place.t0 + shape.rows(), place.rows), ranges);
    all.low = max(all.low - place.begin, 0) / kTile * kTile;
    all.high = min(all.high - place.begin, place.rows);
  }
  all.low &= -kTile;

  const float scale = talk_scale(p);
  for (int slice = 0; slice < channels; slice += kSlice) {
    const int width = min(channels - slice, kSlice), channel0 = place.head * channels + slice;
    Sums sums;
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[n][e] = 0.0f;
    }
    for (int start = all.low; start < all.high; start += shape.chunks * kTile) {
      const int count = min(shape.chunks, divide_up(all.high - start, kTile));
      if (slice > 0 || start > all.low) __syncthreads();
      stage_rows(source, shape, count * kTile, clip(-start, count * kTile), clip(limit - start, count * kTile), width,
                 call.from, place.begin + start, place.b, channel0);
      if constexpr (!kForward) {
        for (int i = static_cast<int>(threadIdx.x); i < count * kTile; i += static_cast<int>(blockDim.x)) {
          windows[i] = sequence_window<T, false>(p, place, start + i);
        }
      }
      wait_for_copies();
      __syncthreads();
      const int begin = kForward ? max((mine.low - start) >> 4, 0) : 0;
      const int end = kForward ? min((mine.high - start + kTile - 1) >> 4, count) : count;
#pragma unroll 1
      for (int chunk = begin; chunk < end; ++chunk) {
        const int s = start + kTile * chunk;
        uint32_t a[4];
        if constexpr (kForward) {
          forward_fragment<T>(windows + kTile * warp + lane / 4, s + lane % 4 * 2, a);
        } else {
          const Window window = windows[kTile * chunk + lane % kTile];
          if (!__any_sync(kFullWarp, window.least() < row0 + kTile && window.most() > row0)) continue;
          gradient_fragment<T>(windows + kTile * chunk + lane % 4 * 2, row0 + lane / 4, a);
        }
        const T* row = source + (kTile * chunk + lane % 16) * shape.row_pitch + lane / 16 * 8;
#pragma unroll
        for (int n = 0; n < kGroups; n += 2) {
          if (8 * n < width) {
            uint32_t b[4];
            load_matrices<true>(b, row + 8 * n);
            multiply_add<T>(sums[n], a, b[0], b[1]);
            multiply_add<T>(sums[n + 1], a, b[2], b[3]);
          }
        }
      }
    }
    if (rows == 0) continue;

    float probe = 0.0f;  // NaN if a sum is not finite, with one instruction per sum
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        probe = fmaf(sums[n][e], 0.0f, probe);
        sums[n][e] *= scale;
      }
    }
    T* to = static_cast<T*>(call.to.data) + int64_t{place.begin + row0} * call.to.stride_t +
            place.b * call.to.stride_b + channel0;
    store_rounded_sums<T>(sums, width, [&](int row, int channel, const uint4& values) {
      if (row < rows) store_16_bytes(to + row * call.to.stride_t + channel, values);
    });
    if (__all_sync(kFullWarp, probe == 0.0f)) continue;
    // A non-finite factor has also met the band's zeros (0 * NaN): compute the sums one at a time, from their own
    // terms.
    __syncwarp();
    const T* from = static_cast<const T*>(call.from.data) + int64_t{place.begin} * call.from.stride_t +
                    place.b * call.from.stride_b + channel0;
    for (int at = lane; at < rows * width; at += 32) {
      const int row = at / width, channel = at - row * width, s = row0 + row;
      const Window own = kForward ? windows[kTile * warp + row] : empty_window();
      float sum = 0.0f;
      const int begin = kForward ? own.least() : all.low, end = kForward ? own.most() : all.high;
#pragma unroll 1
      for (int t = begin; t < end; ++t) {
        const float coefficient =
            kForward ? own.coefficient(t) : sequence_window<T, false>(p, place, t).coefficient(s);
        if (coefficient == 0.0f) continue;
        sum = fmaf(coefficient, t < limit ? to_float(from[t * call.from.stride_t + channel]) : 0.0f, sum);
      }
      to[row * call.to.stride_t + channel] = from_float<T>(sum * scale);
    }
  }

  if (kForward || (p.dleft.data == nullptr && p.dright.data == nullptr)) return;
  __syncthreads();  // all have read the previous windows
  Window* own = windows + kTile * warp;
  if (lane < kTile) {
    own[lane] = lane < rows ? offset_window<T>(p, place.begin + row0 + lane, place.b, place.head, row0 + lane, 0,
                                               place.readable)
                            : empty_window();
  }
  __syncwarp();
  const int width = offset_lanes(p, kTalkVector), together = 32 / width, member = lane & (width - 1);
  const OffsetWriter<T> writer(p, place.b, place.head, member, width);
  const auto of_head = [&](const Rows& all) {
    return static_cast<const T*>(all.data) + place.begin * all.stride_t + place.b * all.stride_b +
           place.head * channels;
  };
  const T *x = of_head(p.x), *grad = of_head(p.grad);
  for (int first = lane * together >> 5; first < kTile; first += kOffsetOutputs * together) {
    const auto row_of = [&](int i) { return min(first + i * together, kTile - 1); };
    float sums[kOffsetOutputs];
    offset_sums<T, kTalkVector>(
        sums, channels, member, width, [&](int i) { return own[row_of(i)]; },
        [&](int i, int c) { return load_pack<T, kTalkVector>(grad + offset(row0 + row_of(i), p.grad.stride_t) + c); },
        [&](int, int s, int c) { return load_pack<T, kTalkVector>(x + offset(s, p.x.stride_t) + c); });
#pragma unroll
    for (int i = 0; i < kOffsetOutputs; ++i) {
      if (first + i * together < rows) writer.write(place.begin + row0 + first + i * together, sums[i]);
    }
  }
#endif
}

// The requirements of both directions. Offsets may have any strides.
inline bool talk_supported(const TalkParams& p, bool backward) {
  const bool half = p.type == Type::kBFloat16 || p.type == Type::kFloat16;
  return p.compute_capability >= 80 && half && per_head(p) >= 16 && per_head(p) % 8 == 0 &&
         talk_shape(p, 1, backward).bytes <= kMostShared;
}

template <bool kForward>
cudaError_t run_talk(const TalkCall& call, cudaStream_t stream) {
  const TalkParams& p = call.p;
  const Shape shape = choose_shape(p, kTalkWarps, [&](int warps) { return talk_shape(p, warps, !kForward); });
  return p.type == Type::kBFloat16 ? launch(talk_kernel<__nv_bfloat16, kForward>, p, call, shape, stream)
                                   : launch(talk_kernel<__half, kForward>, p, call, shape, stream);
}

}  // namespace
}  // namespace band

bool talk_band_forward_supported(const TalkParams& p) {
  return band::talk_supported(p, false) && aligned(p.x, 2, 16) && aligned(p.out, 2, 16);
}

bool talk_band_backward_supported(const TalkBackwardParams& p) {
  return band::talk_supported(p, true) && aligned(p.grad, 2, 16) && aligned(p.dx, 2, 16);
}

cudaError_t talk_band_forward(const TalkParams& p, cudaStream_t stream) {
  TalkBackwardParams all;
  static_cast<TalkParams&>(all) = p;
  return band::run_talk<true>({all, p.x, p.out, {}}, stream);
}

cudaError_t talk_band_backward(const TalkBackwardParams& p, cudaStream_t stream) {
  return band::run_talk<false>({p, p.grad, p.dx, Reaches::of(p)}, stream);
}

}  // namespace lightconv
