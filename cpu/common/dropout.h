// Dropout of any tensor with the mask of philox.h. The backward pass draws the mask again, so none is stored. This
// takes a fraction of the time of torch's dropout on a CPU, which calls a generator for every element.
#pragma once

#include "common/philox.h"

namespace lightconv {

// out = x · mask / (1 − p) for n elements of type float, double, Float16 or BFloat16.
template <class T>
void drop(const T* x, T* out, int64_t n, const Dropout& dropout, int threads);

// The same of max(x, 0).
template <class T>
void relu_drop(const T* x, T* out, int64_t n, const Dropout& dropout, int threads);

// The gradient of x from relu_drop's output, which is 0 where nothing flows back; scale: 1 / (1 − p).
template <class T>
void relu_drop_backward(const T* grad, const T* out, T* dx, int64_t n, double scale, int threads);

}  // namespace lightconv
