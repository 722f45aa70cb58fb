// The loss of label smoothing over rows of logits and its gradient, without the probabilities in memory.
//
// With p = softmax(logits), V words, the target t and e = ε / (V − 1):
//   nll = −log p[t],   loss = (1 − ε − e) · nll + e · Σ −log p
// Their gradients with respect to a logit, for gradients g of the loss and h of nll:
//   (g + h) · p − g · e, at the target less g · (1 − ε − e) + h
#pragma once

#include "common/scalars.h"

namespace lightconv {

// rows × words logits, the rows `pitch` elements apart. A row whose target is `ignore` is not read: its losses and its
// gradient are 0. Other targets must be in 0 … words − 1.
template <class T>
struct Logits {
  const T* data;
  int64_t pitch, rows, words;
  const int64_t* target;
  int64_t ignore;
  double epsilon;
};

// loss, nll and the normaliser log Σ exp(logits), one number for each row.
template <class T>
void smoothed_loss(const Logits<T>& logits, Sum<T>* loss, Sum<T>* nll, Sum<T>* normaliser, int threads);

// `gradient` has its own pitch. grad_nll may be null, for zeros.
template <class T>
void smoothed_loss_backward(const Logits<T>& logits, const Sum<T>* grad_loss, const Sum<T>* grad_nll,
                            const Sum<T>* normaliser, T* gradient, int64_t pitch, int threads);

}  // namespace lightconv
