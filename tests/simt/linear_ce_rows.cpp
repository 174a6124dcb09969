// The row kernels of linear cross-entropy as host functions with plain C names, for tests/simt/test_linear_ce_rows.py.
#include "linear_ce_rows.cu"

extern "C" const char* logprob_rows(const fusedce::LogitRows* rows, const fusedce::RowStatistics* out) {
  return fusedce::launch_logprob_rows(*rows, *out, nullptr);
}

extern "C" const char* parts_rows(const fusedce::LogitRows* rows, float* parts) {
  return fusedce::launch_parts_rows(*rows, parts, nullptr);
}

extern "C" const char* d_logits_rows(const fusedce::LogitRows* rows, const fusedce::RowUpstream* upstream,
                                     void* d_logits, int dtype, std::int64_t out_stride) {
  return fusedce::launch_d_logits_rows(*rows, *upstream, d_logits, static_cast<fusedce::Dtype>(dtype), out_stride,
                                       nullptr);
}
