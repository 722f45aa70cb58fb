// The operators `explain` and `last_path` for CPU tensors: the lists by which the passes choose, in words.
#pragma once

#include <string>

#include "common/arguments.h"
#include "convolution/paths.h"
#include "talk/paths.h"

namespace lightconv {

// A line for each path up to the one that runs: its name, a tab and what it needs.
template <size_t n>
std::string explained(const Path* const (&paths)[n], const Sizes& sizes) {
  std::string lines;
  for (const Path* path : paths) {
    std::string needs = path->needs;
    if (const size_t at = needs.find('W'); at != needs.npos) needs.replace(at, 1, std::to_string(sizes.lanes));
    lines += path->name + ("\t" + needs + "\n");
    if (path->can_run(sizes)) break;
  }
  return lines;
}

// Of a full pass in the type of `like`.
inline std::string explain_op(
    const Tensor& like, std::string_view op, bool backward, int64_t channels, int64_t heads, int64_t kernel_size) {
  Sizes sizes{channels / heads, kernel_size};
  sizes.shared = op == "lightconv";
  dispatch(like, [&](auto zero) { sizes.lanes = kWidth<Sum<decltype(zero)>>; });
  if (op == "talkconv") return explained(kTalk, sizes);
  return backward ? explained(kBackward, sizes) : explained(kForward, sizes);
}

inline std::string last_path_op(const Tensor&) { return last_path.load(); }

}  // namespace lightconv
