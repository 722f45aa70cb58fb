// torch.classes.lightconv.BeamSearch: models in, n-best lists out. The Python side is lightconv_plugin/generation/native.py.
//
// Errors reach Python as ValueError (wrong arguments), torch.OutOfMemoryError, or RuntimeError (anything else).
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "search/beam_search.h"

namespace lightconv::decoding {
inline Arithmetic arithmetic_of(const std::string& dtype) {
  if (dtype == "bfloat16") return Arithmetic::kBFloat16;
  if (dtype == "int8") return Arithmetic::kInt8;
  TORCH_CHECK_VALUE(dtype == "float32", "dtype must be float32, bfloat16 or int8, got ", dtype);
  return Arithmetic::kFloat32;
}

inline const int64_t* words_of(const at::Tensor& tensor, int64_t sentences, const char* name) {
  TORCH_CHECK_VALUE(
      tensor.dim() >= 1 && tensor.size(0) == sentences && tensor.scalar_type() == at::kLong && tensor.is_contiguous() &&
          tensor.device().is_cpu(),
      name, " must be a contiguous int64 tensor on the CPU with an entry for each of ", sentences, " sentences");
  return tensor.const_data_ptr<int64_t>();
}

// Calls f, whose errors are those of the standard library.
template <class F>
auto with_torch_errors(F f) {
  try {
    return f();
  } catch (const std::invalid_argument& error) {
    C10_THROW_ERROR(ValueError, error.what());
  } catch (const std::bad_alloc&) {
    C10_THROW_ERROR(OutOfMemoryError, "out of memory in the search");
  }
}

class BeamSearch : public torch::CustomClassHolder {
 public:
  // options: the numbers of SearchOptions by name, of which this search reads its own. instructions: whether products
  // may use instructions beyond those that the whole library is compiled for.
  BeamSearch(
      const c10::Dict<std::string, double>& options, std::vector<int64_t> suppress, const std::string& dtype,
      bool instructions)
      : options_(options_of(options, std::move(suppress))), arithmetic_(arithmetic_of(dtype)),
        instructions_(instructions) {}

  // The names are those of model.cpp. Every model that is added belongs to the ensemble.
  void add_model(
      const c10::Dict<std::string, at::Tensor>& tensors, const c10::Dict<std::string, double>& numbers,
      const c10::Dict<std::string, std::string>& words) {
    Description description{{}, {}, {}, arithmetic_, instructions_};
    for (const auto& entry : tensors) {
      const at::Tensor tensor = entry.value();
      TORCH_CHECK_VALUE(
          tensor.scalar_type() == at::kFloat && tensor.is_contiguous() && tensor.device().is_cpu() &&
              (tensor.dim() == 1 || tensor.dim() == 2),
          entry.key(), " must be a contiguous float32 vector or matrix on the CPU");
      const bool vector = tensor.dim() == 1;
      description.tensors[entry.key()] = {
          tensor.const_data_ptr<float>(), vector ? 1 : tensor.size(0), vector ? tensor.size(0) : tensor.size(1)};
      // Embedding tables are read in place: those of a memory-mapped file are not copied.
      if (entry.key().find(".embed_") != std::string::npos) tables_.push_back(tensor);
    }
    for (const auto& entry : numbers) description.numbers[entry.key()] = entry.value();
    for (const auto& entry : words) description.words[entry.key()] = entry.value();
    with_torch_errors([&] { models_.push_back(std::make_unique<Model>(description)); });
  }

  // Returns the tokens and positional scores of all hypotheses, concatenated; their lengths; their scores; and the
  // number of hypotheses per sentence. See beam_search.h for the arguments.
  std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> search(
      const at::Tensor& source, const at::Tensor& lengths, const std::optional<at::Tensor>& prefix,
      const std::optional<at::Tensor>& words, int64_t max_len, int64_t begin, int64_t threads) {
    TORCH_CHECK_VALUE(!models_.empty(), "there is no model");
    TORCH_CHECK_VALUE(source.dim() == 2, "source must be (S, T), got ", source.sizes());
    TORCH_CHECK_VALUE(!prefix || prefix->dim() == 2, "prefix must be (S, P), got ", prefix->sizes());
    TORCH_CHECK_VALUE(threads >= 1, "threads must be at least 1, got ", threads);
    TORCH_CHECK_VALUE(!words || words->dim() == 1, "the shortlist must be (W,), got ", words->sizes());
    const int64_t sentences = source.size(0), count = words ? words->size(0) : 0;
    const Batch batch{
        words_of(source, sentences, "source"), words_of(lengths, sentences, "lengths"),
        prefix ? words_of(*prefix, sentences, "prefix") : nullptr, words ? words_of(*words, count, "shortlist") : nullptr,
        sentences, source.size(1), prefix ? prefix->size(1) : 0, count, max_len, begin};
    std::vector<const Model*> ensemble;
    for (const auto& model : models_) ensemble.push_back(model.get());
    return with_torch_errors([&] { return as_tensors(decoding::search(ensemble, options_, batch, int(threads))); });
  }

 private:
  static Options options_of(const c10::Dict<std::string, double>& numbers, std::vector<int64_t> suppress) {
    const auto number = [&](const char* name) {
      TORCH_CHECK_VALUE(numbers.contains(name), "there is no option ", name);
      return numbers.at(name);
    };
    const auto integer = [&](const char* name) { return int64_t(number(name)); };
    return {
        integer("pad"), integer("unk"), integer("eos"), integer("beam_size"), integer("min_len"),
        integer("no_repeat_ngram_size"), number("normalize_scores") != 0, number("match_source_len") != 0,
        number("len_penalty"), number("unk_penalty"), number("temperature"), std::move(suppress)};
  }

  static std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> as_tensors(const Finished& finished) {
    std::vector<int64_t> tokens, lengths, counts;
    std::vector<float> positional, scores;
    for (const auto& hypotheses : finished) {
      counts.push_back(int64_t(hypotheses.size()));
      for (const Hypothesis& hypothesis : hypotheses) {
        tokens.insert(tokens.end(), hypothesis.tokens.begin(), hypothesis.tokens.end());
        positional.insert(positional.end(), hypothesis.positional.begin(), hypothesis.positional.end());
        lengths.push_back(int64_t(hypothesis.tokens.size()));
        scores.push_back(hypothesis.score);
      }
    }
    return {tensor(tokens), tensor(positional), tensor(lengths), tensor(scores), tensor(counts)};
  }

  template <class T>
  static at::Tensor tensor(const std::vector<T>& values) {
    at::Tensor out = at::empty({int64_t(values.size())}, at::CppTypeToScalarType<T>::value);
    std::copy(values.begin(), values.end(), out.mutable_data_ptr<T>());
    return out;
  }

  Options options_;
  Arithmetic arithmetic_;
  bool instructions_;
  std::vector<std::unique_ptr<Model>> models_;
  std::vector<at::Tensor> tables_;
};

}  // namespace lightconv::decoding
