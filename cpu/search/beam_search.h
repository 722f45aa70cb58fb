// Beam search by the rules of lightconv_plugin/generation/beam_search.py, which says what they are.
#pragma once

#include <cstdint>
#include <vector>

#include "search/stacks.h"

namespace lightconv::decoding {

struct Options {
  int64_t pad, unk, eos, beam, min_len, no_repeat_ngram_size;
  bool normalize_scores, match_source_len;
  double len_penalty, unk_penalty, temperature;
  std::vector<int64_t> suppress;
};

// A batch: source (sentences, source_steps) with pads on either side, lengths (sentences,), prefix (sentences, prefix_steps)
// or null, words (word_count,) in ascending order, which alone may be chosen, or null for all.
struct Batch {
  const int64_t *source, *lengths, *prefix, *words;
  int64_t sentences, source_steps, prefix_steps, word_count, max_len, begin;
};

struct Hypothesis {
  std::vector<int64_t> tokens;  // with the end
  std::vector<float> positional;
  float score;
};

using Finished = std::vector<std::vector<Hypothesis>>;

// Returns the finished hypotheses of each sentence, best first; none of a sentence without a possible hypothesis (weights
// with NaN). The sentences are divided among the threads; with fewer than two per thread, the threads share products
// instead. The results are the same for any number of threads.
//
// Throws std::invalid_argument for words and numbers out of range and for a sentence without words, std::bad_alloc, and
// std::runtime_error if the system cannot start that many threads.
Finished search(const std::vector<const Model*>& ensemble, const Options& options, const Batch& batch, int threads);

}  // namespace lightconv::decoding
