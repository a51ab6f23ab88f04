// Which cores a rank gets, on machines that are not at hand.
#include <doctest/doctest.h>

#include <stdlib.h>

#include <algorithm>
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

namespace {

// A /proc with the ranks of one start.
class Processes {
 public:
  Processes() { REQUIRE(mkdtemp(folder_) != nullptr); }
  ~Processes() { std::filesystem::remove_all(folder_); }

  void add(const std::string& pid, const std::vector<std::string>& environment, const std::string& mask) {
    const std::filesystem::path process = std::filesystem::path(folder_) / pid;
    std::filesystem::create_directories(process);
    std::ofstream status(process / "status"), environ(process / "environ");
    status << "Name:\tpython\nCpus_allowed:\tff\nCpus_allowed_list:\t" << mask << "\nMems_allowed:\t1\n";
    for (const std::string& entry : environment) environ << entry << '\0';
  }
  // What torchrun starts.
  void add_rank(const std::string& pid, std::size_t rank, const std::string& mask, const std::string& port = "29500") {
    add(pid, {"HOME=/", "LOCAL_RANK=" + std::to_string(rank), "MASTER_PORT=" + port}, mask);
  }
  Sharers of(std::size_t rank, std::size_t ranks) { return find_sharers(rank, ranks, folder_); }

 private:
  char folder_[64] = "/tmp/zerograph-test-XXXXXX";
};

// The processors of rank `rank`, which its launcher bound to `masks[rank]` of `cpus`.
Slice slice_of(const std::vector<Cpu>& cpus, const std::vector<std::string>& masks, std::size_t rank) {
  Processes processes;
  for (std::size_t other = 0; other < masks.size(); ++other) {
    processes.add_rank(std::to_string(100 + other), other, masks[other]);
    if (other == rank) processes.add_rank("self", other, masks[other]);
  }
  const std::vector<int> mask = parse_cpu_list(masks[rank]);
  std::vector<Cpu> allowed;
  for (const Cpu& cpu : cpus)
    if (std::find(mask.begin(), mask.end(), cpu.id) != mask.end()) allowed.push_back(cpu);
  const Sharers sharers = processes.of(rank, masks.size());
  return slice_cpus(allowed, sharers.place, sharers.ranks);
}

}  // namespace

TEST_CASE("what a launcher has divided is not divided again") {
  const std::vector<Cpu> cpus = machine(2, 64, 1);
  std::vector<std::string> own, node, all(8, "0-127");
  for (int rank = 0; rank < 8; ++rank) {
    own.push_back(std::to_string(16 * rank) + "-" + std::to_string(16 * rank + 15));
    node.push_back(rank < 4 ? "0-63" : "64-127");
  }
  for (const auto& masks : {own, node, all}) {
    std::set<int> seen;
    for (std::size_t rank = 0; rank < 8; ++rank) {
      const Slice slice = slice_of(cpus, masks, rank);
      CHECK(slice.cores == 16);
      for (const int cpu : slice.cpus) CHECK(seen.insert(cpu).second);
    }
    CHECK(seen.size() == 128);
  }
  own[3] = own[2];  // two of eight on one share
  CHECK(slice_of(cpus, own, 2).cores == 8);
  CHECK(slice_of(cpus, own, 3).cpus.front() == 40);
  CHECK(slice_of(cpus, own, 4).cores == 16);
}

TEST_CASE("which processes are the other ranks") {
  const auto is = [](const Sharers& found, std::size_t place, std::size_t ranks) {
    return found.place == place && found.ranks == ranks;
  };
  Processes none;
  CHECK(is(none.of(2, 4), 2, 4));
  Processes some;
  some.add_rank("self", 2, "0-3");
  some.add_rank("12", 2, "0-3");
  CHECK(is(some.of(2, 4), 2, 4));  // the others cannot be seen
  some.add_rank("10", 0, "4-7");
  CHECK(is(some.of(2, 4), 1, 3));
  some.add_rank("11", 1, "0-3", "29501");  // another start's
  some.add_rank("9", 3, "8-11");
  CHECK(is(some.of(2, 4), 1, 2));
  some.add_rank("13", 1, "0-7");  // a wrapper, and the rank that it bound
  CHECK(is(some.of(2, 4), 0, 1));
  some.add_rank("14", 1, "0-3");
  CHECK(is(some.of(2, 4), 1, 2));
  CHECK(is(some.of(1, 4), 1, 4));  // LOCAL_RANK is not what this process was started with
  some.add_rank("15", 7, "0-3");  // no such rank
  some.add("16", {"LOCAL_RANK=0x0", "MASTER_PORT=29500"}, "0-3");
  CHECK(is(some.of(2, 4), 1, 2));
  Processes slurm;
  slurm.add("self", {"SLURM_LOCALID=1", "SLURM_JOB_ID=7", "SLURM_STEP_ID=0"}, "16-31");
  slurm.add("20", {"SLURM_LOCALID=0", "SLURM_JOB_ID=7", "SLURM_STEP_ID=0"}, "0-15");
  CHECK(is(slurm.of(1, 2), 0, 1));
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
