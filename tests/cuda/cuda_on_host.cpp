// Grids and blocks of cuda_on_host.h: fibers and their scheduler, launches, barriers, asynchronous copies.

#include "cuda_on_host.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <utility>
#include <vector>

#if !defined(__x86_64__) || defined(LIGHTCONV_HOST_UCONTEXT)
#define LIGHTCONV_HOST_SWITCH_BY_UCONTEXT
#include <ucontext.h>
#endif

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#define LIGHTCONV_HOST_BEFORE_SWITCH(save, bottom, bytes) __sanitizer_start_switch_fiber(save, bottom, bytes)
#define LIGHTCONV_HOST_AFTER_SWITCH(saved, bottom, bytes) __sanitizer_finish_switch_fiber(saved, bottom, bytes)
#else
#define LIGHTCONV_HOST_BEFORE_SWITCH(save, bottom, bytes) (void)(save)
#define LIGHTCONV_HOST_AFTER_SWITCH(saved, bottom, bytes) (void)(saved)
#endif

namespace lightconv_host {
namespace {

constexpr std::size_t stack_bytes = 256 * 1024;
constexpr int most_threads = 1024;

// ------------------------------------------------------------------------------------------------ one fiber

#ifndef LIGHTCONV_HOST_SWITCH_BY_UCONTEXT

using Context = void*;

// Saves the registers that a call preserves on the stack, the stack's top in *from, and goes on where `to` was saved.
extern "C" void lightconv_host_switch(Context* from, Context to);
asm(R"(
.text
.type lightconv_host_switch, @function
lightconv_host_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size lightconv_host_switch, .-lightconv_host_switch
)");

void begin(Context& context, char* stack, void (*entry)()) {
  // What the switch pops: six registers, then `entry` as the return address; entry finds the stack as after a call.
  auto** top = reinterpret_cast<void**>(stack + stack_bytes - 8);
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  context = top;
}

void swap(Context& from, Context& to) { lightconv_host_switch(&from, to); }

#else

using Context = ucontext_t;

void begin(Context& context, char* stack, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = stack_bytes;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}

void swap(Context& from, Context& to) { swapcontext(&from, &to); }

#endif

enum class State { done, ready, at_barrier, at_collective };

struct Copy {
  void* to;
  const void* from;
  int bytes, source_bytes;
  void now() const {
    std::memcpy(to, from, source_bytes);
    std::memset(static_cast<char*>(to) + source_bytes, 0, bytes - source_bytes);
  }
};

struct Thread {
  Context context{};
  char* stack = nullptr;
  void* fake_stack = nullptr;
  State state = State::done;
  uint3 index{};
  Site site;
  const char* waits_for = "";
  unsigned mask = 0;
  Exchange* exchange = nullptr;
  std::vector<std::vector<Copy>> groups;  // cp.async not yet waited for; the last one is still open
};

std::vector<Thread> threads;
int living = 0;   // threads of this block: the first ones of `threads`
int current = 0;  // the one that runs
Context scheduler;
void* scheduler_fake_stack = nullptr;
const void* scheduler_stack = nullptr;
std::size_t scheduler_stack_bytes = 0;

const char* kernel_name = "";
void (*kernel_call)(void*) = nullptr;
void* kernel_arguments = nullptr;
char* shared_memory = nullptr;
std::size_t shared_bytes = 0;
std::map<const void*, int> shared_allowed;
cudaError_t last_error = cudaSuccess;

LIGHTCONV_HOST_OWN_MEMORY bool same(const Site& a, const Site& b) {
  static_assert(sizeof(Site) == sizeof(void*));  // the address of what says where it is
  if (std::bit_cast<const void*>(a) == std::bit_cast<const void*>(b)) return true;
  return a.line() == b.line() && a.column() == b.column() &&
         (a.file_name() == b.file_name() || !std::strcmp(a.file_name(), b.file_name()));
}

std::string name_of(const Thread& thread) {
  const uint3& t = thread.index;
  return "thread (" + std::to_string(t.x) + "," + std::to_string(t.y) + "," + std::to_string(t.z) + ")";
}

}  // namespace

std::string where(const Site& site) { return std::string(site.file_name()) + ":" + std::to_string(site.line()); }

void fail(const std::string& what) {
  std::fprintf(stderr, "cuda_on_host: %s; kernel %s, block (%u,%u,%u)\n", what.c_str(), kernel_name, blockIdx.x,
               blockIdx.y, blockIdx.z);
  std::fflush(stderr);
  _exit(99);
}

namespace {

void back_to_scheduler() {
  Thread& me = threads[current];
  LIGHTCONV_HOST_BEFORE_SWITCH(&me.fake_stack, scheduler_stack, scheduler_stack_bytes);
  swap(me.context, scheduler);
  LIGHTCONV_HOST_AFTER_SWITCH(me.fake_stack, &scheduler_stack, &scheduler_stack_bytes);
}

void fiber() {
  LIGHTCONV_HOST_AFTER_SWITCH(nullptr, &scheduler_stack, &scheduler_stack_bytes);
  for (;;) {  // one turn a block: fibers are used again
    kernel_call(kernel_arguments);
    threads[current].state = State::done;
    back_to_scheduler();
  }
}

void resume(int which) {
  current = which;
  Thread& thread = threads[which];
  threadIdx = thread.index;
  LIGHTCONV_HOST_BEFORE_SWITCH(&scheduler_fake_stack, thread.stack, stack_bytes);
  swap(scheduler, thread.context);
  LIGHTCONV_HOST_AFTER_SWITCH(scheduler_fake_stack, nullptr, nullptr);
}

void need_fibers(int count) {
  if (threads.empty()) threads.reserve(most_threads);
  while (static_cast<int>(threads.size()) < count) {
    Thread& thread = threads.emplace_back();
    const std::size_t page = 64 * 1024;  // at least a page everywhere; below it a stack that overflows faults
    auto* memory = static_cast<char*>(
        mmap(nullptr, page + stack_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (memory == MAP_FAILED || mprotect(memory + page, stack_bytes, PROT_READ | PROT_WRITE) != 0)
      fail("no memory for a fiber's stack");
    thread.stack = memory + page;
    begin(thread.context, thread.stack, fiber);
  }
}

// ------------------------------------------------------------------------------------------------ one block

void run_warp(int warp) {
  const int first = warp * 32, last = std::min(first + 32, living);
  for (bool progress = true; progress;) {
    progress = false;
    for (int i = first; i < last; ++i) {
      const int which = order == Order::ascending ? i : first + last - 1 - i;
      if (threads[which].state != State::ready) continue;
      resume(which);
      progress = true;
    }
  }
}

std::string describe(const Thread& thread) {
  if (thread.state == State::done) return name_of(thread) + " has returned";
  return name_of(thread) + " waits for " + thread.waits_for + " at " + where(thread.site);
}

// All threads wait or are done. Open the barrier if that is where they are; complain if they will never meet.
bool open_barrier() {
  const Thread& first = threads[0];
  for (int i = 0; i < living; ++i) {
    const Thread& other = threads[i];
    if (other.state == State::at_collective) fail("lanes do not meet: " + describe(other));
    const bool together = other.state == first.state && (first.state == State::done || same(other.site, first.site));
    if (!together) fail("divergent barrier: " + describe(first) + ", " + describe(other));
  }
  if (first.state == State::done) return false;
  for (int i = 0; i < living; ++i) threads[i].state = State::ready;
  return true;
}

void run_block(dim3 block) {
  // Neither pattern is a number that a kernel could pass off as data: NaN, or 3.4e38 which fmaxf does not swallow.
  if (shared_bytes) std::memset(shared_memory, order == Order::ascending ? 0xff : 0x7f, shared_bytes);
  living = static_cast<int>(block.x * block.y * block.z);
  need_fibers(living);
  for (int i = 0; i < living; ++i) {
    const auto n = static_cast<unsigned>(i);
    threads[i].index = {n % block.x, n / block.x % block.y, n / block.x / block.y};
    threads[i].state = State::ready;
    if (threads[i].groups.size() != 1 || !threads[i].groups[0].empty()) threads[i].groups.assign(1, {});
  }
  const int warps = (living + 31) / 32;
  do {
    for (int w = 0; w < warps; ++w) run_warp(order == Order::ascending ? w : warps - 1 - w);
  } while (open_barrier());
}

bool launchable(const void* kernel, dim3 grid, dim3 block, std::size_t shared) {
  const auto threads_wanted = std::uint64_t{block.x} * block.y * block.z;
  const auto allowed = shared_allowed.find(kernel);
  const int most_shared = allowed == shared_allowed.end() ? device.shared_without_asking : allowed->second;
  return grid.x >= 1 && grid.y >= 1 && grid.z >= 1 && grid.x <= 0x7fffffffu && grid.y <= device.grid_height &&
         grid.z <= device.grid_height && threads_wanted >= 1 && threads_wanted <= most_threads && block.z <= 64 &&
         shared <= static_cast<std::size_t>(most_shared);
}

}  // namespace

// ------------------------------------------------------------------------------------------------ launches

void run_grid(const char* name, const void* kernel, dim3 grid, dim3 block, std::size_t shared, void (*call)(void*),
              void* arguments) {
  if (!launchable(kernel, grid, block, shared)) {
    last_error = cudaErrorInvalidConfiguration;
    return;
  }
  kernel_name = name;
  kernel_call = call;
  kernel_arguments = arguments;
  shared_bytes = shared;
  // A heap block of exactly this size: the address sanitizer watches both its ends.
  shared_memory = shared ? static_cast<char*>(std::malloc(shared)) : nullptr;
  blockDim = block;
  gridDim = grid;
  const auto count = std::uint64_t{grid.x} * grid.y * grid.z;
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint64_t n = order == Order::ascending ? i : count - 1 - i;
    blockIdx = {static_cast<unsigned>(n % grid.x), static_cast<unsigned>(n / grid.x % grid.y),
                static_cast<unsigned>(n / grid.x / grid.y)};
    run_block(block);
  }
  std::free(shared_memory);
  shared_memory = nullptr;
  shared_bytes = 0;
}

cudaError_t allow_shared(const void* kernel, int bytes) {
  if (bytes < 0 || bytes > device.shared_at_most) return last_error = cudaErrorInvalidValue;
  // Another host thread may be about to launch what the higher limit was set for.
  const int before = std::exchange(shared_allowed[kernel], bytes);
  if (bytes < before) {
    fail("the limit of shared memory is lowered from " + std::to_string(before) + " to " + std::to_string(bytes));
  }
  return cudaSuccess;
}

void* dynamic_shared() { return shared_memory; }

// ------------------------------------------------------------------------------------------------ waiting

int lane() { return current % 32; }

void barrier(const Site& site) {
  Thread& me = threads[current];
  me.state = State::at_barrier;
  me.site = site;
  me.waits_for = "__syncthreads";
  back_to_scheduler();
}

LIGHTCONV_HOST_OWN_MEMORY void collective(const char* name, unsigned mask, Together together, Exchange* mine, const Site& site) {
  Thread& me = threads[current];
  const int first = current - lane(), lanes_here = std::min(32, living - first);
  const auto complain = [&](const char* what) { fail(name_of(me) + " calls " + name + what + where(site)); };
  if (!(mask >> lane() & 1u)) complain(" with a mask that leaves it out, at ");
  if (lanes_here < 32 && mask >> lanes_here) complain(" with lanes in its mask that the block does not have, at ");
  me.state = State::at_collective;
  me.site = site;
  me.waits_for = name;
  me.mask = mask;
  me.exchange = mine;

  bool complete = true;
  Exchange* lanes[32] = {};
  for (int n = 0; n < lanes_here && complete; ++n) {
    const int i = order == Order::ascending ? lanes_here - 1 - n : n;  // those that come last first
    if (!(mask >> i & 1u)) continue;
    const Thread& other = threads[first + i];
    complete =
        other.state == State::at_collective && other.waits_for == name && other.mask == mask && same(other.site, site);
    lanes[i] = other.exchange;
  }
  if (!complete) {
    back_to_scheduler();
    return;
  }
  if (together) together(lanes, site);
  for (int i = 0; i < lanes_here; ++i)
    if (mask >> i & 1u) threads[first + i].state = State::ready;
  // This one goes on at once; the scheduler comes back to the others.
}

// ------------------------------------------------------------------------------------------------ copies

void must_be_shared(const void* address, std::size_t bytes, const char* what, const Site& site) {
  const auto* at = static_cast<const char*>(address);
  if (reinterpret_cast<std::uintptr_t>(at) % bytes)
    fail(std::string(what) + ": shared address not a multiple of " + std::to_string(bytes) + " at " + where(site));
  if (shared_memory && (at < shared_memory || at + bytes > shared_memory + shared_bytes))
    fail(std::string(what) + ": outside of the block's shared memory at " + where(site));
}

void cp_async(void* shared, const void* global, int bytes, int source_bytes, const Site& site) {
  if ((bytes != 4 && bytes != 8 && bytes != 16) || source_bytes < 0 || source_bytes > bytes)
    fail("cp.async of " + std::to_string(source_bytes) + " of " + std::to_string(bytes) + " bytes at " + where(site));
  must_be_shared(shared, static_cast<std::size_t>(bytes), "cp.async", site);
  if (reinterpret_cast<std::uintptr_t>(global) % static_cast<std::size_t>(bytes))
    fail("cp.async: global address not a multiple of " + std::to_string(bytes) + " at " + where(site));
  const Copy copy{shared, global, bytes, source_bytes};
  if (order == Order::descending)
    copy.now();
  else
    threads[current].groups.back().push_back(copy);
}

void cp_async_commit() { threads[current].groups.emplace_back(); }

void cp_async_wait(int groups_left) {
  auto& groups = threads[current].groups;
  while (static_cast<int>(groups.size()) - 1 > groups_left) {
    for (const Copy& copy : groups.front()) copy.now();
    groups.erase(groups.begin());
  }
}

}  // namespace lightconv_host

// ------------------------------------------------------------------------------------------------ the runtime

cudaError_t cudaPeekAtLastError() { return lightconv_host::last_error; }

cudaError_t cudaGetLastError() { return std::exchange(lightconv_host::last_error, cudaSuccess); }

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorNotSupported:
      return "operation not supported";
  }
  return "unrecognized error code";
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const auto& device = lightconv_host::device;
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = device.multiprocessors;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = device.major;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = device.minor;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = device.shared_at_most + 1024;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = device.shared_at_most;
      return cudaSuccess;
  }
  return cudaErrorInvalidValue;
}
