// Checks and times csrc/kernels/linear_ce_hopper.cu on a Hopper GPU, without torch:
//   nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a tests/native/hopper_gemm_main.cu
//        csrc/kernels/linear_ce_hopper.cu -o hopper_gemm_main && ./hopper_gemm_main
// The reference is the same formula in fp64 on the same bf16 numbers. One line a case; the exit status is the number of
// cases that failed. Paddings and outputs are NaN beforehand.
#include <algorithm>
#include <functional>

#include "hopper_gemm_reference.cuh"

namespace {

int failures = 0;

/// Milliseconds a launch: the median of five runs of five, so that the host's work hides behind the GPU's.
double timed(const std::function<void()>& launch) {
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  constexpr int kLaunches = 5;
  std::vector<float> times(5);
  for (int i = 0; i < 2; ++i) launch();
  for (float& time : times) {
    cudaEventRecord(begin);
    for (int i = 0; i < kLaunches; ++i) launch();
    cudaEventRecord(end);
    check(cudaEventSynchronize(end), "kernel");
    cudaEventElapsedTime(&time, begin, end);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2] / kLaunches;
}

struct Shape {
  i64 rows, depth, vocab, stride;  // stride: of the exponentials
};

void report(const char* name, const Shape& s, double ms, const char* errors, bool good) {
  failures += !good;
  std::printf("%-28s C=%-5lld D=%-5lld V=%-7lld %8.3f ms %6.1f TFLOP/s  %s %s\n", name, (long long)s.rows,
              (long long)s.depth, (long long)s.vocab, ms, 2e-9 * s.rows * s.depth * s.vocab / ms, errors,
              good ? "ok" : "WRONG");
  std::fflush(stdout);
}

double distance(const std::vector<double>& is, const std::vector<double>& should) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < is.size(); ++i) {
    difference += (is[i] - should[i]) * (is[i] - should[i]);
    norm += should[i] * should[i];
  }
  return std::sqrt(difference / norm);
}

struct Inputs {
  Shape s;
  Buffer<bf16> hidden, weight, exponentials;
  Buffer<float> inv_temperature, seed, scale, bias;
  Buffer<i64> target;
  explicit Inputs(const Shape& shape)
      : s(shape),
        hidden(s.rows * s.depth),
        weight(s.vocab * s.depth),
        exponentials(s.rows * s.stride),
        inv_temperature(s.rows),
        seed(s.rows),
        scale(s.rows),
        bias(s.vocab),
        target(s.rows) {
    fill_rows<<<4096, 256>>>(hidden.data, s.rows, s.depth, s.depth, 1.0f, 1);
    fill_rows<<<4096, 256>>>(weight.data, s.vocab, s.depth, s.depth, 1.0f / std::sqrt(float(s.depth)), 2);
    fill_row_inputs<<<unsigned(s.rows / 256 + 1), 256>>>(inv_temperature.data, seed.data, target.data, scale.data,
                                                         s.rows, s.vocab);
    fill_bias<<<unsigned(s.vocab / 256 + 1), 256>>>(bias.data, s.vocab);
    check(cudaDeviceSynchronize(), "inputs");
  }
  fusedce::Bf16Rows hidden_rows() const { return {hidden.data, s.rows, s.depth, s.depth}; }
  fusedce::Bf16Rows weight_rows() const { return {weight.data, s.vocab, s.depth, s.depth}; }
  fusedce::Bf16Rows exponential_rows() const { return {exponentials.data, s.rows, s.vocab, s.stride}; }
};

void seeded_case(Inputs& in, const Buffer<double>& products, i64 samples, bool bias, float softcap, bool store,
                 bool gaps) {
  const Shape& s = in.s;
  const i64 tiles = (s.vocab + fusedce::hopper_vocab_tile() - 1) / fusedce::hopper_vocab_tile();
  Buffer<float> exp_parts(tiles * s.rows), gap_parts(tiles * s.rows);
  const fusedce::LogitSeeds seeds{bias ? in.bias.data : nullptr, in.inv_temperature.data, in.seed.data, in.target.data,
                                  softcap};
  const fusedce::PartialSums sums{exp_parts.data, gaps ? gap_parts.data : nullptr};
  fusedce::Bf16Rows out = in.exponential_rows();
  if (!store) out.data = nullptr;
  const auto launch = [&] {
    check(fusedce::launch_seeded_exponentials(in.hidden_rows(), in.weight_rows(), seeds, out, sums, nullptr));
  };
  in.exponentials.poison();
  launch();
  check(cudaDeviceSynchronize(), "seeded exponentials");
  const auto bits = bits_of(in.exponentials) ^ bits_of(exp_parts);
  const double ms = timed(launch);
  const bool repeats = bits == (bits_of(in.exponentials) ^ bits_of(exp_parts));

  Buffer<RowFound> found_on_gpu(samples);
  Buffer<double> all_sums(s.rows);
  Buffer<int> written(1);
  check(cudaMemset(written.data, 0, 4), "cudaMemset");
  reference_row<<<unsigned(samples), 256>>>(products.data, s.rows / samples, seeds,
                                            store ? in.exponentials.data : nullptr, s.stride, int(s.vocab),
                                            found_on_gpu.data);
  if (store) {
    stored_sums<<<unsigned(s.rows), 256>>>(in.exponentials.data, s.stride, int(s.vocab), all_sums.data, written.data);
  }
  const auto found = found_on_gpu.host();
  const auto exps = exp_parts.host(), gap_host = gap_parts.host();
  const auto stored = all_sums.host();
  double worst = 0, exp_error = 0, gap_error = 0, stored_error = 0;
  for (i64 i = 0; i < s.rows; ++i) {
    double exp = 0, gap = 0;
    for (i64 t = 0; t < tiles; ++t) exp += exps[t * s.rows + i], gap += gap_host[t * s.rows + i];
    if (store && softcap == 0)
      stored_error = std::max(stored_error, std::isnan(stored[i]) ? 1 : std::abs(stored[i] / exp - 1));
    if (i % (s.rows / samples) != 0 || i / (s.rows / samples) >= samples) continue;
    const RowFound& f = found[i / (s.rows / samples)];
    if (store) worst = std::max(worst, std::isnan(f.worst) ? 1 : f.worst);
    exp_error = std::max(exp_error, std::isnan(exp) ? 1 : std::abs(exp / f.exp - 1));
    if (gaps) gap_error = std::max(gap_error, std::isnan(gap) ? 1 : std::abs(gap - f.gap) / f.exp);
  }
  char name[64], errors[160];
  std::snprintf(name, sizeof name, "seeded%s%s%s%s", store ? " store" : "", gaps ? " gaps" : "", bias ? " bias" : "",
                softcap > 0 ? " softcap" : "");
  std::snprintf(errors, sizeof errors, "E %.1e sum %.1e gap %.1e all rows %.1e%s%s", worst, exp_error, gap_error,
                stored_error, repeats ? "" : " NOT REPEATED", written.host()[0] ? " PADDING WRITTEN" : "");
  // bf16 rounds by up to 2^-8 of a value; a row's sum averages that out.
  report(name, s, ms, errors,
         worst < 0.0040 && exp_error < 1e-5 && gap_error < 3e-5 && stored_error < 5e-4 && repeats &&
             written.host()[0] == 0);
}

void d_hidden_case(const Inputs& in) {
  const Shape& s = in.s;
  const i64 samples = 16, step = s.rows / samples;
  Buffer<bf16> out(s.rows * s.depth);
  const auto launch = [&] {
    check(fusedce::launch_d_hidden(in.exponential_rows(), in.weight_rows(), in.scale.data,
                                   {out.data, s.rows, s.depth, s.depth}, nullptr));
  };
  const double ms = timed(launch);
  Buffer<double> products(samples * s.depth);
  reference({in.exponentials.data, s.stride, 1}, step, {in.weight.data, 1, s.depth}, products, samples, s.depth,
            s.vocab);
  auto should = products.host();
  const auto found = sampled(out, samples, s.depth, step);
  const auto scale = in.scale.host();
  const bool finite = all_finite(out);
  std::vector<double> is(should.size());
  for (i64 i = 0; i < samples * s.depth; ++i) {
    should[i] *= scale[i / s.depth * step];
    is[i] = __bfloat162float(found[i]);
  }
  const double error = distance(is, should);
  char errors[64];
  std::snprintf(errors, sizeof errors, "%.1e%s", error, finite ? "" : " NOT FINITE");
  report("d_hidden", s, ms, errors, error < 3e-3 && finite);
}

void d_weight_case(const Inputs& in) {
  const Shape& s = in.s;
  const i64 samples = 64, step = s.vocab / samples;
  Buffer<float> out(s.vocab * s.depth);
  const auto launch = [&](bool accumulate) {
    check(fusedce::launch_d_weight(in.exponential_rows(), in.hidden_rows(), out.data, accumulate, nullptr));
  };
  Buffer<double> products(samples * s.depth);
  reference({in.exponentials.data, 1, s.stride}, step, {in.hidden.data, 1, s.depth}, products, samples, s.depth,
            s.rows);
  const auto should = products.host();
  for (const bool accumulate : {false, true}) {
    const double ms = timed([&] { launch(accumulate); });
    if (accumulate) {
      launch(false);
      launch(true);
    }
    const bool finite = all_finite(out);
    const auto found = sampled(out, samples, s.depth, step);
    std::vector<double> is(found.begin(), found.end());
    for (double& value : is) value /= accumulate ? 2 : 1;
    const double error = distance(is, should);
    char errors[64];
    std::snprintf(errors, sizeof errors, "%.1e%s", error, finite ? "" : " NOT FINITE");
    report(accumulate ? "d_weight accumulate" : "d_weight", s, ms, errors, error < 1e-4 && finite);
  }
}

void run(const Shape& s, bool every_option) {
  Inputs in(s);
  const i64 samples = std::min<i64>(s.rows, every_option ? s.rows : 32);
  Buffer<double> products(samples * s.vocab);
  reference({in.hidden.data, s.depth, 1}, s.rows / samples, {in.weight.data, s.depth, 1}, products, samples, s.vocab,
            s.depth);
  for (int options = 0; options < 16; ++options) {
    const bool bias = options & 1, softcap = options & 2, gaps = options & 4, store = options & 8;
    if (!every_option && bias && softcap) continue;
    seeded_case(in, products, samples, bias, softcap ? (every_option ? 2.0f : 30.0f) : 0.0f, store, gaps);
  }
  seeded_case(in, products, samples, false, 0.0f, true, false);  // what the others read
  poison_padding<<<unsigned(s.rows), 256>>>(in.exponentials.data, s.stride, int(s.vocab));
  d_hidden_case(in);
  d_weight_case(in);
}

}  // namespace

/// Arguments: the rows of the large shapes, 2048 and 4096 unless given.
int main(int count, char** arguments) {
  run({1000, 264, 5003, 5016}, true);
  std::vector<i64> rows;
  for (int i = 1; i < count; ++i) rows.push_back(std::atoll(arguments[i]));
  if (rows.empty()) rows = {2048, 4096};
  for (const i64 n : rows) run({n, 2048, 124160, 124160}, false);
  return failures;
}
