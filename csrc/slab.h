// A file that offloaded tensors live in: reserved at once, private, and gone when its last descriptor is closed.
//
// It has no name where the file system can do that (O_TMPFILE), else its name is removed while it is open, and only
// where even that is refused it is removed at the end. What a killed process may have left in the last two cases is
// removed by the next one that makes a slab in the folder: a slab's maker holds a lock on it (flock) for as long as it
// lives, so a file whose lock can be had belongs to nobody. The lock has a descriptor of its own: that of transfers stays
// open in the kernel until the last one has ended, which may be after the process has.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "memory.h"
#include "status.h"

namespace zg {

enum class Naming : std::uint8_t { automatic, unlinked, named };  // the last two for tests: as if not possible otherwise

class Slab {
 public:
  // Fails with ENOSPC before anything is written where the folder has no room, and where it cannot be opened (folder.h).
  static Status create(const std::string& folder, std::uint64_t bytes, bool direct, Naming naming,
                       std::unique_ptr<Slab>& out);
  ~Slab();

  int fd() const { return file_.get(); }
  const std::string& path() const { return path_; }  // for messages, as there may be no such name
  std::uint64_t bytes() const { return bytes_; }
  bool direct() const { return direct_; }
  const std::string& notes() const { return notes_; }  // why not the faster way, and what it costs; may be empty
  std::size_t memory_alignment() const { return memory_alignment_; }
  std::size_t offset_alignment() const { return offset_alignment_; }

  // Writes dirty pages of mappings to the file: before it is read past the page cache. Waits for the writing.
  Status flush(std::uint64_t offset, std::uint64_t bytes) const;
  // Forgets cached pages of no mapping: after it was written past the page cache.
  Status drop(std::uint64_t offset, std::uint64_t bytes) const;

  // Removes slabs in `folder` whose makers are gone; how many.
  static Status remove_leftovers(const std::string& folder, std::uint32_t& removed);

 private:
  Slab() = default;
  Status open_file(const std::string& folder, bool direct, Naming naming);
  Status open_named(const std::string& folder, int flags, Naming naming);
  Status reserve(const std::string& folder, std::uint64_t bytes);
  Status find_alignment();

  FileDescriptor folder_, file_, lock_;
  pid_t pid_ = 0;
  std::string path_, name_;  // name_: only while it has one
  std::string notes_;
  std::uint64_t bytes_ = 0;
  bool direct_ = false;
  std::size_t memory_alignment_ = 1, offset_alignment_ = 1;
};

// Parts of files, one behind the other in memory; page-aligned, all but the last in size too.
struct FilePart {
  int fd;
  std::uint64_t offset, bytes;
};
Status map_files(const std::vector<FilePart>& parts, Mapping& out);
// The pages of the mapping are read from the file again when they are next used.
Status drop_pages(const Mapping& map, std::uint64_t offset, std::uint64_t bytes);
// Whether any of the pages is in the system's cache, as each one is that somebody read or wrote through the mapping.
Status any_resident(const Mapping& map, std::uint64_t offset, std::uint64_t bytes, bool& out);

}  // namespace zg
