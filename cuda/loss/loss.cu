// A block goes over a row: once for the loss, once for the gradient. Probabilities are never stored.
#include "common/log_sum.cuh"
#include "loss/launchers.h"

namespace lightconv {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// The shares of the target's and of every word's -log p in the loss.
struct Shares {
  float target, each;
};

inline Shares shares_of(const LossParams& p) {
  const double each = p.epsilon / static_cast<double>(p.words - 1);
  return {static_cast<float>(1 - p.epsilon - each), static_cast<float>(each)};
}

// Of some logits: log Σ exp, and the sum.
struct Sums {
  LogSum powers;
  float total = 0.0f;
};

// The sums of all threads of the block, in each of them; `shared` has room for a Sums per warp.
__device__ __forceinline__ Sums over_block(Sums mine, Sums* shared) {
  mine.powers.over_warp();
  mine.total = group_sum(mine.total, 32);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = mine;
  __syncthreads();
  Sums all = shared[0];
  for (int warp = 1; warp < kWarps; ++warp) {
    all.powers.add(shared[warp].powers);
    all.total += shared[warp].total;
  }
  return all;
}

__device__ __forceinline__ bool inside(const LossParams& p, int64_t target) {
  return target >= 0 && target < p.words;
}

template <class T, int V>
__global__ void __launch_bounds__(kThreads) loss_kernel(const LossParams p, const Shares shares) {
  LIGHTCONV_DYNAMIC_SHARED(Sums, shared);
  const int64_t row = blockIdx.x, target = p.target[row];
  if (target == p.ignore) {
    if (threadIdx.x == 0) p.loss[row] = p.nll[row] = p.normaliser[row] = 0.0f;
    return;
  }
  const T* logits = static_cast<const T*>(p.logits) + row * p.pitch;
  Sums mine;
  for (int64_t at = static_cast<int64_t>(threadIdx.x) * V; at < p.words; at += kThreads * V) {
    float values[V];
    widen(load_pack<T, V>(logits + at), values);
    mine.powers.add(values);
#pragma unroll
    for (int v = 0; v < V; ++v) mine.total += values[v];
  }
  const Sums all = over_block(mine, shared);
  if (threadIdx.x != 0) return;
  const float normaliser = all.powers.value();
  const float nll = inside(p, target) ? normaliser - to_float(logits[target]) : NAN;
  p.normaliser[row] = normaliser;
  p.nll[row] = nll;
  p.loss[row] = shares.target * nll + shares.each * (static_cast<float>(p.words) * normaliser - all.total);
}

template <class T, int V>
__global__ void __launch_bounds__(kThreads) gradient_kernel(const LossParams p, const Shares shares) {
  const int64_t row = blockIdx.x, target = p.target[row];
  const T* logits = static_cast<const T*>(p.logits) + row * p.pitch;
  T* gradient = static_cast<T*>(p.gradient) + row * p.gradient_pitch;
  const bool ignored = target == p.ignore;
  const float of_loss = p.grad_loss == nullptr ? 0.0f : p.grad_loss[row * p.grad_loss_stride];
  const float of_nll = p.grad_nll == nullptr ? 0.0f : p.grad_nll[row * p.grad_nll_stride];
  const float scale = of_loss + of_nll, all = of_loss * shares.each, there = of_loss * shares.target + of_nll;
  const float normaliser = inside(p, target) ? p.normaliser[row] : NAN;
  for (int64_t at = static_cast<int64_t>(threadIdx.x) * V; at < p.words; at += kThreads * V) {
    Pack<T, V> pack = zero_pack<T, V>();
    if (!ignored) {
      float values[V];
      widen(load_pack<T, V>(logits + at), values);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        values[v] = exponential(values[v] - normaliser) * scale - all - (at + v == target ? there : 0.0f);
      }
      pack = narrow<T, V>(values);
    }
    store_pack(gradient + at, pack);
  }
}

bool aligned_rows(const void* data, int64_t pitch, int element) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && pitch * element % 16 == 0;
}

template <class T>
cudaError_t launch(const LossParams& p, bool backward, cudaStream_t stream) {
  constexpr int V = kWide<T>;
  const bool wide = p.words % V == 0 && aligned_rows(p.logits, p.pitch, sizeof(T)) &&
                    (!backward || aligned_rows(p.gradient, p.gradient_pitch, sizeof(T)));
  const auto kernel = backward ? wide ? gradient_kernel<T, V> : gradient_kernel<T, 1>
                      : wide   ? loss_kernel<T, V>
                               : loss_kernel<T, 1>;
  return launch_blocks(kernel, p.rows, kThreads, backward ? 0 : kWarps * sizeof(Sums), stream, p, shares_of(p));
}

cudaError_t launch_by_type(const LossParams& p, bool backward, cudaStream_t stream) {
  return by_type(p.type, [&](auto zero) { return launch<decltype(zero)>(p, backward, stream); });
}

}  // namespace

cudaError_t smoothed_loss(const LossParams& params, cudaStream_t stream) {
  return launch_by_type(params, false, stream);
}

cudaError_t smoothed_loss_backward(const LossParams& params, cudaStream_t stream) {
  return launch_by_type(params, true, stream);
}

}  // namespace lightconv
