// A block goes over a row of C channels at a time, which its threads hold in registers: V neighbouring channels in each
// of N packs. Sums over a row are in float32 and in the same order in every launch.
#include "dropout/mask.cuh"

namespace lightconv {
namespace {

constexpr int kMostThreads = 1024;
constexpr int kMostWarps = kMostThreads / 32;
// The backward pass: about as many threads as a large GPU runs at a time, and rows per block that are worth the sums
// over channels which each block leaves behind.
constexpr int64_t kThreadsAtOnce = 128 * 1024;
constexpr int64_t kLeastRows = 8;

// What a thread holds of a row.
template <int V, int N>
struct Held {
  float value[N][V];

  __device__ __forceinline__ float* operator[](int n) { return value[n]; }
};

// Calls f(pack, first channel) for the thread's packs that exist.
template <int V, int N, class F>
__device__ __forceinline__ void each_pack(int channels, F f) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int c = static_cast<int>(n * blockDim.x + threadIdx.x) * V;
    if (c < channels) f(n, c);
  }
}

// The sums over a block of each thread's two numbers, in all threads; `shared` has room for two per warp.
__device__ __forceinline__ float2 block_sums(float a, float b, float2* shared) {
  a = group_sum(a, 32);
  b = group_sum(b, 32);
  __syncthreads();  // earlier sums have been read
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = make_float2(a, b);
  __syncthreads();
  float2 all = shared[0];
  for (unsigned warp = 1; warp < blockDim.x / 32; ++warp) {
    all.x += shared[warp].x;
    all.y += shared[warp].y;
  }
  return all;
}

// A row on its way through the norm: residual + dropout(x), which of x was kept, and the row's mean and 1/deviation.
template <class T, int V, int N>
struct Row {
  Held<V, N> sum;
  uint32_t kept = 0;  // bit n V + v
  float mean, scale;

  __device__ __forceinline__ void read(const NormParams& p, const Factors& mask, int64_t row, float2* shared) {
    const int channels = static_cast<int>(p.channels);
    const int64_t first = row * p.channels;
    const T *x = static_cast<const T*>(p.x) + first, *residual = static_cast<const T*>(p.residual) + first;
    float total = 0.0f, squares = 0.0f;
    kept = 0;
    each_pack<V, N>(channels, [&](int n, int c) {
      float added[V], factors[V];
      widen(load_pack<T, V>(residual + c), sum.value[n]);
      widen(load_pack<T, V>(x + c), added);
      mask.draw(static_cast<uint64_t>(first + c), factors);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        sum[n][v] += factors[v] * added[v];
        total += sum[n][v];
        kept |= static_cast<uint32_t>(factors[v] != 0.0f) << (n * V + v);
      }
    });
    mean = block_sums(total, 0.0f, shared).x / static_cast<float>(channels);
    each_pack<V, N>(channels, [&](int n, int) {
#pragma unroll
      for (int v = 0; v < V; ++v) squares += (sum[n][v] - mean) * (sum[n][v] - mean);
    });
    scale = 1.0f / sqrtf(block_sums(squares, 0.0f, shared).x / static_cast<float>(channels) + p.epsilon);
  }
};

template <class T, int V, int N>
__global__ void __launch_bounds__(kMostThreads) norm_kernel(const NormParams p) {
  LIGHTCONV_DYNAMIC_SHARED(float2, shared);
  Row<T, V, N> row;
  row.read(p, Factors(p.mask), blockIdx.x, shared);
  T* out = static_cast<T*>(p.out) + blockIdx.x * p.channels;
  each_pack<V, N>(static_cast<int>(p.channels), [&](int n, int c) {
    float weight[V], values[V];
    widen(load_pack<T, V>(static_cast<const T*>(p.weight) + c), weight);
    widen(load_pack<T, V>(static_cast<const T*>(p.bias) + c), values);
#pragma unroll
    for (int v = 0; v < V; ++v) values[v] += (row.sum[n][v] - row.mean) * row.scale * weight[v];
    store_pack(out + c, narrow<T, V>(values));
  });
}

// With s = residual + dropout(x), n = (s - mean) * scale, and g the gradient times the weight:
//   ds = scale * (g - mean(g) - n * mean(g n)),  dresidual = ds,  dx = ds * factors
// Each block leaves its sums of grad * n and grad over rows, the gradients of weight and bias, in the workspace.
template <class T, int V, int N>
__global__ void __launch_bounds__(kMostThreads) backward_kernel(const NormParams p) {
  LIGHTCONV_DYNAMIC_SHARED(float2, shared);
  const int channels = static_cast<int>(p.channels);
  const Factors mask(p.mask);
  const float inverse = 1.0f / static_cast<float>(channels), kept_scale = mask.scale;
  Held<V, N> dweight = {}, dbias = {};
  for (int64_t at = blockIdx.x; at < p.rows; at += gridDim.x) {
    Row<T, V, N> row;
    row.read(p, mask, at, shared);
    Held<V, N> grads;
    float total = 0.0f, along = 0.0f;
    each_pack<V, N>(channels, [&](int n, int c) {
      float weight[V];
      widen(load_pack<T, V>(static_cast<const T*>(p.grad) + at * p.channels + c), grads.value[n]);
      widen(load_pack<T, V>(static_cast<const T*>(p.weight) + c), weight);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        row.sum[n][v] = (row.sum[n][v] - row.mean) * row.scale;
        dweight[n][v] += grads[n][v] * row.sum[n][v];
        dbias[n][v] += grads[n][v];
        grads[n][v] *= weight[v];
        total += grads[n][v];
        along += grads[n][v] * row.sum[n][v];
      }
    });
    const float2 sums = block_sums(total, along, shared);
    each_pack<V, N>(channels, [&](int n, int c) {
      float dx[V];
#pragma unroll
      for (int v = 0; v < V; ++v) {
        grads[n][v] = row.scale * (grads[n][v] - inverse * (sums.x + row.sum[n][v] * sums.y));
        dx[v] = row.kept >> (n * V + v) & 1 ? grads[n][v] * kept_scale : 0.0f;
      }
      const int64_t to = at * p.channels + c;
      if (p.dresidual != nullptr) store_pack(static_cast<T*>(p.dresidual) + to, narrow<T, V>(grads.value[n]));
      if (p.dx != nullptr) store_pack(static_cast<T*>(p.dx) + to, narrow<T, V>(dx));
    });
  }
  if (p.dweight == nullptr) return;
  float* sums = static_cast<float*>(p.workspace) + static_cast<int64_t>(blockIdx.x) * 2 * channels;
  each_pack<V, N>(channels, [&](int n, int c) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      sums[c + v] = dweight[n][v];
      sums[channels + c + v] = dbias[n][v];
    }
  });
}

constexpr int kColumns = 32, kGroups = kMostThreads / kColumns;

// Adds up what the blocks left: 32 columns of the workspace in a block, each by 32 threads.
template <class T>
__global__ void __launch_bounds__(kMostThreads) sums_kernel(const NormParams p, const int64_t parts) {
  LIGHTCONV_DYNAMIC_SHARED(float, shared);
  const int group = static_cast<int>(threadIdx.x) / kColumns, lane = static_cast<int>(threadIdx.x) % kColumns;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns + lane, columns = 2 * p.channels;
  float sum = 0.0f;
  if (column < columns) {
    const float* from = static_cast<const float*>(p.workspace) + column;
    for (int64_t part = group; part < parts; part += kGroups) sum += from[part * columns];
  }
  shared[threadIdx.x] = sum;
  __syncthreads();
  if (group != 0 || column >= columns) return;
  for (int other = 1; other < kGroups; ++other) sum += shared[other * kColumns + lane];
  T* to = static_cast<T*>(column < p.channels ? p.dweight : p.dbias);
  to[column < p.channels ? column : column - p.channels] = from_float<T>(sum);
}

struct Layout {
  bool wide;
  int threads;
  int64_t parts;  // blocks of a backward pass
};

Layout layout_of(const NormParams& p) {
  const int element = p.type == Type::kFloat32 ? 4 : 2, vector = 16 / element;
  Layout layout;
  layout.wide = p.channels % vector == 0 &&
                wide_pointers(p.x, p.residual, p.weight, p.bias, p.out, p.grad, p.dx, p.dresidual);
  const int64_t held = layout.wide ? vector : 4;  // channels of a thread
  layout.threads = round_up(static_cast<int>(divide_up(p.channels, held)), 32);
  const int64_t most = kThreadsAtOnce / layout.threads, wanted = divide_up(p.rows, kLeastRows);
  layout.parts = wanted < most ? wanted : most;
  return layout;
}

template <class T, int V, int N>
cudaError_t launch(const NormParams& p, bool backward, const Layout& layout, cudaStream_t stream) {
  const size_t shared = layout.threads / 32 * sizeof(float2);
  if (!backward) return launch_blocks(norm_kernel<T, V, N>, p.rows, layout.threads, shared, stream, p);
  const cudaError_t error =
      launch_blocks(backward_kernel<T, V, N>, layout.parts, layout.threads, shared, stream, p);
  if (error != cudaSuccess || p.dweight == nullptr) return error;
  return launch_blocks(sums_kernel<T>, divide_up(2 * p.channels, int64_t{kColumns}), kMostThreads,
                       kMostThreads * sizeof(float), stream, p, layout.parts);
}

template <class T>
cudaError_t launch(const NormParams& p, bool backward, cudaStream_t stream) {
  if (p.channels > kMostNormChannels) return cudaErrorInvalidValue;
  const Layout layout = layout_of(p);
  return layout.wide ? launch<T, kWide<T>, 1>(p, backward, layout, stream)
                     : launch<T, 1, 4>(p, backward, layout, stream);
}

cudaError_t launch_by_type(const NormParams& p, bool backward, cudaStream_t stream) {
  return by_type(p.type, [&](auto zero) { return launch<decltype(zero)>(p, backward, stream); });
}

}  // namespace

cudaError_t dropout_add_norm(const NormParams& params, cudaStream_t stream) {
  return launch_by_type(params, false, stream);
}

size_t norm_workspace_bytes(const NormParams& params) {
  return params.dweight == nullptr ? 0 : layout_of(params).parts * 2 * params.channels * sizeof(float);
}

cudaError_t dropout_add_norm_backward(const NormParams& params, cudaStream_t stream) {
  return launch_by_type(params, true, stream);
}

}  // namespace lightconv
