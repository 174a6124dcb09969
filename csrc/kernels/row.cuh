// How a block walks one row in 16-byte steps, wherever the row starts and ends.
#pragma once

#include "gpu.h"

namespace fusedce {

/// N neighbouring elements that one load or store moves.
template <typename T, int N>
struct alignas(N * sizeof(T)) Vec {
  T at[N];
};

constexpr int kVectorWidth = 4;  // fp32 words in 16 bytes
using Logits4 = Vec<float, kVectorWidth>;

template <typename T, int N>
__device__ inline bool is_aligned(const T* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % sizeof(Vec<T, N>) == 0;
}

/// A row cut into its unaligned head, its aligned vectors and a tail. Head and tail have at most 3 words each.
struct RowSplit {
  int head;  // the first vector starts at this column
  int num_vectors;
  int num_edges;  // words in head and tail together

  __device__ RowSplit(const float* row, int num_columns) {
    const int misaligned = static_cast<int>(reinterpret_cast<std::uintptr_t>(row) / sizeof(float) % kVectorWidth);
    const int to_boundary = misaligned ? kVectorWidth - misaligned : 0;
    head = to_boundary < num_columns ? to_boundary : num_columns;
    num_vectors = (num_columns - head) / kVectorWidth;
    num_edges = num_columns - num_vectors * kVectorWidth;
  }
  /// The column of the i-th word of head and tail.
  __device__ int edge_column(int i) const { return i < head ? i : i + num_vectors * kVectorWidth; }
  __device__ int vector_column(int v) const { return head + v * kVectorWidth; }
};

/// Four neighbouring words, by one load where `aligned`.
__device__ inline Logits4 load4(const float* from, bool aligned) {
  if (aligned) return *reinterpret_cast<const Logits4*>(from);
  Logits4 words;
#pragma unroll
  for (int j = 0; j < kVectorWidth; ++j) words.at[j] = from[j];
  return words;
}

/// Four neighbouring elements, rounded to T, by one store where kAligned.
template <typename T, bool kAligned>
__device__ inline void store4(T* to, const Logits4& values) {
  if constexpr (!kAligned) {
#pragma unroll
    for (int j = 0; j < kVectorWidth; ++j) to[j] = from_float<T>(values.at[j]);
  } else if constexpr (sizeof(T) == sizeof(float)) {
    *reinterpret_cast<Logits4*>(to) = values;
  } else {
    const std::uint64_t low = pack2<T>(values.at[0], values.at[1]);
    const std::uint64_t high = pack2<T>(values.at[2], values.at[3]);
    *reinterpret_cast<std::uint64_t*>(to) = low | high << 32;
  }
}

}  // namespace fusedce
