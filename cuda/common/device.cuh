// Shared by all kernels: number types, vector accesses, sequences, staging of rows, sums over lanes.
//
// Under LIGHTCONV_HOST the same sources run on a CPU (tests/cuda/cuda_on_host.h). So everything that is not plain C++
// with CUDA's builtins is wrapped by the functions and macros of this file (matrix instructions: common/band.cuh).
#pragma once

#include "common/problem.h"

#ifndef LIGHTCONV_HOST
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define LIGHTCONV_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__)
#define LIGHTCONV_DYNAMIC_SHARED(T, name)                           \
  extern __shared__ __align__(16) unsigned char lightconv_shared[]; \
  T* name = reinterpret_cast<T*>(lightconv_shared)
#endif

#include <type_traits>

namespace lightconv {

constexpr unsigned kFullWarp = 0xffffffffu;
// The same on every device, so that tiles are the same, too. More than this needs an opt-in for each kernel.
constexpr int kSharedBytes = 48 * 1024;
// Blocks are only laid out along the grid's x: the other dimensions are limited to 65,535.
constexpr int64_t kMostBlocks = 0x7fffffff;

// ------------------------------------------------------------------------------------------------ numbers

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <class T>
__device__ __forceinline__ T from_float(float value) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(value);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(value);
  } else {
    return value;
  }
}

// Host: f(T{}) for the T that `type` stands for, such as [&](auto zero) { return launch<decltype(zero)>(params); }.
template <class F>
inline auto by_type(Type type, F f) {
  if (type == Type::kFloat32) return f(float{});
  if (type == Type::kFloat16) return f(__half{});
  return f(__nv_bfloat16{});
}

// exp2 of a product: relative error about 2^-22 (1 + |x|), far below a weight's own rounding for the x <= 0 that
// matter.
__device__ __forceinline__ float exponential(float x) { return __expf(x); }

// exp's overflow at very negative x gives the right limit, 0.
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

__host__ __device__ __forceinline__ int divide_up(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ __forceinline__ int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
__host__ __device__ __forceinline__ int round_up(int a, int to) { return (a + to - 1) / to * to; }

// ------------------------------------------------------------------------------------------------ vector accesses

// What a thread moves at a time: V elements of 16 bytes together, or one element. A pointer to a Pack must be aligned
// to its size.
template <class T, int V>
struct alignas(sizeof(T) * V) Pack {
  T value[V];
};

// Elements in 16 bytes.
template <class T>
constexpr int kWide = 16 / static_cast<int>(sizeof(T));

template <class T, int V>
__device__ __forceinline__ Pack<T, V> load_pack(const T* from) {
  Pack<T, V> pack;
  if constexpr (sizeof(pack) == 16) {
    *reinterpret_cast<uint4*>(&pack) = *reinterpret_cast<const uint4*>(from);
  } else {
    pack = *reinterpret_cast<const Pack<T, V>*>(from);
  }
  return pack;
}

template <class T, int V>
__device__ __forceinline__ void store_pack(T* to, const Pack<T, V>& pack) {
  if constexpr (sizeof(pack) == 16) {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(&pack);
  } else {
    *reinterpret_cast<Pack<T, V>*>(to) = pack;
  }
}

// Stores 16 bytes at once, which the compiler does not do for words that it has computed one by one.
__device__ __forceinline__ void store_16_bytes(void* to, const uint4& words) {
#if defined(LIGHTCONV_HOST)
  *static_cast<uint4*>(to) = words;
#else
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x), "r"(words.y), "r"(words.z),
               "r"(words.w)
               : "memory");
#endif
}

template <class T, int V>
__device__ __forceinline__ Pack<T, V> zero_pack() {
  Pack<T, V> pack;
#pragma unroll
  for (int v = 0; v < V; ++v) pack.value[v] = from_float<T>(0.0f);
  return pack;
}

template <class T, int V>
__device__ __forceinline__ void widen(const Pack<T, V>& pack, float (&values)[V]) {
#pragma unroll
  for (int v = 0; v < V; ++v) values[v] = to_float(pack.value[v]);
}

template <class T, int V>
__device__ __forceinline__ Pack<T, V> narrow(const float (&values)[V]) {
  Pack<T, V> pack;
#pragma unroll
  for (int v = 0; v < V; ++v) pack.value[v] = from_float<T>(values[v]);
  return pack;
}

// index * stride for an index that is not negative: three instructions fewer than for an int.
__device__ __forceinline__ int64_t offset(int index, int64_t stride) {
  return static_cast<int64_t>(static_cast<uint32_t>(index)) * stride;
}

// Row `row` of (T, B, C), from channel c on.
template <class T, int V>
__device__ __forceinline__ Pack<T, V> load_row(const Rows& rows, int64_t row, int64_t b, int c) {
  return load_pack<T, V>(static_cast<const T*>(rows.data) + row * rows.stride_t + b * rows.stride_b + c);
}

// Host: whether rows of (T, B, C) can be read `bytes` at a time from every channel that is a multiple of that.
inline bool aligned(const void* data, int64_t stride_t, int64_t stride_b, int element, int bytes) {
  return reinterpret_cast<uintptr_t>(data) % bytes == 0 && stride_t * element % bytes == 0 &&
         stride_b * element % bytes == 0;
}
inline bool aligned(const Rows& rows, int element, int bytes) {
  return aligned(rows.data, rows.stride_t, rows.stride_b, element, bytes);
}
inline bool aligned(const MutableRows& rows, int element, int bytes) {
  return aligned(rows.data, rows.stride_t, rows.stride_b, element, bytes);
}

// ------------------------------------------------------------------------------------------------ sequences

// The rows [begin, end) of a sequence that may be read.
struct Span {
  int64_t begin, end;
};

// The sequence to which row t of batch element b belongs. It is within the data for any values of lengths and
// cu_seqlens.
__device__ inline Span sequence_span(const Problem& p, int64_t b, int64_t t) {
  Span span{-static_cast<int64_t>(p.state_rows), p.steps};
  if (p.lengths != nullptr) {
    const int64_t at = b * p.lengths_stride;
    const int64_t length = p.lengths_int64 ? static_cast<const int64_t*>(p.lengths)[at]
                                           : static_cast<int64_t>(static_cast<const int32_t*>(p.lengths)[at]);
    span.end = length < 0 ? 0 : length < p.steps ? length : p.steps;
  } else if (p.cu_seqlens != nullptr) {
    // The last sequence that begins at or before t: empty sequences have no rows.
    int64_t low = 0, high = p.sequences - 1;
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (p.cu_seqlens[middle * p.cu_seqlens_stride] <= t) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const int64_t begin = p.cu_seqlens[low * p.cu_seqlens_stride];
    const int64_t end = p.cu_seqlens[(low + 1) * p.cu_seqlens_stride];
    span.begin = begin < 0 ? 0 : begin;
    span.end = end < p.steps ? end : p.steps;
  }
  return span;
}

// ------------------------------------------------------------------------------------------------ launches

// Host: launches kernel(arguments...) on `blocks` blocks along x, or nothing if that is 0.
template <class... Parameters, class... Arguments>
inline cudaError_t launch_blocks(void (*kernel)(Parameters...), int64_t blocks, int threads, size_t shared_bytes,
                                 cudaStream_t stream, const Arguments&... arguments) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  LIGHTCONV_LAUNCH(kernel, dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)), shared_bytes,
                   stream, arguments...);
  return cudaGetLastError();
}

// ------------------------------------------------------------------------------------------------ tiles

// Host: how many heads `vectors` vectors of V channels touch at most.
inline int heads_touched(const Problem& p, int vectors, int V) {
  const int width = vectors * V, channels_of_head = p.channels / p.heads;
  if (channels_of_head % width == 0) return 1;
  const int touched = width % channels_of_head == 0 ? width / channels_of_head : (width - 1) / channels_of_head + 2;
  return touched < p.heads ? touched : p.heads;
}

// Shared memory after `count` elements at `from`, aligned to 8 bytes.
template <class To, class T>
__device__ __forceinline__ To* after(T* from, int count) {
  return reinterpret_cast<To*>(reinterpret_cast<unsigned char*>(from) +
                               round_up(count * static_cast<int>(sizeof(T)), 8));
}

// Goes through the cells of a table with `width` columns row by row, `step` cells at a time from cell `at` on: the
// divisions happen once.
struct Walk {
  int row, column, rows, columns, width;

  __device__ __forceinline__ Walk(int at, int step, int width)
      : row(static_cast<unsigned>(at) / static_cast<unsigned>(width)),
        column(at - row * width),
        rows(static_cast<unsigned>(step) / static_cast<unsigned>(width)),
        columns(step - rows * width),
        width(width) {}
  __device__ __forceinline__ void next() {
    row += rows;
    column += columns;
    if (column >= width) column -= width, ++row;
  }
};

// The part of the numbers [begin, end) that is in [first, first + count), counted from `first`.
__device__ __forceinline__ int2 clipped(int64_t begin, int64_t end, int64_t first, int count) {
  const int64_t low = begin - first, high = end - first;
  return make_int2(static_cast<int>(low < 0 ? 0 : low < count ? low : count),
                   static_cast<int>(high < 0 ? 0 : high < count ? high : count));
}

// Rows first ... first + count - 1 of a tensor into shared memory, `pitch` elements apart; zeros for those outside
// [begin, end). load(row, v) gives the Pack of vector v < vectors of row first + row.
template <class T, int V, class Load>
__device__ __forceinline__ void stage_rows(T* shared, int pitch, int count, int64_t first, int64_t begin, int64_t end,
                                           int vectors, Load load) {
  constexpr int kAtOnce = 4;  // loads in flight together
  const int2 readable = clipped(begin, end, first, count);
  Walk walk(static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), vectors);
  while (walk.row < count) {
    Pack<T, V> packs[kAtOnce];
    int to[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      packs[i] = zero_pack<T, V>();
      if (walk.row >= readable.x && walk.row < readable.y) packs[i] = load(walk.row, walk.column);
      to[i] = walk.row < count ? walk.row * pitch + walk.column * V : -1;
      walk.next();
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (to[i] >= 0) store_pack(shared + to[i], packs[i]);
    }
  }
}

// The same of `rows`, whose row `first` may not exist, from channel c of b on.
template <class T, int V>
__device__ __forceinline__ void stage_rows(T* shared, int pitch, int count, int64_t first, int64_t begin, int64_t end,
                                           int vectors, const Rows& rows, int64_t b, int c) {
  const int64_t origin = first * rows.stride_t + b * rows.stride_b + c;
  stage_rows<T, V>(shared, pitch, count, first, begin, end, vectors, [&](int row, int v) {
    return load_pack<T, V>(static_cast<const T*>(rows.data) + (origin + offset(row, rows.stride_t) + v * V));
  });
}

// ------------------------------------------------------------------------------------------------ sums over lanes

// Sums and maxima over `width` neighbouring lanes (a power of two); every lane gets the same bits. All 32 lanes call.
__device__ __forceinline__ float group_sum(float value, int width) {
  for (int distance = width / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(kFullWarp, value, distance);
  return value;
}
__device__ __forceinline__ float group_max(float value, int width) {
  for (int distance = width / 2; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, distance));
  }
  return value;
}

}  // namespace lightconv
