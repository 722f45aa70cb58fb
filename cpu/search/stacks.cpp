#include "search/stacks.h"

#include <algorithm>

namespace lightconv::decoding {
namespace {

void add_rows(const float* y, int64_t n, float* x) {
  for (int64_t i = 0; i < n; ++i) x[i] += y[i];
}

// x = x + f(norm(x)), or norm(x + f(x)); f(in, out) may use everything but `x` and `y`.
template <class F>
void sublayer(const Norm& norm, bool before, int64_t rows, int64_t dim, float* x, float* normed, float* y, F f) {
  const float* in = x;
  if (before) {
    norm(x, rows, normed);
    in = normed;
  }
  f(in, y);
  add_rows(y, rows * dim, x);
  if (!before) norm(x, rows, x);
}

void feed_forward(const Layer& layer, const float* x, int64_t rows, int64_t dim, float* y, Workshop& shop) {
  const int64_t width = layer.fc1.outputs();
  float* hidden = shop.hidden.get(rows * width);
  layer.fc1(x, dim, rows, hidden, width, shop);
  // Row by row: the last few elements are computed in another way, and which these are must not depend on other rows.
  for (int64_t row = 0; row < rows; ++row) activate(layer.activation, hidden + row * width, width);
  layer.fc2(hidden, width, rows, y, dim, shop);
}

// The input of a convolution, (rows, channels), after projection and gate, to `to`. Returns what `leave` needs: the parts
// that the projection made, in shop.hidden, or null.
const float* enter(const Mixer& mixer, const float* x, int64_t rows, int64_t dim, float* to, Workshop& shop) {
  if (!mixer.enter) {
    std::copy_n(x, rows * dim, to);
    return nullptr;
  }
  const int64_t width = mixer.enter.outputs(), channels = mixer.channels;
  if (mixer.parts == 1) {
    mixer.enter(x, dim, rows, to, width, shop);
    return nullptr;
  }
  float* made = shop.hidden.get(rows * width);
  mixer.enter(x, dim, rows, made, width, shop);
  if (mixer.parts == 2) {
    gate(made, rows, channels, to);
    return nullptr;
  }
  for (int64_t row = 0; row < rows; ++row) {
    const float *before = made + row * width, *values = before + 2 * channels;
    for (int64_t c = 0; c < channels; ++c) to[row * channels + c] = before[c] * values[c];
  }
  return made;
}

// The output of a convolution, gated by the second of three parts and projected; `mixed` (rows, channels) is overwritten.
void leave(
    const Mixer& mixer, const float* made, float* mixed, int64_t rows, int64_t dim, float* y, Workshop& shop) {
  const int64_t channels = mixer.channels;
  for (int64_t row = 0; made && row < rows; ++row) {
    const float* after = made + row * 3 * channels + channels;
    for (int64_t c = 0; c < channels; ++c) mixed[row * channels + c] *= after[c];
  }
  mixer.leave(mixed, channels, rows, y, dim, shop);
}

void convolve_sentences(const Mixer& mixer, const Sentences& sentences, float* u, float* y, Workshop& shop) {
  const int64_t rows = sentences.rows(), channels = mixer.channels, taps = mixer.taps();
  for (size_t row = 0; row < sentences.pads.size(); ++row) {
    if (sentences.pads[row]) std::fill_n(u + row * channels, channels, 0.0f);
  }
  const bool full = mixer.kind == Kind::kFull;
  const float** sources = shop.sources.get(full ? rows * taps : taps);
  const float* filters = full ? nullptr : mixer.filters_of(u, rows, shop);
  for (int64_t s = 0; s < sentences.count(); ++s) {
    const int64_t begin = sentences.begins[s], end = sentences.begins[s + 1];
    for (int64_t row = begin; row < end; ++row) {
      const float** of_row = full ? sources + row * taps : sources;
      for (int64_t k = 0; k < taps; ++k) {
        const int64_t from = row - mixer.left + k;
        of_row[k] = from >= begin && from < end ? u + from * channels : nullptr;
      }
      if (!full) mixer.mix(sources, filters ? filters + row * mixer.heads * taps : nullptr, y + row * channels, shop);
    }
  }
  if (full) mixer.convolve(sources, rows, y, shop);
}

void attend_sentences(const Mixer& mixer, const Sentences& sentences, const float* x, float* y, Workshop& shop) {
  const int64_t rows = sentences.rows(), dim = mixer.channels, head_dim = dim / mixer.heads;
  float* projected = shop.hidden.get(rows * 3 * dim);
  mixer.product(x, dim, rows, projected, 3 * dim, shop);
  Buffer<float> memory_of_parts;
  for (int64_t i = 0; i < 3; ++i) {
    const Mixer& convolution = mixer.projections[i];
    if (!convolution) continue;
    float *part = memory_of_parts.get(2 * rows * dim), *convolved = part + rows * dim;
    for (int64_t row = 0; row < rows; ++row) std::copy_n(projected + (row * 3 + i) * dim, dim, part + row * dim);
    convolve_sentences(convolution, sentences, part, convolved, shop);
    for (int64_t row = 0; row < rows; ++row) std::copy_n(convolved + row * dim, dim, projected + (row * 3 + i) * dim);
  }
  const bool windowed = mixer.left >= 0 || mixer.right >= 0;
  std::vector<float> keys, mask;
  for (int64_t s = 0; s < sentences.count(); ++s) {
    const int64_t begin = sentences.begins[s], steps = sentences.length(s);
    const float* first = projected + begin * 3 * dim;
    keys.resize(dim * round_up<float>(steps));
    transpose_keys(first + dim, 3 * dim, steps, mixer.heads, head_dim, keys.data());
    const char* pads = sentences.pads.empty() ? nullptr : sentences.pads.data() + begin;
    Memory memory{keys.data(), first + 2 * dim, 3 * dim, steps, mixer.heads, head_dim, nullptr};
    if (!windowed && !pads) {
      // Outputs take the places of the queries.
      attend_all(memory, first, const_cast<float*>(first), 3 * dim, steps, shop);
      continue;
    }
    mask.resize(steps);
    memory.mask = mask.data();
    for (int64_t t = 0; t < steps; ++t) {
      for (int64_t other = 0; other < steps; ++other) {
        const bool near = (mixer.left < 0 || other >= t - mixer.left) && (mixer.right < 0 || other <= t + mixer.right);
        // A pad sees itself: an empty softmax would be NaN.
        mask[other] = near && (!pads || !pads[other] || other == t) ? 0 : -kInfinity;
      }
      const float* query = first + t * 3 * dim;
      attend_all(memory, query, const_cast<float*>(query), 3 * dim, 1, shop);
    }
  }
  mixer.leave(projected, 3 * dim, rows, y, dim, shop);
}

}  // namespace

bool Sentences::add(const int64_t* words, int64_t n, int64_t pad) {
  int64_t first = 0, last = n;
  while (first < last && words[first] == pad) ++first;
  while (first < last && words[last - 1] == pad) --last;
  int64_t position = 0;
  for (int64_t i = first; i < last; ++i) {
    const bool is_pad = words[i] == pad;
    if (is_pad && pads.empty()) pads.assign(tokens.size(), 0);
    tokens.push_back(words[i]);
    positions.push_back(position);
    position += !is_pad;
    if (!pads.empty() || is_pad) pads.push_back(is_pad);
  }
  begins.push_back(rows());
  return first < last;
}

void encode(const Stack& stack, const Sentences& sentences, float* x, Workshop& shop) {
  const int64_t rows = sentences.rows(), dim = stack.dim;
  stack.embed(sentences.tokens.data(), sentences.positions.data(), rows, x, shop);
  for (size_t row = 0; row < sentences.pads.size(); ++row) {
    if (sentences.pads[row]) std::fill_n(x + row * dim, dim, 0.0f);
  }
  Buffer<float> normed_memory, y_memory, u_memory;
  float *normed = normed_memory.get(rows * dim), *out = y_memory.get(rows * dim);
  for (const Layer& layer : stack.layers) {
    const Mixer& mixer = layer.mixer;
    sublayer(layer.mixer_norm, layer.before, rows, dim, x, normed, out, [&](const float* in, float* y) {
      if (mixer.kind == Kind::kAttention) return attend_sentences(mixer, sentences, in, y, shop);
      float* u = u_memory.get(rows * mixer.channels);
      const float* made = enter(mixer, in, rows, dim, u, shop);
      if (!mixer.leave) return convolve_sentences(mixer, sentences, u, y, shop);
      float* mixed = shop.mixed.get(rows * mixer.channels);
      convolve_sentences(mixer, sentences, u, mixed, shop);
      leave(mixer, made, mixed, rows, dim, y, shop);
    });
    sublayer(layer.final_norm, layer.before, rows, dim, x, normed, out, [&](const float* in, float* y) {
      feed_forward(layer, in, rows, dim, y, shop);
    });
  }
  if (stack.final_norm) stack.final_norm(x, rows, x);
}

// ------------------------------------------------------------------------------------------------ decoding

Decoding::Decoding(const Model& model, const Sentences& sentences, int64_t capacity, Workshop& shop)
    : model_(model), sentences_(sentences), capacity_(capacity), shop_(shop), sources_(model.decoder.layers.size()) {
  const int64_t rows = sentences.rows(), encoder_dim = model.encoder.dim;
  Buffer<float> memory;
  float* encoded = memory.get(rows * encoder_dim);
  encode(model.encoder, sentences, encoded, shop);
  for (char pad : sentences.pads) masks_.push_back(pad ? -kInfinity : 0.0f);
  for (size_t i = 0; i < sources_.size(); ++i) {
    const Layer& layer = model.decoder.layers[i];
    pasts_.emplace_back();
    pasts_.back().mixer = Past(layer.mixer);
    for (const Mixer& convolution : layer.mixer.projections) pasts_.back().projections.emplace_back(convolution);
    pasts_.back().queries = Past(layer.query_convolution);
    if (!layer.query) continue;
    Source& source = sources_[i];
    const int64_t dim = layer.query.outputs();
    source.keys_values.resize(rows * 2 * dim);
    layer.keys_values(encoded, encoder_dim, rows, source.keys_values.data(), 2 * dim, shop);
    source.begins.push_back(0);
    for (int64_t s = 0; s < sentences.count(); ++s) {
      source.begins.push_back(source.begins.back() + dim * round_up<float>(sentences.length(s)));
    }
    source.keys.resize(source.begins.back());
    for (int64_t s = 0; s < sentences.count(); ++s) {
      transpose_keys(
          source.keys_values.data() + sentences.begins[s] * 2 * dim, 2 * dim, sentences.length(s), layer.heads,
          dim / layer.heads, source.keys.data() + source.begins[s]);
    }
  }
}

float* Decoding::remember(Past& past, int64_t time, int64_t rows, bool forever) {
  if (!forever) return past.steps[time % past.steps.size()].get(capacity_ * past.width);
  past.steps.emplace_back();
  return past.steps.back().get(rows * past.width);
}

void Decoding::sources_of(Past& past, const Rows& rows, int64_t row, int64_t taps, const float** sources) {
  for (int64_t k = 0; k < taps; ++k) {
    const int64_t t = rows.time - taps + 1 + k;
    if (t < 0) {
      sources[k] = nullptr;
      continue;
    }
    const int64_t ancestor = t == rows.time ? row : rows.ancestors[row * rows.pitch + t];
    sources[k] = past.at(t) + ancestor * past.width;
  }
}

void Decoding::convolve(const Mixer& mixer, Past& past, const Rows& rows, float* y, int64_t y_pitch) {
  const int64_t taps = mixer.taps();
  const float* filters = mixer.filters_of(past.at(rows.time), rows.count, shop_);
  const float** sources = shop_.sources.get(taps);
  for (int64_t row = 0; row < rows.count; ++row) {
    sources_of(past, rows, row, taps, sources);
    mixer.mix(sources, filters ? filters + row * mixer.heads * taps : nullptr, y + row * y_pitch, shop_);
  }
}

void Decoding::convolve_projection(const Mixer& convolution, Past& past, const Rows& rows, float* x, int64_t pitch) {
  if (!convolution) return;
  float* now = remember(past, rows.time, rows.count, false);
  for (int64_t row = 0; row < rows.count; ++row) std::copy_n(x + row * pitch, past.width, now + row * past.width);
  convolve(convolution, past, rows, x, pitch);
}

void Decoding::mix(const Layer& layer, LayerPast& pasts, const Rows& rows, const float* x, float* y) {
  const Mixer& mixer = layer.mixer;
  Past& past = pasts.mixer;
  const int64_t dim = model_.decoder.dim, channels = mixer.channels, time = rows.time;
  const bool attention = mixer.kind == Kind::kAttention;
  float* now = remember(past, time, rows.count, attention && mixer.left < 0);
  const int64_t taps = mixer.left < 0 ? time + 1 : mixer.left + 1;
  if (attention) {
    float* projected = shop_.hidden.get(rows.count * 3 * channels);
    mixer.product(x, dim, rows.count, projected, 3 * channels, shop_);
    for (int64_t i = 0; i < 3; ++i) {
      convolve_projection(mixer.projections[i], pasts.projections[i], rows, projected + i * channels, 3 * channels);
    }
    for (int64_t row = 0; row < rows.count; ++row) {
      std::copy_n(projected + row * 3 * channels + channels, 2 * channels, now + row * past.width);
    }
    float* out = shop_.mixed.get(rows.count * channels);
    const float** sources = shop_.sources.get(taps);
    const int64_t skipped = std::max<int64_t>(0, taps - 1 - time);
    for (int64_t row = 0; row < rows.count; ++row) {
      sources_of(past, rows, row, taps, sources);
      attend_past(
          projected + row * 3 * channels, sources + skipped, taps - skipped, mixer.heads, channels / mixer.heads,
          out + row * channels, shop_);
    }
    return mixer.leave(out, channels, rows.count, y, dim, shop_);
  }
  const float* made = enter(mixer, x, rows.count, dim, now, shop_);
  float* out = mixer.leave ? shop_.mixed.get(rows.count * channels) : y;
  if (mixer.kind == Kind::kFull) {
    const float** sources = shop_.sources.get(rows.count * taps);
    for (int64_t row = 0; row < rows.count; ++row) sources_of(past, rows, row, taps, sources + row * taps);
    mixer.convolve(sources, rows.count, out, shop_);
  } else {
    convolve(mixer, past, rows, out, channels);
  }
  if (mixer.leave) leave(mixer, made, out, rows.count, dim, y, shop_);
}

void Decoding::attend_source(
    const Layer& layer, const Source& source, Past& past, const Rows& rows, const float* x, float* y) {
  const int64_t dim = layer.query.outputs();
  float* queries = shop_.mixed.get(rows.count * dim);
  layer.query(x, model_.decoder.dim, rows.count, queries, dim, shop_);
  convolve_projection(layer.query_convolution, past, rows, queries, dim);
  for (int64_t row = 0; row < rows.count;) {
    const int64_t s = rows.sentence[row];
    int64_t end = row + 1;
    while (end < rows.count && rows.sentence[end] == s) ++end;
    const int64_t begin = sentences_.begins[s];
    const Memory memory{
        source.keys.data() + source.begins[s], source.keys_values.data() + begin * 2 * dim + dim, 2 * dim,
        sentences_.length(s), layer.heads, dim / layer.heads, masks_.empty() ? nullptr : masks_.data() + begin};
    // Outputs take the places of the queries.
    attend_all(memory, queries + row * dim, queries + row * dim, dim, end - row, shop_);
    row = end;
  }
  layer.attention_out(queries, dim, rows.count, y, model_.decoder.dim, shop_);
}

const float* Decoding::step(const Rows& rows) {
  const Stack& stack = model_.decoder;
  const int64_t n = rows.count, dim = stack.dim;
  float *x = x_.get(capacity_ * dim), *out = y_.get(capacity_ * dim), *normed = normed_.get(capacity_ * dim);
  positions_.assign(n, rows.time);
  stack.embed(rows.tokens, positions_.data(), n, x, shop_);
  for (size_t i = 0; i < stack.layers.size(); ++i) {
    const Layer& layer = stack.layers[i];
    sublayer(layer.mixer_norm, layer.before, n, dim, x, normed, out, [&](const float* in, float* y) {
      mix(layer, pasts_[i], rows, in, y);
    });
    if (layer.query) {
      sublayer(layer.attention_norm, layer.before, n, dim, x, normed, out, [&](const float* in, float* y) {
        attend_source(layer, sources_[i], pasts_[i].queries, rows, in, y);
      });
    }
    sublayer(layer.final_norm, layer.before, n, dim, x, normed, out, [&](const float* in, float* y) {
      feed_forward(layer, in, n, dim, y, shop_);
    });
  }
  if (stack.final_norm) stack.final_norm(x, n, x);
  if (!model_.project_out) return x;
  const int64_t last = model_.project_out.outputs();
  float* projected = out_.get(capacity_ * last);
  model_.project_out(x, dim, n, projected, last, shop_);
  return projected;
}

}  // namespace lightconv::decoding
