// Forward pass of both operators on the tensor cores (common/band.cuh).
//
// A block: up to 128 rows of a head of one sequence, a warp for each 16 of them. Bytes per row for R = 64, K = 31: 128
// of x (158 rows for 128), 62 of weights, 128 of out. Shared memory at 8 warps: 160 rows of x of 144 bytes, and bands
// of 8 * 16 * 112: 37 KB, of which 20 KB are in flight while the taps are normalised. lightconv needs one band for all
// rows: 25 KB.
#include "convolution/band_registers.cuh"

namespace lightconv {
namespace band {
namespace {

// kChunks: chunks_in_registers. kFull: C/H is a slice.
template <class T, int kChunks, bool kFull>
__global__ void __launch_bounds__(256, kFull ? 3 : 2)
    forward_kernel(const __grid_constant__ ConvParams p, const Shape launched) {
#ifdef LIGHTCONV_HAS_MATRIX_UNITS
  const Shape shape = known<kChunks, kFull>(launched);
  LIGHTCONV_DYNAMIC_SHARED(unsigned char, shared);
  T* source = reinterpret_cast<T*>(shared + shape.source_at);
  T* bands = reinterpret_cast<T*>(shared + shape.bands_at);
  float* taps = reinterpret_cast<float*>(shared + shape.taps_at);

  const Place place = find_place(p, shape);
  if (place.t0 >= place.rows) return;
  const int warp = warp_index(), lane = lane_index();
  const int channels = kFull ? kSlice : p.channels / p.heads;
  // Staged row j is row t0 - padding_l + j of the sequence.
  const int first = place.t0 - p.padding_l;
  const int staged = (shape.warps + shape.chunks - 1) * kTile, used = shape.rows() + p.kernel_size - 1;
  const int low = clip(-first, used), high = clip(place.readable - first, used);
  const auto stage_slice = [&](int slice) {
    const int width = min(channels - slice, kSlice);
    stage_inputs(source, p, shape, staged, low, high, width, place.begin + first, place.b,
                 place.head * channels + slice);
    return width;
  };
  int width = stage_slice(0);

  const int t = place.t0 + kTile * warp;
  const int rows = clip(place.rows - t, kTile);
  T* band = bands + (p.dynamic ? warp : 0) * kTile * shape.band_pitch;
  const TapTile tile{place.begin + t, rows, low - kTile * warp, high - kTile * warp};
  if constexpr (kChunks > 0) {
    if (p.dynamic) {
      Fragments<kChunks> filters;
      make_fragments<T>(p, place, tile, filters);
      store_fragments(filters, shape.band_pitch, band);
    } else if (warp == 0) {
      make_light_band(p, place.head, shape.band_pitch, band);
    }
  } else if (p.dynamic) {
    make_band(p, place, tile, shape, taps + warp * kTile * shape.tap_pitch, band);
  } else if (warp == 0) {
    make_band(p, place, TapTile{0, kTile, 0, INT_MAX}, shape, taps, band);
  }

  const T* rows_here = source + warp * kTile * shape.row_pitch;
  for (int slice = 0;; slice += kSlice) {
    wait_for_copies();
    __syncthreads();
    const int channel0 = place.head * channels + slice;
    if (rows > 0) {
      T* out = static_cast<T*>(p.out.data) + offset(place.begin + t, p.out.stride_t) +
               offset(place.b, p.out.stride_b) + channel0;
      const T* bias = p.bias == nullptr ? nullptr : static_cast<const T*>(p.bias) + channel0;
      Sums sums;
      const bool scrubbed = band_product<T, kChunks>(
          sums, shape, width,
          [&](int chunk, uint32_t(&a)[4]) {
            load_matrices<false>(a, band + lane % 16 * shape.band_pitch + kTile * chunk + lane / 16 * 8);
          },
          [&](int chunk) { return rows_here + chunk * kTile * shape.row_pitch; },
          [&](Sums& to) {
            if (bias == nullptr) return;
#pragma unroll
            for (int n = 0; n < kGroups; ++n) {
              if (8 * n < width) {
                const Pack<T, 2> pair = load_pack<T, 2>(bias + 8 * n + lane % 4 * 2);
#pragma unroll
                for (int e = 0; e < 4; ++e) to[n][e] += to_float(pair.value[e % 2]);
              }
            }
          });
      T* mine = out + lane / 4 * p.out.stride_t + lane % 4 * 8;
      store_rounded_sums<T>(sums, width, [&](int row, int channel, const uint4& values) {
        T* to = mine + (row - lane / 4) * p.out.stride_t + (channel - lane % 4 * 8);
        if (row < rows) store_16_bytes(to, values);
      });
      if (scrubbed) {
        const int begin = low - kTile * warp, end = high - kTile * warp;
        repair(
            p.kernel_size, width,
            [&](int row, int k, int channel, float& w, float& u) {
              if (row + k < begin || row + k >= end) return false;
              w = to_float(band[row * shape.band_pitch + row + k]);
              u = to_float(rows_here[(row + k) * shape.row_pitch + channel]);
              return true;
            },
            [&](int row, int channel, float sum) {
              if (row >= rows) return;
              if (bias != nullptr) sum += to_float(bias[channel]);
              out[row * p.out.stride_t + channel] = from_float<T>(sum);
            });
      }
    }
    if (slice + kSlice >= channels) return;
    __syncthreads();
    width = stage_slice(slice + kSlice);
  }
#endif
}

Shape forward_shape(const ConvParams& p, int warps) {
  Shape shape = shape_of(p, warps);
  shape.band_tiles = p.dynamic ? warps : 1;
  shape.tap_tiles = chunks_in_registers(p) > 0 ? 0 : shape.band_tiles;
  shape.bands_at = shape.source_at + row_bytes(shape, warps + shape.chunks - 1);
  shape.taps_at = shape.bands_at + band_bytes(shape);
  shape.bytes = shape.taps_at + tap_bytes(shape, shape.tap_tiles);
  return shape;
}

template <class T>
cudaError_t launch_forward(const ConvParams& p, const Shape& shape, cudaStream_t stream) {
  const bool full = per_head(p) == kSlice;
  switch (chunks_in_registers(p)) {
    case 2:
      return full ? launch(forward_kernel<T, 2, true>, p, p, shape, stream)
                  : launch(forward_kernel<T, 2, false>, p, p, shape, stream);
    case 3:
      return full ? launch(forward_kernel<T, 3, true>, p, p, shape, stream)
                  : launch(forward_kernel<T, 3, false>, p, p, shape, stream);
    default: return launch(forward_kernel<T, 0, false>, p, p, shape, stream);
  }
}

}  // namespace
}  // namespace band

bool band_forward_supported(const ConvParams& p) {
  return band::operands_supported(p) && aligned(p.out, 2, 16) && reinterpret_cast<uintptr_t>(p.bias) % 4 == 0 &&
         band::forward_shape(p, 1).bytes <= band::kMostShared;
}

cudaError_t band_forward(const ConvParams& p, cudaStream_t stream) {
  const band::Shape shape =
      band::choose_shape(p, 8, [&](int warps) { return band::forward_shape(p, warps); });
  return p.type == Type::kBFloat16 ? band::launch_forward<__nv_bfloat16>(p, shape, stream)
                                   : band::launch_forward<__half>(p, shape, stream);
}

}  // namespace lightconv
