// How a call is computed: by the first path of a list that can run it. The launchers choose by these lists, and
// `lightconv doctor --explain` prints them.
#pragma once

#include <string>

#include "common/problem.h"

namespace lightconv {

template <class Params>
struct Path {
  const char* name;
  const char* needs;  // what can_run asks for, in words
  bool (*can_run)(const Params&);
  cudaError_t (*run)(const Params&, cudaStream_t);
  int64_t (*slabs)(const Params&) = nullptr;  // backward: how many partial sums of lightconv's gradient `run` writes
};

// The last path of a list can always run.
template <class Params>
bool always(const Params&) {
  return true;
}

template <class Params, int n>
const Path<Params>& first_of(const Path<Params> (&paths)[n], const Params& p) {
  int i = 0;
  while (!paths[i].can_run(p)) ++i;
  return paths[i];
}

// A line for each path up to the one that runs: its name, a tab and what it needs.
template <class Params, int n>
std::string explained(const Path<Params> (&paths)[n], const Params& p) {
  std::string lines;
  for (const Path<Params>& path : paths) {
    lines += path.name + ("\t" + std::string(path.needs) + "\n");
    if (path.can_run(p)) break;
  }
  return lines;
}

}  // namespace lightconv
