// The passes over a problem, for the types float, double, c10::Half and c10::BFloat16.
#pragma once

#include "convolution/problem.h"

namespace lightconv {

// p.out from p.x (and p.state).
template <class T>
void forward(const Problem<T>& p);

// What of p.dx, p.dstate and p.dweight is there, from p.grad and p.grad_state. With a shared filter the gradient of
// its taps is added up in p.partial: kBundles planes of (H, filter_pitch), zero before, to be summed in their order.
template <class T>
void backward(const Problem<T>& p);

constexpr int64_t kBundles = 64;

}  // namespace lightconv
