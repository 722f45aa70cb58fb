// A trained encoder-decoder as the search runs it. What each part computes is defined by lightconv_plugin/modules.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/normalize.h"
#include "search/linear.h"

namespace lightconv::decoding {

// A tensor of the model: `rows` times `columns` floats; a vector is one row.
struct Matrix {
  const float* data;
  int64_t rows, columns;
};

// A model as named tensors, numbers and words, as lightconv_plugin/generation/native.py describes it. The code that creates a
// Model from it must keep the embedding tables alive; everything else is copied.
struct Description {
  std::map<std::string, Matrix> tensors;
  std::map<std::string, double> numbers;
  std::map<std::string, std::string> words;  // of kinds, activations …
  Arithmetic arithmetic;
  bool instructions;

  bool has(const std::string& name) const { return tensors.count(name) > 0; }
  // These throw std::invalid_argument with the missing name.
  const Matrix& tensor(const std::string& name) const;
  double number(const std::string& name) const;
  const std::string& word(const std::string& name) const;
  int64_t integer(const std::string& name) const { return static_cast<int64_t>(number(name)); }
  std::vector<float> values(const std::string& name) const;  // empty if there is no such tensor
  // `name`.weight and `name`.bias; an empty layer if there is no weight. exact: float32 in every arithmetic.
  Linear linear(const std::string& name, bool exact = false) const;
};

struct Norm {
  Norm() = default;
  Norm(const Description& from, const std::string& name);
  explicit operator bool() const { return !weight.empty(); }
  // Rows of weight.size() channels; y may be x.
  void operator()(const float* x, int64_t rows, float* y) const;

  std::vector<float> weight, bias;
  float eps = 0;
};

enum class Activation { kRelu, kReluSquared, kGelu, kGeluTanh, kSwish, kTanh, kLinear };
enum class Kind { kShared, kPredicted, kTalk, kFull, kAttention };
enum class Positions { kNone, kSinusoidal, kLearned };

void activate(Activation activation, float* x, int64_t n);
// (rows, 2n) → (rows, n): the first half times the sigmoid of the second; y may be x.
void gate(const float* x, int64_t rows, int64_t n, float* y);

// The filter of a row is applied to the inputs from `left` steps before it to `right` steps after it, earliest first.
struct Mixer {
  Mixer() = default;
  Mixer(const Description& from, const std::string& name);
  // The mixer of this name; an empty one if there is none.
  static Mixer optional(const Description& from, const std::string& name);
  explicit operator bool() const { return channels > 0; }
  int64_t taps() const { return left + 1 + right; }

  // The filters of rows with inputs x (rows, channels), each (heads, taps); null where all rows share theirs.
  const float* filters_of(const float* x, int64_t rows, Workshop& shop) const;
  // y (channels,) = Σ filter · source over the taps; a source outside the sentence is null. filter: the row's, or null.
  void mix(const float* const* sources, const float* filter, float* y, Workshop& shop) const;
  // The same for a full convolution, for rows with `taps()` sources each; y (rows, channels).
  void convolve(const float* const* sources, int64_t rows, float* y, Workshop& shop) const;

  Kind kind = Kind::kShared;
  int64_t left = 0, right = 0;  // attention: −1 for everything
  int64_t channels = 0, heads = 1;
  int64_t parts = 1;  // of what `enter` returns: 2 for a GLU, 3 for gates before and after the convolution
  Normalize normalize = Normalize::kNone;
  Linear enter, leave;
  Linear reduce;               // kPredicted at low rank: what `product` reads, else empty
  Linear product;              // kPredicted: filters; kTalk: offsets; kFull: the convolution; kAttention: queries, keys, values
  std::vector<float> filters;  // kShared, normalised: (taps, channels) where heads are narrow, else (heads, taps)
  std::vector<float> bias;
  std::vector<Mixer> projections;  // kAttention: the convolutions of queries, keys and values, each may be empty
  bool narrow() const { return channels / heads < kWidth<float>; }  // than a vector: then each channel has a filter

 private:
  // `count` filters of (taps,) from their logits; both have room for a vector beyond their end.
  void normalise(const float* logits, int64_t count, float* filters) const;
  void windows(const float* offsets, float* filter) const;
};

struct Layer {
  Layer(const Description& from, const std::string& name);

  bool before;  // norms before the sublayers, else after their residuals
  Activation activation;
  Mixer mixer;
  Norm mixer_norm, attention_norm, final_norm;
  int64_t heads = 0;  // of the attention over the encoder
  Linear query, keys_values, attention_out;
  Mixer query_convolution;  // empty where there is none
  Linear fc1, fc2;
};

struct Stack {
  Stack(const Description& from, const std::string& name);

  // x (rows, dim): the vectors of words at positions that count from 0.
  void embed(const int64_t* tokens, const int64_t* positions, int64_t rows, float* x, Workshop& shop) const;

  int64_t words, dim;
  Matrix table;
  float scale;
  Positions positions;
  int64_t pad;
  Matrix learned{};
  Linear project_in;
  Norm embedding_norm, final_norm;
  std::vector<Layer> layers;

 private:
  struct Waves;
  const float* position(int64_t number) const;
  std::shared_ptr<Waves> waves_;
};

struct Model {
  explicit Model(const Description& from);

  Stack encoder, decoder;
  Linear project_out, output;
};

}  // namespace lightconv::decoding
