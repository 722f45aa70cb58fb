// How a call is computed: by the first path of a list that can run it. The passes choose by these lists, and
// `lightconv doctor --explain` prints them (explain.h).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace lightconv {

// What a choice depends on.
struct Sizes {
  int64_t per_head = 1;     // C/H
  int64_t kernel_size = 1;  // K
  int64_t lanes = 1;        // W, the sums in a vector
  bool shared = false;      // one filter for all positions
  int64_t tokens = 0;       // of a step; 0: a full pass
};

struct Path {
  const char* name;
  const char* needs;  // what can_run asks for, in words; W is the number of lanes
  bool (*can_run)(const Sizes&);
};

// The path of the last call, for tests.
inline std::atomic<const char*> last_path{""};

// Chooses the path of a call. The last of a list can always run.
template <size_t n>
const Path* take(const Path* const (&paths)[n], const Sizes& sizes) {
  const Path* const* path = paths;
  while (!(*path)->can_run(sizes)) ++path;
  last_path = (*path)->name;
  return *path;
}

inline bool always(const Sizes&) { return true; }

}  // namespace lightconv
