#include "cores.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <map>
#include <sstream>

namespace zg {

namespace {

std::string read_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

using Core = std::vector<int>;  // its hardware threads

constexpr double kUnlimited = std::numeric_limits<double>::infinity();

double ratio(double quota, double period) { return quota > 0 && period > 0 ? quota / period : kUnlimited; }

// Of one group, by version 2 ("50000 100000", "max 100000") or 1 of the interface; no such file: no limit.
double quota_of(const std::string& group) {
  std::istringstream both(read_line(group + "/cpu.max"));
  double quota = 0, period = 0;
  if (both >> quota >> period) return ratio(quota, period);
  std::istringstream first(read_line(group + "/cpu.cfs_quota_us")), second(read_line(group + "/cpu.cfs_period_us"));
  return first >> quota && second >> period ? ratio(quota, period) : kUnlimited;
}

}  // namespace

std::vector<int> parse_cpu_list(const std::string& text) {
  std::vector<int> numbers;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    int first = 0, last = 0;
    const int found = std::sscanf(part.c_str(), "%d-%d", &first, &last);
    if (found < 1) continue;
    for (int i = first; i <= (found == 2 ? last : first); ++i) numbers.push_back(i);
  }
  return numbers;
}

std::vector<int> allowed_cpus() {
  // The mask may be wider than cpu_set_t on large machines.
  for (int size = CPU_SETSIZE;; size *= 2) {
    cpu_set_t* set = CPU_ALLOC(size);
    const std::size_t bytes = CPU_ALLOC_SIZE(size);
    CPU_ZERO_S(bytes, set);
    const bool read = sched_getaffinity(0, bytes, set) == 0;
    std::vector<int> cpus;
    for (int i = 0; read && i < size; ++i)
      if (CPU_ISSET_S(i, bytes, set)) cpus.push_back(i);
    CPU_FREE(set);
    if (!cpus.empty()) return cpus;
    if (size > 1 << 20) return {0};
  }
}

std::vector<Cpu> describe_cpus(const std::vector<int>& allowed, const std::string& system) {
  std::map<int, int> nodes;
  for (const int node : parse_cpu_list(read_line(system + "/node/online")))
    for (const int cpu : parse_cpu_list(read_line(system + "/node/node" + std::to_string(node) + "/cpulist")))
      nodes[cpu] = node;
  std::vector<Cpu> cpus;
  for (const int id : allowed) {
    const std::string topology = system + "/cpu/cpu" + std::to_string(id) + "/topology/thread_siblings_list";
    const std::vector<int> siblings = parse_cpu_list(read_line(topology));
    const auto node = nodes.find(id);
    cpus.push_back({id, siblings.empty() ? id : siblings.front(), node == nodes.end() ? 0 : node->second});
  }
  return cpus;
}

double cpu_quota(const std::string& groups, const std::string& mount) {
  double least = kUnlimited;
  std::ifstream file(groups);
  for (std::string line; std::getline(file, line);) {  // id:controllers:path, no controllers in version 2
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool unified = controllers == ",,";
    if (!unified && controllers.find(",cpu,") == std::string::npos) continue;
    const std::string top = unified ? mount : mount + "/cpu";
    // Every group above limits as well. A container may see its own group at the top, and not under its full path.
    for (std::string path = line.substr(second + 1);; path.erase(path.find_last_of('/'))) {
      least = std::min(least, quota_of(top + path));
      if (path.find('/') == std::string::npos) break;
    }
  }
  return least;
}

Slice slice_cpus(std::vector<Cpu> cpus, std::size_t rank, std::size_t ranks) {
  std::map<int, std::map<int, Core>> nodes;
  std::size_t total = 0;
  for (const Cpu& cpu : cpus) {
    Core& core = nodes[cpu.node][cpu.core];
    if (core.empty()) ++total;
    core.push_back(cpu.id);
  }
  std::map<int, std::vector<Core>> free;
  for (const auto& [node, cores] : nodes)
    for (const auto& [first, core] : cores) free[node].push_back(core);

  Slice slice;
  const std::size_t share = std::max<std::size_t>(1, total / ranks);
  const auto take = [&](std::vector<Core>& from, std::size_t count, Slice& to) {
    for (std::size_t i = 0; i < count; ++i) to.cpus.insert(to.cpus.end(), from[i].begin(), from[i].end());
    from.erase(from.begin(), from.begin() + static_cast<std::ptrdiff_t>(count));
    to.cores += count;
  };
  // More ranks than cores: they share them in turn.
  for (std::size_t r = 0; r <= rank % total; ++r) {
    slice = {};
    const auto roomy =
        std::find_if(free.begin(), free.end(), [&](const auto& entry) { return entry.second.size() >= share; });
    if (roomy != free.end()) {
      take(roomy->second, share, slice);
      continue;
    }
    while (slice.cores < share) {
      const auto most = std::max_element(free.begin(), free.end(), [](const auto& a, const auto& b) {
        return a.second.size() < b.second.size();
      });
      take(most->second, std::min(share - slice.cores, most->second.size()), slice);
    }
  }
  std::sort(slice.cpus.begin(), slice.cpus.end());
  return slice;
}

}  // namespace zg
