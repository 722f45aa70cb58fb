// The backward pass: which kernels compute the gradients, and in which order.
#pragma once

#include "convolution/input_gradient.cuh"
#include "convolution/short_backward.cuh"
#include "convolution/weight_gradient.cuh"

namespace lightconv {

// Whether everything can be read and written a vector at a time.
template <class T>
bool backward_wide(const ConvBackwardParams& p) {
  constexpr int size = sizeof(T);
  return p.channels / p.heads % kWide<T> == 0 && aligned(p.x, size, 16) && aligned(p.state, size, 16) &&
         aligned(p.grad, size, 16) && aligned(p.grad_state, size, 16) && aligned(p.dx, size, 16) &&
         aligned(p.dstate, size, 16);
}

template <class T, bool kDynamic, int V>
cudaError_t tiled_backward(const ConvBackwardParams& p, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  if (p.dx.data != nullptr || p.dstate.data != nullptr) error = tiled_input_gradient<T, kDynamic, V>(p, stream);
  if (error == cudaSuccess && p.dweight != nullptr) error = tiled_weight_gradient<T, kDynamic, V>(p, stream);
  return error;
}

enum class BackwardPath { kShort, kBand, kTiles };

// As forward_of.
template <class T>
BackwardPath backward_path(const ConvBackwardParams& p) {
  const bool full_pass = p.state_rows == 0 && p.grad.data != nullptr && p.grad_state.data == nullptr;
  if (full_pass && band_backward_supported(p)) return BackwardPath::kBand;
  return short_backward_supported<T>(p) ? BackwardPath::kShort : BackwardPath::kTiles;
}

// The slabs that the first launch of lightconv's weight gradient writes.
template <class T>
int64_t slabs_of(const ConvBackwardParams& p) {
  switch (backward_path<T>(p)) {
    case BackwardPath::kShort: return short_slabs<T>(p);
    case BackwardPath::kBand: return band_slabs(p);
    case BackwardPath::kTiles: break;
  }
  return backward_wide<T>(p) ? light_gradient_tile<T, kWide<T>>(p).slabs : light_gradient_tile<T, 1>(p).slabs;
}

// All paths write slabs, from which one function computes lightconv's gradient.
template <class T>
cudaError_t backward_of(const ConvBackwardParams& p, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  if (p.batch > 0) {
    switch (backward_path<T>(p)) {
      case BackwardPath::kShort: error = short_backward<T>(p, stream); break;
      case BackwardPath::kBand: error = band_backward(p, stream); break;
      case BackwardPath::kTiles:
        error = with_constants<T>(p, backward_wide<T>(p), [&](auto dynamic, auto V) {
          return tiled_backward<T, decltype(dynamic)::value, decltype(V)::value>(p, stream);
        });
    }
  }
  if (error != cudaSuccess || p.dynamic || p.dweight == nullptr) return error;
  return finish_light_weight_gradient<T>(p, p.batch > 0 ? slabs_of<T>(p) : 0, stream);
}

template <class T>
size_t workspace_bytes_of(const ConvBackwardParams& p) {
  if (p.dynamic || p.dweight == nullptr) return 0;
  // Even the sum of no slabs needs a place.
  const int64_t slabs = p.batch > 0 ? slabs_of<T>(p) : 1;
  return sizeof(float) * p.heads * static_cast<size_t>(p.kernel_size) * static_cast<size_t>(slabs > 0 ? slabs : 1);
}

}  // namespace lightconv
