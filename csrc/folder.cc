#include "folder.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include <utility>
#include <vector>

namespace zg {

namespace {

constexpr int kMostLinks = 40;  // as in the kernel: links that lead to one another end somewhere

constexpr const char* kCannot = "cannot open the folder for offloaded tensors";

bool is_absolute(const std::string& path) { return !path.empty() && path.front() == '/'; }

FileDescriptor open_start(const char* start) { return FileDescriptor(open(start, O_PATH | O_DIRECTORY | O_CLOEXEC)); }

// Puts the names of `path` on the stack `names`, the first one on top.
void push_names(const std::string& path, std::vector<std::string>& names) {
  for (std::size_t end = path.size(); end > 0;) {
    const std::size_t slash = path.find_last_of('/', end - 1);
    const std::size_t begin = slash == std::string::npos ? 0 : slash + 1;
    if (std::string name = path.substr(begin, end - begin); !name.empty() && name != ".") names.push_back(std::move(name));
    end = slash == std::string::npos ? 0 : slash;
  }
}

// One look-up of a path.
class Walk {
 public:
  explicit Walk(const std::string& folder) : folder_(folder), at_(open_start(is_absolute(folder) ? "/" : ".")) {
    push_names(folder, names_);
  }

  Status run(FileDescriptor& out) {
    if (folder_.empty()) return refused(kCannot, ENOENT);
    while (!names_.empty()) ZG_TRY(step());
    out = FileDescriptor(openat(at_.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    return out.get() >= 0 ? Status{} : refused(kCannot, errno);
  }

 private:
  Status step() {
    const std::string name = std::move(names_.back());
    names_.pop_back();
    // A folder is asked for first: nothing else has the kernel mount what is mounted on first use.
    FileDescriptor next(openat(at_.get(), name.c_str(), O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (next.get() < 0 && (errno == ENOTDIR || errno == ELOOP))
      next = FileDescriptor(openat(at_.get(), name.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC));
    struct stat info;
    if (next.get() < 0 || fstat(next.get(), &info) != 0) return refused(kCannot, errno);
    if (S_ISLNK(info.st_mode)) return follow(name, next, info.st_uid);
    at_ = std::move(next);
    return {};
  }

  Status follow(const std::string& name, const FileDescriptor& link, uid_t owner) {
    if (names_.empty())
      return refused("the folder for offloaded tensors is a symbolic link, which whoever owns it may turn elsewhere", ELOOP,
                     "give the folder itself, as `realpath` prints it");
    if (owner != 0 && owner != geteuid())
      return refused("'" + name + "', on the way to the folder for offloaded tensors, is a symbolic link of user " +
                         std::to_string(owner) + ", who may turn it elsewhere", ELOOP,
                     "give the folder as `realpath` prints it, if that is the one you mean");
    char target[PATH_MAX];
    const ssize_t length = readlinkat(link.get(), "", target, sizeof target);
    if (length < 0 || ++links_ > kMostLinks) return refused(kCannot, length < 0 ? errno : ELOOP);
    const std::string path(target, static_cast<std::size_t>(length));
    if (is_absolute(path)) at_ = open_start("/");
    push_names(path, names_);
    return {};
  }

  Status refused(const std::string& what, int error, const char* hint = "a folder that exists and can be written") {
    return failed(what, error, folder_, hint);
  }

  const std::string& folder_;
  FileDescriptor at_;
  std::vector<std::string> names_;  // still to come; the next one is the last
  int links_ = 0;
};

}  // namespace

Status open_folder(const std::string& folder, FileDescriptor& out) { return Walk(folder).run(out); }

}  // namespace zg
