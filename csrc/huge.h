// Private memory on 2 MiB pages where the kernel gives them: direct I/O into 4 KiB pages costs two thirds of the speed,
// as every page is pinned and described to the disk by itself.
#pragma once

#include <cstddef>

#include "memory.h"
#include "status.h"

namespace zg {

inline constexpr std::size_t kHugePage = std::size_t{2} << 20;

// At least `bytes`, starting at a multiple of 2 MiB; zero until written.
Status map_huge(std::size_t bytes, Mapping& out);

}  // namespace zg
