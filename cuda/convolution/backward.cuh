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

inline bool band_backward_can_run(const ConvBackwardParams& p) {
  return p.state_rows == 0 && p.grad.data != nullptr && p.grad_state.data == nullptr && band_backward_supported(p);
}

template <class T>
cudaError_t tiles_backward(const ConvBackwardParams& p, cudaStream_t stream) {
  return with_constants<T>(p, backward_wide<T>(p), [&](auto dynamic, auto V) {
    return tiled_backward<T, decltype(dynamic)::value, decltype(V)::value>(p, stream);
  });
}

template <class T>
int64_t tiles_slabs(const ConvBackwardParams& p) {
  return backward_wide<T>(p) ? light_gradient_tile<T, kWide<T>>(p).slabs : light_gradient_tile<T, 1>(p).slabs;
}

// As kForward. All paths write slabs, from which one function computes lightconv's gradient.
template <class T>
constexpr Path<ConvBackwardParams> kBackward[3] = {
    {"band", kBandNeeds, band_backward_can_run, band_backward, band_slabs},
    {"short", kShortNeeds, short_backward_supported<T>, short_backward<T>, short_slabs<T>},
    {"tiles", "", always<ConvBackwardParams>, tiles_backward<T>, tiles_slabs<T>},
};

template <class T>
cudaError_t backward_of(const ConvBackwardParams& p, cudaStream_t stream) {
  const Path<ConvBackwardParams>& path = first_of(kBackward<T>, p);
  const cudaError_t error = p.batch > 0 ? path.run(p, stream) : cudaSuccess;
  if (error != cudaSuccess || p.dynamic || p.dweight == nullptr) return error;
  return finish_light_weight_gradient<T>(p, p.batch > 0 ? path.slabs(p) : 0, stream);
}

template <class T>
std::string explain_backward(const ConvBackwardParams& p) {
  return explained(kBackward<T>, p);
}

template <class T>
size_t workspace_bytes_of(const ConvBackwardParams& p) {
  if (p.dynamic || p.dweight == nullptr) return 0;
  // Even the sum of no slabs needs a place.
  const int64_t slabs = p.batch > 0 ? first_of(kBackward<T>, p).slabs(p) : 1;
  return sizeof(float) * p.heads * static_cast<size_t>(p.kernel_size) * static_cast<size_t>(slabs > 0 ? slabs : 1);
}

}  // namespace lightconv
