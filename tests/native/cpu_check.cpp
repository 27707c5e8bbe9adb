// cpu_check: the CPU backend's operations and models against the reference, without Python, so that it runs under an
// emulator of another architecture.
//
//   cpu_check [ops] [latent] [models] [drafts] [lanes] [--isa NAME] [--threads N] [--seed S]
//
// No part named: all of them. Exit status 1 when a check failed.
#include <cstdlib>
#include <set>

#include "check_lanes.h"
#include "common.h"
#include "cpu/cpu.h"

int main(int argc, char** argv) {
  using namespace ds4;
  using namespace ds4::gpu;
  std::set<std::string> parts;
  std::string isa = "auto";
  int threads = 2;
  uint64_t seed = static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count()) % 1000000;
  for (int i = 1; i < argc; ++i) {
    const std::string a = argv[i];
    const bool value = i + 1 < argc;
    if (a == "--isa" && value)
      isa = argv[++i];
    else if (a == "--threads" && value)
      threads = std::atoi(argv[++i]);
    else if (a == "--seed" && value)
      seed = static_cast<uint64_t>(std::atoll(argv[++i]));
    else
      parts.insert(a);
  }
  const auto ops = make_cpu_ops(threads, isa);
  std::printf("%s; seed %llu\n", ops->name().c_str(), static_cast<unsigned long long>(seed));
  Results results;
  const auto part = [&](const char* name, const auto& body) {
    if (!parts.empty() && !parts.contains(name)) return;
    const int checks = results.checks, failed = results.failed;
    try {
      body();
    } catch (const std::exception& e) {
      results.expect(false, std::string(name) + " stopped: " + e.what());
    }
    std::printf("== %s: %d checks, %d failed\n", name, results.checks - checks, results.failed - failed);
    std::fflush(stdout);
  };
  const Traits traits{.rounds_to_bf16 = true, .f16_attention_only = true};
  part("ops", [&] { check_ops(*ops, results, seed, traits); });
  part("latent", [&] { check_latent(*ops, results, seed, traits); });
  part("models", [&] { check_models(*ops, results, seed); });
  part("drafts", [&] { check_drafts(*ops, results, seed); });
  part("lanes", [&] { check_lanes(*ops, results, seed); });
  return results.failed ? 1 : 0;
}
