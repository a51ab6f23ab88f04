#include "slab.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <thread>
#include <utility>

#include "folder.h"

namespace zg {

namespace {

constexpr std::uint64_t kPage = 4096;
constexpr const char* kPrefix = ".zerograph-";
constexpr const char* kSuffix = ".slab";
constexpr int kAttempts = 64;
constexpr auto kTransfersEnd = std::chrono::seconds(2);  // those in flight: a gigabyte on a slow disk

std::string number(std::uint64_t value) { return std::to_string(value); }

std::string gigabytes(std::uint64_t bytes) {
  const std::uint64_t tenths = bytes / 100'000'000;
  return number(tenths / 10) + "." + number(tenths % 10) + " GB (" + number(bytes) + " bytes)";
}

// A random name, so that nobody can be in its place beforehand.
Status make_name(std::string& out) {
  std::uint64_t bits = 0;
  if (getrandom(&bits, sizeof bits, 0) != sizeof bits) return failed("cannot get random bytes", errno, {});
  static constexpr char digits[] = "0123456789abcdef";
  out = kPrefix;
  for (int i = 0; i < 16; ++i) out += digits[bits >> (4 * i) & 15];
  out += kSuffix;
  return {};
}

bool is_slab_name(const std::string& name) {
  const std::string prefix = kPrefix, suffix = kSuffix;
  return name.size() == prefix.size() + 16 + suffix.size() && name.compare(0, prefix.size(), prefix) == 0 &&
         name.compare(name.size() - suffix.size(), suffix.size(), suffix) == 0;
}

// Whether a living process holds `name`; if not, it is removed.
bool remove_if_dead(int folder, const std::string& name) {
  const FileDescriptor file(openat(folder, name.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
  struct stat info;
  if (file.get() < 0 || fstat(file.get(), &info) != 0 || !S_ISREG(info.st_mode) || info.st_uid != geteuid()) return false;
  // A maker that has not come to locking its new file finds it locked, or gone, and takes another name.
  if (flock(file.get(), LOCK_EX | LOCK_NB) != 0) return false;
  return unlinkat(folder, name.c_str(), 0) == 0;
}

void remove_dead(int folder, std::uint32_t& removed) {
  const int copy = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR* list = copy < 0 ? nullptr : fdopendir(copy);
  if (list == nullptr) {
    if (copy >= 0) close(copy);
    return;
  }
  while (const dirent* entry = readdir(list))
    if (is_slab_name(entry->d_name) && remove_if_dead(folder, entry->d_name)) ++removed;
  closedir(list);
}

bool is_same(int fd, const struct stat& file) {
  struct stat info;
  return fstat(fd, &info) == 0 && info.st_dev == file.st_dev && info.st_ino == file.st_ino;
}

bool means_unsupported(int error) { return error == EOPNOTSUPP || error == EINVAL || error == EISDIR || error == ENOENT; }

// statx(2) with STATX_DIOALIGN, which older headers do not have; the layout is the kernel's own.
bool ask_alignment(int fd, std::uint32_t& memory, std::uint32_t& offset) {
  constexpr unsigned kDioAlign = 0x2000, kMemoryAt = 152, kOffsetAt = 156;
  unsigned char answer[256] = {};
  std::uint32_t mask = 0;
  if (syscall(SYS_statx, fd, "", 0x1000 /* AT_EMPTY_PATH */, kDioAlign, answer) != 0) return false;
  memcpy(&mask, answer, sizeof mask);
  memcpy(&memory, answer + kMemoryAt, sizeof memory);
  memcpy(&offset, answer + kOffsetAt, sizeof offset);
  return (mask & kDioAlign) != 0;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------
// Making and removing

Status Slab::create(const std::string& folder, std::uint64_t bytes, bool direct, Naming naming,
                    std::unique_ptr<Slab>& out) {
  std::unique_ptr<Slab> slab(new Slab);
  slab->pid_ = getpid();
  ZG_TRY(open_folder(folder, slab->folder_));
  std::uint32_t removed = 0;
  remove_dead(slab->folder_.get(), removed);
  ZG_TRY(slab->open_file(folder, direct, naming));
  ZG_TRY(slab->reserve(folder, (bytes + kPage - 1) / kPage * kPage));
  ZG_TRY(slab->find_alignment());
  out = std::move(slab);
  return {};
}

Slab::~Slab() {
  if (!name_.empty() && pid_ == getpid()) unlinkat(folder_.get(), name_.c_str(), 0);
}

Status Slab::remove_leftovers(const std::string& folder, std::uint32_t& removed) {
  FileDescriptor opened;
  ZG_TRY(open_folder(folder, opened));
  removed = 0;
  remove_dead(opened.get(), removed);
  return {};
}

Status Slab::open_file(const std::string& folder, bool direct, Naming naming) {
  for (const bool attempt : {true, false}) {
    if (attempt && !direct) continue;
    const int flags = O_RDWR | O_CLOEXEC | (attempt ? O_DIRECT : 0);
    if (naming == Naming::automatic) {
      file_ = FileDescriptor(openat(folder_.get(), ".", flags | O_TMPFILE | O_EXCL, 0600));
      path_ = folder + "/(unnamed slab)";
    }
    if (file_.get() < 0 && (naming != Naming::automatic || means_unsupported(errno)))
      ZG_TRY(open_named(folder, flags, naming));
    direct_ = attempt;
    if (file_.get() >= 0) return {};
    if (!attempt || !means_unsupported(errno)) break;
  }
  return failed("cannot make a file for offloaded tensors", errno, folder, "a folder that this user may write to");
}

// Leaves file_ unset, with errno, where the file cannot be opened with these flags.
Status Slab::open_named(const std::string& folder, int flags, Naming naming) {
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    std::string name;
    ZG_TRY(make_name(name));
    FileDescriptor lock(openat(folder_.get(), name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (lock.get() < 0 && errno == EEXIST) continue;
    if (lock.get() < 0) return {};
    struct stat info;
    if (flock(lock.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) continue;  // someone is removing it
    if (fstat(lock.get(), &info) != 0 || info.st_nlink == 0) continue;
    FileDescriptor file(openat(folder_.get(), name.c_str(), flags | O_NOFOLLOW));
    if (file.get() < 0) {  // a file system without O_DIRECT, say
      const int error = errno;
      unlinkat(folder_.get(), name.c_str(), 0);
      errno = error;
      return {};
    }
    if (!is_same(file.get(), info)) continue;  // somebody else has put another file in its place
    path_ = folder + "/" + name;
    if (naming == Naming::named || unlinkat(folder_.get(), name.c_str(), 0) != 0) {
      name_ = name;
      lock_ = std::move(lock);
    } else {
      path_ += " (unlinked)";
    }
    file_ = std::move(file);
    return {};
  }
  errno = EEXIST;
  return {};
}

Status Slab::reserve(const std::string& folder, std::uint64_t bytes) {
  const auto full = [&](std::uint64_t room) {
    return failed("no room for offloaded tensors: needed are " + gigabytes(bytes) + ", free are " + gigabytes(room),
                  ENOSPC, folder, "free some space, offload less, or give another folder, alone or besides");
  };
  struct statvfs info;
  const auto room = [&] {
    return fstatvfs(file_.get(), &info) == 0 ? std::uint64_t{info.f_bavail} * info.f_frsize : ~std::uint64_t{0};
  };
  // The kernel keeps the file of a run that was killed until the transfers that it had in flight have ended.
  const auto end = std::chrono::steady_clock::now() + kTransfersEnd;
  while (bytes > room()) {
    const bool hopeless = bytes > std::uint64_t{info.f_blocks} * info.f_frsize;
    if (hopeless || std::chrono::steady_clock::now() > end) return full(room());
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  int error = 0;
  do {
    error = bytes == 0 || fallocate(file_.get(), 0, 0, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  } while (error == EINTR);
  if (error == EOPNOTSUPP || error == ENOSYS) {
    // posix_fallocate would write to every block instead: hours for a large slab. A disk that fills up later is then an
    // error of the transfer that finds it so.
    notes_ += "the file system of " + folder + " reserves no space: a disk that is full later fails a write\n";
    error = ftruncate(file_.get(), static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  }
  if (error == ENOSPC || error == EDQUOT) return full(room());
  if (error != 0) return failed("cannot reserve " + gigabytes(bytes) + " for offloaded tensors", error, folder);
  bytes_ = bytes;
  return {};
}

Status Slab::find_alignment() {
  if (!direct_) return {};
  std::uint32_t memory = 0, offset = 0;
  if (!ask_alignment(file_.get(), memory, offset)) {
    memory_alignment_ = offset_alignment_ = kPage;  // right for every disk
  } else if (memory == 0 || offset == 0 || offset > kPage || memory > kPage) {
    const int flags = fcntl(file_.get(), F_GETFL);
    if (flags < 0 || fcntl(file_.get(), F_SETFL, flags & ~O_DIRECT) != 0)
      return failed("cannot turn off O_DIRECT", errno, path_);
    direct_ = false;
  } else {
    memory_alignment_ = memory;
    offset_alignment_ = offset;
  }
  return {};
}

// ---------------------------------------------------------------------------------------------------------------
// Two views of one file

Status Slab::flush(std::uint64_t offset, std::uint64_t bytes) const {
  if (bytes == 0) return {};
  // The data need to be where direct reads look, not safe from a power cut: no journal, no flush of the disk's cache.
  constexpr unsigned kAll = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
  int error;
  do {
    error = sync_file_range(file_.get(), static_cast<off64_t>(offset), static_cast<off64_t>(bytes), kAll) == 0 ? 0 : errno;
    if (error == ENOSYS || error == EINVAL || error == EOPNOTSUPP) error = fdatasync(file_.get()) == 0 ? 0 : errno;
  } while (error == EINTR);
  if (error == 0) return {};
  return failed("cannot write " + number(bytes) + " bytes at offset " + number(offset) + " of " + path_ +
                    " from the page cache", error, path_);
}

Status Slab::drop(std::uint64_t offset, std::uint64_t bytes) const {
  if (bytes == 0) return {};
  const int error = posix_fadvise(file_.get(), static_cast<off_t>(offset), static_cast<off_t>(bytes), POSIX_FADV_DONTNEED);
  if (error == 0) return {};
  return failed("cannot drop cached pages of " + path_, error, path_);
}

Status map_files(const std::vector<FilePart>& parts, Mapping& out) {
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const FilePart& part = parts[i];
    if (part.offset % kPage != 0 || part.bytes == 0 || (i + 1 < parts.size() && part.bytes % kPage != 0))
      return fail(Code::invalid, "parts of a mapping must be whole pages, got " + number(part.bytes) + " bytes at offset " +
                                     number(part.offset));
    struct stat info;
    if (fstat(part.fd, &info) != 0) return failed("cannot map a file", errno, {});
    if (static_cast<std::uint64_t>(info.st_size) < part.offset + part.bytes)  // else its use is a SIGBUS
      return fail(Code::invalid, "cannot map " + number(part.bytes) + " bytes at offset " + number(part.offset) +
                                     " of a file of " + number(static_cast<std::uint64_t>(info.st_size)));
    total += part.bytes;
  }
  if (total == 0) return fail(Code::invalid, "a mapping of nothing");
  void* area = mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (area == MAP_FAILED) return failed("cannot find room in memory for a mapping of " + gigabytes(total), errno, {});
  Mapping map(area, total);
  std::byte* place = map.data();
  for (const FilePart& part : parts) {
    if (mmap(place, part.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, part.fd, static_cast<off_t>(part.offset)) ==
        MAP_FAILED)
      return failed("cannot map " + gigabytes(part.bytes) + " of a file", errno, {});
    place += part.bytes;
  }
  out = std::move(map);
  return {};
}

Status drop_pages(const Mapping& map, std::uint64_t offset, std::uint64_t bytes) {
  if (offset > map.bytes() || bytes > map.bytes() - offset)
    return fail(Code::invalid, "the mapping has " + number(map.bytes()) + " bytes");
  const std::uint64_t begin = offset / kPage * kPage;
  if (bytes == 0) return {};
  if (madvise(map.data() + begin, offset + bytes - begin, MADV_DONTNEED) != 0)
    return failed("cannot drop pages of a mapping", errno, {});
  return {};
}

Status any_resident(const Mapping& map, std::uint64_t offset, std::uint64_t bytes, bool& out) {
  if (offset > map.bytes() || bytes > map.bytes() - offset)
    return fail(Code::invalid, "the mapping has " + number(map.bytes()) + " bytes");
  out = false;
  std::array<unsigned char, 4096> resident;  // of as many pages, the lowest bit of each
  const std::uint64_t end = offset + bytes;
  for (std::uint64_t begin = offset / kPage * kPage; begin < end && !out; begin += resident.size() * kPage) {
    const std::uint64_t size = std::min<std::uint64_t>(resident.size() * kPage, end - begin);
    if (mincore(map.data() + begin, size, resident.data()) != 0)
      return failed("cannot ask which pages of a mapping are in memory", errno, {});
    out = std::any_of(resident.begin(), resident.begin() + (size + kPage - 1) / kPage, [](auto page) { return page & 1; });
  }
  return {};
}

}  // namespace zg
