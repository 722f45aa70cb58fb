#include "search/vocabulary.h"

#include <algorithm>
#include <cmath>

#include "search/beam_search.h"
#include "search/rows.h"

namespace lightconv::decoding {
namespace {

// Columns that are added up at a time. The last bits of the sums, and so of a score, depend on it.
constexpr int64_t kPiece = 1024;
// Logits of about this many words stay in a core's second-level cache until they have been read.
constexpr int64_t kCached = 1 << 17;
// Rows that are kept whole at a time: enough that reading the weight again for each part hardly takes time.
constexpr int64_t kWholeRows = 96;
// Reading fewer logits than this takes less time than waking the other threads for it.
constexpr int64_t kEntriesWorthSharing = 1 << 15;

float log_normaliser(const float* logits, int64_t n) {
  LogSum sum;
  for (int64_t first = 0; first < n; first += kPiece) sum.add(logits + first, std::min(kPiece, n - first));
  return sum.value();
}

}  // namespace

Outputs::Outputs(const std::vector<const Model*>& ensemble, const Batch& batch) : words_(batch.words) {
  if (words_) {
    for (const Model* model : ensemble) selected_.push_back(model->output.select(words_, batch.word_count));
    for (const Linear& layer : selected_) layers_.push_back(&layer);
  } else {
    for (const Model* model : ensemble) layers_.push_back(&model->output);
  }
}

int64_t Outputs::column(int64_t word) const {
  if (!words_) return word;
  const int64_t *end = words_ + columns(), *found = std::lower_bound(words_, end, word);
  return found != end && *found == word ? found - words_ : -1;
}

Vocabulary::Vocabulary(const Outputs& outputs, const Options& options, Workshop& shop)
    : outputs_(outputs), options_(options), shop_(shop), pad_(outputs.column(options.pad)),
      unk_(outputs.column(options.unk)), eos_(outputs.column(options.eos)), words_(outputs.columns()) {
  for (int64_t word : options.suppress) suppress_.push_back(outputs.column(word));
}

// Calls f(first, last) for all rows of `columns` logits, on several threads if that is worth it.
template <class F>
void Vocabulary::each_row(int64_t rows, int64_t columns, F f) {
  if (rows * columns < kEntriesWorthSharing) f(0, rows);
  else shop_.team.share(rows, f);
}

void Vocabulary::best(
    const std::vector<const float*>& hidden, int64_t rows, int64_t count, const std::vector<Constraint>& constraints) {
  count_ = count;
  values_.resize(rows * count);
  indices_.resize(rows * count);
  const bool forced = std::any_of(constraints.begin(), constraints.end(), [](const Constraint& constraint) {
    return constraint.forced >= 0 || constraint.copy_of >= 0;
  });
  if (outputs_.models() == 1 && !forced) in_pieces(hidden[0], rows, constraints);
  else at_once(hidden, rows, constraints);
}

void Vocabulary::in_pieces(const float* hidden, int64_t rows, const std::vector<Constraint>& constraints) {
  const Linear& output = outputs_.layer(0);
  const int64_t width = std::max(kPiece, kCached / rows / kPiece * kPiece);
  float* logits = logits_.get(rows * std::min(width, words_));
  const Product product = output.prepare(hidden, output.inputs(), rows, shop_);
  std::vector<LogSum> sums(rows);
  std::vector<BestEntries> best;
  for (int64_t row = 0; row < rows; ++row) best.emplace_back(&values_[row * count_], &indices_[row * count_], count_);
  for (int64_t first = 0; first < words_; first += width) {
    const int64_t last = std::min(first + width, words_), pitch = last - first;
    output.compute(product, logits, pitch, first, last, shop_.team);
    each_row(rows, pitch, [&](int64_t from, int64_t to) {
      for (int64_t row = from; row < to; ++row) {
        float* mine = logits + row * pitch;
        cool(mine, pitch);
        for (int64_t i = 0; i < pitch; i += kPiece) sums[row].add(mine + i, std::min(kPiece, pitch - i));
        constrain(mine, first, last, constraints[row]);
        best[row].add(mine, pitch, first);
      }
    });
  }
  for (int64_t row = 0; row < rows; ++row) settle(row, sums[row].value());
}

void Vocabulary::at_once(
    const std::vector<const float*>& hidden, int64_t rows, const std::vector<Constraint>& constraints) {
  const int64_t parts = (rows + kWholeRows - 1) / kWholeRows, most = (rows + parts - 1) / parts, pitch = most * words_;
  float* logits = logits_.get(outputs_.models() * pitch);
  for (int64_t first = 0; first < rows; first += most) {
    const int64_t some = std::min(most, rows - first);
    for (int64_t m = 0; m < outputs_.models(); ++m) {
      const Linear& output = outputs_.layer(m);
      output(hidden[m] + first * output.inputs(), output.inputs(), some, logits + m * pitch, words_, shop_);
    }
    each_row(some, outputs_.models() * words_, [&](int64_t from, int64_t to) {
      std::vector<float> bounds(words_);
      for (int64_t row = from; row < to; ++row) {
        average(logits + row * words_, pitch, first + row, constraints[first + row], bounds.data());
      }
    });
  }
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t source = constraints[row].copy_of;
    if (source < 0) continue;
    std::copy_n(&values_[source * count_], count_, &values_[row * count_]);
    std::copy_n(&indices_[source * count_], count_, &indices_[row * count_]);
  }
}

void Vocabulary::average(float* logits, int64_t pitch, int64_t row, const Constraint& constraint, float* bounds) {
  const int64_t models = outputs_.models();
  float normaliser = std::log(float(models));
  for (int64_t m = 0; m < models; ++m) {
    float* mine = logits + m * pitch;
    cool(mine, words_);
    const float own = log_normaliser(mine, words_);
    if (models == 1) normaliser = own;
    else for (int64_t w = 0; w < words_; ++w) mine[w] -= own;
    // As in fairseq, a row that is broken in one model is so in the mean.
    if (!std::isfinite(own)) normaliser = kInfinity;
    if (m == 0) std::copy_n(mine, words_, bounds);
    else bound_log_add(bounds, mine, words_);
  }
  constrain(bounds, 0, words_, constraint);
  if (constraint.forced >= 0) {
    const int64_t column = outputs_.column(constraint.forced);
    const float bound = bounds[column];
    std::fill_n(bounds, words_, -kInfinity);
    bounds[column] = bound;
  }
  // Bounds rule out most words. The sum is computed only for the others.
  BestEntries(&values_[row * count_], &indices_[row * count_], count_).add(bounds, words_, 0, [&](int64_t column) {
    if (bounds[column] == -kInfinity) return -kInfinity;
    float sum = logits[column];
    for (int64_t m = 1; m < models; ++m) sum = log_add(sum, logits[m * pitch + column]);
    return column == unk_ ? sum - float(options_.unk_penalty) : sum;
  });
  settle(row, normaliser);
}

void Vocabulary::cool(float* logits, int64_t n) const {
  if (options_.temperature == 1) return;
  const float temperature = float(options_.temperature);
  for (int64_t i = 0; i < n; ++i) logits[i] /= temperature;
}

void Vocabulary::constrain(float* logits, int64_t first, int64_t last, const Constraint& constraint) const {
  const auto forbid = [&](int64_t column) {
    if (column >= first && column < last) logits[column - first] = -kInfinity;
  };
  forbid(pad_);
  if (options_.unk_penalty != 0 && unk_ >= first && unk_ < last) logits[unk_ - first] -= float(options_.unk_penalty);
  if (constraint.only_end) {
    for (int64_t column = first; column < last; ++column) {
      if (column != eos_) logits[column - first] = -kInfinity;
    }
  }
  if (constraint.no_end) forbid(eos_);
  if (constraint.suppress) for (int64_t column : suppress_) forbid(column);
  for (int64_t word : constraint.blocked) forbid(outputs_.column(word));
}

// Turns a row's best logits into log-probabilities; a broken row (NaN, infinities) has none above −∞.
void Vocabulary::settle(int64_t row, float normaliser) {
  float* values = &values_[row * count_];
  const bool broken = !std::isfinite(normaliser);
  for (int64_t k = 0; k < count_; ++k) {
    values[k] = broken ? -kInfinity : values[k] - normaliser;
    if (broken) indices_[row * count_ + k] = k;
  }
}

}  // namespace lightconv::decoding
