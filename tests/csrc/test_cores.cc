// Which cores a rank gets, on machines that are not at hand.
#include <doctest/doctest.h>

#include <stdlib.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>

#include "cores.h"

using namespace zg;

namespace {

// `nodes` memory nodes of `cores` cores with `threads` hardware threads each, numbered as Linux does on x86.
std::vector<Cpu> machine(int nodes, int cores, int threads) {
  std::vector<Cpu> cpus;
  for (int thread = 0; thread < threads; ++thread)
    for (int core = 0; core < nodes * cores; ++core)
      cpus.push_back({thread * nodes * cores + core, core, core / cores});
  return cpus;
}

std::set<int> nodes_of(const Slice& slice, const std::vector<Cpu>& cpus) {
  std::set<int> nodes;
  for (const Cpu& cpu : cpus)
    for (const int id : slice.cpus)
      if (cpu.id == id) nodes.insert(cpu.node);
  return nodes;
}

}  // namespace

TEST_CASE("lists of processors") {
  CHECK(parse_cpu_list("0-3,8,10-11\n") == std::vector<int>{0, 1, 2, 3, 8, 10, 11});
  CHECK(parse_cpu_list("5") == std::vector<int>{5});
  CHECK(parse_cpu_list("").empty());
}

TEST_CASE("shares are disjoint, equal, and on one node where one has room") {
  for (const int nodes : {1, 2, 4})
    for (const int threads : {1, 2})
      for (const std::size_t ranks : {1, 2, 3, 4, 5, 7, 8}) {
        const std::vector<Cpu> cpus = machine(nodes, 6, threads);
        const std::size_t share = static_cast<std::size_t>(nodes) * 6 / ranks;
        if (share == 0) continue;
        std::set<int> seen;
        std::size_t spread = 0;
        for (std::size_t rank = 0; rank < ranks; ++rank) {
          const Slice slice = slice_cpus(cpus, rank, ranks);
          CHECK(slice.cores == share);
          CHECK(slice.cpus.size() == share * static_cast<std::size_t>(threads));
          for (const int cpu : slice.cpus) CHECK(seen.insert(cpu).second);
          spread += nodes_of(slice, cpus).size() > 1;
        }
        const std::size_t roomy = static_cast<std::size_t>(nodes) * (6 / share);
        CHECK(spread == (ranks > roomy ? ranks - roomy : 0));
      }
}

TEST_CASE("more ranks than cores share them in turn") {
  const std::vector<Cpu> cpus = machine(1, 2, 1);
  CHECK(slice_cpus(cpus, 0, 5).cpus == std::vector<int>{0});
  CHECK(slice_cpus(cpus, 1, 5).cpus == std::vector<int>{1});
  CHECK(slice_cpus(cpus, 4, 5).cpus == std::vector<int>{0});
}

TEST_CASE("the time that control groups leave") {
  char folder[] = "/tmp/zerograph-test-XXXXXX";
  REQUIRE(mkdtemp(folder) != nullptr);
  const std::filesystem::path root = folder;
  const auto put = [&](const char* file, const char* text) {
    std::filesystem::create_directories((root / file).parent_path());
    std::ofstream(root / file) << text << "\n";
  };
  const auto quota = [&] { return cpu_quota((root / "self").string(), folder); };
  CHECK(std::isinf(quota()));
  put("self", "0::/a/b");
  CHECK(std::isinf(quota()));
  put("cpu.max", "max 100000");
  CHECK(std::isinf(quota()));
  put("a/cpu.max", "250000 100000");
  CHECK(quota() == 2.5);
  put("a/b/cpu.max", "400000 100000");
  CHECK(quota() == 2.5);  // the group above is the narrower one
  put("a/b/cpu.max", "50000 100000");
  CHECK(quota() == 0.5);
  put("self", "3:cpuset:/\n2:cpu,cpuacct:/elsewhere/on/the/host\n0::/");
  put("cpu/cpu.cfs_period_us", "100000");
  put("cpu/cpu.cfs_quota_us", "-1");
  CHECK(std::isinf(quota()));
  put("cpu/cpu.cfs_quota_us", "150000");
  CHECK(quota() == 1.5);
  std::filesystem::remove_all(root);
}

TEST_CASE("this machine") {
  const std::vector<int> allowed = allowed_cpus();
  REQUIRE(!allowed.empty());
  const std::vector<Cpu> cpus = describe_cpus(allowed, "/sys/devices/system");
  CHECK(cpus.size() == allowed.size());
  CHECK(slice_cpus(cpus, 0, 1).cpus == allowed);
  CHECK(describe_cpus({3}, "/nowhere")[0].core == 3);
}
