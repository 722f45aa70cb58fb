// Attention of single queries, head by head.
#pragma once

#include <cmath>
#include <type_traits>

#include "search/linear.h"
#include "search/rows.h"

namespace lightconv::decoding {

// The keys and values that the queries of a sentence read. Keys are transposed, so that the scores of neighbouring
// positions are adjacent: (heads, head_dim, pitch), where pitch is `steps` rounded up to whole vectors. Values are
// rows.
struct Memory {
  const float* keys;
  const float* values;
  int64_t value_pitch, steps, heads, head_dim;
  const float* mask;  // (steps,) 0 or −∞, or null

  int64_t pitch() const { return round_up<float>(steps); }
};

// Keys as rows, `row_pitch` floats apart → (heads, head_dim, pitch) with zeros after the last step.
inline void transpose_keys(
    const float* rows, int64_t row_pitch, int64_t steps, int64_t heads, int64_t head_dim, float* keys) {
  const int64_t pitch = round_up<float>(steps);
  for (int64_t channel = 0; channel < heads * head_dim; ++channel) {
    float* to = keys + channel * pitch;
    for (int64_t t = 0; t < steps; ++t) to[t] = rows[t * row_pitch + channel];
    for (int64_t t = steps; t < pitch; ++t) to[t] = 0;
  }
}

// scores (n,) → their softmax; `scores` has room for whole vectors.
inline void softmax(float* scores, int64_t n) {
  constexpr int64_t lanes = kWidth<float>;
  for (int64_t t = n; t < round_up<float>(n); ++t) scores[t] = -kInfinity;
  const float top = largest(scores, n);
  Vector<float> sum{};
  for (int64_t t = 0; t < n; t += lanes) {
    const Vector<float> power = exponential(load(scores + t) - top);
    store(scores + t, power);
    sum += power;
  }
  const float share = 1 / sum_across<float>(sum)[0];
  for (int64_t t = 0; t < n; t += lanes) store(scores + t, load(scores + t) * share);
}

// sums[q][v] += factors[q · factor_pitch + i] · rows[i · row_pitch + v · lanes] for all i, in order; several vectors at
// a time, so that their additions do not wait for each other.
template <int Q, int N>
LIGHTCONV_INLINE void sum_rows(
    const float* factors, int64_t factor_pitch, const float* rows, int64_t row_pitch, int64_t count,
    Vector<float> (&sums)[Q][N]) {
  for (int64_t i = 0; i < count; ++i) {
    for (int v = 0; v < N; ++v) {
      const Vector<float> row = load(rows + i * row_pitch + v * kWidth<float>);
      for (int q = 0; q < Q; ++q) sums[q][v] += factors[q * factor_pitch + i] * row;
    }
  }
}

// Q queries of one head, `query_pitch` floats apart, and their outputs; scores: Q · memory.pitch() floats.
template <int Q>
void attend(const Memory& memory, int64_t head, const float* query, float* out, int64_t query_pitch, float* scores) {
  constexpr int64_t lanes = kWidth<float>;
  const int64_t dim = memory.head_dim, pitch = memory.pitch();
  const float scale = 1 / std::sqrt(float(dim));
  const float* keys = memory.keys + head * dim * pitch;
  const auto score = [&](auto vectors, int64_t t) {
    V sums[Q][vectors.value] = {};
    sum_rows(query, query_pitch, keys + t, pitch, dim, sums);
    for (int q = 0; q < Q; ++q) {
      for (int v = 0; v < vectors.value; ++v) store(scores + q * pitch + t + v * lanes, sums[q][v] * scale);
    }
  };
  int64_t t = 0;
  for (; t + 4 * lanes <= pitch; t += 4 * lanes) score(std::integral_constant<int, 4>(), t);
  for (; t < pitch; t += lanes) score(std::integral_constant<int, 1>(), t);
  for (int q = 0; q < Q; ++q) {
    for (t = 0; memory.mask && t < memory.steps; ++t) scores[q * pitch + t] += memory.mask[t];
    softmax(scores + q * pitch, memory.steps);
  }
  const float* values = memory.values + head * dim;
  const auto mix = [&](auto vectors, int64_t c) {
    V sums[Q][vectors.value] = {};
    sum_rows(scores, pitch, values + c, memory.value_pitch, memory.steps, sums);
    for (int q = 0; q < Q; ++q) {
      for (int v = 0; v < vectors.value; ++v) store(out + q * query_pitch + c + v * lanes, sums[q][v]);
    }
  };
  int64_t c = 0;
  for (; c + 4 * lanes <= dim; c += 4 * lanes) mix(std::integral_constant<int, 4>(), c);
  for (; c + lanes <= dim; c += lanes) mix(std::integral_constant<int, 1>(), c);
  for (; c < dim; ++c) {
    for (int q = 0; q < Q; ++q) {
      float sum = 0;
      for (t = 0; t < memory.steps; ++t) sum += scores[q * pitch + t] * values[t * memory.value_pitch + c];
      out[q * query_pitch + c] = sum;
    }
  }
}

// All heads of `queries` queries of the same sentence. A query's result does not depend on how many there are.
inline void attend_all(
    const Memory& memory, const float* query, float* out, int64_t query_pitch, int64_t queries, Workshop& shop) {
  float* scores = shop.scores.get(4 * memory.pitch());
  for (int64_t head = 0; head < memory.heads; ++head) {
    const int64_t offset = head * memory.head_dim;
    int64_t q = 0;
    for (; q + 4 <= queries; q += 4) {
      attend<4>(memory, head, query + q * query_pitch + offset, out + q * query_pitch + offset, query_pitch, scores);
    }
    for (; q < queries; ++q) {
      attend<1>(memory, head, query + q * query_pitch + offset, out + q * query_pitch + offset, query_pitch, scores);
    }
  }
}

// One query over the rows of its own past: sources[t] are the keys (heads · head_dim), followed by the values.
inline void attend_past(
    const float* query, const float* const* sources, int64_t steps, int64_t heads, int64_t head_dim, float* out,
    Workshop& shop) {
  constexpr int64_t lanes = kWidth<float>;
  float* scores = shop.scores.get(round_up<float>(steps));
  const float scale = 1 / std::sqrt(float(head_dim));
  const int64_t whole = head_dim / lanes * lanes;
  for (int64_t head = 0; head < heads; ++head, query += head_dim, out += head_dim) {
    const int64_t key = head * head_dim, value = (heads + head) * head_dim;
    for (int64_t t = 0; t < steps; ++t) {
      V sum{};
      for (int64_t c = 0; c < whole; c += lanes) sum += load(query + c) * load(sources[t] + key + c);
      float total = sum_across<float>(sum)[0];
      for (int64_t c = whole; c < head_dim; ++c) total += query[c] * sources[t][key + c];
      scores[t] = total * scale;
    }
    softmax(scores, steps);
    int64_t c = 0;
    for (; c < whole; c += lanes) {
      V sum{};
      for (int64_t t = 0; t < steps; ++t) sum += scores[t] * load(sources[t] + value + c);
      store(out + c, sum);
    }
    for (; c < head_dim; ++c) {
      float sum = 0;
      for (int64_t t = 0; t < steps; ++t) sum += scores[t] * sources[t][value + c];
      out[c] = sum;
    }
  }
}

}  // namespace lightconv::decoding
