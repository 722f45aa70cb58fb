// The tensor-core path for half types: a filter's taps (or talkconv's coefficients) laid out as a band matrix.
//
// The R = C/H channels of a head share their filters, so 16 output rows of a head are a product
//
//     out[16, R] = band[16, 16 + K-1] * u[16 + K-1, R],        band[i, i + k] = w[t0 + i, k], else 0
//
// which mma.m16n8k16 computes in `chunks` = ceil((15 + K) / 16) steps with float sums. The gradient of u is the product
// with the transposed band. The gradient of the taps is the band of grad[16, R] * u[16 + K-1, R]^T.
//
// Arithmetic, per element of a tensor: 2 * 16 * chunks FLOP per product. For K = 31 this is 96, or 6 GFLOP for 64M
// elements: 8 microseconds of an H200's tensor cores, and an eighth of the time that the memory needs. So everything is
// arranged around the copies: whole tiles of rows are copied by cp.async while the taps are normalised, with 10 to 40
// KB in flight for each of several blocks on an SM.
#pragma once

#include "common/device.cuh"

#include <climits>

namespace lightconv {
namespace band {

constexpr int kTile = 16;      // rows of a matrix product
constexpr int kSlice = 64;     // channels at a time
constexpr int kGroups = kSlice / 8;

// ------------------------------------------------------------------------------------------------ instructions

// cp.async, and mma of this shape, came with 8.0. For older devices the kernels are empty; operands_supported() and
// talk_supported() never choose them there.
#if defined(LIGHTCONV_HOST) || !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define LIGHTCONV_HAS_MATRIX_UNITS 1
#endif

// d += a * b: a 16 x 16 (rows), b 16 x 8 (columns), d 16 x 8. Lane 4g + q holds rows g and g+8, columns 2q and 2q+1.
template <class T>
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if defined(LIGHTCONV_HOST)
  const uint32_t b[2] = {b0, b1};
  lightconv_host::mma_m16n8k16(d, a, b, d, std::is_same_v<T, __nv_bfloat16>);
#else
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
#endif
}

// Four 8 x 8 matrices of halves; lanes 8i ... 8i+7 point at the rows of matrix i.
template <bool transposed>
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const void* row) {
#if defined(LIGHTCONV_HOST)
  lightconv_host::ldmatrix_x4(r, row, transposed);
#else
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  if constexpr (transposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  }
#endif
}

// Copies 16 bytes into shared memory, visible to this thread after wait_for_copies(). If not `real`, writes zeros and
// reads nothing.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool real) {
#if defined(LIGHTCONV_HOST)
  lightconv_host::cp_async(to, from, 16, real ? 16 : 0);
#else
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(real ? 16 : 0)
               : "memory");
#endif
}

__device__ __forceinline__ void wait_for_copies() {
#if defined(LIGHTCONV_HOST)
  lightconv_host::cp_async_commit();
  lightconv_host::cp_async_wait(0);
#else
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// ------------------------------------------------------------------------------------------------ shapes

// How a launch divides the work, and a block its shared memory; made on the host, from the params only.
struct Shape {
  int warps = 1;          // of a block; each has its own tile of 16 rows
  int chunks = 1;         // matrix products along the band
  int tiles = 1;          // blocks along time: of each sequence, or of all packed ones together
  int width = kSlice;     // channels staged at a time, a multiple of 16
  int row_pitch = 0;      // of staged rows, in elements; an odd multiple of 16 bytes: no bank conflicts
  int band_pitch = 0;     // of the bands, likewise
  int tap_pitch = 0;      // of the taps, in floats; odd
  int band_tiles = 0;     // of 16 rows; lightconv has one for all
  int tap_tiles = 0;
  // Where in shared memory, in bytes.
  int grad_at = 0, source_at = 0, bands_at = 0, taps_at = 0, dtaps_at = 0, bytes = 0;

  __host__ __device__ int rows() const { return kTile * warps; }
};

// The shape of a launch, with the constants of a kernel for kChunks chunks (0: any) and rows of a whole slice, so that
// offsets in shared memory are constants, too.
template <int kChunks, bool kFull>
__device__ __forceinline__ Shape known(Shape shape) {
  if (kChunks > 0) shape.chunks = kChunks, shape.band_pitch = kTile * kChunks + 8;
  if (kFull) shape.width = kSlice, shape.row_pitch = kSlice + 8;
  return shape;
}

inline int per_head(const Problem& p) { return p.channels / p.heads; }

inline Shape rows_shape(const Problem& p, int warps) {
  Shape shape;
  shape.warps = warps;
  shape.tiles = static_cast<int>(p.cu_seqlens != nullptr ? p.steps / shape.rows() + p.sequences
                                                         : divide_up(p.steps, int64_t{shape.rows()}));
  shape.width = round_up(per_head(p), kTile) < kSlice ? round_up(per_head(p), kTile) : kSlice;
  shape.row_pitch = shape.width + 8;
  return shape;
}

inline int row_bytes(const Shape& shape, int tiles) { return tiles * kTile * shape.row_pitch * 2; }

constexpr int kMostRows = INT_MAX / 4;     // row numbers, and sums of a few, are ints
constexpr int kMostShared = 96 * 1024;     // every device from 8.0 on has 99 KB for a block

// Shared memory for a block, if `blocks` of them are to fit on an SM.
inline int shared_for(int compute_capability, int blocks) {
  const int major = compute_capability / 10;
  int kilobytes = 100;  // 8.6, 8.9, 12.0
  if (compute_capability == 80 || compute_capability == 87) kilobytes = 164;
  if (major >= 9 && major <= 11) kilobytes = 228;
  return min(kilobytes * 1024 / blocks - 1024, kMostShared);
}

// The longest tiles that leave room for other blocks and are not mostly beyond the end of the sequence. make(warps)
// returns a Shape. The choice does not change the output: every tile of 16 rows is computed in the same way.
template <class Make>
inline Shape choose_shape(const Problem& p, int most_warps, Make make) {
  const int64_t steps = p.cu_seqlens != nullptr ? p.steps / p.sequences : p.steps;
  const auto fits = [&](int warps, int blocks) {
    return kTile * warps / 2 < steps && make(warps).bytes <= shared_for(p.compute_capability, blocks);
  };
  for (int warps = most_warps; warps >= 4; warps /= 2) {
    if (fits(warps, 16 / warps)) return make(warps);
  }
  for (int warps = 4; warps > 1; warps /= 2) {
    if (fits(warps, 2)) return make(warps);
  }
  return make(1);
}

// Launches kernel(argument, shape) for all tiles of the problem.
template <class Argument>
inline cudaError_t launch(void (*kernel)(Argument, Shape), const Problem& p, const Argument& argument,
                          const Shape& shape, cudaStream_t stream) {
  if (p.steps > kMostRows || p.batch > kMostRows || p.sequences > kMostRows) return cudaErrorInvalidConfiguration;
  if (shape.bytes > kSharedBytes) {
    // The maximum for any call, not just for this one: another thread may be between this and its launch.
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostShared);
    if (error != cudaSuccess) return error;
  }
  return launch_blocks(kernel, shape.tiles * p.batch * p.heads, 32 * shape.warps, shape.bytes, stream, argument, shape);
}

// ------------------------------------------------------------------------------------------------ places

// What a block works on. Rows are counted from the beginning of the sequence, packed or not, so the tiles and the sums
// of a sequence do not depend on its surroundings.
struct Place {
  int head, b;
  int begin;     // the sequence's row 0 in the data
  int rows;      // of the sequence's outputs
  int readable;  // rows of u that may be read
  int t0;        // the block's first row; there is no work unless it is below `rows`
};

// Unsigned numbers are divided by powers of two in one instruction, ints in four.
__device__ __forceinline__ int lane_index() { return static_cast<int>(threadIdx.x % 32u); }
__device__ __forceinline__ int warp_index() { return static_cast<int>(threadIdx.x / 32u); }

// The block's tile among those of all packed sequences, each of which begins a new one.
__device__ inline void find_packed(const Problem& p, int rows_a_tile, int tile, Place& place) {
  int before = 0;
  for (int first = 0; first < p.sequences; first += 32) {
    const int i = first + lane_index();
    int begin = 0, rows = 0;
    if (i < p.sequences) {
      const int end = min(p.cu_seqlens[(i + 1) * p.cu_seqlens_stride], static_cast<int>(p.steps));
      begin = max(p.cu_seqlens[i * p.cu_seqlens_stride], 0);
      rows = max(end - begin, 0);
    }
    const int own = divide_up(rows, rows_a_tile);
    int upto = own;
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(kFullWarp, upto, distance);
      if (lane_index() >= distance) upto += other;
    }
    const unsigned reached = __ballot_sync(kFullWarp, before + upto > tile);
    if (reached != 0) {
      const int owner = __ffs(static_cast<int>(reached)) - 1;
      place.begin = __shfl_sync(kFullWarp, begin, owner);
      place.rows = __shfl_sync(kFullWarp, rows, owner);
      place.t0 = (tile - before - __shfl_sync(kFullWarp, upto - own, owner)) * rows_a_tile;
      return;
    }
    before += __shfl_sync(kFullWarp, upto, 31);
  }
}

// Heads next to each other, then time: neighbouring blocks share cache lines of weights and halo rows of x.
__device__ inline Place find_place(const Problem& p, const Shape& shape) {
  // Unsigned: the division of signed numbers takes 1.5 times as many instructions.
  const unsigned heads = static_cast<unsigned>(p.heads), tiles = static_cast<unsigned>(shape.tiles);
  const unsigned rest = blockIdx.x / heads, b = rest / tiles;
  const int tile = static_cast<int>(rest - b * tiles);
  Place place{static_cast<int>(blockIdx.x - rest * heads), static_cast<int>(b), 0, 0, 0, 0};
  if (p.cu_seqlens != nullptr) {
    find_packed(p, shape.rows(), tile, place);
    place.readable = place.rows;
  } else {
    place.rows = static_cast<int>(p.steps);
    place.readable = static_cast<int>(sequence_span(p, place.b, 0).end);
    place.t0 = tile * shape.rows();
  }
  return place;
}

// Row numbers relative to a tile, of which only those in [0, most] matter.
__device__ __forceinline__ int clip(int value, int most) { return min(max(value, 0), most); }

// ------------------------------------------------------------------------------------------------ staging

// Which 8 channels of which rows a thread copies: rows `first`, first + step, ...; surplus threads copy none.
struct Carrier {
  int column, first, step;

  __device__ __forceinline__ Carrier(int width, int count) {
    const unsigned vectors = static_cast<unsigned>(round_up(width, kTile)) / 8u, row = threadIdx.x / vectors;
    step = static_cast<int>(blockDim.x / vectors);
    column = static_cast<int>(threadIdx.x - row * vectors) * 8;
    first = static_cast<int>(row) < step ? static_cast<int>(row) : count;
  }
};

// The block copies `count` rows of a (T, B, C) tensor, `width` channels from `channel` on, into shared memory: row 0 is
// the data's row `start`. Rows outside [low, high) are zeros, and so are the channels that round the width up to 16;
// nothing is read for them.
template <class T>
__device__ __forceinline__ void stage_rows(T* to, const Shape& shape, int count, int low, int high, int width,
                                           const Rows& rows, int start, int b, int channel) {
  const Carrier carrier(width, count);
  const T* data = static_cast<const T*>(rows.data);
  const T* from = data + offset(b, rows.stride_b) + (start + carrier.first) * rows.stride_t + channel + carrier.column;
  const int64_t step = carrier.step * rows.stride_t;
  to += carrier.first * shape.row_pitch + carrier.column;
  if (carrier.column >= width) low = high = count;
  for (int row = carrier.first; row < count; row += carrier.step) {
    const bool real = row >= low && row < high;
    copy_async(to, real ? from : data, real);
    from += step;
    to += carrier.step * shape.row_pitch;
  }
}

}  // namespace band
}  // namespace lightconv
