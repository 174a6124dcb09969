// Tensor maps for Hopper's copy engine (TMA): a matrix's address, sizes and strides, and the box that one copy moves.
#pragma once

#include <cuda.h>

#include "gpu.h"

namespace fusedce {
namespace hopper {

/// A matrix whose rows are dense and `stride` elements apart.
struct Matrix {
  const void* data;
  std::int64_t rows;
  std::int64_t columns;
  std::int64_t stride;
};

/// The driver's function that writes tensor maps, found through the runtime: nothing links with the driver's library.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static const auto found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result);
#endif
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? function : nullptr;
  }();
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
}

/// A map of `matrix` in boxes of 128 bytes × box_rows. nullptr, or what is wrong.
template <typename Element>
const char* make_map(CUtensorMap* map, const Matrix& matrix, int box_rows) {
  constexpr auto kType = sizeof(Element) == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  constexpr auto kSize = static_cast<std::int64_t>(sizeof(Element));
  constexpr std::int64_t kMost = std::int64_t{1} << 30;  // coordinates are int, and tiles reach past the end
  if (reinterpret_cast<std::uintptr_t>(matrix.data) % 16 != 0) return "a matrix starts at no multiple of 16 bytes";
  if (matrix.stride * kSize % 16 != 0) return "the rows of a matrix are not a multiple of 16 bytes apart";
  if (matrix.rows < 1 || matrix.columns < 1 || matrix.rows >= kMost || matrix.columns >= kMost) {
    return "a matrix has no rows or columns, or 2^30 or more";
  }
  if (matrix.stride < matrix.columns) return "the rows of a matrix overlap";
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return "the driver has no cuTensorMapEncodeTiled";
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(matrix.columns), static_cast<cuuint64_t>(matrix.rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(matrix.stride * kSize)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(128 / kSize), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult result =
      encode(map, kType, 2, const_cast<void*>(matrix.data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? nullptr : "the driver refuses a matrix's tensor map";
}

}  // namespace hopper
}  // namespace fusedce
