#include "memory.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <string>

namespace zg {

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) close(fd_);
}

namespace {

Status map_file(int fd, std::size_t bytes, const std::string& path, Mapping& out) {
  // Populated at once: one call instead of a page fault every 4 KiB.
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  if (data == MAP_FAILED)
    return fail(Code::system, "cannot map " + std::to_string(bytes) + " bytes of shared memory", errno, path);
  out = Mapping(data, bytes);
  return {};
}

}  // namespace

Status create_shared(const char* name, std::size_t bytes, SharedMemory& out) {
  FileDescriptor file(static_cast<int>(memfd_create(name, MFD_CLOEXEC)));
  const std::string path = std::string("memfd:") + name;
  if (file.get() < 0) return fail(Code::system, "cannot create shared memory", errno, path);
  // Allocated now: a full machine then is an error here and not a SIGBUS in the middle of a copy.
  int error;
  do {
    error = posix_fallocate(file.get(), 0, static_cast<off_t>(bytes));
  } while (error == EINTR);
  if (error != 0) {
    return fail(Code::system,
                "cannot allocate " + std::to_string(bytes) +
                    " bytes of shared memory\n\nhint: smaller buckets need smaller messages",
                error, path);
  }
  Mapping map;
  ZG_TRY(map_file(file.get(), bytes, path, map));
  out.file = std::move(file);
  out.map = std::move(map);
  return {};
}

Status open_shared(pid_t pid, int fd, std::size_t bytes, Mapping& out) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  FileDescriptor file(open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (file.get() < 0) return fail(Code::system, std::string("cannot open: ") + strerror(errno), errno, path);
  struct stat info;
  if (fstat(file.get(), &info) != 0) return fail(Code::system, "cannot stat", errno, path);
  if (static_cast<std::size_t>(info.st_size) < bytes) {
    return fail(Code::system,
                "holds " + std::to_string(info.st_size) + " bytes, expected " + std::to_string(bytes), EPROTO,
                path);
  }
  return map_file(file.get(), bytes, path, out);
}

FileDescriptor watch_process(pid_t pid) {
#ifdef SYS_pidfd_open
  return FileDescriptor(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
#else
  (void)pid;
  return FileDescriptor();
#endif
}

bool is_alive(pid_t pid, const FileDescriptor& watch) {
  if (watch.get() < 0) return kill(pid, 0) == 0 || errno != ESRCH;
  pollfd entry{watch.get(), POLLIN, 0};
  return poll(&entry, 1, 0) <= 0;
}

}  // namespace zg
