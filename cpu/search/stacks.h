// Encoding sentences, and decoding them one step at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "search/attention.h"
#include "search/model.h"

namespace lightconv::decoding {

// Sentences one after the other, without padding: the words of sentence s are rows begins[s] … begins[s + 1] − 1. A pad
// between words is also a row, but no other row reads it.
struct Sentences {
  std::vector<int64_t> tokens, positions, begins{0};
  std::vector<char> pads;  // empty where there are none

  int64_t rows() const { return static_cast<int64_t>(tokens.size()); }
  int64_t count() const { return static_cast<int64_t>(begins.size()) - 1; }
  int64_t length(int64_t s) const { return begins[s + 1] - begins[s]; }
  // Adds a sentence, `n` tokens with pads on either side; false if it has no word.
  bool add(const int64_t* words, int64_t n, int64_t pad);
};

// x (sentences.rows(), dim): the output of the encoder for the sentences.
void encode(const Stack& stack, const Sentences& sentences, float* x, Workshop& shop);

// The hypotheses of a step. Row r belongs to sentence sentence[r]. Its ancestor at an earlier step t is row
// ancestors[r · pitch + t] of that step; at this step it is r itself.
struct Rows {
  int64_t count, time;
  const int64_t* tokens;
  const int32_t* sentence;
  const int32_t* ancestors;
  int64_t pitch;
};

// One search of one model. What a step keeps is never moved: reordering or dropping hypotheses only changes the table
// of ancestors.
class Decoding {
 public:
  // `capacity`: the most rows of a step.
  Decoding(const Model& model, const Sentences& sentences, int64_t capacity, Workshop& shop);

  // Returns the input of the output layer, (rows.count, model.output.inputs()). Steps must be in order.
  const float* step(const Rows& rows);

 private:
  // What a mixer keeps of the last steps, or of all.
  struct Past {
    Past() = default;
    explicit Past(const Mixer& mixer)
        : width(mixer.kind == Kind::kAttention ? 2 * mixer.channels : mixer.channels) {
      if (mixer.left >= 0) steps.resize(mixer.left + 1);
    }
    std::vector<Buffer<float>> steps;
    int64_t width = 0;
    float* at(int64_t time) { return steps[time % static_cast<int64_t>(steps.size())].get(0); }
  };
  struct LayerPast {
    Past mixer;
    std::vector<Past> projections;  // of attention's convolutions
    Past queries;                   // of the convolution before the attention over the encoder
  };
  struct Source {
    std::vector<float> keys_values;  // (rows, 2d)
    std::vector<float> keys;         // transposed, sentence after sentence
    std::vector<int64_t> begins;     // of a sentence's keys
  };

  void mix(const Layer& layer, LayerPast& pasts, const Rows& rows, const float* x, float* y);
  void attend_source(
      const Layer& layer, const Source& source, Past& past, const Rows& rows, const float* x, float* y);
  // What the ancestors of a row kept of the last `taps` steps, including this one; null before the sentence.
  void sources_of(Past& past, const Rows& rows, int64_t row, int64_t taps, const float** sources);
  // y (rows.count, channels), with rows y_pitch floats apart: the convolution of what `past` keeps, including this
  // step.
  void convolve(const Mixer& mixer, Past& past, const Rows& rows, float* y, int64_t y_pitch);
  // Convolves x in place, if there is a convolution; the rows of x are `pitch` floats apart.
  void convolve_projection(const Mixer& convolution, Past& past, const Rows& rows, float* x, int64_t pitch);
  float* remember(Past& past, int64_t time, int64_t rows, bool forever);

  const Model& model_;
  const Sentences& sentences_;
  int64_t capacity_;
  Workshop& shop_;
  std::vector<float> masks_;  // (rows of the source,), empty where there are no pads
  std::vector<LayerPast> pasts_;
  std::vector<Source> sources_;
  std::vector<int64_t> positions_;
  Buffer<float> x_, y_, normed_, out_;
};

}  // namespace lightconv::decoding
