// The sum over many slabs of lightconv's weight gradient, on the whole device (weight_gradient.cuh finishes it).
//
// A block adds up kSlabsOfPart slabs for 32 neighbouring taps, with all loads in flight at once: a warp reads 128 bytes
// of every eighth slab. The sum replaces the first of these slabs, which no other block reads at these taps.
#include "convolution/slabs.h"

#include "common/device.cuh"

namespace lightconv {
namespace {

constexpr int kWarps = 8, kLoads = kSlabsOfPart / kWarps;

__global__ void __launch_bounds__(32 * kWarps) add_slabs_kernel(float* slabs, const int64_t count, const int64_t size,
                                                                const int64_t columns) {
  LIGHTCONV_DYNAMIC_SHARED(float, sums);
  const int lane = static_cast<int>(threadIdx.x % 32u), warp = static_cast<int>(threadIdx.x / 32u);
  const int64_t part = blockIdx.x / columns, tap = (blockIdx.x - part * columns) * 32 + lane;
  const int64_t first = part * kSlabsOfPart;
  float loaded[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int64_t slab = first + warp + i * kWarps;
    loaded[i] = slab < count && tap < size ? slabs[slab * size + tap] : 0.0f;
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) sum += loaded[i];
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (warp != 0 || tap >= size) return;
#pragma unroll
  for (int other = 1; other < kWarps; ++other) sum += sums[other * 32 + lane];
  slabs[first * size + tap] = sum;
}

}  // namespace

cudaError_t add_slabs(float* slabs, int64_t count, int64_t size, cudaStream_t stream) {
  const int64_t columns = divide_up(size, int64_t{32}), parts = divide_up(count, int64_t{kSlabsOfPart});
  return launch_blocks(add_slabs_kernel, columns * parts, 32 * kWarps, 32 * kWarps * sizeof(float), stream, slabs,
                       count, size, columns);
}

}  // namespace lightconv
