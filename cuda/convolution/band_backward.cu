// Backward pass of both operators on the tensor cores (common/band.cuh): the gradients of x and of the filters
// together.
//
// A block: up to 128 filters of a head of one sequence, rows t0 ... t0 + 127 of grad, a warp for each 16 of them; and
// as many rows of x's gradient, from t0 - padding_l mod 16 on, so that the transposed bands of the filters are the
// bands of that product. Filters and grad include the K-1 rows before and after that the gradient of x needs; x
// includes the K-1 rows that the filters reach. Bytes per row for R = 64, K = 31: 128 for each of grad, x and dx, and
// 62 for each of the weights and their gradient. Shared memory at 8 warps: 176 rows of grad and 160 of x, of 144 bytes
// each, bands 11 * 16 * 112, and the gradients of the taps 8 * 16 * 112: 80 KB, of which 42 KB are in flight while the
// taps are normalised.
//
// The gradient of lightconv's filters is a sum over all blocks: each block writes K floats to the workspace (slabs.h).
#include "convolution/band_registers.cuh"

namespace lightconv {
namespace band {
namespace {

// The most warps of a block. More warps share more of the filters and rows before and after their own.
constexpr int most_warps(int chunks, bool full) { return chunks > 0 && full ? 8 : 4; }

// dtaps[i, k] (+)= grad's row i * row i + k of u, over the channels of a slice, for a warp's 16 filters.
template <class T>
__device__ __forceinline__ void correlate(const Shape& shape, int kernel_size, int width, const TapTile& tile,
                                          const T* grad, const T* source, bool add, float* dtaps) {
  const int lane = lane_index();
  constexpr int kSteps = kSlice / 16;
  __syncwarp();  // ldmatrix needs all lanes together, and the stores before it may have let them diverge
  uint32_t a[kSteps][4];
#pragma unroll
  for (int r = 0; r < kSteps; ++r) {
    if (16 * r < width) load_matrices<false>(a[r], grad + lane % 16 * shape.row_pitch + lane / 16 * 8 + 16 * r);
  }
  const T* row = source + (lane % 8 + lane / 16 * 8) * shape.row_pitch + lane / 8 % 2 * 8;
  for (int chunk = 0; chunk < shape.chunks; ++chunk, row += kTile * shape.row_pitch) {
    float sums[2][4] = {};
#pragma unroll
    for (int r = 0; r < kSteps; ++r) {
      if (16 * r < width) {
        uint32_t b[4];
        load_matrices<false>(b, row + 16 * r);
        multiply_add<T>(sums[0], a[r], b[0], b[1]);
        multiply_add<T>(sums[1], a[r], b[2], b[3]);
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = lane / 4 + e / 2 * 8, k = kTile * chunk + 8 * n + lane % 4 * 2 + e % 2 - i;
        if (k >= 0 && k < kernel_size) {
          float* to = dtaps + i * shape.tap_pitch + k;
          const float sum = i < tile.real && tile.meets(i + k) ? sums[n][e] : 0.0f;
          *to = add ? *to + sum : sum;
        }
      }
    }
  }
}

// Blocks per multiprocessor: as many as fit into its shared memory.
constexpr int least_blocks(int chunks, bool full, bool dynamic) {
  if (chunks == 0) return 4;
  return chunks == 2 || (full && !dynamic) ? 3 : 2;
}

// kChunks: chunks_in_registers. kFull: C/H is a slice.
template <class T, int kChunks, bool kFull, bool kDynamic>
__global__ void __launch_bounds__(32 * most_warps(kChunks, kFull), least_blocks(kChunks, kFull, kDynamic))
    backward_kernel(const __grid_constant__ ConvBackwardParams p, const Shape launched) {
#ifdef LIGHTCONV_HAS_MATRIX_UNITS
  const Shape shape = known<kChunks, kFull>(launched);
  LIGHTCONV_DYNAMIC_SHARED(unsigned char, shared);
  T* grad = reinterpret_cast<T*>(shared + shape.grad_at);
  T* source = reinterpret_cast<T*>(shared + shape.source_at);
  T* bands = reinterpret_cast<T*>(shared + shape.bands_at);
  const int warp = warp_index(), lane = lane_index();
  float* taps = reinterpret_cast<float*>(shared + shape.taps_at) + (kDynamic ? warp : 0) * kTile * shape.tap_pitch;
  float* all_dtaps = reinterpret_cast<float*>(shared + shape.dtaps_at);
  float* dtaps = all_dtaps + warp * kTile * shape.tap_pitch;
  const bool need_x = p.dx.data != nullptr, need_weight = p.dweight != nullptr;
  float* partial = static_cast<float*>(p.workspace) + static_cast<int64_t>(blockIdx.x) * p.kernel_size;

  const Place place = find_place(p, shape);
  if (place.t0 >= place.rows) {
    if (!kDynamic && need_weight) {
      for (int k = static_cast<int>(threadIdx.x); k < p.kernel_size; k += static_cast<int>(blockDim.x)) {
        partial[k] = 0.0f;
      }
    }
    return;
  }
  const int channels = kFull ? kSlice : p.channels / p.heads;
  // Staged rows of grad begin at row grad0 of the sequence, those of u at source0. `before` tiles of 16 come before the
  // block's own.
  const int before = shape.chunks - 1 - p.padding_l / kTile;
  const int grad0 = place.t0 - kTile * before, source0 = place.t0 - p.padding_l;
  const int dx0 = place.t0 - p.padding_l % kTile;
  const bool last = place.t0 + shape.rows() >= place.rows;
  const int dx_end = last ? place.rows : dx0 + shape.rows();
  const int staged_grad = kTile * (shape.warps + shape.chunks);
  const int own = place.t0 - grad0;
  const int grad_low = need_x ? clip(max(dx0 + p.padding_l - p.kernel_size + 1, 0) - grad0, own) : own;
  const int grad_high =
      min(place.rows, need_x ? dx_end + p.padding_l : place.t0 + shape.rows()) - grad0;

  const auto stage_slice = [&](int slice) {
    const int width = min(channels - slice, kSlice), channel = place.head * channels + slice;
    stage_rows(grad, shape, staged_grad, grad_low, grad_high, width, p.grad, place.begin + grad0, place.b, channel);
    if (need_weight) {
      const int used = shape.rows() + p.kernel_size - 1;
      stage_inputs(source, p, shape, staged_grad - kTile, clip(-source0, used), clip(place.readable - source0, used),
                   width, place.begin + source0, place.b, channel);
    }
    return width;
  };
  int width = stage_slice(0);

  // The filters of tile i of the staged ones. Rows of u count from where filter 0's first tap is.
  const auto tap_tile = [&](int i) {
    const int t = grad0 + kTile * i;
    return TapTile{place.begin + t, clip(place.rows - t, kTile), p.padding_l - t, place.readable + p.padding_l - t};
  };
  const TapTile tile = tap_tile(before + warp);
  // First the filters before and after the block's own, then the warp's own, which remain in `taps`.
  [[maybe_unused]] FilterStats stats;
  [[maybe_unused]] Fragments<kChunks> filters;
  if constexpr (kDynamic) {
    for (int i = need_x ? warp : shape.chunks;; i += shape.warps) {
      const bool beside = i < shape.chunks;
      const int at = !beside ? before + warp : i < before ? i : i + shape.warps;
      T* band = need_x ? bands + at * kTile * shape.band_pitch : nullptr;
      const bool needed = kTile * at < grad_high && kTile * (at + 1) > grad_low;
      if (needed) {
        if constexpr (kChunks > 0) {
          make_fragments<T>(p, place, tap_tile(at), filters);
          if (need_x) store_fragments(filters, shape.band_pitch, band);
        } else {
          stats = make_band(p, place, tap_tile(at), shape, taps, band);
        }
      } else if (need_x) {
        clear_band(band, shape.band_pitch);
      }
      if (!beside) break;
    }
  } else if (need_x && warp == 0) {
    if constexpr (kChunks > 0) {
      make_light_band(p, place.head, shape.band_pitch, bands);
    } else {
      make_band(p, place, TapTile{0, kTile, 0, INT_MAX}, shape, taps, bands);
    }
  }

  [[maybe_unused]] Gradients<(kChunks > 0 ? kChunks : 1)> gradients = {};
  for (int slice = 0;; slice += kSlice) {
    const int channel0 = place.head * channels + slice;
    wait_for_copies();
    __syncthreads();
    const T* left = grad + (before + warp) * kTile * shape.row_pitch;
    const T* right = source + warp * kTile * shape.row_pitch;
    if constexpr (kChunks > 0) {
      // First, so that the filters need not stay in registers.
      if (need_weight) correlate<T, kChunks>(shape, width, left, right, gradients);
      if (need_weight && slice + kSlice >= channels) {
        if constexpr (!kDynamic) {
          spread_gradients<kChunks>(tile, p.kernel_size, gradients, shape.tap_pitch, dtaps);
        } else if (tile.real > 0) {
          T* scratch = reinterpret_cast<T*>(all_dtaps) + warp * kTile * shape.band_pitch;
          store_gradients(p, place, tile, filters, gradients, shape.band_pitch, scratch);
        }
      }
    }
    for (int m = warp; need_x && m < shape.warps + (last ? 1 : 0); m += shape.warps) {
      const int s0 = dx0 + kTile * m;
      if (s0 >= dx_end || s0 + kTile <= 0) continue;
      Sums sums;
      // The chunk of 16 columns of u's rows that this tile is, in the bands of the tiles m ... m + chunks-1.
      const bool scrubbed = band_product<T, kChunks>(
          sums, shape, width,
          [&](int chunk, uint32_t(&a)[4]) {
            const T* band = bands + (kDynamic ? m + shape.chunks - 1 - chunk : 0) * kTile * shape.band_pitch;
            load_matrices<true>(
                a, band + (lane % 8 + lane / 16 * 8) * shape.band_pitch + kTile * chunk + lane / 8 % 2 * 8);
          },
          [&](int chunk) { return grad + (m + shape.chunks - 1 - chunk) * kTile * shape.row_pitch; },
          [](Sums&) {});
      if (p.glu) {
        store_sums(sums, width, [&](int row, int channel, float(&values)[8]) {
          const int s = s0 + row;
          if (s < 0 || s >= dx_end) return;
          store_input_gradient<T, 8>(p, place.begin + s, place.b, channel0 + channel, values, s < place.readable);
        });
      } else {
        T* dx = static_cast<T*>(p.dx.data) + int64_t{place.begin + s0} * p.dx.stride_t +
                offset(place.b, p.dx.stride_b);
        T* mine = dx + lane / 4 * p.dx.stride_t + channel0 + lane % 4 * 8;
        store_rounded_sums<T>(sums, width, [&](int row, int channel, const uint4& values) {
          const int s = s0 + row;
          if (s < 0 || s >= dx_end) return;
          T* to = mine + (row - lane / 4) * p.dx.stride_t + (channel - lane % 4 * 8);
          store_16_bytes(to, s < place.readable ? values : make_uint4(0, 0, 0, 0));
        });
      }
      if (scrubbed) {
        repair(
            p.kernel_size, width,
            [&](int row, int k, int channel, float& w, float& g) {
              const int at = s0 + row + p.padding_l - k - grad0;
              if (at < grad_low || at >= grad_high) return false;
              const int i = at % kTile;
              w = to_float(bands[((kDynamic ? at - i : 0) + i) * shape.band_pitch + i + k]);
              g = to_float(grad[at * shape.row_pitch + channel]);
              return true;
            },
            [&](int row, int channel, float sum) {
              const int s = s0 + row;
              if (s < 0 || s >= dx_end) return;
              const float values[1] = {sum};
              store_input_gradient<T, 1>(p, place.begin + s, place.b, channel0 + channel, values, s < place.readable);
            });
      }
    }
    if (kChunks == 0 && need_weight) {
      if (shape.dtaps_at == shape.bands_at) __syncthreads();  // no warp needs the bands any more
      correlate(shape, p.kernel_size, width, tile, left, right, slice > 0, dtaps);
    }
    if (slice + kSlice >= channels) break;
    __syncthreads();
    width = stage_slice(slice + kSlice);
  }
  if (!need_weight) return;
  if constexpr (kDynamic) {
    if constexpr (kChunks == 0) {
      if (tile.real > 0) store_filters<T>(p, place, tile, shape, stats, taps, dtaps);
    }
    return;
  }
  __syncthreads();
  for (int k = static_cast<int>(threadIdx.x); k < p.kernel_size; k += static_cast<int>(blockDim.x)) {
    float sum = 0.0f;
    for (int i = 0; i < shape.rows(); ++i) sum += all_dtaps[i * shape.tap_pitch + k];
    partial[k] = sum;
  }
#endif
}

Shape backward_shape(const ConvBackwardParams& p, int warps) {
  Shape shape = shape_of(p, warps);
  const bool need_x = p.dx.data != nullptr, need_weight = p.dweight != nullptr;
  shape.band_tiles = !need_x ? 0 : p.dynamic ? warps + shape.chunks : 1;
  const bool registers = chunks_in_registers(p) > 0;
  const int dtap_bytes = !need_weight ? 0 : registers && p.dynamic ? warps * kTile * shape.band_pitch * 2
                                                                   : tap_bytes(shape, warps);
  shape.source_at = shape.grad_at + row_bytes(shape, warps + shape.chunks);
  shape.taps_at = shape.source_at + (need_weight ? row_bytes(shape, warps + shape.chunks - 1) : 0);
  shape.bands_at = shape.taps_at + tap_bytes(shape, registers ? 0 : p.dynamic ? warps : need_x);
  shape.dtaps_at = shape.bands_at + band_bytes(shape);
  if (!registers && per_head(p) <= kSlice && band_bytes(shape) >= dtap_bytes) shape.dtaps_at = shape.bands_at;
  shape.bytes = max(shape.bands_at + band_bytes(shape), shape.dtaps_at + dtap_bytes);
  return shape;
}

Shape backward_shape(const ConvBackwardParams& p) {
  const int most = most_warps(chunks_in_registers(p), per_head(p) == kSlice);
  return choose_shape(p, most, [&](int warps) { return backward_shape(p, warps); });
}

template <class T, int kChunks, bool kFull>
cudaError_t launch_backward(const ConvBackwardParams& p, const Shape& shape, cudaStream_t stream) {
  return p.dynamic ? launch(backward_kernel<T, kChunks, kFull, true>, p, p, shape, stream)
                   : launch(backward_kernel<T, kChunks, kFull, false>, p, p, shape, stream);
}

template <class T>
cudaError_t launch_backward(const ConvBackwardParams& p, const Shape& shape, cudaStream_t stream) {
  const bool full = per_head(p) == kSlice;
  switch (chunks_in_registers(p)) {
    case 2: return full ? launch_backward<T, 2, true>(p, shape, stream) : launch_backward<T, 2, false>(p, shape, stream);
    case 3: return full ? launch_backward<T, 3, true>(p, shape, stream) : launch_backward<T, 3, false>(p, shape, stream);
    default: return launch_backward<T, 0, false>(p, shape, stream);
  }
}

}  // namespace
}  // namespace band

bool band_backward_supported(const ConvBackwardParams& p) {
  return band::operands_supported(p) && aligned(p.grad, 2, 16) && aligned(p.dx, 2, 16) &&
         band::backward_shape(p, 1).bytes <= band::kMostShared;
}

int64_t band_slabs(const ConvBackwardParams& p) { return band::backward_shape(p).tiles * p.batch; }

cudaError_t band_backward(const ConvBackwardParams& p, cudaStream_t stream) {
  const band::Shape shape = band::backward_shape(p);
  return p.type == Type::kBFloat16 ? band::launch_backward<__nv_bfloat16>(p, shape, stream)
                                   : band::launch_backward<__half>(p, shape, stream);
}

}  // namespace lightconv
