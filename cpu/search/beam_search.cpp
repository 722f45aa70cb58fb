#include "search/beam_search.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

#include "search/vocabulary.h"

namespace lightconv::decoding {
namespace {

// One continuation of a hypothesis of a sentence.
struct Candidate {
  float score;
  int64_t word;
  int32_t parent;  // which hypothesis of the sentence
};

// The hypotheses of a batch at some step: `beam` rows for each live sentence.
struct Table {
  Table(int64_t rows, int64_t length) : length(length), tokens(rows * length), scores(rows * length), ancestors(rows * length) {}

  void copy(int64_t to, const Table& other, int64_t from, int64_t steps) {
    std::copy_n(&other.tokens[from * length], steps + 1, &tokens[to * length]);
    std::copy_n(&other.scores[from * length], steps, &scores[to * length]);
    std::copy_n(&other.ancestors[from * length], steps, &ancestors[to * length]);
  }

  int64_t length;
  std::vector<int64_t> tokens;     // the beginning symbol first
  std::vector<float> scores;       // cumulative
  std::vector<int32_t> ancestors;  // see Rows
};

// The search for some sentences of a batch on one thread, or on a team that shares products.
class Search {
 public:
  Search(
      const std::vector<const Model*>& ensemble, const Outputs& outputs, const Options& options, const Batch& batch,
      std::vector<int64_t> numbers, Team& team, Finished& finished)
      : options_(options), batch_(batch), live_(std::move(numbers)), finished_(finished), shop_(team),
        vocabulary_(outputs, options, shop_) {
    for (int64_t number : live_) {
      if (!sentences_.add(batch.source + number * batch.source_steps, batch.source_steps, ensemble[0]->encoder.pad)) {
        throw std::invalid_argument("sentence " + std::to_string(number) + " of the batch has no words");
      }
    }
    const int64_t rows = count() * options.beam;
    for (const Model* model : ensemble) decodings_.emplace_back(*model, sentences_, rows, shop_);
    order_.resize(count());
    std::iota(order_.begin(), order_.end(), 0);
  }

  void run() {
    const int64_t beam = options_.beam, max_len = batch_.max_len, length = max_len + 2;
    Table now(count() * beam, length), next(count() * beam, length);
    for (int64_t row = 0; row < count(); ++row) now.tokens[row * length] = batch_.begin;
    std::vector<char> ignored(count() * beam, 0);
    for (int64_t step = 0; step <= max_len; ++step) {
      // In the first step all hypotheses of a sentence are the same, so one row is enough.
      const int64_t width = step == 0 ? 1 : beam;
      predict(now, step, width);
      const int64_t words = vocabulary_.words();
      const int64_t most = std::min(2 * beam, width * words - 1);
      const int64_t before = count();
      int64_t kept = 0;
      for (int64_t i = 0; i < before; ++i) {
        choose(now, i, step, width, most);
        char* ignore = &ignored[i * beam];
        finish(now, i, step, width, ignore);
        const int64_t enough = step < max_len ? beam : 1;
        if (int64_t(finished_[live_[i]].size()) >= enough || step == max_len) continue;
        go_on(now, next, i, kept, step, width, ignore, &ignored[kept * beam]);
        live_[kept] = live_[i];
        order_[kept] = order_[i];
        ++kept;
      }
      live_.resize(kept);
      std::swap(now, next);
      if (kept == 0) break;
    }
  }

 private:
  int64_t count() const { return static_cast<int64_t>(live_.size()); }

  // Runs the models, and finds the best next words of each row.
  void predict(Table& now, int64_t step, int64_t width) {
    const int64_t rows = count() * width, beam = options_.beam, length = now.length;
    tokens_.resize(rows);
    sentence_.resize(rows);
    for (int64_t row = 0; row < rows; ++row) {
      tokens_[row] = now.tokens[row * length + step];
      sentence_[row] = int32_t(order_[row / width]);
    }
    const Rows described{rows, step, tokens_.data(), sentence_.data(), now.ancestors.data(), length};
    hidden_.clear();
    for (Decoding& decoding : decodings_) hidden_.push_back(decoding.step(described));
    constraints_.resize(rows);
    const bool forcing = batch_.prefix && step < batch_.prefix_steps && step < batch_.max_len;
    for (int64_t row = 0; row < rows; ++row) {
      Constraint& constraint = constraints_[row];
      constraint.blocked.clear();
      constraint.forced = -1;
      constraint.only_end = step >= batch_.max_len;
      constraint.no_end = !forcing && step < options_.min_len;
      constraint.suppress = !forcing;
      if (forcing) {
        const int64_t word = batch_.prefix[live_[row / width] * batch_.prefix_steps + step];
        if (word != options_.pad) constraint.forced = word;
      }
    }
    if (forcing && width > 1) {
      // Where the prefix ends here, all hypotheses become the first, as in fairseq.
      for (int64_t i = 0; i < count(); ++i) {
        if (constraints_[i * width].forced != options_.eos) continue;
        for (int64_t j = 1; j < width; ++j) {
          constraints_[i * width + j].copy_of = i * width;
          std::copy_n(&now.tokens[i * beam * length], step + 1, &now.tokens[(i * beam + j) * length]);
          std::copy_n(&now.scores[i * beam * length], step, &now.scores[(i * beam + j) * length]);
        }
      }
    }
    const int64_t n = options_.no_repeat_ngram_size;
    if (n > 0 && step >= n) {
      for (int64_t row = 0; row < rows; ++row) block(&now.tokens[row * length], step, n, constraints_[row].blocked);
    }
    const int64_t best = std::min(std::min(2 * beam, width * vocabulary_.words() - 1), vocabulary_.words());
    vocabulary_.best(hidden_, rows, best, constraints_);
    for (Constraint& constraint : constraints_) constraint.copy_of = -1;
  }

  // Words that would repeat an n-gram; tokens 1 … step are already chosen.
  static void block(const int64_t* tokens, int64_t step, int64_t n, std::vector<int64_t>& blocked) {
    const int64_t* last = tokens + step + 2 - n;
    for (int64_t begin = 1; begin + n - 1 <= step; ++begin) {
      if (std::equal(last, last + n - 1, tokens + begin)) blocked.push_back(tokens[begin + n - 1]);
    }
  }

  // The `most` best continuations of sentence i, the best first; ties by hypothesis, then by rank.
  void choose(const Table& now, int64_t i, int64_t step, int64_t width, int64_t most) {
    candidates_.clear();
    for (int64_t j = 0; j < width; ++j) {
      const int64_t row = i * width + j;
      const float before = step ? now.scores[row * now.length + step - 1] : 0;
      for (int64_t k = 0; k < vocabulary_.count(); ++k) {
        const float value = vocabulary_.value(row, k);
        candidates_.push_back({step ? value + before : value, vocabulary_.word(row, k), int32_t(j)});
      }
    }
    std::stable_sort(candidates_.begin(), candidates_.end(), [](const Candidate& a, const Candidate& b) {
      return a.score > b.score;
    });
    candidates_.resize(std::min<size_t>(candidates_.size(), most));
  }

  // Whether candidate k ends a hypothesis. Candidates that only fill the beam do not.
  bool ends(int64_t k, const char* ignored) const {
    const Candidate& candidate = candidates_[k];
    return candidate.word == options_.eos && candidate.score != -kInfinity && !(k < options_.beam && ignored[k]);
  }

  // Appends the hypotheses of sentence i that end here.
  void finish(const Table& now, int64_t i, int64_t step, int64_t width, const char* ignored) {
    std::vector<Hypothesis>& found = finished_[live_[i]];
    const int64_t beam = options_.beam, first_slots = std::min<int64_t>(beam, candidates_.size());
    for (int64_t k = 0; k < first_slots; ++k) {
      if (!ends(k, ignored) || int64_t(found.size()) >= beam) continue;
      const int64_t row = (i * width + candidates_[k].parent) * now.length;
      Hypothesis hypothesis;
      hypothesis.tokens.assign(&now.tokens[row + 1], &now.tokens[row + 1] + step);
      hypothesis.tokens.push_back(options_.eos);
      hypothesis.positional.resize(step + 1);
      float before = 0;
      for (int64_t t = 0; t <= step; ++t) {
        const float cumulative = t == step ? candidates_[k].score : now.scores[row + t];
        hypothesis.positional[t] = t ? cumulative - before : cumulative;
        before = cumulative;
      }
      float score = candidates_[k].score;
      if (options_.normalize_scores) score /= float(std::pow(double(step + 1), options_.len_penalty));
      if (options_.match_source_len && step > batch_.lengths[live_[i]]) score = -kInfinity;
      hypothesis.score = score;
      found.push_back(std::move(hypothesis));
    }
  }

  // The first `beam` candidates that do not end become the hypotheses of sentence `to`. If there are fewer, others fill
  // the beam and are ignored.
  void go_on(
      const Table& now, Table& next, int64_t i, int64_t to, int64_t step, int64_t width, const char* ignored,
      char* now_ignored) {
    const int64_t beam = options_.beam, all = static_cast<int64_t>(candidates_.size());
    order_of_slots_.clear();
    std::vector<char>& over = over_;
    over.assign(all, 0);
    for (int64_t k = 0; k < all; ++k) over[k] = ends(k, ignored) || (k < beam && ignored[k]);
    for (int64_t k = 0; k < all; ++k) if (!over[k]) order_of_slots_.push_back(k);
    for (int64_t k = 0; k < all; ++k) if (over[k]) order_of_slots_.push_back(k);
    for (int64_t j = 0; j < beam; ++j) {
      const int64_t k = order_of_slots_[j];
      const Candidate& candidate = candidates_[k];
      const int64_t from = i * width + candidate.parent, row = to * beam + j;
      next.copy(row, now, from, step);
      next.ancestors[row * next.length + step] = int32_t(from);
      next.tokens[row * next.length + step + 1] = candidate.word;
      next.scores[row * next.length + step] = candidate.score;
    }
    for (int64_t j = 0; j < beam; ++j) now_ignored[j] = over[order_of_slots_[j]];
  }

  const Options& options_;
  const Batch& batch_;
  std::vector<int64_t> live_, order_;  // numbers in the batch; in sentences_
  Finished& finished_;
  Workshop shop_;
  Vocabulary vocabulary_;
  Sentences sentences_;
  std::vector<Decoding> decodings_;
  std::vector<int64_t> tokens_, order_of_slots_;
  std::vector<int32_t> sentence_;
  std::vector<const float*> hidden_;
  std::vector<Constraint> constraints_;
  std::vector<Candidate> candidates_;
  std::vector<char> over_;
};

void inside(const int64_t* words, int64_t n, int64_t most, const char* what) {
  for (int64_t i = 0; i < n; ++i) {
    if (words[i] < 0 || words[i] >= most) {
      throw std::invalid_argument(
          std::string(what) + " must be words in 0 … " + std::to_string(most - 1) + ", got " + std::to_string(words[i]));
    }
  }
}

// The shortlist must be in order, and have what the search may be forced to choose.
void check_shortlist(const Options& options, const Batch& batch, int64_t words) {
  const int64_t *first = batch.words, *last = first + batch.word_count;
  inside(first, batch.word_count, words, "shortlist");
  if (std::adjacent_find(first, last, std::greater_equal<int64_t>()) != last) {
    throw std::invalid_argument("the words of the shortlist must be in ascending order");
  }
  const auto needs = [&](int64_t word, const char* what) {
    if (!std::binary_search(first, last, word)) {
      throw std::invalid_argument(std::string(what) + " " + std::to_string(word) + " is not in the shortlist");
    }
  };
  needs(options.eos, "eos");
  for (int64_t i = 0; batch.prefix && i < batch.sentences * batch.prefix_steps; ++i) {
    if (batch.prefix[i] != options.pad) needs(batch.prefix[i], "prefix");
  }
}

void check(const std::vector<const Model*>& ensemble, const Options& options, const Batch& batch) {
  const int64_t words = ensemble[0]->output.outputs();
  const auto at_least = [](int64_t least, int64_t value, const char* what) {
    if (value < least) {
      throw std::invalid_argument(
          std::string(what) + " must be at least " + std::to_string(least) + ", got " + std::to_string(value));
    }
  };
  at_least(1, options.beam, "beam_size");
  at_least(0, batch.max_len, "max_len");
  inside(&options.pad, 1, words, "pad");
  inside(&options.unk, 1, words, "unk");
  inside(&options.eos, 1, words, "eos");
  inside(options.suppress.data(), options.suppress.size(), words, "suppress");
  if (batch.words) check_shortlist(options, batch, words);
  const int64_t choices = batch.words ? batch.word_count : words;
  if (options.beam >= choices) {
    throw std::invalid_argument(
        "beam_size must be below the " + std::to_string(choices) + " words of the " +
        (batch.words ? "shortlist" : "vocabulary") + ", got " + std::to_string(options.beam));
  }
  if (batch.sentences > 0) {
    // Of a table. Beyond it, a table would not fit into any memory, and its size might overflow.
    constexpr int64_t kMostElements = int64_t(1) << 40;
    const int64_t rows = batch.sentences * options.beam, most = kMostElements / rows - 2;
    if (batch.max_len > most) {
      throw std::invalid_argument(
          "max_len must be at most " + std::to_string(most) + " for " + std::to_string(rows) + " hypotheses, got " +
          std::to_string(batch.max_len));
    }
  }
  for (const Model* model : ensemble) {
    if (model->output.outputs() != words) throw std::invalid_argument("the models have different vocabularies");
    inside(batch.source, batch.sentences * batch.source_steps, model->encoder.words, "source");
    inside(&batch.begin, 1, model->decoder.words, "begin");
    if (batch.prefix) inside(batch.prefix, batch.sentences * batch.prefix_steps, model->decoder.words, "prefix");
  }
}

}  // namespace

Finished search(const std::vector<const Model*>& ensemble, const Options& options, const Batch& batch, int threads) {
  check(ensemble, options, batch);
  Finished finished(batch.sentences);
  if (batch.sentences == 0) return finished;
  const Outputs outputs(ensemble, batch);
  // With fewer than two sentences for each, threads share products instead.
  const int parts = int(std::clamp<int64_t>(batch.sentences / 2, 1, threads));
  Team team(parts);
  team.run([&](int part) {
    // Dealt out in turn, because neighbours often have similar lengths.
    std::vector<int64_t> numbers;
    for (int64_t number = part; number < batch.sentences; number += parts) numbers.push_back(number);
    Team members(threads / parts + (part < threads % parts));
    Search some(ensemble, outputs, options, batch, std::move(numbers), members, finished);
    some.run();
  });
  for (std::vector<Hypothesis>& hypotheses : finished) {
    std::stable_sort(hypotheses.begin(), hypotheses.end(), [](const Hypothesis& a, const Hypothesis& b) {
      return a.score > b.score;
    });
  }
  return finished;
}

}  // namespace lightconv::decoding
