// gpu_check: everything that can only be checked or timed on a GPU, without Python.
//
//   gpu_check [ops] [latent] [models] [drafts] [draws] [few] [wide] [many] [uploads] [bench] [prefill]
//             [decode] [experts] [model] [--layers N] [--experts TYPE] [--seed S] [--csv FILE]
//
// No part named: all of them. `--experts`: the type of a model's experts (q4_k, mxfp4, q8_0), else IQ2_XXS and Q2_K.
// Exit status 1 when a check failed.
#include <cstdlib>
#include <set>

#include "common.h"
#include "cuda/cuda.h"

int main(int argc, char** argv) {
  using namespace ds4;
  using namespace ds4::gpu;
  std::set<std::string> parts;
  int64_t layers = 43;
  DType gate_up = DType::IQ2_XXS, down = DType::Q2_K;
  uint64_t seed = static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count()) % 1000000;
  std::string csv_path = "gpu_check.csv";
  for (int i = 1; i < argc; ++i) {
    const std::string a = argv[i];
    const bool value = i + 1 < argc;
    if (a == "--layers" && value)
      layers = std::atoll(argv[++i]);
    else if (a == "--seed" && value)
      seed = static_cast<uint64_t>(std::atoll(argv[++i]));
    else if (a == "--experts" && value) {
      const std::string type = argv[++i];
      gate_up = down = type == "q4_k" ? DType::Q4_K : type == "mxfp4" ? DType::MXFP4 : DType::Q8_0;
    } else if (a == "--csv" && value)
      csv_path = argv[++i];
    else
      parts.insert(a);
  }
  const auto wanted = [&](const char* part) { return parts.empty() || parts.contains(part); };
  std::string why;
  const auto devices = cuda_devices(why);
  if (devices.empty()) {
    std::printf("no CUDA device: %s\n", why.c_str());
    return 2;
  }
  std::printf("device %s, %.1f GB; seed %llu\n", devices[0].name.c_str(),
              static_cast<double>(devices[0].memory_bytes) / 1e9, static_cast<unsigned long long>(seed));
  Results results;
  std::FILE* csv = std::fopen(csv_path.c_str(), "w");
  if (!csv) {
    std::printf("cannot write %s\n", csv_path.c_str());
    return 2;
  }
  std::fprintf(csv, "name,T,us,bytes\n");
  const auto part = [&](const char* name, const auto& body) {
    if (!wanted(name)) return;
    const auto start = std::chrono::steady_clock::now();
    const Results before = results;
    try {
      body();
    } catch (const std::exception& e) {
      results.expect(false, std::string(name) + " stopped: " + e.what());
    }
    std::printf("== %s: %d checks, %d failed, %.1f s\n", name, results.checks - before.checks,
                results.failed - before.failed,
                std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    std::fflush(stdout);
  };
  const auto ops = make_cuda_ops({});
  part("ops", [&] { check_ops(*ops, results, seed); });
  part("latent", [&] { check_latent(*ops, results, seed); });
  part("models", [&] { check_models(*ops, results, seed); });
  part("drafts", [&] { check_drafts(*ops, results, seed); });
  part("few", [&] { check_few(*ops, results, seed); });
  part("wide", [&] { check_wide(*ops, results, seed); });
  part("many", [&] { check_many(*ops, results, seed); });
  part("draws", [&] { check_draws(*ops, results, seed); });
  part("uploads", [&] { check_uploads(*ops, results, seed), bench_uploads(*ops, csv); });
  part("bench", [&] { bench_ops(*make_cuda_ops({.device = 0, .synthetic_weights = true}), csv); });
  part("prefill", [&] { bench_prefill(csv, layers); });
  part("experts", [&] { bench_experts(*make_cuda_ops({.device = 0, .synthetic_weights = true}), csv); });
  part("decode", [&] { bench_decode(*make_cuda_ops({.device = 0, .synthetic_weights = true}), csv); });
  part("model", [&] { bench_model(csv, layers, gate_up, down); });
  std::fclose(csv);
  std::printf("%d checks, %d failed\n", results.checks, results.failed);
  return results.failed ? 1 : 0;
}
