// A bf16 matrix product with fp32 accumulators for Hopper, whose epilogue is a functor: out = f(A·B), or out += A·B.
//
// A block owns tiles of 128 × 256; a cluster of two blocks owns a pair of them, one below the other, and shares the
// columns of B: each block fetches half of them for both. Of a block's three groups of 128 threads the first starts the
// copies (one thread does), and the other two multiply and write 64 rows of the tile each:
//
//   producer            full[s]  ──────────▶   groups 1 and 2
//   A: 128 × 64, B: 64 × 256 into stage s      64 × 256 accumulators, 4 products of depth 16 a stage
//                       empty[s] ◀──────────   of both blocks: B's stage is written from both
//
// The grid is persistent: while the groups write a tile, the producer fetches stages of the next. Each wave writes its
// 16 rows in parts of 128 bytes, registers → swizzled shared memory → TMA, with two parts in flight.
//
// A tile's order of summation depends on K alone, and one block writes it: results repeat bit for bit.
// Tails in M, N and K: TMA reads zeros outside of a matrix and does not write there.
#pragma once

#include "hopper.cuh"
#include "tensor_map.h"
#include "wave.cuh"

namespace fusedce {
namespace hopper {

constexpr int kTileM = 128;
constexpr int kTileN = 256;
constexpr int kTileK = 64;  // 128 bytes: as wide as a swizzled row may be
constexpr int kStages = 4;
constexpr int kBlocks = 2;                    // of a cluster
constexpr int kThreads = 3 * kGroup;          // the producer's group, and two that multiply
constexpr int kHalfBytes = 128 * kTileK * 2;  // A's tile, and either half of B's
constexpr int kStageBytes = 3 * kHalfBytes;
constexpr int kWaves = kGroup / kWaveSize;
constexpr int kBoxRows = 64 / kWaves;  // the accumulators of 16 rows are a wave's own
constexpr int kBoxBytes = kBoxRows * 128;
constexpr int kSpan = 16;          // tiles of the faster dimension before the slower one advances
constexpr int kGroupBarriers = 1;  // ids of named barriers: one for each multiplying group
constexpr int kWaveBarriers = 3;   // and one for each of its waves
// 128·40 + 256·232 = 384·168: what a block has at its start, the only one of its multiprocessor.
constexpr int kProducerRegisters = 40;
constexpr int kMultiplierRegisters = 232;

/// Counted in what a cluster takes at a time.
struct TileGrid {
  int pairs_m;  // of 2 · 128 rows
  int tiles_n;
  int steps_k;  // of a tile
};

/// Where a thread's accumulators d belong: d[4j + 2h + b] to row + 8h and column + 8j + b, with h and b 0 or 1.
struct Fragment {
  int row;
  int column;
  int tile_n;
  int thread;      // of the group
  int barrier;     // named: for the group's threads
  float* scratch;  // kTileN words of shared memory, the group's own
};

enum class Write { kNone, kStore, kAdd };

/// What one kernel computes. An Epilogue has
///   Args, a kernel parameter; Element, bf16 or float; kWrite
///   (args, fragment)   called while the tile's last products run, which hides its loads
///   prepare(d)         once all products are there
///   apply(&d[4j], j)   replaces the eight words of an even j and the next by what is to be written
///   end_part<p>(d)     after the words of a part, before they are written together
///   finish()           after all of them
template <Major kMajorA, Major kMajorB, bool kRowsFirst, class EpilogueType>
struct Gemm {
  static constexpr Major kA = kMajorA;
  static constexpr Major kB = kMajorB;
  static constexpr bool kRowsAreFaster = kRowsFirst;  // what neighbours in time share: B's columns, else A's rows
  using Epilogue = EpilogueType;
};

struct Shared {
  unsigned char a[kStages][kHalfBytes];
  unsigned char b[kStages][2 * kHalfBytes];
  unsigned char boxes[2][kWaves][2][kBoxBytes];  // of each multiplying wave
  float scratch[2][kTileN];
  std::uint64_t full[kStages];
  std::uint64_t empty[kStages];
};

/// A stage and the parity of its use, walking round.
struct Cursor {
  int stage = 0;
  unsigned parity = 0;
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

struct Place {
  int pair_m;
  int tile_n;
};

/// The t-th pair of tiles: spans of the faster dimension, so that what runs at one time shares its operands in L2.
template <bool kRowsFirst>
__device__ inline Place place_of(const TileGrid& grid, int t) {
  const int faster = kRowsFirst ? grid.pairs_m : grid.tiles_n;
  const int slower = kRowsFirst ? grid.tiles_n : grid.pairs_m;
  const int first = t / (kSpan * slower) * kSpan;
  const int width = min(kSpan, faster - first);
  const int inside = t % (kSpan * slower);
  const int fast = first + inside % width;
  const int slow = inside / width;
  return kRowsFirst ? Place{fast, slow} : Place{slow, fast};
}

/// Starts the copy of 128 rows or columns from `mn` on, 64 deep from `k` on: one box where K is contiguous, else two.
template <Major kMajor, typename... Blocks>
__device__ inline void load_half(const CUtensorMap& map, unsigned char* to, std::uint64_t* bar, int mn, int k,
                                 Blocks... blocks) {
  if constexpr (kMajor == Major::kK) {
    load_box(map, to, bar, k, mn, blocks...);
  } else {
    load_box(map, to, bar, mn, k, blocks...);
    load_box(map, to + kHalfBytes / 2, bar, mn + 64, k, blocks...);
  }
}

/// Brings what the epilogue will add to into L2, a share at every step: all blocks add at about the same time, and
/// would wait for memory together.
template <class Epilogue>
__device__ inline void prefetch_output(const CUtensorMap& map, const TileGrid& grid, int row, int column, int k) {
  constexpr int kColumns = 128 / static_cast<int>(sizeof(typename Epilogue::Element));
  constexpr int kBoxes = kTileN / kColumns * (kTileM / kBoxRows);
  for (int i = k; i < kBoxes; i += grid.steps_k) {
    prefetch_box(map, column + i % (kTileN / kColumns) * kColumns, row + i / (kTileN / kColumns) * kBoxRows);
  }
}

/// The one thread that starts all copies of its block.
template <class G>
__device__ inline void produce(Shared& shared, const CUtensorMap& map_a, const CUtensorMap& map_b,
                               const CUtensorMap& map_out, const TileGrid& grid) {
  const int rank = rank_in_cluster();
  Cursor at;
  for (int t = blockIdx.x / kBlocks; t < grid.pairs_m * grid.tiles_n; t += gridDim.x / kBlocks) {
    const Place place = place_of<G::kRowsAreFaster>(grid, t);
    const int row = (place.pair_m * kBlocks + rank) * kTileM;
    const int column = place.tile_n * kTileN + rank * 128;
    for (int k = 0; k < grid.steps_k; ++k, at.advance()) {
      std::uint64_t* full = &shared.full[at.stage];
      wait(&shared.empty[at.stage], at.parity ^ 1);
      arrive_expecting(full, kStageBytes);  // the half from the other block counts here too, even if it comes first
      load_half<G::kA>(map_a, shared.a[at.stage], full, row, k * kTileK);
      load_half<G::kB>(map_b, shared.b[at.stage] + rank * kHalfBytes, full, column, k * kTileK, std::uint16_t{3});
      if constexpr (G::Epilogue::kWrite == Write::kAdd) {
        prefetch_output<typename G::Epilogue>(map_out, grid, row, place.tile_n * kTileN, k);
      }
    }
  }
}

/// A wave's writer: hands parts of its 16 rows to TMA, by two boxes of shared memory in turn. Waves do not wait for one
/// another.
template <class Epilogue>
class Writer {
 public:
  __device__ Writer(Shared& shared, const CUtensorMap& map, int group, int thread)
      : boxes_(shared.boxes[group][thread / kWaveSize]),
        map_(map),
        barrier_(kWaveBarriers + group * kWaves + thread / kWaveSize),
        lane_(thread % kWaveSize) {}

  static constexpr int kColumns = 128 / static_cast<int>(sizeof(typename Epilogue::Element));  // of a part

  /// Writes d's part of kColumns columns from kPart · kColumns on; d is already what is to be written. row: the wave's.
  template <int kPart>
  __device__ void write(const float (&d)[kAccumulators], int row, int column) {
    unsigned char* box = boxes_[kPart % 2];
    if (lane_ == 0) wait_stores_read<1>();  // the one before the last was from this box
    sync_named(barrier_, kWaveSize);
    fill<kPart>(d, shared_address(box));
    fence_for_async();  // the box was written by ordinary stores, and TMA reads it
    sync_named(barrier_, kWaveSize);
    if (lane_ == 0) store_box<Epilogue::kWrite == Write::kAdd>(map_, box, column + kPart * kColumns, row);
  }

  __device__ void finish() {
    if (lane_ == 0) wait_stores();  // shared memory must outlive its reader
  }

 private:
  /// 16-byte piece c of row r lies at c XOR (r mod 8), as TMA expects it; no two threads of a store share a bank.
  template <int kPart>
  __device__ void fill(const float (&d)[kAccumulators], std::uint32_t box) {
    if constexpr (sizeof(typename Epilogue::Element) == 2) {
      // Each store is of 16 rows × 16 columns. Threads 0–7 bring the addresses of rows 0–7, 8–15 of rows 8–15, the
      // others of the columns' second half.
      const std::uint32_t row = box + lane_ % 16 * 128;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int piece = (2 * i + lane_ / 16) ^ lane_ % 8;
        const float* of = &d[kPart * 32 + i * 8];
        store_matrices(row + piece * 16, pack2<bf16>(of[0], of[1]), pack2<bf16>(of[2], of[3]),
                       pack2<bf16>(of[4], of[5]), pack2<bf16>(of[6], of[7]));
      }
    } else {
      // 8 bytes a thread, 32 a row: rows 2i and 2i + 1 would meet in the same banks, so that odd rows go another way
      // round.
      const int row = lane_ / 4;
      const bool odd = row % 2 != 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int other = i ^ 2;
        const int piece = (2 * (odd ? other : i) + lane_ % 4 / 2) ^ row;
        const std::uint32_t to = box + row * 128 + piece * 16 + lane_ % 2 * 8;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* mine = &d[kPart * 16 + i * 4 + half * 2];
          const float* turned = &d[kPart * 16 + other * 4 + half * 2];
          asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to + half * 8 * 128), "f"(odd ? turned[0] : mine[0]),
                       "f"(odd ? turned[1] : mine[1])
                       : "memory");
        }
      }
    }
  }

  unsigned char (*boxes_)[kBoxBytes];
  const CUtensorMap& map_;
  int barrier_;
  int lane_;
};

/// Applies the epilogue to parts kPart, kPart + 1, … and writes each.
template <int kPart, class Epilogue>
__device__ inline void write_parts(float (&d)[kAccumulators], Epilogue& epilogue, Writer<Epilogue>& writer, int row,
                                   int column) {
  constexpr int kParts = kTileN / Writer<Epilogue>::kColumns;
  if constexpr (kPart < kParts) {
    constexpr int kEights = Writer<Epilogue>::kColumns / 8;
#pragma unroll
    for (int j = kPart * kEights; j < (kPart + 1) * kEights; j += 2) epilogue.apply(&d[4 * j], j);
    epilogue.template end_part<kPart>(d);
    if constexpr (Epilogue::kWrite != Write::kNone) writer.template write<kPart>(d, row, column);
    write_parts<kPart + 1>(d, epilogue, writer, row, column);
  }
}

/// A group that multiplies, and writes its 64 rows of each tile.
template <class G>
__device__ inline void multiply_tiles(Shared& shared, const CUtensorMap& map_out, const TileGrid& grid,
                                      const typename G::Epilogue::Args& args) {
  const int group = static_cast<int>(threadIdx.x) / kGroup - 1;
  const int thread = static_cast<int>(threadIdx.x) % kGroup;
  const int lane = thread % kWaveSize;
  const int rank = rank_in_cluster();
  Writer<typename G::Epilogue> writer(shared, map_out, group, thread);
  Cursor at;
  // Every wave tells both blocks that it has read a stage: each of their producers writes into both.
  const auto release = [&](int stage) {
    if (lane < kBlocks) arrive_at(&shared.empty[stage], lane);
  };
  float d[kAccumulators];
  for (int t = blockIdx.x / kBlocks; t < grid.pairs_m * grid.tiles_n; t += gridDim.x / kBlocks) {
    int previous = 0;
    for (int k = 0; k < grid.steps_k; ++k) {
      wait(&shared.full[at.stage], at.parity);
      const std::uint64_t a = operand<G::kA>(shared.a[at.stage] + group * (kHalfBytes / 2));
      const std::uint64_t b = operand<G::kB>(shared.b[at.stage]);
      begin_products();
#pragma unroll
      for (int i = 0; i < kTileK / 16; ++i) {
        multiply<G::kA, G::kB>(d, a + i * kStep16<G::kA>, b + i * kStep16<G::kB>, k + i > 0);
      }
      commit_products();
      wait_products<1>();  // the step before has been read; this one keeps the tensor cores busy
      if (k > 0) release(previous);
      previous = at.stage;
      at.advance();
    }
    // All this while the last products run.
    const Place place = place_of<G::kRowsAreFaster>(grid, t);
    const int row = (place.pair_m * kBlocks + rank) * kTileM + group * 64 + thread / kWaveSize * kBoxRows;
    const int column = place.tile_n * kTileN;
    typename G::Epilogue epilogue(args, {row + lane / 4, column + lane % 4 * 2, place.tile_n, thread,
                                         kGroupBarriers + group, shared.scratch[group]});
    wait_products<0>();
    settle(d);
    release(previous);
    epilogue.prepare(d);
    write_parts<0>(d, epilogue, writer, row, column);
    epilogue.finish();
  }
  if constexpr (G::Epilogue::kWrite != Write::kNone) writer.finish();
}

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define FUSEDCE_CLUSTER  // older architectures have none
#else
#define FUSEDCE_CLUSTER __cluster_dims__(kBlocks, 1, 1)
#endif

template <class G>
__global__ void FUSEDCE_CLUSTER __launch_bounds__(kThreads, 1)
    gemm_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                const __grid_constant__ CUtensorMap map_out, const TileGrid grid,
                const typename G::Epilogue::Args args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    prefetch_map(map_a);
    prefetch_map(map_b);
    if (G::Epilogue::kWrite != Write::kNone) prefetch_map(map_out);
    for (int stage = 0; stage < kStages; ++stage) {
      init_barrier(&shared.full[stage], 1);
      init_barrier(&shared.empty[stage], kBlocks * 2 * kGroup / kWaveSize);
    }
    fence_barrier_init();
  }
  sync_cluster();
  if (threadIdx.x < kGroup) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x == 0) produce<G>(shared, map_a, map_b, map_out, grid);
  } else {
    take_registers<kMultiplierRegisters>();
    multiply_tiles<G>(shared, map_out, grid, args);
  }
  sync_cluster();  // the other block may still copy into this one's memory, or arrive at its barriers
#else
  __trap();  // launched on a GPU for which there is no machine code here
#endif
}

/// Starts out = f(A·B) on `stream`. a: (m, k) rows, or (k, m) where M is contiguous; b: (n, k), or (k, n); out: (m, n),
/// not looked at where the epilogue writes none. nullptr, or what is wrong.
template <class G>
const char* launch_gemm(const Matrix& a, const Matrix& b, const Matrix& out, const typename G::Epilogue::Args& args,
                        void* stream) {
  constexpr bool kAlongA = G::kA == Major::kK;
  constexpr bool kAlongB = G::kB == Major::kK;
  const std::int64_t m = kAlongA ? a.rows : a.columns;
  const std::int64_t n = kAlongB ? b.rows : b.columns;
  const std::int64_t k = kAlongA ? a.columns : a.rows;
  if ((kAlongB ? b.columns : b.rows) != k) return "the operands differ in K";
  CUtensorMap map_a{}, map_b{}, map_out{};
  const char* error = make_map<bf16>(&map_a, a, kAlongA ? 128 : kTileK);
  if (error == nullptr) error = make_map<bf16>(&map_b, b, kAlongB ? 128 : kTileK);
  if (error == nullptr && G::Epilogue::kWrite != Write::kNone) {
    if (out.rows != m || out.columns != n) return "the output's shape is not that of the product";
    error = make_map<typename G::Epilogue::Element>(&map_out, out, kBoxRows);
  }
  if (error != nullptr) return error;
  int device = 0, major = 0, minor = 0, multiprocessors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (major != 9 || minor != 0) return "these kernels are for compute capability 9.0";
  const auto over = [](std::int64_t size, int tile) { return static_cast<int>((size + tile - 1) / tile); };
  const TileGrid grid{over(m, kBlocks * kTileM), over(n, kTileN), over(k, kTileK)};
  const std::int64_t pairs = static_cast<std::int64_t>(grid.pairs_m) * grid.tiles_n;
  if (pairs >= std::int64_t{1} << 26) return "the output has 2^26 pairs of tiles or more";
  const int clusters = pairs < multiprocessors / kBlocks ? static_cast<int>(pairs) : multiprocessors / kBlocks;
  const auto kernel = gemm_kernel<G>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(sizeof(Shared)));
  kernel<<<clusters * kBlocks, kThreads, sizeof(Shared), static_cast<gpuStream>(stream)>>>(map_a, map_b, map_out, grid,
                                                                                           args);
  return last_error();
}

}  // namespace hopper
}  // namespace fusedce
