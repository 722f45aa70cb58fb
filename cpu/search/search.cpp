// What a step of beam search computes between the linear layers: attention of a few queries, log-normalisers and the
// best entries of rows of logits. float32 only; lightconv_plugin/ops/reference_search.py defines them.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <cmath>
#include <tuple>
#include <vector>

#include "search/rows.h"

namespace lightconv {
namespace {

using V = Vector<float>;
constexpr int64_t kLanes = kWidth<float>;

void check_rows(const at::Tensor& logits) {
  TORCH_CHECK(logits.dim() == 2 && logits.scalar_type() == at::kFloat, "lightconv: logits must be (N, V), float32");
}

// ------------------------------------------------------------------------------------------------ logits

at::Tensor log_normalisers(const at::Tensor& any_logits) {
  check_rows(any_logits);
  const at::Tensor logits = any_logits.contiguous();
  const int64_t rows = logits.size(0), n = logits.size(1);
  at::Tensor out = at::empty({rows}, logits.options());
  const float* from = logits.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, rows, std::max<int64_t>(1, 65536 / std::max<int64_t>(1, n)), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      LogSum sum;
      sum.add(from + row * n, n);
      to[row] = sum.value();
    }
  });
  return out;
}

std::tuple<at::Tensor, at::Tensor> best_of_rows(const at::Tensor& any_logits, int64_t count) {
  check_rows(any_logits);
  const at::Tensor logits = any_logits.contiguous();
  const int64_t rows = logits.size(0), n = logits.size(1);
  TORCH_CHECK(count >= 1 && count <= n, "lightconv: count must be in 1 … ", n, ", got ", count);
  at::Tensor values = at::empty({rows, count}, logits.options());
  at::Tensor indices = at::empty({rows, count}, logits.options().dtype(at::kLong));
  const float* from = logits.const_data_ptr<float>();
  float* value = values.mutable_data_ptr<float>();
  int64_t* index = indices.mutable_data_ptr<int64_t>();
  at::parallel_for(0, rows, std::max<int64_t>(1, 65536 / n), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      BestEntries(value + row * count, index + row * count, count).add(from + row * n, n, 0);
    }
  });
  return {values, indices};
}

// ------------------------------------------------------------------------------------------------ attention

// What the queries of one sentence and head read and write: queries and outputs are `pitch` floats apart; keys and
// values are (steps, channels); the mask is 0 or −∞, with `mask_pitch` floats from query to query.
struct Head {
  const float *query, *keys, *values, *mask;
  float* out;
  int64_t pitch, steps, channels, mask_pitch;
  float scale;
};

template <int kQueries>
void attend_to(const Head& head, int64_t from, float* scores) {
  const int64_t steps = head.steps, channels = head.channels, row = round_up<float>(steps);
  const float* query = head.query + from * head.pitch;
  for (int64_t t = 0; t < steps; ++t) {
    V sums[kQueries] = {};
    for (int64_t c = 0; c < channels; c += kLanes) {
      const V key = load(head.keys + t * channels + c);
      for (int i = 0; i < kQueries; ++i) sums[i] += load(query + i * head.pitch + c) * key;
    }
    for (int i = 0; i < kQueries; ++i) {
      const float masked = head.mask ? head.mask[(from + i) * head.mask_pitch + t] : 0.0f;
      scores[i * row + t] = sum_across<float>(sums[i])[0] * head.scale + masked;
    }
  }
  float shares[kQueries];
  for (int i = 0; i < kQueries; ++i) {
    float* score = scores + i * row;
    for (int64_t t = steps; t < row; ++t) score[t] = -kInfinity;
    const float top = largest(score, row);
    V sum{};
    for (int64_t t = 0; t < row; t += kLanes) {
      const V power = exponential(load(score + t) - top);
      store(score + t, power);
      sum += power;
    }
    shares[i] = 1 / sum_across<float>(sum)[0];
  }
  for (int64_t c = 0; c < channels; c += kLanes) {
    V sums[kQueries] = {};
    for (int64_t t = 0; t < steps; ++t) {
      const V value = load(head.values + t * channels + c);
      for (int i = 0; i < kQueries; ++i) sums[i] += scores[i * row + t] * value;
    }
    for (int i = 0; i < kQueries; ++i) store(head.out + (from + i) * head.pitch + c, sums[i] * shares[i]);
  }
}

at::Tensor attend(
    const at::Tensor& any_query, const at::Tensor& keys, const at::Tensor& values, const c10::optional<at::Tensor>& mask) {
  const at::Tensor query = any_query.contiguous();
  TORCH_CHECK(query.dim() == 3 && keys.dim() == 4 && values.sizes() == keys.sizes(), "lightconv: wrong dimensions");
  const int64_t sentences = keys.size(0), heads = keys.size(1), steps = keys.size(2), channels = keys.size(3);
  const int64_t queries = query.size(1);
  TORCH_CHECK(query.size(0) == sentences && query.size(2) == heads * channels, "lightconv: query must be (S, Q, H·D)");
  TORCH_CHECK(channels % 16 == 0, "lightconv: the channels of a head must be a multiple of 16, got ", channels);
  for (const at::Tensor& tensor : {query, keys, values}) {
    TORCH_CHECK(tensor.scalar_type() == at::kFloat, "lightconv: attend computes in float32");
    // The stride of a dimension of size 1 may be anything.
    const bool rows_follow = tensor.size(-2) == 1 || tensor.stride(-2) == tensor.size(-1);
    TORCH_CHECK(tensor.stride(-1) == 1 && rows_follow, "lightconv: steps must be contiguous");
  }
  if (mask) {
    TORCH_CHECK(
        mask->dim() == 4 && mask->size(0) == sentences && mask->size(1) == 1 && mask->size(3) == steps &&
            (mask->size(2) == 1 || mask->size(2) == queries) && mask->scalar_type() == at::kFloat &&
            (mask->stride(3) == 1 || steps == 1),
        "lightconv: mask must be (S, 1, 1 or Q, T), float32");
  }
  at::Tensor out = at::empty_like(query);
  const float* q = query.const_data_ptr<float>();
  const float* k = keys.const_data_ptr<float>();
  const float* v = values.const_data_ptr<float>();
  const float* m = mask ? mask->const_data_ptr<float>() : nullptr;
  float* o = out.mutable_data_ptr<float>();
  const int64_t work = std::max<int64_t>(1, queries * steps * channels);
  at::parallel_for(0, sentences * heads, std::max<int64_t>(1, 65536 / work), [&](int64_t first, int64_t last) {
    std::vector<float> scores(4 * round_up<float>(steps));
    for (int64_t number = first; number < last; ++number) {
      const int64_t s = number / heads, h = number % heads;
      Head head;
      head.query = q + (s * queries * heads + h) * channels;
      head.out = o + (s * queries * heads + h) * channels;
      head.keys = k + s * keys.stride(0) + h * keys.stride(1);
      head.values = v + s * values.stride(0) + h * values.stride(1);
      head.mask = m ? m + s * mask->stride(0) : nullptr;
      head.mask_pitch = m && mask->size(2) > 1 ? mask->stride(2) : 0;
      head.pitch = heads * channels;
      head.steps = steps;
      head.channels = channels;
      head.scale = 1 / std::sqrt(float(channels));
      int64_t i = 0;
      for (; i + 4 <= queries; i += 4) attend_to<4>(head, i, scores.data());
      if (queries - i >= 2) attend_to<2>(head, i, scores.data()), i += 2;
      if (i < queries) attend_to<1>(head, i, scores.data());
    }
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(lightconv, CPU, m) {
  m.impl("log_normalisers", &log_normalisers);
  m.impl("best_of_rows", &best_of_rows);
  m.impl("attend", &attend);
}

}  // namespace lightconv
