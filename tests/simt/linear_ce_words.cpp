// The kernels of single words as host functions with plain C names, for tests/simt/host_words.py.
#include "linear_ce_words.cu"

using namespace fusedce;

extern "C" const char* argmax_rows(const WordRows* rows, std::int64_t* words) {
  return launch_argmax_rows(*rows, words, nullptr);
}

extern "C" const char* selected_logits(const WordRows* rows, const Slots* slots, float* raw) {
  return launch_selected_logits(*rows, *slots, raw, nullptr);
}

extern "C" const char* selected_gradient(const WordRows* rows, const Slots* slots, const SlotGradients* gradients,
                                         void* d_logits, int dtype, std::int64_t out_stride) {
  return launch_selected_gradient(*rows, *slots, *gradients, d_logits, static_cast<Dtype>(dtype), out_stride, nullptr);
}
