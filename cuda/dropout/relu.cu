// ReLU with dropout, element by element. Where the output is 0, nothing flows back, so the mask is not drawn again.
#include "dropout/mask.cuh"

namespace lightconv {
namespace {

constexpr int kThreads = 256;

template <class T, int V>
__global__ void __launch_bounds__(kThreads) forward_kernel(const ReluParams p) {
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * V;
  if (at >= p.elements) return;
  float values[V], factors[V];
  widen(load_pack<T, V>(static_cast<const T*>(p.x) + at), values);
  Factors(p.mask).draw(static_cast<uint64_t>(at), factors);
#pragma unroll
  // NaN is not <= 0: it remains, unless it is dropped.
  for (int v = 0; v < V; ++v) values[v] = values[v] <= 0.0f || factors[v] == 0.0f ? 0.0f : values[v] * factors[v];
  store_pack(static_cast<T*>(p.out) + at, narrow<T, V>(values));
}

template <class T, int V>
__global__ void __launch_bounds__(kThreads) backward_kernel(const ReluParams p) {
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * V;
  if (at >= p.elements) return;
  float out[V], grad[V];
  widen(load_pack<T, V>(static_cast<const T*>(p.out) + at), out);
  widen(load_pack<T, V>(static_cast<const T*>(p.grad) + at), grad);
#pragma unroll
  for (int v = 0; v < V; ++v) grad[v] = out[v] <= 0.0f ? 0.0f : grad[v] * p.mask.keep_scale;
  store_pack(static_cast<T*>(p.dx) + at, narrow<T, V>(grad));
}

template <class T>
cudaError_t launch(const ReluParams& p, bool backward, cudaStream_t stream) {
  constexpr int V = kWide<T>;
  const bool wide = p.elements % V == 0 && wide_pointers(p.x, p.out, p.grad, p.dx);
  const auto kernel = backward ? wide ? backward_kernel<T, V> : backward_kernel<T, 1>
                      : wide   ? forward_kernel<T, V>
                               : forward_kernel<T, 1>;
  const int64_t packs = wide ? p.elements / V : p.elements;
  return launch_blocks(kernel, divide_up(packs, int64_t{kThreads}), kThreads, 0, stream, p);
}

cudaError_t launch_by_type(const ReluParams& p, bool backward, cudaStream_t stream) {
  return by_type(p.type, [&](auto zero) { return launch<decltype(zero)>(p, backward, stream); });
}

}  // namespace

cudaError_t relu_dropout(const ReluParams& params, cudaStream_t stream) {
  return launch_by_type(params, false, stream);
}

cudaError_t relu_dropout_backward(const ReluParams& params, cudaStream_t stream) {
  return launch_by_type(params, true, stream);
}

}  // namespace lightconv
