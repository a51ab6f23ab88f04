// Anonymous shared memory: a memfd and its mapping. Nothing has a name in a file system, so nothing is left behind
// however a process ends, and the size of /dev/shm does not matter.
#pragma once

#include <sys/types.h>

#include <cstddef>

#include "status.h"

namespace zg {

class Mapping {
 public:
  Mapping() = default;
  Mapping(void* data, std::size_t bytes) : data_(data), bytes_(bytes) {}
  Mapping(Mapping&& other) noexcept { swap(other); }
  Mapping& operator=(Mapping&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Mapping();

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  std::size_t bytes() const { return bytes_; }

 private:
  void swap(Mapping& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd = -1) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept { std::swap(fd_, other.fd_); }
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~FileDescriptor();

  int get() const { return fd_; }

 private:
  int fd_ = -1;
};

// Memory of this process that others may open: `bytes` is rounded up to pages by the caller.
struct SharedMemory {
  FileDescriptor file;
  Mapping map;
};

Status create_shared(const char* name, std::size_t bytes, SharedMemory& out);

// Maps the memory behind descriptor `fd` of process `pid`, which must be at least `bytes` long.
Status open_shared(pid_t pid, int fd, std::size_t bytes, Mapping& out);

// A descriptor that becomes readable when `pid` ends; -1 where the kernel has none.
FileDescriptor watch_process(pid_t pid);

// False once the process has ended, even while its parent has not collected it.
bool is_alive(pid_t pid, const FileDescriptor& watch);

}  // namespace zg
