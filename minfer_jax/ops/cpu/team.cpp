// A kernel's chunks are divided into one run a thread. A thread claims the chunks of its own run
// one after the other, so that it reads memory in order, and then what others have left. The
// caller waits only for chunks that a helper is already running, never for a helper to be given a
// thread: XLA runs kernels on the same pool, and a kernel that waits for a free thread there can
// wait for ever. A helper stays for a little after a job, because the next kernel of a step
// follows within microseconds and waking a thread takes longer.
//
// There is one team in a process, whatever clients it serves. A kernel that finds it at work (XLA
// may run two at once) works alone.

#include <atomic>
#include <chrono>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "pool.h"

namespace minfer {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kLinger = std::chrono::milliseconds(3);
constexpr uint32_t kSpins = 64;  // between two looks at the clock
constexpr uint32_t kPatience = 4096;  // pauses before the caller lets others run
constexpr uint32_t kMaxThreads = 64;

// A run: the job's number, the next chunk and the last, in one word. A claim succeeds only while
// all three are what the claimer has seen.
constexpr uint64_t kBits = 20, kMask = (1 << kBits) - 1;
uint64_t run_of(uint64_t job, uint64_t begin, uint64_t end) {
  return job << (2 * kBits) | end << kBits | begin;
}
uint64_t next(uint64_t run) { return run & kMask; }
uint64_t end(uint64_t run) { return run >> kBits & kMask; }

struct alignas(64) Run {
  std::atomic<uint64_t> word{0};
};

struct Team {
  Run runs[kMaxThreads];
  alignas(64) std::atomic<uint64_t> job{0};  // what helpers watch
  std::atomic<uint32_t> width{0};            // runs of the job
  std::atomic<void (*)(void*, uint32_t)> body{nullptr};
  std::atomic<void*> data{nullptr};
  alignas(64) std::atomic<uint32_t> done{0};
  alignas(64) std::atomic<bool> busy{false};
  std::atomic<uint64_t> helpers{0};  // a bit for each thread but the caller's, which is 0
};
Team team;

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Runs the unclaimed chunks of one run; how many that were.
uint32_t work_off(std::atomic<uint64_t>& word) {
  uint32_t n = 0;
  uint64_t run = word.load(std::memory_order_acquire);
  while (next(run) < end(run)) {
    // Belong to this run if the claim succeeds: the next job's are not set while a chunk is left.
    auto body = team.body.load(std::memory_order_relaxed);
    void* data = team.data.load(std::memory_order_relaxed);
    if (word.compare_exchange_weak(run, run + 1, std::memory_order_acq_rel)) {
      body(data, static_cast<uint32_t>(next(run)));
      ++n;
      run = word.load(std::memory_order_acquire);
    }
  }
  return n;
}

// Thread `id`'s part in the current job: its own run, then the others'.
void work(uint32_t id) {
  uint32_t width = team.width.load(std::memory_order_relaxed), n = 0;
  for (uint32_t i = 0; i < width; ++i) n += work_off(team.runs[(id + i) % width].word);
  if (n) team.done.fetch_add(n, std::memory_order_release);
}

void help(uint32_t id) {
  auto until = Clock::now() + kLinger;
  uint64_t seen = 0;
  for (uint32_t spins = 1;; ++spins) {
    uint64_t job = team.job.load(std::memory_order_acquire);
    if (job != seen) {
      seen = job;
      // A job of fewer threads than the one this helper was called for does without it.
      if (id < team.width.load(std::memory_order_relaxed)) work(id);
      until = Clock::now() + kLinger;
    }
    pause();
    if (spins % kSpins == 0 && Clock::now() > until) break;
  }
  team.helpers.fetch_and(~(uint64_t{1} << id), std::memory_order_relaxed);
}

void call_helpers(const Pool& pool, uint32_t width) {
  uint64_t here = team.helpers.load(std::memory_order_relaxed);
  for (uint32_t id = 1; id < width; ++id) {
    if (here >> id & 1) continue;
    team.helpers.fetch_or(uint64_t{1} << id, std::memory_order_relaxed);
    pool.schedule(help, id);
  }
}

}  // namespace

void share(const Pool& pool, uint32_t n, void (*body)(void* data, uint32_t chunk), void* data) {
  uint32_t width = pool.threads < kMaxThreads ? pool.threads : kMaxThreads;
  if (n < width) width = n;
  if (width < 2 || n > kMask || team.busy.exchange(true, std::memory_order_acquire)) {
    for (uint32_t i = 0; i < n; ++i) body(data, i);
    return;
  }
  uint64_t job = team.job.load(std::memory_order_relaxed) + 1;
  team.body.store(body, std::memory_order_relaxed);
  team.data.store(data, std::memory_order_relaxed);
  team.width.store(width, std::memory_order_relaxed);
  team.done.store(0, std::memory_order_relaxed);
  for (uint32_t i = 0; i < width; ++i) {
    uint64_t begin = uint64_t{n} * i / width, end = uint64_t{n} * (i + 1) / width;
    team.runs[i].word.store(run_of(job, begin, end), std::memory_order_release);
  }
  team.job.store(job, std::memory_order_release);
  call_helpers(pool, width);
  work(0);
  for (uint32_t spins = 1; team.done.load(std::memory_order_acquire) != n; ++spins) {
    pause();
    if (spins % kPatience == 0) std::this_thread::yield();  // a helper may have lost its CPU
  }
  team.busy.store(false, std::memory_order_release);
}

uint32_t threads(const Pool& pool) { return pool.threads; }

}  // namespace minfer
