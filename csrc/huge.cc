#include "huge.h"

#include <errno.h>
#include <sys/mman.h>

#include <cstdint>
#include <string>

namespace zg {

Status map_huge(std::size_t bytes, Mapping& out) {
  const std::size_t size = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  void* area = mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (area == MAP_FAILED)
    return fail(Code::system, "cannot map " + std::to_string(size) + " bytes for I/O", errno);
  // Mappings start at any 4 KiB page: one huge page more, of which the ends that do not fit are given back.
  auto* const begin = static_cast<std::byte*>(area);
  const std::size_t lead = (kHugePage - reinterpret_cast<std::uintptr_t>(area) % kHugePage) % kHugePage;
  if (lead != 0) munmap(begin, lead);
  if (lead != kHugePage) munmap(begin + lead + size, kHugePage - lead);
  madvise(begin + lead, size, MADV_HUGEPAGE);  // a wish; without it everything works, slower
  out = Mapping(begin + lead, size);
  return {};
}

}  // namespace zg
