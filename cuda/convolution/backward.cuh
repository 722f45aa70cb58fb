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

template <class T, int V>
cudaError_t backward_with(const ConvBackwardParams& p, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  if (p.batch > 0 && (p.dx.data != nullptr || p.dstate.data != nullptr)) {
    error = p.dynamic ? tiled_input_gradient<T, true, V>(p, stream) : tiled_input_gradient<T, false, V>(p, stream);
  }
  if (error == cudaSuccess && p.dweight != nullptr) error = launch_weight_gradient<T, V>(p, stream);
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

template <class T>
cudaError_t backward_of(const ConvBackwardParams& p, cudaStream_t stream) {
  switch (backward_path<T>(p)) {
    case BackwardPath::kShort: return short_backward<T>(p, stream);
    case BackwardPath::kBand: return band_backward(p, stream);
    case BackwardPath::kTiles: break;
  }
  return backward_wide<T>(p) ? backward_with<T, kWide<T>>(p, stream) : backward_with<T, 1>(p, stream);
}

template <class T>
size_t workspace_bytes_of(const ConvBackwardParams& p) {
  const BackwardPath path = backward_path<T>(p);
  if (path == BackwardPath::kBand) return band_workspace_bytes(p);
  if (p.dynamic || p.dweight == nullptr) return 0;
  const int64_t slabs = path == BackwardPath::kShort ? short_slabs<T>(p)
                        : backward_wide<T>(p)        ? light_gradient_tile<T, kWide<T>>(p).slabs
                                                     : light_gradient_tile<T, 1>(p).slabs;
  // The sum of no slabs has a place too.
  return sizeof(float) * p.heads * static_cast<size_t>(p.kernel_size) * static_cast<size_t>(slabs > 0 ? slabs : 1);
}

}  // namespace lightconv
