// The passes over a problem, for the types float, double, Float16 and BFloat16.
#pragma once

#include "convolution/problem.h"

namespace lightconv {

// Computes p.out from p.x (and p.state).
template <class T>
void run_forward(Problem<T>& p);

// Computes p.dx, p.dstate and p.dweight, where they are not null, from p.grad and p.grad_state.
template <class T>
void run_backward(Problem<T>& p);

// The parts of these passes that run on all threads. The taps of a shared filter are in p.taps.
template <class T>
void forward(const Problem<T>& p);

// With a shared filter, the gradient of its taps goes to p.partial (unless it is null): up to kBundles planes of
// (H, filter_pitch). The gradient is their sum, in their order.
template <class T>
void backward(const Problem<T>& p);

// The same in tiles of one sentence: for heads narrower than a vector, and backward for long predicted filters too.
template <class T>
void tile_forward(const Problem<T>& p);
template <class T>
void tile_backward(const Problem<T>& p);

constexpr int64_t kBundles = 64;

}  // namespace lightconv
