// Which cores the threads of this process should run on.
#pragma once

#include <string>
#include <vector>

namespace zg {

struct Cpu {
  int id;    // the kernel's number
  int core;  // the least number among its hardware threads: those of one core share it
  int node;  // of memory
};

// Where the cores of this rank are: a share of `cpus` for each of `ranks` processes on this machine.
struct Slice {
  std::vector<int> cpus;
  std::size_t cores = 0;  // physical ones
};

// The numbers in a list of the kernel's: "0-3,8".
std::vector<int> parse_cpu_list(const std::string& text);

// What is known of the processors in `allowed`. `system` is /sys/devices/system, and another folder in tests.
std::vector<Cpu> describe_cpus(const std::vector<int>& allowed, const std::string& system);

// The processors this process may use.
std::vector<int> allowed_cpus();

// How many cores' time the control groups of this process leave it (a container's --cpus); infinity without a limit.
// `groups` is /proc/self/cgroup, `mount` /sys/fs/cgroup, and others in tests.
double cpu_quota(const std::string& groups, const std::string& mount);

// The ranks of this machine that run on the very processors of this one, itself among them.
struct Sharers {
  std::size_t place;  // of this rank among them
  std::size_t ranks;
};

// Of the `ranks` processes that a launcher started on this machine, this one being number `rank`. A launcher that binds
// each to processors of its own, or to those of a memory node, has divided them already. Masks are read from `proc`
// (/proc, and others in tests), so that no rank waits for another. A rank that cannot be seen there counts as a sharer.
Sharers find_sharers(std::size_t rank, std::size_t ranks, const std::string& proc);

// The share of rank `rank`: as many whole cores for each, disjoint where there are enough, and on one memory node
// where one has room. Every rank computes the shares of all and so they agree.
Slice slice_cpus(std::vector<Cpu> cpus, std::size_t rank, std::size_t ranks);

}  // namespace zg
