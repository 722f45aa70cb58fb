// Dropout, a residual connection and its layer norm over rows; the formula is in lightconv_plugin/ops/residual.py.
#pragma once

#include "common/philox.h"
#include "common/scalars.h"

namespace lightconv {

// norm(residual + dropout(x)), all contiguous.
template <class T>
struct ResidualNorm {
  const T* x;  // (rows, channels)
  const T* residual;
  const T* weight;  // (channels,)
  int64_t rows, channels;
  Dropout dropout;
  double epsilon;
};

template <class T>
void dropout_add_norm(const ResidualNorm<T>& norm, const T* bias, T* out, int threads);

// A gradient that is not needed is null; those of weight and bias come together.
template <class T>
void dropout_add_norm_backward(const ResidualNorm<T>& norm, const T* grad, T* dx, T* dresidual, T* dweight, T* dbias,
                               int threads);

}  // namespace lightconv
