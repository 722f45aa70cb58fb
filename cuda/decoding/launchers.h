// What a step of beam search needs besides matrix products, attention and norms. The formulas are in
// lightconv_plugin/ops/decoding.py.
#pragma once

#include "common/problem.h"

namespace lightconv {

// A causal convolution of the newest input and those of each hypothesis's ancestors, which lie in a ring.
struct RingParams {
  Type type = Type::kFloat32;  // of every floating tensor
  bool float_weight = false;   // but the weight, if this is set: that is float32
  int64_t rows = 0;            // N: row n is hypothesis n mod `beams` of sentence n div `beams`
  int beams = 1;               // hypotheses of a sentence in this step
  int channels = 0;            // C
  int heads = 1;               // H, divides C
  int taps = 1;                // K, at most `slots`
  int slots = 1;               // step t's inputs are in slot t mod `slots`
  int64_t sentences = 0;       // that the ring has room for
  int64_t width = 0;           // hypotheses of a sentence that the ring has room for
  bool softmax = false;        // normalise the weight over its taps

  const void* x = nullptr;  // (N, C), rows `x_stride` elements apart
  int64_t x_stride = 0;
  void* ring = nullptr;          // (slots, sentences, width, C), contiguous
  const void* weight = nullptr;  // (N, H, K) with these strides, in elements
  int64_t weight_stride_n = 0;
  int64_t weight_stride_h = 0;
  int64_t weight_stride_k = 0;
  const void* bias = nullptr;          // (C,) or null
  const int64_t* ancestors = nullptr;  // (N div beams, beams, steps) with these strides
  int64_t ancestors_stride_s = 0;
  int64_t ancestors_stride_b = 0;
  int64_t ancestors_stride_t = 0;
  const int64_t* now = nullptr;  // one element, the current step
  void* out = nullptr;           // (N, C), contiguous
};

cudaError_t ring_step(const RingParams& params, cudaStream_t stream);

constexpr int kMostPenalties = 4;

// The words with the highest log-probabilities of each row.
struct BestParams {
  Type type = Type::kFloat32;  // of the logits
  int64_t rows = 0;            // N
  int words = 0;               // V
  int count = 0;               // k, at most V
  const void* logits = nullptr;  // (N, V), rows `pitch` elements apart
  int64_t pitch = 0;
  const float* normalisers = nullptr;  // (N,) with this stride; null: log Σ exp(logits)
  int64_t normaliser_stride = 0;
  const float* scores = nullptr;  // (N,) with this stride, added to a row's results; null: 0
  int64_t score_stride = 0;
  int penalties = 0;
  int penalised[kMostPenalties] = {};    // the words from whose logits
  float penalty[kMostPenalties] = {};    // this much is subtracted
  float* log_probabilities = nullptr;  // (N, k)
  int64_t* best = nullptr;             // (N, k)
};

cudaError_t best_words(const BestParams& params, cudaStream_t stream);

}  // namespace lightconv
