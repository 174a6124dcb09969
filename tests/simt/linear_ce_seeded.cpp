// The row kernels of the seeded exponentials as host functions with plain C names, for tests/simt/host_seeded.py.
#include "linear_ce_seeded.cu"

using namespace fusedce;

extern "C" const char* target_logits(const SeededChunk* chunk, const SeededRows* rows) {
  return launch_target_logits(*chunk, *rows, nullptr);
}

extern "C" const char* seeded_statistics(const SeededChunk* chunk, const SeededRows* rows, const float* partial,
                                         int num_tiles, const Exponentials* exponentials) {
  return launch_seeded_statistics(*chunk, *rows, partial, num_tiles, *exponentials, nullptr);
}

extern "C" const char* seeded_scale(const SeededChunk* chunk, const SeededRows* rows, const SeededUpstream* upstream,
                                    const Exponentials* exponentials) {
  return launch_seeded_scale(*chunk, *rows, *upstream, *exponentials, nullptr);
}

extern "C" const char* scaled(const void* in, const float* scale, void* out, std::int64_t count) {
  return launch_scaled(in, scale, out, count, nullptr);
}
