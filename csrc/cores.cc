#include "cores.h"

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <map>

#include "memory.h"

namespace zg {

namespace {

// What a file holds; nothing where it cannot be read. Not a stream: their locales are shared with whatever other libstdc++
// the process has (torch's), which crashed where ours was linked statically (CMakeLists.txt).
std::string read_file(const std::string& path) {
  std::string text;
  const FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  char block[4096];
  for (ssize_t got; (got = read(file.get(), block, sizeof block)) > 0 || (got < 0 && errno == EINTR);)
    if (got > 0) text.append(block, static_cast<std::size_t>(got));
  return text;
}

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(at, begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

using Core = std::vector<int>;  // its hardware threads

constexpr double kUnlimited = std::numeric_limits<double>::infinity();

double ratio(double quota, double period) { return quota > 0 && period > 0 ? quota / period : kUnlimited; }

// Of one group, by version 2 ("50000 100000", "max 100000") or 1 of the interface; no such file: no limit.
double quota_of(const std::string& group) {
  double quota = 0, period = 0;
  if (std::sscanf(read_file(group + "/cpu.max").c_str(), "%lf %lf", &quota, &period) == 2) return ratio(quota, period);
  const bool limited = std::sscanf(read_file(group + "/cpu.cfs_quota_us").c_str(), "%lf", &quota) == 1 &&
                       std::sscanf(read_file(group + "/cpu.cfs_period_us").c_str(), "%lf", &period) == 1;
  return limited ? ratio(quota, period) : kUnlimited;
}

std::size_t number_of(const std::string& text, std::size_t otherwise) {
  std::size_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end ? value : otherwise;
}

using Environment = std::map<std::string, std::string>;

// What a process was started with.
Environment read_environment(const std::string& process) {
  Environment found;
  for (const std::string& entry : split(read_file(process + "/environ"), '\0'))
    if (const std::size_t sign = entry.find('='); sign != std::string::npos)
      found.emplace(entry.substr(0, sign), entry.substr(sign + 1));
  return found;
}

// The list of processors a process may use, as the kernel writes it; empty where that is unknown.
std::string read_mask(const std::string& process) {
  static const std::string key = "Cpus_allowed_list:";
  for (const std::string& line : split(read_file(process + "/status"), '\n'))
    if (line.compare(0, key.size(), key) == 0) return line.substr(std::min(line.size(), key.size() + 1));
  return {};
}

// How a launcher tells its processes their numbers on this machine, and what only processes of one start have in common.
struct Launcher {
  const char* rank;
  std::vector<const char*> start;
};

const std::vector<Launcher>& launchers() {
  static const std::vector<Launcher> known{
      {"LOCAL_RANK", {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}},  // torchrun
      {"SLURM_LOCALID", {"SLURM_JOB_ID", "SLURM_STEP_ID"}},                   // srun
      {"OMPI_COMM_WORLD_LOCAL_RANK", {"PMIX_NAMESPACE"}},                     // mpirun
  };
  return known;
}

std::string value_of(const Environment& environment, const char* name) {
  const auto found = environment.find(name);
  return found == environment.end() ? std::string() : found->second;
}

}  // namespace

Sharers find_sharers(std::size_t rank, std::size_t ranks, const std::string& proc) {
  const Environment own = read_environment(proc + "/self");
  const std::string mask = read_mask(proc + "/self");
  const auto launcher = std::find_if(launchers().begin(), launchers().end(), [&](const Launcher& l) {
    return number_of(value_of(own, l.rank), ranks) == rank;
  });
  if (launcher == launchers().end() || mask.empty()) return {rank, ranks};
  // A rank may be several processes, the wrapper that bound it or loaders of data: one with the mask will do.
  std::vector<bool> seen(ranks), shares(ranks);
  std::error_code error;
  for (std::filesystem::directory_iterator entry(proc, error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string(), process = entry->path().string();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    const Environment environment = read_environment(process);
    const std::size_t number = number_of(value_of(environment, launcher->rank), ranks);
    const bool ours = std::all_of(launcher->start.begin(), launcher->start.end(), [&](const char* variable) {
      return value_of(environment, variable) == value_of(own, variable);
    });
    const std::string its = number < ranks && ours ? read_mask(process) : std::string();
    if (its.empty()) continue;
    seen[number] = true;
    shares[number] = shares[number] || its == mask;
  }
  Sharers found{0, 0};
  for (std::size_t other = 0; other < ranks; ++other) {
    if (other == rank) found.place = found.ranks;
    if (other == rank || !seen[other] || shares[other]) ++found.ranks;
  }
  return found;
}

std::vector<int> parse_cpu_list(const std::string& text) {
  std::vector<int> numbers;
  for (const std::string& part : split(text, ',')) {
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
  for (const int node : parse_cpu_list(read_file(system + "/node/online")))
    for (const int cpu : parse_cpu_list(read_file(system + "/node/node" + std::to_string(node) + "/cpulist")))
      nodes[cpu] = node;
  std::vector<Cpu> cpus;
  for (const int id : allowed) {
    const std::string topology = system + "/cpu/cpu" + std::to_string(id) + "/topology/thread_siblings_list";
    const std::vector<int> siblings = parse_cpu_list(read_file(topology));
    const auto node = nodes.find(id);
    cpus.push_back({id, siblings.empty() ? id : siblings.front(), node == nodes.end() ? 0 : node->second});
  }
  return cpus;
}

double cpu_quota(const std::string& groups, const std::string& mount) {
  double least = kUnlimited;
  for (const std::string& line : split(read_file(groups), '\n')) {  // id:controllers:path, no controllers in version 2
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
