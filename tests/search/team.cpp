// Whether the threads of a team sleep while they have nothing to do: returns 0 if they all do within ten seconds.
#include "search/team.h"

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>

// Threads of this process that run or want to; the caller is one.
static int running() {
  int result = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string stat;
    std::getline(std::ifstream(task.path() / "stat"), stat);
    result += stat.compare(stat.rfind(')') + 1, 3, " R ") == 0;
  }
  return result;
}

static bool others_sleep() {
  for (int tries = 0; tries < 200; ++tries) {
    if (running() == 1) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  return false;
}

int main() {
  lightconv::decoding::Team team(3);
  std::atomic<int64_t> done{0};
  for (int round = 1; round <= 100; ++round) {
    if (round % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the next round wakes them
    team.share(30, [&](int64_t first, int64_t last) { done += last - first; });
    if (done != 30 * round) return 1;
  }
  bool slept = others_sleep();
  team.run([&](int member) {
    if (member == 2) slept = others_sleep() && slept;  // the calling thread waits for it, the other one for work
  });
  return slept ? 0 : 2;
}
