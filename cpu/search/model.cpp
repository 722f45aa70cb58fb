#include "search/model.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "search/rows.h"

namespace lightconv::decoding {
namespace {

template <class T>
using Named = std::pair<const char*, T>;

constexpr Named<Activation> kActivations[] = {
    {"relu", Activation::kRelu}, {"relu_squared", Activation::kReluSquared}, {"gelu", Activation::kGelu},
    {"gelu_fast", Activation::kGeluTanh}, {"gelu_accurate", Activation::kGeluTanh}, {"swish", Activation::kSwish},
    {"tanh", Activation::kTanh}, {"linear", Activation::kLinear}};
constexpr Named<Kind> kKinds[] = {
    {"shared", Kind::kShared}, {"predicted", Kind::kPredicted}, {"talk", Kind::kTalk}, {"full", Kind::kFull},
    {"attention", Kind::kAttention}};
constexpr Named<Positions> kPositions[] = {
    {"none", Positions::kNone}, {"sinusoidal", Positions::kSinusoidal}, {"learned", Positions::kLearned}};

[[noreturn]] void unknown(const std::string& name, const std::string& word) {
  throw std::invalid_argument(name + " " + word + " is unknown to the native search");
}

template <class T, size_t N>
T named(const Description& from, const std::string& name, const Named<T> (&values)[N]) {
  const std::string& word = from.word(name);
  for (const auto& [each, value] : values) {
    if (word == each) return value;
  }
  unknown(name, word);
}

Normalize normalization(const Description& from, const std::string& name) {
  const Normalize value = normalize_of(from.word(name));
  if (value == Normalize::kUnknown) unknown(name, from.word(name));
  return value;
}

}  // namespace

// ------------------------------------------------------------------------------------------------ reading

const Matrix& Description::tensor(const std::string& name) const {
  const auto found = tensors.find(name);
  if (found == tensors.end()) throw std::invalid_argument("the model has no tensor " + name);
  return found->second;
}

double Description::number(const std::string& name) const {
  const auto found = numbers.find(name);
  if (found == numbers.end()) throw std::invalid_argument("the model has no number " + name);
  return found->second;
}

const std::string& Description::word(const std::string& name) const {
  const auto found = words.find(name);
  if (found == words.end()) throw std::invalid_argument("the model has no word " + name);
  return found->second;
}

std::vector<float> Description::values(const std::string& name) const {
  if (!has(name)) return {};
  const Matrix& matrix = tensor(name);
  return {matrix.data, matrix.data + matrix.rows * matrix.columns};
}

Linear Description::linear(const std::string& name, bool exact) const {
  if (!has(name + ".weight")) return {};
  const Matrix& weight = tensor(name + ".weight");
  const float* bias = has(name + ".bias") ? tensor(name + ".bias").data : nullptr;
  const Arithmetic wanted = exact ? Arithmetic::kFloat32 : arithmetic;
  return Linear(weight.data, bias, weight.rows, weight.columns, wanted, choose(wanted, instructions));
}

Norm::Norm(const Description& from, const std::string& name)
    : weight(from.values(name + ".weight")), bias(from.values(name + ".bias")) {
  if (!weight.empty()) eps = float(from.number(name + ".eps"));
}

Mixer::Mixer(const Description& from, const std::string& name)
    : kind(named(from, name + ".kind", kKinds)), left(from.integer(name + ".left")),
      right(from.integer(name + ".right")), channels(from.integer(name + ".channels")),
      heads(from.integer(name + ".heads")), parts(from.integer(name + ".parts")),
      normalize(normalization(from, name + ".normalize")), enter(from.linear(name + ".enter")),
      leave(from.linear(name + ".leave")), reduce(from.linear(name + ".reduce")),
      product(from.linear(name + ".product", kind == Kind::kTalk)),
      filters(from.values(name + ".filters")), bias(from.values(name + ".conv_bias")) {
  if (kind == Kind::kAttention) {
    for (const char* part : {"q", "k", "v"}) projections.push_back(optional(from, name + "." + part + "_conv"));
  }
  if (kind != Kind::kShared || !narrow()) return;
  const std::vector<float> of_heads = std::move(filters);  // (heads, taps)
  filters.resize(taps() * channels);
  for (int64_t k = 0; k < taps(); ++k) {
    for (int64_t c = 0; c < channels; ++c) filters[k * channels + c] = of_heads[c / (channels / heads) * taps() + k];
  }
}

Mixer Mixer::optional(const Description& from, const std::string& name) {
  return from.words.count(name + ".kind") ? Mixer(from, name) : Mixer();
}

Layer::Layer(const Description& from, const std::string& name)
    : before(from.number(name + ".before") != 0), activation(named(from, name + ".activation", kActivations)),
      mixer(from, name + ".mixer"), mixer_norm(from, name + ".mixer_norm"),
      attention_norm(from, name + ".attention_norm"), final_norm(from, name + ".final_norm"),
      query(from.linear(name + ".query")), keys_values(from.linear(name + ".keys_values")),
      attention_out(from.linear(name + ".attention_out")),
      query_convolution(Mixer::optional(from, name + ".query_conv")), fc1(from.linear(name + ".fc1")),
      fc2(from.linear(name + ".fc2")) {
  if (query) heads = from.integer(name + ".attention_heads");
}

Stack::Stack(const Description& from, const std::string& name)
    : dim(from.integer(name + ".dim")), table(from.tensor(name + ".embed_tokens")),
      scale(float(from.number(name + ".scale"))), positions(named(from, name + ".positions", kPositions)),
      pad(from.integer(name + ".pad")), project_in(from.linear(name + ".project_in")),
      embedding_norm(from, name + ".embedding_norm"), final_norm(from, name + ".final_norm") {
  words = table.rows;
  if (positions == Positions::kLearned) learned = from.tensor(name + ".embed_positions");
  if (positions == Positions::kSinusoidal) waves_ = std::make_shared<Waves>();
  const int64_t depth = from.integer(name + ".layers");
  for (int64_t i = 0; i < depth; ++i) layers.emplace_back(from, name + ".layers." + std::to_string(i));
}

Model::Model(const Description& from)
    : encoder(from, "encoder"), decoder(from, "decoder"), project_out(from.linear("project_out")),
      output(from.linear("output")) {}

// ------------------------------------------------------------------------------------------------ words, positions

// Rows of sines and cosines, computed once, in blocks that never move.
struct Stack::Waves {
  static constexpr int64_t kBlock = 256;

  const float* of(int64_t number, int64_t dim) {
    const std::lock_guard<std::mutex> lock(mutex);
    const size_t block = number / kBlock;
    if (blocks.size() <= block) blocks.resize(block + 1);
    if (blocks[block].empty()) fill(blocks[block], int64_t(block) * kBlock, dim);
    return blocks[block].data() + number % kBlock * dim;
  }

  static void fill(std::vector<float>& rows, int64_t first, int64_t dim) {
    rows.assign(kBlock * dim, 0.0f);
    const int64_t half = dim / 2;
    const float rate = -float(std::log(10000.0) / double(std::max<int64_t>(half - 1, 1)));
    for (int64_t i = 0; i < half; ++i) {
      const float frequency = std::exp(float(i) * rate);
      for (int64_t n = 0; n < kBlock; ++n) {
        rows[n * dim + i] = std::sin(float(first + n) * frequency);
        rows[n * dim + half + i] = std::cos(float(first + n) * frequency);
      }
    }
  }

  std::mutex mutex;
  std::vector<std::vector<float>> blocks;
};

const float* Stack::position(int64_t number) const {
  if (positions == Positions::kSinusoidal) return waves_->of(number + 1 + pad, dim);
  if (number + 1 + pad >= learned.rows) {
    throw std::invalid_argument(
        "a sequence of " + std::to_string(number + 1) + " tokens is longer than the " +
        std::to_string(learned.rows - 1 - pad) + " learned positions");
  }
  return learned.data + (number + 1 + pad) * learned.columns;
}

void Stack::embed(const int64_t* tokens, const int64_t* numbers, int64_t rows, float* x, Workshop& shop) const {
  const int64_t width = table.columns;
  float* vectors = project_in ? shop.words.get(rows * width) : x;
  for (int64_t row = 0; row < rows; ++row) {
    const float* from = table.data + tokens[row] * width;
    for (int64_t c = 0; c < width; ++c) vectors[row * width + c] = from[c] * scale;
  }
  if (project_in) project_in(vectors, width, rows, x, dim, shop);
  for (int64_t row = 0; row < rows && positions != Positions::kNone; ++row) {
    const float* add = position(numbers[row]);
    for (int64_t c = 0; c < dim; ++c) x[row * dim + c] += add[c];
  }
  if (embedding_norm) embedding_norm(x, rows, x);
}

// ------------------------------------------------------------------------------------------------ rows

void Norm::operator()(const float* x, int64_t rows, float* y) const {
  const int64_t n = weight.size(), whole = n / kLanes * kLanes;
  for (int64_t row = 0; row < rows; ++row, x += n, y += n) {
    V sum{};
    for (int64_t c = 0; c < whole; c += kLanes) sum += load(x + c);
    float total = sum_across<float>(sum)[0];
    for (int64_t c = whole; c < n; ++c) total += x[c];
    const float mean = total / float(n);
    V square{};
    for (int64_t c = 0; c < whole; c += kLanes) {
      const V centred = load(x + c) - mean;
      square += centred * centred;
    }
    float squares = sum_across<float>(square)[0];
    for (int64_t c = whole; c < n; ++c) squares += (x[c] - mean) * (x[c] - mean);
    const float factor = 1 / std::sqrt(squares / float(n) + eps);
    for (int64_t c = 0; c < whole; c += kLanes) {
      store(y + c, (load(x + c) - mean) * factor * load(&weight[c]) + load(&bias[c]));
    }
    for (int64_t c = whole; c < n; ++c) y[c] = (x[c] - mean) * factor * weight[c] + bias[c];
  }
}

void activate(Activation activation, float* x, int64_t n) {
  switch (activation) {
    case Activation::kRelu:
      for (int64_t i = 0; i < n; ++i) x[i] = x[i] < 0 ? 0 : x[i];  // NaN stays
      return;
    case Activation::kReluSquared:
      for (int64_t i = 0; i < n; ++i) x[i] = x[i] < 0 ? 0 : x[i] * x[i];
      return;
    case Activation::kGelu:
      for (int64_t i = 0; i < n; ++i) x[i] = 0.5f * x[i] * (1 + std::erf(x[i] * 0.70710678118654752f));
      return;
    case Activation::kGeluTanh:
      for (int64_t i = 0; i < n; ++i) {
        x[i] = 0.5f * x[i] * (1 + std::tanh(0.79788456080286536f * (x[i] + 0.044715f * x[i] * x[i] * x[i])));
      }
      return;
    case Activation::kSwish: {
      int64_t i = 0;
      for (; i + kLanes <= n; i += kLanes) store(x + i, load(x + i) * sigmoid<float>(load(x + i)));
      for (; i < n; ++i) x[i] /= 1 + std::exp(-x[i]);
      return;
    }
    case Activation::kTanh:
      for (int64_t i = 0; i < n; ++i) x[i] = std::tanh(x[i]);
      return;
    case Activation::kLinear: return;
  }
}

void gate(const float* x, int64_t rows, int64_t n, float* y) {
  const int64_t whole = n / kLanes * kLanes;
  for (int64_t row = 0; row < rows; ++row, x += 2 * n, y += n) {
    for (int64_t c = 0; c < whole; c += kLanes) store(y + c, load(x + c) * sigmoid<float>(load(x + n + c)));
    for (int64_t c = whole; c < n; ++c) y[c] = x[c] / (1 + std::exp(-x[n + c]));
  }
}

}  // namespace lightconv::decoding
