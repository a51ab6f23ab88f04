#include "io_queue.h"

#include <errno.h>
#include <string.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "clock.h"

namespace zg {

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kCheckInterval = std::chrono::milliseconds(100);
constexpr std::size_t kMaxBlock = std::size_t{1} << 30;   // a transfer's result is a signed 32-bit number in io_uring
constexpr std::uint64_t kWorthSplitting = 256u << 10;     // below, one copy costs less than two transfers more
constexpr std::uint32_t kTries = 200;                     // in a row, without a byte moved: about two seconds
constexpr std::uint32_t kStalls = 4;                      // short results within one block, before it counts as the end

std::uint64_t round_down(std::uint64_t value, std::uint64_t unit) { return value / unit * unit; }
std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) { return round_down(value + unit - 1, unit); }
std::string number(std::uint64_t value) { return std::to_string(value); }
std::size_t index(Priority priority) { return static_cast<std::size_t>(priority); }
const char* verb(Direction direction) { return direction == Direction::read ? "read" : "write"; }

struct Range {
  std::uint32_t file;
  std::uint64_t begin, end;
};

// Room for `wanted` elements, and for as many again as there is room for now, so that one more each time costs little.
template <typename T>
void make_room(std::vector<T>& list, std::size_t wanted) {
  if (list.capacity() < wanted) list.reserve(std::max(wanted, 2 * list.capacity()));
}

void move_to(IoPieces& row, IoPiece& piece) {
  row.splice(row.end(), *piece.row, piece.place);
  piece.row = &row;
}

bool overlap(const Range& a, const Range& b) { return a.file == b.file && a.begin < b.end && b.begin < a.end; }

}  // namespace

struct IoRequest {
  std::uint64_t id = 0;
  Direction direction = Direction::read;
  Priority priority = Priority::now;
  std::vector<Range> ranges;  // in whole blocks
  std::vector<IoPiece> pieces;
  IoPieces aside;  // those in no queue
  std::vector<std::shared_ptr<IoFile>> files;
  std::size_t left = 0, queued = 0;  // pieces that have not ended; that have not been taken
  std::size_t blockers = 0;
  std::vector<std::weak_ptr<IoRequest>> blocked_by;
  std::vector<std::shared_ptr<IoRequest>> dependents;
  bool enqueued = false, dropped = false, done = false;
  const IoPiece* failed = nullptr;  // the first one
  int error = 0;                    // its errno; 0: nothing more moved
  IoTimes times;
  std::condition_variable changed;
};

namespace {

// Says what failed, for whoever waited: the thread that found it may take no memory.
Status explain(const IoRequest& request) {
  const IoPiece& piece = *request.failed;
  const std::string reason = request.error != 0                        ? strerror(request.error)
                             : piece.direction == Direction::read ? "the file ends there"
                                                                       : "nothing more is written";
  return fail(Code::system,
              std::string("cannot ") + verb(request.direction) + " " + number(piece.length - piece.moved) +
                  " bytes at offset " + number(piece.begin + piece.moved) + " of " + piece.file->path + ": " + reason,
              request.error != 0 ? request.error : EIO, piece.file->path);
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------
// Setting up

IoQueue::IoQueue(const IoOptions& options) : options_(options) {}
IoQueue::~IoQueue() = default;

Status IoQueue::create(const IoOptions& options, std::unique_ptr<IoQueue>& out) {
  const auto within = [](std::uint64_t value, std::uint64_t low, std::uint64_t high, const char* name) {
    if (value >= low && value <= high) return Status{};
    return fail(Code::invalid, std::string(name) + " must be from " + number(low) + " to " + number(high) + ", got " +
                                   number(value));
  };
  ZG_TRY(within(options.depth, 1, 4096, "depth"));
  ZG_TRY(within(options.threads, 1, 256, "threads"));
  ZG_TRY(within(options.block, 64u << 10, kMaxBlock, "block"));
  ZG_TRY(within(options.buffer, 64u << 10, kMaxBlock, "buffer"));
  ZG_TRY(within(options.buffers, 1, 1024, "buffers"));
  if (options.block % 4096 != 0 || options.buffer % 4096 != 0)
    return fail(Code::invalid, "block and buffer must be multiples of 4096");
  std::unique_ptr<IoQueue> queue(new IoQueue(options));
  ZG_TRY(map_huge(options.buffer * options.buffers, queue->staging_));
  for (std::uint32_t i = options.buffers; i-- > 0;)
    queue->buffers_.push_back(queue->staging_.data() + i * options.buffer);
  queue->set_capacity(options.depth);
  out = std::move(queue);
  return {};
}

Status IoQueue::attach(int fd, std::string path, std::size_t memory_alignment, std::size_t offset_alignment,
                       std::uint32_t& file) {
  if (fd < 0) return fail(Code::invalid, "a file descriptor is not negative, got " + std::to_string(fd));
  if (memory_alignment == 0 || offset_alignment == 0 || 4096 % memory_alignment != 0 || 4096 % offset_alignment != 0)
    return fail(Code::invalid, "alignments must divide 4096, got " + number(memory_alignment) + " and " +
                                   number(offset_alignment));
  std::lock_guard lock(mutex_);
  if (closing_) return fail(Code::invalid, "the I/O engine is closed");
  file = next_file_++;
  files_[file] = std::make_shared<IoFile>(IoFile{file, fd, std::move(path), memory_alignment, offset_alignment});
  return {};
}

Status IoQueue::detach(std::uint32_t file) {
  std::lock_guard lock(mutex_);
  const auto found = files_.find(file);
  if (found == files_.end()) return fail(Code::invalid, "no file " + number(file) + " is attached");
  if (found->second->users != 0)
    return fail(Code::invalid, "file " + found->second->path + " is in use by " + number(found->second->users) +
                                   " requests\n\nhint: wait for their tickets");
  files_.erase(found);
  return {};
}

void IoQueue::close() {
  std::lock_guard lock(mutex_);
  closing_ = true;
  notify();
}

void IoQueue::release() {
  std::lock_guard lock(mutex_);
  buffers_.clear();
  staging_ = Mapping();
}

void IoQueue::notify() {
  work_.notify_all();
  if (idle_ && wake_ != nullptr) {
    idle_ = false;
    wake_(wake_self_);
  }
}

IoStats IoQueue::stats() const {
  std::lock_guard lock(mutex_);
  return stats_;
}

// ---------------------------------------------------------------------------------------------------------------
// Submitting

Status IoQueue::submit(Direction direction, const std::vector<Segment>& segments, Priority priority,
                       std::uint64_t& ticket) {
  std::lock_guard lock(mutex_);
  if (closing_) return fail(Code::invalid, "the I/O engine is closed");
  const auto request = std::make_shared<IoRequest>();
  request->direction = direction;
  request->priority = priority;
  for (const Segment& segment : segments) {
    const auto found = files_.find(segment.file);
    if (found == files_.end()) return fail(Code::invalid, "no file " + number(segment.file) + " is attached");
    constexpr std::uint64_t kEnd = std::uint64_t{1} << 62;
    if (segment.offset > kEnd || segment.bytes > kEnd)
      return fail(Code::invalid, "offset " + number(segment.offset) + " or size " + number(segment.bytes) + " is too large");
    if (segment.bytes == 0) continue;
    if (segment.address == 0) return fail(Code::invalid, "memory at address 0");
    IoFile& file = *found->second;
    const Range range{file.id, round_down(segment.offset, file.offset_alignment),
                      round_up(segment.offset + segment.bytes, file.offset_alignment)};
    for (const Range& other : request->ranges)
      if (direction == Direction::write && overlap(range, other))
        return fail(Code::invalid, "two parts of one write touch the same block of " + file.path + " near offset " +
                                       number(segment.offset));
    request->ranges.push_back(range);
    request->files.push_back(found->second);
    split(*request, segment, file);
  }
  for (IoPiece& piece : request->pieces) {
    piece.request = request.get();
    piece.row = &request->aside;
    piece.place = request->aside.insert(request->aside.end(), &piece);
  }
  // Whatever takes memory comes before anything else changes.
  const std::vector<Owner> blockers = blockers_of(*request);
  request->blocked_by.assign(blockers.begin(), blockers.end());
  for (const Owner& earlier : blockers) make_room(earlier->dependents, earlier->dependents.size() + 1);
  make_room(pending_, pending_.size() + 1);
  make_room(finished_, finished_.size() + pending_.size() + 1);
  requests_.emplace(next_ticket_, request);
  for (const auto& file : request->files) ++file->users;
  request->left = request->queued = request->pieces.size();
  request->id = ticket = next_ticket_++;
  request->blockers = blockers.size();
  for (const Owner& earlier : blockers) {
    earlier->dependents.push_back(request);
    raise(*earlier, priority);
  }
  pending_.push_back(request);
  if (request->left == 0)
    complete(*request);
  else if (request->blockers == 0)
    enqueue(*request);
  return {};
}

// A direct middle where memory and offset permit it, and staged ends.
void IoQueue::split(IoRequest& request, const Segment& segment, IoFile& file) {
  const std::uint64_t unit = file.offset_alignment, begin = segment.offset, end = begin + segment.bytes;
  std::uint64_t first = round_up(begin, unit), last = round_down(end, unit);
  const bool whole = first == begin && last == end;
  const bool direct = last > first && (segment.address + (first - begin)) % file.memory_alignment == 0 &&
                      (whole || last - first >= kWorthSplitting);
  if (!direct) first = last = end;
  const auto stage = [&](std::uint64_t from, std::uint64_t to) {
    while (from < to) {
      const std::uint64_t next = std::min(to, round_down(from, unit) + options_.buffer);
      add_piece(request, file, segment, from, next, true);
      from = next;
    }
  };
  stage(begin, first);
  for (std::uint64_t from = first; from < last; from += options_.block)
    add_piece(request, file, segment, from, std::min(last, from + options_.block), false);
  stage(last, end);
}

void IoQueue::add_piece(IoRequest& request, IoFile& file, const Segment& segment, std::uint64_t from, std::uint64_t to,
                        bool staged) {
  const std::uint64_t unit = file.offset_alignment;
  IoPiece piece{};
  piece.file = &file;
  piece.address = segment.address + (from - segment.offset);
  piece.offset = from;
  piece.bytes = to - from;
  piece.staged = staged;
  piece.direction = request.direction;
  const bool may_pad = segment.padded && to == segment.offset + segment.bytes;
  piece.merge = request.direction == Direction::write && (from % unit != 0 || (to % unit != 0 && !may_pad));
  piece.begin = staged ? round_down(from, unit) : from;
  piece.length = (staged ? round_up(to, unit) : to) - piece.begin;
  request.pieces.push_back(piece);
}

std::vector<IoQueue::Owner> IoQueue::blockers_of(const IoRequest& request) const {
  std::vector<Owner> found;
  for (const Owner& earlier : pending_) {
    if (earlier->direction == Direction::read && request.direction == Direction::read) continue;
    const bool meets = std::any_of(earlier->ranges.begin(), earlier->ranges.end(), [&](const Range& a) {
      return std::any_of(request.ranges.begin(), request.ranges.end(), [&](const Range& b) { return overlap(a, b); });
    });
    if (meets) found.push_back(earlier);
  }
  return found;
}

void IoQueue::enqueue(IoRequest& request) {
  request.enqueued = true;
  Level& level = levels_[index(request.priority)];
  for (IoPiece& piece : request.pieces) {
    if (piece.taken) continue;
    piece.order = next_order_++;
    move_to(piece.staged ? level.staged : level.direct, piece);
  }
  notify();
}

void IoQueue::raise(IoRequest& request, Priority priority) {
  if (request.done || request.priority <= priority) return;
  request.priority = priority;
  for (const auto& weak : request.blocked_by)
    if (const Owner earlier = weak.lock()) raise(*earlier, priority);
  if (request.enqueued && request.queued != 0 && !request.dropped) enqueue(request);
}

// ---------------------------------------------------------------------------------------------------------------
// Waiting

Status IoQueue::wait(std::uint64_t ticket, double timeout, Interrupted interrupted, IoTimes* times) {
  std::unique_lock lock(mutex_);
  const auto found = requests_.find(ticket);
  if (found == requests_.end())
    return fail(Code::invalid, "ticket " + number(ticket) + " is not known, or was waited for already");
  const Owner request = found->second;
  if (timeout != 0) raise(*request, Priority::now);
  const Clock::time_point begin = Clock::now();
  while (!request->done) {
    Clock::duration slice = kCheckInterval;
    if (timeout >= 0) {
      const std::chrono::duration<double> left(timeout - std::chrono::duration<double>(Clock::now() - begin).count());
      if (left.count() <= 0)
        return fail(Code::timeout, "ticket " + number(ticket) + " is not done after " + std::to_string(timeout) + " s");
      slice = std::min(slice, std::chrono::duration_cast<Clock::duration>(left) + Clock::duration(1));
    }
    if (request->changed.wait_for(lock, slice) == std::cv_status::timeout && !request->done && interrupted != nullptr) {
      lock.unlock();
      const bool stop = interrupted();
      lock.lock();
      if (stop) return fail(Code::interrupted, "interrupted");
    }
  }
  if (times != nullptr) *times = request->times;
  requests_.erase(ticket);
  if (finished_.size() > 2 * requests_.size() + 64)
    std::erase_if(finished_, [&](std::uint64_t id) { return requests_.count(id) == 0; });
  return request->failed != nullptr ? explain(*request) : Status{};
}

Status IoQueue::done(std::uint64_t ticket, bool& out) {
  std::lock_guard lock(mutex_);
  const auto found = requests_.find(ticket);
  out = found == requests_.end() || found->second->done;
  return {};
}

void IoQueue::finished(std::vector<std::uint64_t>& tickets) {
  std::lock_guard lock(mutex_);
  tickets = finished_;
  finished_.clear();  // and keeps its room
}

// ---------------------------------------------------------------------------------------------------------------
// Ending

void IoQueue::drop(IoRequest& request) {
  request.dropped = true;
  request.left -= request.queued;
  request.queued = 0;
  for (IoPiece& piece : request.pieces)
    if (piece.row != &request.aside) move_to(request.aside, piece);
}

void IoQueue::complete(IoRequest& request) {
  request.done = true;
  if (request.times.began != 0) request.times.ended = now();
  for (const auto& file : request.files) --file->users;
  finished_.push_back(request.id);
  for (const Owner& dependent : request.dependents)
    if (--dependent->blockers == 0 && !dependent->done) enqueue(*dependent);
  request.dependents.clear();
  request.blocked_by.clear();
  request.changed.notify_all();
  const auto place = std::find_if(pending_.begin(), pending_.end(), [&](const Owner& o) { return o.get() == &request; });
  pending_.erase(place);  // the last use of `request`: it may be gone now
  if (closing_ && pending_.empty()) notify();
}

void IoQueue::end_piece(IoPiece& piece, std::optional<int> error) {
  std::lock_guard lock(mutex_);
  IoRequest& request = *piece.request;
  if (piece.buffer != nullptr) buffers_.push_back(std::exchange(piece.buffer, nullptr));
  if (piece.level == Priority::later) --running_later_;
  --request.left;
  if (error && request.failed == nullptr) {
    request.failed = &piece;
    request.error = *error;
    drop(request);  // the rest of it is of no use
  }
  if (request.left == 0) complete(request);
  work_.notify_one();  // a buffer or a place may have been what another thread waits for
}

// ---------------------------------------------------------------------------------------------------------------
// The backend's side

IoPiece* IoQueue::pick() {
  for (std::size_t i = 0; i < kPriorities; ++i) {
    Level& level = levels_[i];
    const auto priority = static_cast<Priority>(i);
    if (priority == Priority::later && running_later_ >= later_limit_) continue;
    const bool direct = !level.direct.empty(), staged = !level.staged.empty() && !buffers_.empty();
    if (!direct && !staged) continue;
    const bool take_staged = staged && (!direct || level.staged.front()->order < level.direct.front()->order);
    IoPiece& piece = *(take_staged ? level.staged : level.direct).front();
    move_to(piece.request->aside, piece);
    --piece.request->queued;
    if (piece.request->times.began == 0) piece.request->times.began = now();
    piece.taken = true;
    piece.level = priority;
    if (priority == Priority::later) ++running_later_;
    if (take_staged) {
      piece.buffer = buffers_.back();
      buffers_.pop_back();
    }
    return &piece;
  }
  return nullptr;
}

IoPiece* IoQueue::take(bool& over) {
  std::lock_guard lock(mutex_);
  IoPiece* piece = pick();
  over = piece == nullptr && closing_ && pending_.empty();
  idle_ = piece == nullptr && !over;
  return piece;
}

IoPiece* IoQueue::take_blocking() {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (IoPiece* piece = pick()) return piece;
    if (closing_ && pending_.empty()) return nullptr;
    work_.wait(lock);
  }
}

void IoQueue::load(IoPiece& piece) {
  piece.memory = piece.staged ? piece.buffer : reinterpret_cast<std::byte*>(piece.address);
  if (!piece.staged || piece.request->direction == Direction::read) return;
  if (piece.merge) {
    piece.direction = Direction::read;  // the blocks as they are; finish puts the caller's bytes over them
    return;
  }
  memcpy(piece.memory, reinterpret_cast<const void*>(piece.address), piece.bytes);
  memset(piece.memory + piece.bytes, 0, piece.length - piece.bytes);
}

const Fault* IoQueue::fault(Fault::Point point) {
  const std::uint64_t count = ++fault_counts_[static_cast<std::size_t>(point)];
  for (const Fault& fault : faults_)
    if (fault.point == point && count >= fault.nth && count - fault.nth < fault.times) return &fault;
  return nullptr;
}

void IoQueue::inject(std::vector<Fault> faults) {
  std::lock_guard lock(mutex_);
  faults_ = std::move(faults);
  std::fill(std::begin(fault_counts_), std::end(fault_counts_), 0);
  faulty_ = !faults_.empty();
}

int IoQueue::injected_submit() {
  if (!faulty_) return 0;
  std::lock_guard lock(mutex_);
  const Fault* found = fault(Fault::Point::submit);
  return found == nullptr ? 0 : static_cast<int>(found->value);
}

IoTransfer IoQueue::transfer(IoPiece& piece) {
  IoTransfer out{piece.direction == Direction::write, piece.file->fd, piece.memory + piece.moved,
                 piece.length - piece.moved, piece.begin + piece.moved};
  if (!faulty_) return out;
  std::lock_guard lock(mutex_);
  const Fault* found = fault(out.write ? Fault::Point::write : Fault::Point::read);
  if (found == nullptr) return out;
  out.injected = true;
  if (found->effect == Fault::Effect::error) out.result = -static_cast<long>(found->value);
  if (found->effect != Fault::Effect::cut) return out;
  // Just as many bytes move as the result says: a write moves the whole blocks of them, as the engine
  // goes on from there; of a read what follows is spoilt afterwards.
  const std::uint64_t faked = out.bytes - std::min<std::uint64_t>(found->value, out.bytes - 1);
  const std::uint64_t real = out.write ? round_down(faked, piece.file->offset_alignment) : out.bytes;
  out.result = static_cast<long>(faked);
  if (real == 0) return out;
  out.injected = false;
  out.faked = faked;
  out.bytes = real;
  return out;
}

bool IoQueue::finish(IoPiece& piece, const IoTransfer& transfer, long result) {
  if (transfer.faked != 0 && result == static_cast<long>(transfer.bytes)) {
    if (!transfer.write) memset(transfer.memory + transfer.faked, 0xEE, transfer.bytes - transfer.faked);
    result = static_cast<long>(transfer.faked);
  }
  const bool retried = result == -EINTR || result == -EAGAIN || result == -EBUSY;
  {
    std::lock_guard lock(mutex_);
    ++stats_.transfers;
    stats_.retries += retried ? 1 : 0;
    if (result > 0) {
      const auto moved = static_cast<std::uint64_t>(result);
      (transfer.write ? stats_.bytes_written : stats_.bytes_read) += moved;
      if (piece.staged) stats_.bytes_staged += moved;
    }
  }
  piece.pause = {};
  if (retried && ++piece.tries < kTries) {
    if (piece.tries > 2) piece.pause = std::chrono::milliseconds(std::min(piece.tries, 10u));
    return true;
  }
  const std::uint64_t before = piece.moved;
  const bool reads = piece.direction == Direction::read;
  if (result > 0) {
    const std::uint64_t reached = before + static_cast<std::uint64_t>(result);
    const std::uint64_t wanted = piece.staged && reads && !piece.merge
                                     ? piece.offset + piece.bytes - piece.begin  // what follows is not asked for
                                     : piece.length;
    if (reached < wanted) {
      // Direct I/O goes on at a whole block.
      piece.moved = round_down(reached, piece.file->offset_alignment);
      if (piece.moved > before) piece.tries = 0;
      if (piece.moved > before || ++piece.tries < kStalls) return true;
    } else {
      return ended(piece);
    }
  }
  if (result >= 0 && reads && piece.merge) {  // the file ends here: nothing to keep
    memset(piece.memory + piece.moved, 0, piece.length - piece.moved);
    return ended(piece);
  }
  end_piece(piece, result < 0 ? static_cast<int>(-result) : 0);
  return false;
}

// All of `piece` was transferred. True where that was the reading that comes before its writing.
bool IoQueue::ended(IoPiece& piece) {
  std::byte* const place = piece.memory + (piece.offset - piece.begin);
  auto* const callers = reinterpret_cast<std::byte*>(piece.address);
  if (piece.merge && piece.direction == Direction::read) {
    memcpy(place, callers, piece.bytes);
    piece.direction = Direction::write;
    piece.moved = 0;
    piece.tries = 0;
    return true;
  }
  if (piece.staged && piece.direction == Direction::read) memcpy(callers, place, piece.bytes);
  end_piece(piece);
  return false;
}

}  // namespace zg
