// Checks and times csrc/kernels/linear_ce_hopper.cu on a Hopper GPU, without torch:
//   nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a tests/native/hopper_gemm_main.cu
//        csrc/kernels/linear_ce_hopper.cu -o hopper_gemm_main && ./hopper_gemm_main
// The reference is the same formula in fp64 on the same bf16 numbers. One line a case; the exit status is the number of
// cases that failed. Paddings and outputs are NaN beforehand.
#include <algorithm>
#include <functional>
#include <string>

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
  Buffer<float> inv_temperature, seed, scale, bias, numbers;
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
        numbers(8 * s.rows),
        target(s.rows) {
    fill_rows<<<4096, 256>>>(hidden.data, s.rows, s.depth, s.depth, 1.0f, 1);
    fill_rows<<<4096, 256>>>(weight.data, s.vocab, s.depth, s.depth, 1.0f / std::sqrt(float(s.depth)), 2);
    fill_row_inputs<<<unsigned(s.rows / 256 + 1), 256>>>(inv_temperature.data, seed.data, target.data, scale.data,
                                                         s.rows, s.vocab);
    fill_numbers<<<unsigned(s.rows / 256 + 1), 256>>>(numbers.data, inv_temperature.data, seed.data, s.rows);
    fill_bias<<<unsigned(s.vocab / 256 + 1), 256>>>(bias.data, s.vocab);
    check(cudaDeviceSynchronize(), "inputs");
  }
  fusedce::Bf16Rows hidden_rows() const { return {hidden.data, s.rows, s.depth, s.depth}; }
  fusedce::Bf16Rows weight_rows() const { return {weight.data, s.vocab, s.depth, s.depth}; }
  fusedce::Bf16Rows exponential_rows() const { return {exponentials.data, s.rows, s.vocab, s.stride}; }
};

/// A case of the kernels whose products are logits: its options, the launch and what it is held against.
struct LogitCase {
  const char* name;
  bool bias, flag;  // flag: of the sums, also Σ e^g·g; of the gradient, also the entropy's
  float softcap;
};

std::string named(const LogitCase& of) {
  return std::string(of.name) + (of.flag ? " entropy" : "") + (of.bias ? " bias" : "") +
         (of.softcap > 0 ? " softcap" : "");
}

fusedce::LogitTerms terms_of(const Inputs& in, const LogitCase& of) {
  return {of.bias ? in.bias.data : nullptr, in.target.data, of.softcap};
}

/// Time, and whether two launches leave the same bits in both buffers.
template <typename A, typename B>
double timed_twice(const std::function<void()>& launch, const Buffer<A>& first, const Buffer<B>& second,
                   bool* repeats) {
  launch();
  check(cudaDeviceSynchronize(), "launch");
  const auto bits = bits_of(first) ^ bits_of(second);
  const double ms = timed(launch);
  *repeats = bits == (bits_of(first) ^ bits_of(second));
  return ms;
}

std::vector<RowFound> references(const Inputs& in, const Buffer<double>& products, i64 samples, const LogitCase& of,
                                 const float* numbers, const bf16* stored) {
  const Shape& s = in.s;
  Buffer<RowFound> found(samples);
  reference_row<<<unsigned(samples), 256>>>(products.data, s.rows / samples, terms_of(in, of),
                                            {in.inv_temperature.data, in.seed.data}, numbers, of.flag, stored, s.stride,
                                            int(s.vocab), found.data);
  return found.host();
}

i64 tiles_of(const Shape& s) { return (s.vocab + fusedce::hopper_vocab_tile() - 1) / fusedce::hopper_vocab_tile(); }

void sums_case(const Inputs& in, const Buffer<double>& products, i64 samples, const LogitCase& of) {
  const Shape& s = in.s;
  const i64 tiles = tiles_of(s), step = s.rows / samples;
  Buffer<float> maxima(tiles * s.rows), exps(tiles * s.rows), gaps(tiles * s.rows), raw_target(s.rows);
  bool repeats = false;
  const double ms = timed_twice(
      [&] {
        check(fusedce::launch_logit_sums(in.hidden_rows(), in.weight_rows(), terms_of(in, of), in.inv_temperature.data,
                                         {maxima.data, exps.data, of.flag ? gaps.data : nullptr, raw_target.data},
                                         nullptr));
      },
      maxima, exps, &repeats);
  const auto found = references(in, products, samples, of, nullptr, nullptr);
  const auto max = maxima.host(), exp = exps.host(), gap = gaps.host(), seed = in.seed.host(), raw = raw_target.host();
  const auto slope = in.inv_temperature.host();
  const auto target = in.target.host();
  double exp_error = 0, gap_error = 0;
  bool targets = true;
  for (i64 r = 0; r < samples; ++r) {
    const i64 row = r * step;
    double exp_sum = 0, gap_sum = 0;
    for (i64 t = 0; t < tiles; ++t) {
      const i64 at = t * s.rows + row;
      const double moved = (double(max[at]) - seed[row]) * slope[row];
      exp_sum += exp[at] * std::exp(moved);
      gap_sum += (gap[at] + exp[at] * moved) * std::exp(moved);
    }
    exp_error = std::max(exp_error, std::isnan(exp_sum) ? 1 : std::abs(exp_sum / found[r].exp - 1));
    if (of.flag)
      gap_error = std::max(gap_error, std::isnan(gap_sum) ? 1 : std::abs(gap_sum - found[r].gap) / found[r].exp);
    targets = targets && std::isnan(raw[row]) == (target[row] < 0);
  }
  char errors[128];
  std::snprintf(errors, sizeof errors, "sum %.1e gap %.1e%s%s", exp_error, gap_error, repeats ? "" : " NOT REPEATED",
                targets ? "" : " TARGETS");
  report(named(of).c_str(), s, ms, errors, exp_error < 1e-5 && gap_error < 3e-5 && repeats && targets);
}

void gradient_case(Inputs& in, const Buffer<double>& products, i64 samples, const LogitCase& of) {
  const Shape& s = in.s;
  Buffer<float> none(1);
  Buffer<double> unused(s.rows);
  Buffer<int> written(1);
  bool repeats = false;
  in.exponentials.poison();
  const double ms = timed_twice(
      [&] {
        check(fusedce::launch_logit_gradient(in.hidden_rows(), in.weight_rows(), terms_of(in, of), in.numbers.data,
                                             of.flag, in.exponential_rows(), nullptr));
      },
      in.exponentials, none, &repeats);
  check(cudaMemset(written.data, 0, 4), "cudaMemset");
  stored_sums<<<unsigned(s.rows), 256>>>(in.exponentials.data, s.stride, int(s.vocab), unused.data, written.data);
  double worst = 0;
  for (const RowFound& f : references(in, products, samples, of, in.numbers.data, in.exponentials.data)) {
    worst = std::max(worst, std::isnan(f.worst) ? 1 : f.worst);
  }
  char errors[128];
  std::snprintf(errors, sizeof errors, "%.1e%s%s", worst, repeats ? "" : " NOT REPEATED",
                written.host()[0] ? " PADDING WRITTEN" : "");
  report(named(of).c_str(), s, ms, errors, worst < 0.0045 && repeats && written.host()[0] == 0);
}

void seeded_case(Inputs& in, const Buffer<double>& products, i64 samples, const LogitCase& of) {
  const Shape& s = in.s;
  const i64 tiles = tiles_of(s), step = s.rows / samples;
  Buffer<float> sums(tiles * s.rows);
  Buffer<double> stored_of(s.rows);
  Buffer<int> written(1);
  bool repeats = false;
  in.exponentials.poison();
  const double ms = timed_twice(
      [&] {
        check(fusedce::launch_seeded_exponentials(in.hidden_rows(), in.weight_rows(), terms_of(in, of),
                                                  {in.inv_temperature.data, in.seed.data}, in.exponential_rows(),
                                                  sums.data, nullptr));
      },
      in.exponentials, sums, &repeats);
  check(cudaMemset(written.data, 0, 4), "cudaMemset");
  stored_sums<<<unsigned(s.rows), 256>>>(in.exponentials.data, s.stride, int(s.vocab), stored_of.data, written.data);
  const auto found = references(in, products, samples, of, nullptr, in.exponentials.data);
  const auto of_tiles = sums.host();
  const auto stored = stored_of.host();
  double worst = 0, exp_error = 0, stored_error = 0;
  for (i64 row = 0; row < s.rows; ++row) {
    double exp = 0;
    for (i64 t = 0; t < tiles; ++t) exp += of_tiles[t * s.rows + row];
    if (of.softcap == 0) {
      stored_error = std::max(stored_error, std::isnan(stored[row]) ? 1 : std::abs(stored[row] / exp - 1));
    }
    if (row % step != 0 || row / step >= samples) continue;
    const RowFound& f = found[row / step];
    worst = std::max(worst, std::isnan(f.worst) ? 1 : f.worst);
    exp_error = std::max(exp_error, std::isnan(exp) ? 1 : std::abs(exp / f.exp - 1));
  }
  char errors[160];
  std::snprintf(errors, sizeof errors, "E %.1e sum %.1e all rows %.1e%s%s", worst, exp_error, stored_error,
                repeats ? "" : " NOT REPEATED", written.host()[0] ? " PADDING WRITTEN" : "");
  // bf16 rounds by up to 2^-8 of a value; a row's sum averages that out.
  report(named(of).c_str(), s, ms, errors,
         worst < 0.0040 && exp_error < 1e-5 && stored_error < 5e-4 && repeats && written.host()[0] == 0);
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
  for (int options = 0; options < 8; ++options) {
    const bool bias = options & 1, cap = options & 2, flag = options & 4;
    if (!every_option && bias && cap) continue;
    const float softcap = cap ? (every_option ? 2.0f : 30.0f) : 0.0f;
    sums_case(in, products, samples, {"sums", bias, flag, softcap});
    gradient_case(in, products, samples, {"gradient", bias, flag, softcap});
    if (!flag) seeded_case(in, products, samples, {"seeded", bias, false, softcap});
  }
  seeded_case(in, products, samples, {"seeded", false, false, 0.0f});  // what the others read
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
