// The passes over a problem, for the types float, double, Float16 and BFloat16.
#pragma once

#include "convolution/problem.h"

namespace lightconv {

// p.out from p.x (and p.state).
template <class T>
void run_forward(Problem<T>& p);

// Those of p.dx, p.dstate and p.dweight that are not null, from p.grad and p.grad_state.
template <class T>
void run_backward(Problem<T>& p);

// The parts of these that run on all threads. A shared filter's taps are p.taps.
template <class T>
void forward(const Problem<T>& p);

// With a shared filter the gradient of its taps is added to p.partial: kBundles planes of (H, filter_pitch), zero before
// the call, whose sum, in their order, is the gradient.
template <class T>
void backward(const Problem<T>& p);

// The same in tiles of one sentence: for heads narrower than a vector, and backward for long predicted filters too.
template <class T>
void tile_forward(const Problem<T>& p);
template <class T>
void tile_backward(const Problem<T>& p);

constexpr int64_t kBundles = 64;

}  // namespace lightconv
