#include "memory.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "streams.h"
#include "trace.h"

namespace fake {
namespace {

constexpr std::size_t kArena = std::size_t{16} << 30;  // of which only what is used takes memory
constexpr std::size_t kGrain = 512;

struct Block {
  std::size_t begin, size;
  std::int64_t stream;
  std::vector<std::int64_t> readers;  // other streams that were said to use it
  bool used = true;
};

// As the allocator of a GPU: what is freed is used again by the stream that it was made for, in the order in which that
// stream is told, and nobody waits. All its bits are set then, so that whoever still reads it reads not-a-number.
class Arena final : public c10::Allocator {
 public:
  Arena() {
    const int file = memfd_create("fake-device", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, kArena) == 0, "no room for the fake device");
    shown_ = static_cast<char*>(mmap(nullptr, kArena, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0));
    used_ = static_cast<char*>(mmap(nullptr, kArena, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0));
    TORCH_CHECK(shown_ != MAP_FAILED && used_ != MAP_FAILED, "no addresses for the fake device");
    close(file);
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    const c10::Device device(kType, 0);
    if (bytes == 0) return {nullptr, nullptr, &release, device};
    auto* block = take((bytes + kGrain - 1) / kGrain * kGrain);
    report(*block, 1);
    return {shown_ + block->begin, block, &release, device};
  }

  void copy_data(void*, const void*, std::size_t) const override {
    TORCH_CHECK(false, "the fake device copies in its streams only");
  }

  void* kernel_address(const void* address) const {
    const auto* at = static_cast<const char*>(address);
    if (at == nullptr) return nullptr;
    TORCH_CHECK(at >= shown_ && at < shown_ + kArena, "memory of the host was given to the fake device");
    return used_ + (at - shown_);
  }

  void record(void* context, std::int64_t stream) {
    std::lock_guard hold(lock_);
    auto* block = static_cast<Block*>(context);
    if (block != nullptr && stream != block->stream) block->readers.push_back(stream);
  }

  std::size_t held() const { return held_; }

  void keep_history(bool keep) {
    std::lock_guard hold(lock_);
    keeps_ = keep;
    if (keep) history_.clear();
  }

  std::vector<Allocation> history() {
    std::lock_guard hold(lock_);
    return history_;
  }

  std::vector<Piece> pieces() {
    std::lock_guard hold(lock_);
    std::vector<Piece> found;
    for (const auto* block : made_) found.push_back({shown(*block), block->size, block->used});
    return found;
  }

 private:
  std::uintptr_t shown(const Block& block) const { return reinterpret_cast<std::uintptr_t>(shown_ + block.begin); }

  // Tells torch's profiler of memory that is taken (1) or given back (-1).
  void report(const Block& block, std::int64_t sign) {
    const auto size = sign * static_cast<std::int64_t>(block.size);
    c10::reportMemoryUsageToProfiler(shown_ + block.begin, size, held_, end_, c10::Device(kType, 0));
  }

  void remember(const Block& block, bool taken) {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    const auto microseconds = std::chrono::duration_cast<std::chrono::microseconds>(now).count();
    if (keeps_) history_.push_back({taken, shown(block), block.size, block.stream, microseconds});
  }

  Block* take(std::size_t size) {
    const auto stream = current_stream();
    std::lock_guard hold(lock_);
    held_ += size;
    auto& free = free_[{stream, size}];
    if (!free.empty()) {
      auto* found = free.back();
      free.pop_back();
      found->used = true;
      remember(*found, true);
      return found;
    }
    TORCH_CHECK(end_ + size <= kArena, "the fake device is out of memory");
    auto* made = new Block{end_, size, stream, {}};
    made_.push_back(made);
    end_ += size;
    remember(*made, true);
    spoil(*made);
    return made;
  }

  void spoil(const Block& block) {
    tell({"kernel", block.stream, 0, "the end of its life", {}, {shown(block)}});
    launch(block.stream, [at = used_ + block.begin, size = block.size] { std::memset(at, 0xFF, size); });
  }

  void give(Block* block) {
    report(*block, -1);
    std::lock_guard hold(lock_);
    held_ -= block->size;
    block->used = false;
    remember(*block, false);
    for (auto reader : block->readers) Mark::set(reader)->hold(block->stream);
    block->readers.clear();
    spoil(*block);
    free_[{block->stream, block->size}].push_back(block);
  }

  static void release(void* context);

  std::mutex lock_;
  char *shown_, *used_;
  std::size_t end_ = 0, held_ = 0;
  std::map<std::pair<std::int64_t, std::size_t>, std::vector<Block*>> free_;
  std::vector<Block*> made_;
  bool keeps_ = false;
  std::vector<Allocation> history_;
};

Arena& arena() {
  static auto* made = new Arena;  // outlives whatever is freed at the end of the process
  return *made;
}

void Arena::release(void* context) {
  if (context != nullptr) arena().give(static_cast<Block*>(context));
}

class Pinned final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    const auto size = std::max<std::size_t>(bytes, 1);
    give_back();
    void* at = std::aligned_alloc(4096, (size + 4095) / 4096 * 4096);
    TORCH_CHECK(at != nullptr, "no memory that copies may use");
    std::lock_guard hold(lock_);
    ranges_[static_cast<char*>(at)] = size;
    return {at, at, &release, c10::Device(c10::DeviceType::CPU)};
  }

  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }

  bool has(const void* address) {
    std::lock_guard hold(lock_);
    const auto* at = static_cast<const char*>(address);
    auto behind = ranges_.upper_bound(const_cast<char*>(at));
    if (behind == ranges_.begin()) return false;
    const auto& [begin, size] = *--behind;
    return at < begin + size;
  }

  void add(void* at, std::size_t size) {
    std::lock_guard hold(lock_);
    ranges_[static_cast<char*>(at)] = size;
  }

  void remove(void* at) {
    std::lock_guard hold(lock_);
    ranges_.erase(static_cast<char*>(at));
  }

 private:
  struct Leaving {
    void* at;
    std::vector<std::shared_ptr<Mark>> marks;
  };

  static void release(void* at);

  // As torch's allocator: no memory goes before the copies that may use it have ended.
  void let_go(void* at) {
    remove(at);
    auto marks = mark_all();
    std::lock_guard hold(lock_);
    leaving_.push_back({at, std::move(marks)});
  }

  void give_back() {
    std::lock_guard hold(lock_);
    std::erase_if(leaving_, [](const Leaving& one) {
      const bool ended = std::ranges::all_of(one.marks, [](auto& mark) { return mark->passed(); });
      if (ended) std::free(one.at);
      return ended;
    });
  }

  std::mutex lock_;
  std::map<char*, std::size_t> ranges_;
  std::vector<Leaving> leaving_;
};

Pinned& pinned_memory() {
  static auto* made = new Pinned;
  return *made;
}

void Pinned::release(void* at) { pinned_memory().let_go(at); }

}  // namespace

c10::Allocator* memory() { return &arena(); }
c10::Allocator* pinned() { return &pinned_memory(); }
bool is_pinned(const void* address) { return pinned_memory().has(address); }
void pin(void* at, std::size_t size) { pinned_memory().add(at, size); }
void unpin(void* at) { pinned_memory().remove(at); }
void* kernel_address(const void* address) { return arena().kernel_address(address); }
void record(void* context, std::int64_t stream) { arena().record(context, stream); }
std::size_t held() { return arena().held(); }
void keep_history(bool keep) { arena().keep_history(keep); }
std::vector<Allocation> history() { return arena().history(); }
std::vector<Piece> pieces() { return arena().pieces(); }

}  // namespace fake
