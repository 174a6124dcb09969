// Hopper's own instructions (sm_90a) as functions: asynchronous copies of tiles (TMA), the barriers in shared memory on
// which they complete, and wgmma, the matrix product of a group of 128 threads. PTX names them; the comments say what
// they order.
//
// Two "proxies" look at shared memory: ordinary loads and stores, and the asynchronous units (TMA and wgmma). A write
// of one is seen by the other only after a fence, or after a barrier on which the write itself completes.
#pragma once

#include <cuda.h>

#include "gpu.h"

namespace fusedce {
namespace hopper {

constexpr int kGroup = 128;         // threads that issue a wgmma together and share its accumulators
constexpr int kAccumulators = 128;  // fp32 words a thread holds of a group's 64 × 256 product

__device__ inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// ── barriers in shared memory ───────────────────────────────────────────────────────────────────────────────────────
// A phase ends when all arrivals and all announced bytes are in. Its parity alternates: wait(bar, p) returns once the
// phase of parity p has ended, and a fresh barrier behaves as if a phase of parity 1 had.

__device__ inline void init_barrier(std::uint64_t* bar, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(arrivals));
}

/// Makes init_barrier() visible to the other block of the cluster and to TMA, once sync_cluster() has followed.
__device__ inline void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

/// The one arrival of the thread that starts copies of `bytes` onto this barrier.
__device__ inline void arrive_expecting(std::uint64_t* bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes)
               : "memory");
}

/// Arrives at the barrier that lies where `bar` does in block `rank` of the cluster. Relaxed: wait_products() has ended
/// the reads that this reports, and a release to another block would be a fence of all memory at every step.
__device__ inline void arrive_at(std::uint64_t* bar, int rank) {
  asm volatile(
      "{\n.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [there];\n}" ::"r"(shared_address(bar)),
      "r"(rank)
      : "memory");
}

/// What a phase's copies wrote is visible to wgmma and TMA after it.
__device__ inline void wait(std::uint64_t* bar, unsigned parity) {
  unsigned done;
  do {
    asm volatile(
        "{\n.reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n}"
        : "=r"(done)
        : "r"(shared_address(bar)), "r"(parity)
        : "memory");
  } while (!done);
}

/// Both blocks of the cluster, all threads; no thread's earlier accesses are later than another's after it.
__device__ inline void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

__device__ inline int rank_in_cluster() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

/// Barrier `id` (1 to 15) of `threads` threads.
__device__ inline void sync_named(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ── copies of tiles ─────────────────────────────────────────────────────────────────────────────────────────────────
// One thread starts them. The map holds the matrix's address, sizes and strides, and the box that one copy moves; what
// lies outside of the matrix is read as 0 and not written.

/// Copies the box at (inner, outer) to `to`, at the same place in every block of the bit mask `blocks`, and counts its
/// bytes on the barrier that lies at `bar` in each.
__device__ inline void load_box(const CUtensorMap& map, void* to, std::uint64_t* bar, int inner, int outer,
                                std::uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(bar)), "r"(inner), "r"(outer), "h"(blocks)
      : "memory");
}

/// The same into this block alone.
__device__ inline void load_box(const CUtensorMap& map, void* to, std::uint64_t* bar, int inner, int outer) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          shared_address(to)),
      "l"(&map), "r"(shared_address(bar)), "r"(inner), "r"(outer)
      : "memory");
}

/// Brings the box into L2.
__device__ inline void prefetch_box(const CUtensorMap& map, int inner, int outer) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(&map), "r"(inner), "r"(outer)
               : "memory");
}

/// Stores the box, or adds it to what is there (fp32, in L2), and closes this thread's bulk group.
template <bool kAdd>
__device__ inline void store_box(const CUtensorMap& map, const void* from, int inner, int outer) {
  if constexpr (kAdd) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
        "r"(shared_address(from)), "r"(inner), "r"(outer)
        : "memory");
  } else {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
                 "r"(shared_address(from)), "r"(inner), "r"(outer)
                 : "memory");
  }
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/// Waits until all but the last kPending of this thread's stores have read their shared memory.
template <int kPending>
__device__ inline void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
/// Waits until all of this thread's stores are done.
__device__ inline void wait_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

/// Lets TMA see this thread's ordinary writes to shared memory.
__device__ inline void fence_for_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ inline void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// Four 8 × 8 matrices of 16-bit words, a row of each by the address of one thread. Thread 4r + c of a wave brings
/// words 2c and 2c + 1 of row r in each register.
__device__ inline void store_matrices(std::uint32_t address, std::uint32_t w0, std::uint32_t w1, std::uint32_t w2,
                                      std::uint32_t w3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(w0), "r"(w1),
               "r"(w2), "r"(w3)
               : "memory");
}

// ── the matrix product ──────────────────────────────────────────────────────────────────────────────────────────────

/// How an operand lies: with K contiguous, or with M (of A) or N (of B) contiguous.
enum class Major { kK = 0, kMN = 1 };

/// The 64-bit word that tells wgmma where an operand's tile starts in shared memory, and how it lies there:
///   bits  0–13  address / 16
///   bits 16–29  "leading" offset / 16: K contiguous: unused with this swizzle; M or N contiguous: from one block of 64
///               columns to the next, here the 64 × 64 box of 8,192 bytes that one copy wrote
///   bits 32–45  "stride" offset / 16: from 8 rows of 128 bytes to the next 8, 1,024 bytes (rows run along M or N where
///               K is contiguous, along K where it is not)
///   bits 62–63  1: swizzled as TMA's SWIZZLE_128B writes, 16-byte piece c of row r at c XOR (r mod 8)
/// The swizzle is a function of address bits: tiles start at multiples of 1,024 bytes, and a step inside of one adds to
/// bits 0–13.
template <Major kMajor>
__device__ inline std::uint64_t operand(const void* tile) {
  constexpr std::uint64_t kLeading = kMajor == Major::kK ? 0 : 8192 / 16;
  constexpr std::uint64_t kStride = 1024 / 16;
  return std::uint64_t{1} << 62 | kStride << 32 | kLeading << 16 | (shared_address(tile) & 0x3ffffu) >> 4;
}

/// What 16 steps along K add to operand(): 32 bytes inside the swizzled rows, or 16 rows.
template <Major kMajor>
constexpr std::uint64_t kStep16 = kMajor == Major::kK ? 32 / 16 : 16 * 128 / 16;

/// Before the first product after ordinary code touched the accumulators: their registers are now wgmma's.
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
/// Closes a batch of products.
__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Waits until at most the last kPending batches are in flight: the others have read their tiles and written d.
template <int kPending>
__device__ inline void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
/// After wait_products<0>(): the compiler, which sees no link between that wait and d, must not read d any earlier.
__device__ inline void settle(float (&d)[kAccumulators]) {
#pragma unroll
  for (float& word : d) asm volatile("" : "+f"(word)::"memory");
}

#define FUSEDCE_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FUSEDCE_16(i) FUSEDCE_4(i), FUSEDCE_4(i + 4), FUSEDCE_4(i + 8), FUSEDCE_4(i + 12)

/// d += A·B, or d = A·B unless `add`, for A of 64 × 16 and B of 16 × 256 bf16. Asynchronous: see the waits above. The
/// last four immediates: neither operand negated, and whether A and B have M and N contiguous.
template <Major kA, Major kB>
__device__ inline void multiply(float (&d)[kAccumulators], std::uint64_t a, std::uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
      "%128, %129, add, 1, 1, %131, %132;\n}"
      : FUSEDCE_16(0), FUSEDCE_16(16), FUSEDCE_16(32), FUSEDCE_16(48), FUSEDCE_16(64), FUSEDCE_16(80), FUSEDCE_16(96),
        FUSEDCE_16(112)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(static_cast<int>(kA)), "n"(static_cast<int>(kB)));
}

#undef FUSEDCE_16
#undef FUSEDCE_4

/// Registers a thread may hold from here on, by all threads of a group: what one group gives, another takes.
template <int kRegisters>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// 2^x and 1/x by the special-function unit, to about 2 and 1 units in the last place.
__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// The smaller of two; NaN if one is, which fminf() would drop.
__device__ inline float min_or_nan(float x, float y) {
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

}  // namespace hopper
}  // namespace fusedce
