// Runs a GPU kernel's own text on the host: one fiber per GPU thread, waves of SIMT_WAVE lanes (32 or 64).
//
// A thread runs until it waits at a barrier or a shuffle; it goes on when all threads of its block, or all lanes of its
// wave, wait there too. Threads that can never meet are reported, not waited for. Blocks run one after another.
//
// Built with -fsanitize=thread, every fiber is a thread of its own for the sanitizer, and barriers and shuffles are all
// that orders them: a missing __syncthreads() is reported as the data race that it is.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

#define __global__
#define __device__
#define __launch_bounds__(...)
#define __shared__ static  // one block at a time, so one object for all blocks

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline dim3 threadIdx, blockIdx, gridDim;  // of the thread that runs

namespace simt {

constexpr int kWaveSize = SIMT_WAVE;
constexpr std::size_t kStackBytes = 64 << 10;

// ── 16-bit floats ───────────────────────────────────────────────────────────────────────────────────────────────────

struct bf16 {
  std::uint16_t bits;
};
using fp16 = _Float16;

template <typename T>
T from_float(float value) {
  return static_cast<T>(value);
}
template <>
inline bf16 from_float<bf16>(float value) {
  std::uint32_t word;
  std::memcpy(&word, &value, sizeof(word));
  if (value != value) return {static_cast<std::uint16_t>(word >> 16 | 0x40)};
  return {static_cast<std::uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16)};  // to nearest, ties to even
}
template <typename T>
std::uint32_t pack2(float low, float high) {
  const T pair[2] = {from_float<T>(low), from_float<T>(high)};
  std::uint32_t word;
  std::memcpy(&word, pair, sizeof(word));
  return word;
}

// ── the order of memory accesses, for the thread sanitizer ──────────────────────────────────────────────────────────

#if defined(__SANITIZE_THREAD__)
inline void release(void* meeting) { __tsan_release(meeting); }
inline void acquire(void* meeting) { __tsan_acquire(meeting); }
inline void* make_fiber() { return __tsan_create_fiber(0); }
inline void free_fiber(void* fiber) { __tsan_destroy_fiber(fiber); }
inline void* this_fiber() { return __tsan_get_current_fiber(); }
inline void switch_fiber(void* fiber) { __tsan_switch_to_fiber(fiber, __tsan_switch_to_fiber_no_sync); }
#else
inline void release(void*) {}
inline void acquire(void*) {}
inline void* make_fiber() { return nullptr; }
inline void free_fiber(void*) {}
inline void* this_fiber() { return nullptr; }
inline void switch_fiber(void*) {}
#endif

// ── threads, waves, a block ─────────────────────────────────────────────────────────────────────────────────────────

enum class State { kRuns, kAtBarrier, kAtShuffle, kDone };

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  void* fiber = make_fiber();
  State state = State::kRuns;

  ~Thread() { free_fiber(fiber); }
};

struct Block {
  std::vector<Thread> threads;
  std::vector<int> posted;  // a shuffle's word of every thread
  std::function<void()> kernel;
  ucontext_t host;
  void* host_fiber = this_fiber();
  int current = 0;

  explicit Block(int num_threads) : threads(num_threads), posted(num_threads) {}
};

inline Block* block = nullptr;
inline char start_and_end;  // addresses that stand for meetings
inline char barrier_meeting;

/// Called by a GPU thread: gives way until the host lets it go on.
__attribute__((no_sanitize("thread"))) inline void wait(State state, void* meeting) {
  Block& b = *block;
  const int self = b.current;
  b.threads[self].state = state;
  release(meeting);
  switch_fiber(b.host_fiber);
  swapcontext(&b.threads[self].context, &b.host);
  acquire(meeting);
}

__attribute__((no_sanitize("thread"))) inline int current_thread() { return block->current; }

__attribute__((no_sanitize("thread"))) inline int shuffle_xor(int word, int lane_mask) {
  const int self = current_thread();
  void* wave = &block->posted[self / kWaveSize * kWaveSize];
  block->posted[self] = word;
  wait(State::kAtShuffle, wave);
  const int other = block->posted[self ^ lane_mask];
  wait(State::kAtShuffle, wave);  // all have read, so the words may be overwritten
  return other;
}

__attribute__((no_sanitize("thread"))) inline void run_thread() {
  acquire(&start_and_end);
  block->kernel();
  wait(State::kDone, &start_and_end);
}

/// Lets one thread run until it waits.
__attribute__((no_sanitize("thread"))) inline void resume(int index) {
  Block& b = *block;
  b.current = index;
  threadIdx = dim3(static_cast<unsigned>(index));
  switch_fiber(b.threads[index].fiber);
  swapcontext(&b.host, &b.threads[index].context);
}

/// Whether all of threads [first, last) wait as `state`, and if so lets them go on.
__attribute__((no_sanitize("thread"))) inline bool let_go(int first, int last, State state) {
  for (int i = first; i < last; ++i) {
    if (block->threads[i].state != state) return false;
  }
  for (int i = first; i < last; ++i) block->threads[i].state = State::kRuns;
  return true;
}

/// Runs the block's threads to their end. False if some wait where the others never come.
__attribute__((no_sanitize("thread"))) inline bool run_block() {
  Block& b = *block;
  const int count = static_cast<int>(b.threads.size());
  for (Thread& thread : b.threads) {
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = kStackBytes;
    thread.context.uc_link = nullptr;
    thread.state = State::kRuns;
    makecontext(&thread.context, run_thread, 0);
  }
  release(&start_and_end);
  for (bool moved = true; moved;) {
    moved = false;
    for (int i = 0; i < count; ++i) {
      if (b.threads[i].state == State::kRuns) resume(i);
    }
    for (int wave = 0; wave < count; wave += kWaveSize) moved |= let_go(wave, wave + kWaveSize, State::kAtShuffle);
    moved |= let_go(0, count, State::kAtBarrier);
  }
  acquire(&start_and_end);
  for (const Thread& thread : b.threads) {
    if (thread.state != State::kDone) return false;
  }
  return true;
}

/// Runs a grid. nullptr, or what is wrong with the kernel.
template <typename... Parameters>
const char* launch(void (*kernel)(Parameters...), dim3 grid, int num_threads, Parameters... arguments) {
  if (num_threads % kWaveSize) return "the block is not made of whole waves";
  Block own(num_threads);
  own.kernel = [&] { kernel(arguments...); };
  block = &own;
  gridDim = grid;
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) {
      blockIdx = dim3(x, y);
      if (!run_block()) return "divergence: threads wait where the others never come";
    }
  }
  return nullptr;
}

}  // namespace simt

inline void __syncthreads() { simt::wait(simt::State::kAtBarrier, &simt::barrier_meeting); }
