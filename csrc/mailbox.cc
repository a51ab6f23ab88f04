#include "mailbox.h"

#include <linux/futex.h>
#include <sched.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <ctime>
#include <new>
#include <thread>

#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace zg {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint64_t kMagic = 0x32786f626c69616dULL;  // "mailbox2"
constexpr std::size_t kPage = 4096;
constexpr std::size_t kAlign = 64;
constexpr std::uint64_t kRetiredRing = 256;
constexpr std::size_t kTextBytes = 1024;
constexpr unsigned kGenerationShift = 40;  // operations of a generation, before their numbers are the next one's
constexpr auto kCheckInterval = std::chrono::milliseconds(100);

std::size_t align_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }

std::string number(std::uint64_t value) { return std::to_string(value); }

const char* name_of(std::uint32_t kind) {
  switch (static_cast<Kind>(kind)) {
    case Kind::gather: return "gather";
    case Kind::reduce: return "reduce";
    case Kind::all_reduce: return "all_reduce";
    case Kind::barrier: return "barrier";
  }
  return "unknown operation";
}

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

// One message. `sequence` is written last by the sender; everything else is then constant until all ranks, the sender
// included, have added themselves to `acks`.
struct alignas(kAlign) Slot {
  std::atomic<std::uint64_t> sequence;  // operation number + 1; 0: never used
  std::atomic<std::uint32_t> acks;
  std::uint32_t kind;
  std::uint64_t tag;
  std::uint64_t pieces;
  std::uint64_t block;
  std::uint64_t bytes;  // of the block
  std::int32_t fd;      // of the block, -1 for none
};

enum : std::uint32_t { kOpen = 0, kClosed = 1 };

struct Control {
  std::uint64_t magic, token;
  std::uint32_t rank, world;
  std::int32_t pid;
  std::atomic<std::uint32_t> state;
  std::atomic<std::uint64_t> aborted;  // the generation that this rank ended last, + 1; 0: none
  char text[kTextBytes];               // why
  alignas(kAlign) std::atomic<std::uint32_t> doorbell;  // futex: peers ring it when they post or abort
  std::atomic<std::uint32_t> sleeping;
  alignas(kAlign) std::atomic<std::uint64_t> retired;  // how many blocks were closed; the last ones follow
  std::atomic<std::uint64_t> retired_ids[kRetiredRing];
  Slot slots[2 * Mailbox::kRing];  // two per operation: all_reduce posts a second message
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);

namespace {

// What a block begins with: whose message it holds.
struct alignas(kAlign) BlockHeader {
  std::uint64_t token, sequence, exchanging, pieces;
};

// What follows, one per piece: enough for the receiver to compare with its own.
struct PieceHeader {
  std::uint64_t count, chunk;
  std::uint64_t dtype;
  std::uint64_t offset;  // gather: of the data, from the start of the block
};

std::size_t header_bytes(std::size_t pieces) {
  return align_up(sizeof(BlockHeader) + pieces * sizeof(PieceHeader), kAlign);
}

PieceHeader* piece_headers(std::byte* block) { return reinterpret_cast<PieceHeader*>(block + sizeof(BlockHeader)); }

const PieceHeader* piece_headers(const std::byte* block) {
  return reinterpret_cast<const PieceHeader*>(block + sizeof(BlockHeader));
}

using Payload = std::shared_ptr<Mapping>;

const std::byte* data_of(const Payload& block) { return block != nullptr ? block->data() : nullptr; }

constexpr const char* kClosedByOthers =
    "\n\nhint: something in that process closed a descriptor that it had not opened; the number is another file's now";

void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t seen, std::chrono::nanoseconds timeout) {
  const timespec time{static_cast<time_t>(timeout.count() / 1000000000), static_cast<long>(timeout.count() % 1000000000)};
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT, seen, &time, nullptr, 0);
}

void futex_wake(std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
}

void ring(Control& control) {
  control.doorbell.fetch_add(1);
  if (control.sleeping.load() != 0) futex_wake(control.doorbell);
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------
// Setting up

Mailbox::Mailbox(std::uint32_t rank, std::uint32_t world, std::uint64_t token, Interrupted interrupted)
    : rank_(rank), world_(world), token_(token), interrupted_(interrupted), pid_(getpid()), peers_(world) {}

Status Mailbox::create(std::uint32_t rank, std::uint32_t world, std::uint64_t token, Interrupted interrupted,
                       std::unique_ptr<Mailbox>& out) {
  if (world == 0 || rank >= world)
    return fail(Code::invalid, "rank " + number(rank) + " is not in a world of " + number(world));
  ZG_TRY(check_target());
  std::unique_ptr<Mailbox> box(new Mailbox(rank, world, token, interrupted));
  ZG_TRY(create_shared("zerograph-control", align_up(sizeof(Control), kPage), box->control_));
  Control& control = *new (box->control_.map.data()) Control;  // fresh memory is zero: nothing posted, open
  control.magic = kMagic;
  control.token = token;
  control.rank = rank;
  control.world = world;
  control.pid = box->pid_;
  box->connected_ = world == 1;
  out = std::move(box);
  return {};
}

Mailbox::~Mailbox() { close(0); }

Status Mailbox::connect(const std::vector<std::pair<pid_t, int>>& ranks) {
  std::lock_guard lock(mutex_);
  if (closed_) return fail(Code::invalid, "the mailbox is closed");
  if (ranks.size() != world_)
    return fail(Code::invalid, "connect needs one (pid, fd) for each of " + number(world_) + " ranks, got " +
                                   number(ranks.size()));
  std::vector<Peer> peers(world_);
  for (std::uint32_t rank = 0; rank < world_; ++rank) {
    if (rank == rank_) continue;
    const auto [pid, fd] = ranks[rank];
    Peer& peer = peers[rank];
    const std::string who = "rank " + number(rank_) + " cannot reach the memory of rank " + number(rank) + " (pid " +
                            number(static_cast<std::uint64_t>(pid)) + "): ";
    const std::string hint =
        "\n\nhint: ranks must be processes of one user in one PID namespace of one host; use gloo otherwise";
    Status opened = open_shared(pid, fd, sizeof(Control), peer.page);
    if (!opened.ok()) return fail(Code::connect, who + opened.text + hint, opened.error, opened.path);
    peer.control = reinterpret_cast<Control*>(peer.page.data());
    const Control& control = *peer.control;
    if (control.magic != kMagic || control.token != token_ || control.rank != rank || control.world != world_ ||
        control.pid != pid) {
      return fail(Code::connect, who + "the file there is not its control page" + hint, EPROTO,
                  "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd));
    }
    peer.pid = pid;
    peer.watch = watch_process(pid);
  }
  std::lock_guard peers_lock(peers_mutex_);
  peers_ = std::move(peers);
  connected_ = true;
  return {};
}

Control& Mailbox::own_control() const { return *reinterpret_cast<Control*>(control_.map.data()); }

Control& Mailbox::control_of(std::uint32_t rank) const {
  return rank == rank_ ? own_control() : *peers_[rank].control;
}

Slot& Mailbox::slot_of(Control& control, std::uint64_t sequence, bool second) const {
  return control.slots[2 * (sequence % kRing) + (second ? 1 : 0)];
}

void Mailbox::abort(const std::string& text) {
  std::lock_guard lock(peers_mutex_);  // not mutex_, which whoever waits holds
  Control& control = own_control();
  const std::uint64_t ended = generation_.load() + 1;
  if (control.aborted.load() >= ended) return;  // the first reason stays
  const std::size_t length = std::min(text.size(), kTextBytes - 1);
  memcpy(control.text, text.data(), length);
  control.text[length] = 0;
  control.aborted.store(ended, std::memory_order_release);
  ring_peers();
}

bool Mailbox::aborted() const {
  std::lock_guard lock(peers_mutex_);
  const std::uint64_t ended = generation_.load() + 1;
  if (own_control().aborted.load() >= ended) return true;
  return std::any_of(peers_.begin(), peers_.end(), [&](const Peer& peer) {
    return peer.control != nullptr && peer.control->aborted.load() >= ended;
  });
}

std::vector<std::uint32_t> Mailbox::missing(std::uint64_t ticket) const {
  std::lock_guard lock(mutex_);
  std::vector<std::uint32_t> ranks;
  const auto found = tickets_.find(ticket);
  for (std::uint32_t rank = 0; found != tickets_.end() && rank < world_; ++rank)
    if (found->second.pending[rank]) ranks.push_back(rank);
  return ranks;
}

bool Mailbox::is_present(std::uint32_t rank) const {
  std::lock_guard lock(peers_mutex_);
  if (rank == rank_) return own_control().state.load() == kOpen;
  if (rank >= peers_.size() || peers_[rank].control == nullptr) return false;
  return peers_[rank].control->state.load() == kOpen && is_alive(peers_[rank].pid, peers_[rank].watch);
}

Status Mailbox::recover(std::uint64_t generation) {
  std::lock_guard lock(mutex_);
  if (closed_) return fail(Code::invalid, "the mailbox is closed");
  if (generation <= generation_.load() || generation >> (64 - kGenerationShift) != 0)
    return fail(Code::invalid,
                "generation " + number(generation) + " does not come after " + number(generation_.load()));
  tickets_.clear();
  for (const Posted& posted : posted_) {
    posted.slot->sequence.store(0);
    if (posted.block != nullptr) posted.block->busy = false;
  }
  posted_.clear();
  failed_ = false;
  std::lock_guard peers_lock(peers_mutex_);  // abort() compares with the generation
  next_sequence_ = generation << kGenerationShift;
  generation_.store(generation);
  return {};
}

void Mailbox::ring_peers() {
  for (Peer& peer : peers_)  // none once the mailbox is closed
    if (peer.control != nullptr) ring(*peer.control);
}

void Mailbox::close(double linger) {
  std::lock_guard lock(mutex_);
  if (closed_) return;
  closed_ = true;
  if (getpid() == pid_) {  // a forked child only lets go of its mappings
    const auto deadline = Clock::now() + std::chrono::duration<double>(linger);
    reclaim();
    while (!posted_.empty() && !failed_ && tickets_.empty() && Clock::now() < deadline) {
      // A rank that has closed has read what it wanted; stop when nobody is left to read, or someone gave up.
      const std::uint64_t ended = generation_.load() + 1;
      bool readers = false, aborted = own_control().aborted.load() >= ended;
      for (std::uint32_t rank = 0; rank < world_ && connected_; ++rank) {
        if (rank == rank_) continue;
        const std::uint32_t state = control_of(rank).state.load();
        aborted = aborted || control_of(rank).aborted.load() >= ended;
        readers = readers || (state == kOpen && is_alive(peers_[rank].pid, peers_[rank].watch));
      }
      if (aborted || !readers) break;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      reclaim();
    }
    own_control().state.store(kClosed);
    ring_peers();
  }
  tickets_.clear();
  posted_.clear();
  pool_.clear();
  std::lock_guard peers_lock(peers_mutex_);
  peers_.clear();
}

// ---------------------------------------------------------------------------------------------------------------
// Blocks

std::uint64_t Mailbox::bytes() const {
  std::lock_guard lock(mutex_);
  std::uint64_t total = control_.map.bytes();
  for (const auto& block : pool_) total += block->memory.map.bytes();
  return total;
}

// Blocks whose message all ranks have taken become free.
void Mailbox::reclaim() {
  std::erase_if(posted_, [&](const Posted& posted) {
    if (posted.slot->acks.load(std::memory_order_acquire) < world_) return false;
    if (posted.block != nullptr) posted.block->busy = false;
    return true;
  });
}

void Mailbox::retire_idle() {
  Control& control = own_control();
  std::erase_if(pool_, [&](const std::unique_ptr<Block>& block) {
    if (block->busy || messages_ - block->last_used < kIdleMessages) return false;
    const std::uint64_t count = control.retired.load();
    control.retired_ids[count % kRetiredRing].store(block->id);
    control.retired.store(count + 1);
    return true;
  });
}

Status Mailbox::acquire(std::size_t bytes, Block*& out) {
  reclaim();
  if (messages_ % 256 == 0) retire_idle();
  // Best fit, but a small message does not take a large block: the large message would then allocate another.
  const std::size_t largest = 8 * bytes + (std::size_t{1} << 20);
  Block* best = nullptr;
  for (const auto& block : pool_) {
    const std::size_t size = block->memory.map.bytes();
    if (block->busy || size < bytes || size > largest) continue;
    if (best == nullptr || size < best->memory.map.bytes()) best = block.get();
  }
  if (best == nullptr) {
    retire_idle();
    // Sizes in steps of an eighth, so that messages of similar size share blocks.
    const std::size_t size = align_up(bytes, std::max(kPage, std::bit_floor(bytes) / 8));
    auto block = std::make_unique<Block>();
    block->id = next_block_++;
    ZG_TRY(create_shared("zerograph-block", size, block->memory));
    best = block.get();
    pool_.push_back(std::move(block));
  }
  best->busy = true;
  best->last_used = messages_;
  out = best;
  return {};
}

// ---------------------------------------------------------------------------------------------------------------
// Sending

std::uint64_t Mailbox::slice(const Piece& piece, std::uint32_t rank) const {
  const std::uint64_t begin = std::min(piece.count, rank * piece.chunk);
  return std::min(piece.count - begin, piece.chunk);
}

std::size_t Mailbox::region_bytes(const std::vector<Piece>& pieces, std::uint32_t receiver) const {
  std::size_t bytes = 0;
  for (const Piece& piece : pieces) bytes += align_up(slice(piece, receiver) * size_of(piece.dtype), kAlign);
  return bytes;
}

std::size_t Mailbox::region(const std::vector<Piece>& pieces, std::uint32_t sender, std::uint32_t receiver) const {
  std::size_t offset = header_bytes(pieces.size());
  for (std::uint32_t rank = 0; rank < receiver; ++rank)
    if (rank != sender) offset += region_bytes(pieces, rank);
  return offset;
}

Status Mailbox::check_pieces(Kind kind, const std::vector<Piece>& pieces) const {
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    const std::string where = "piece " + number(i) + " of " + name_of(static_cast<std::uint32_t>(kind)) + ": ";
    if (static_cast<std::uint32_t>(piece.dtype) >= kDTypes || static_cast<std::uint32_t>(piece.source) >= kDTypes)
      return fail(Code::invalid, where + "unknown dtype");
    if (piece.count != 0 && piece.address == 0) return fail(Code::invalid, where + "null address");
    if (piece.dtype != piece.source && !(is_float(piece.dtype) && is_float(piece.source)))
      return fail(Code::invalid, where + "cannot cast " + name_of(piece.source) + " to " + name_of(piece.dtype));
    if (kind == Kind::gather) continue;
    if (!is_float(piece.dtype)) return fail(Code::invalid, where + "cannot reduce " + name_of(piece.dtype));
    if (piece.chunk < (piece.count + world_ - 1) / world_)
      return fail(Code::invalid, where + number(world_) + " chunks of " + number(piece.chunk) + " do not cover " +
                                     number(piece.count) + " elements");
  }
  return {};
}

Status Mailbox::open_ticket(Kind kind, std::uint64_t tag, std::vector<Piece> pieces, Ticket*& out) {
  if (closed_) return fail(Code::invalid, "the mailbox is closed");
  if (!connected_) return fail(Code::invalid, "the mailbox is not connected");
  ZG_TRY(check_pieces(kind, pieces));
  for (bool second : {false, true}) {
    const Slot& slot = slot_of(own_control(), next_sequence_, second);
    if (slot.sequence.load() != 0 && slot.acks.load() < world_)
      return fail(Code::invalid, "more than " + number(kRing) +
                                     " operations in flight\n\nhint: finish the ticket of each start_*");
  }
  const std::uint64_t sequence = next_sequence_++;
  Ticket& ticket = tickets_[sequence];
  ticket.sequence = sequence;
  ticket.kind = kind;
  ticket.tag = tag;
  ticket.pieces = std::move(pieces);
  ticket.pending.assign(world_, true);
  ticket.pending[rank_] = false;
  ticket.blocks.assign(world_, {});
  out = &ticket;
  return {};
}

// A block with room for the headers and `payload` bytes, headers written. An operation without pieces has none.
Status Mailbox::prepare(Ticket& ticket, std::size_t payload, bool second, Block*& block) {
  block = nullptr;
  ticket.own = nullptr;
  if (ticket.pieces.empty()) return {};
  Status status = acquire(header_bytes(ticket.pieces.size()) + payload, block);
  if (!status.ok()) {
    failed_ = true;
    abort("no memory for a message: " + status.text);
    return status;
  }
  ticket.own = block->memory.map.data();
  *reinterpret_cast<BlockHeader*>(ticket.own) = {token_, ticket.sequence, second, ticket.pieces.size()};
  PieceHeader* headers = piece_headers(ticket.own);
  for (std::size_t i = 0; i < ticket.pieces.size(); ++i) {
    const Piece& piece = ticket.pieces[i];
    headers[i] = {piece.count, piece.chunk, static_cast<std::uint64_t>(piece.dtype), 0};
  }
  return {};
}

void Mailbox::publish(const Ticket& ticket, Block* block) {
  Slot& slot = slot_of(own_control(), ticket.sequence, ticket.exchanging);
  slot.acks.store(0, std::memory_order_relaxed);
  slot.kind = static_cast<std::uint32_t>(ticket.kind);
  slot.tag = ticket.tag;
  slot.pieces = ticket.pieces.size();
  slot.block = block != nullptr ? block->id : 0;
  slot.bytes = block != nullptr ? block->memory.map.bytes() : 0;
  slot.fd = block != nullptr ? block->memory.file.get() : -1;
  slot.sequence.store(ticket.sequence + 1, std::memory_order_release);
  posted_.push_back({&slot, block});
  ++messages_;
  ring_peers();
}

Status Mailbox::start_gather(std::uint64_t tag, std::vector<Piece> pieces, std::uint64_t& sequence) {
  std::lock_guard lock(mutex_);
  Ticket* ticket;
  ZG_TRY(open_ticket(Kind::gather, tag, std::move(pieces), ticket));
  std::size_t payload = 0;
  for (const Piece& piece : ticket->pieces) payload += align_up(piece.count * size_of(piece.dtype), kAlign);
  Block* block;
  ZG_TRY(prepare(*ticket, payload, false, block));
  PieceHeader* headers = ticket->own != nullptr ? piece_headers(ticket->own) : nullptr;
  std::size_t offset = header_bytes(ticket->pieces.size());
  for (std::size_t i = 0; i < ticket->pieces.size(); ++i) {
    const Piece& piece = ticket->pieces[i];
    headers[i].offset = offset;
    kernels().convert(reinterpret_cast<const void*>(piece.address), piece.source, ticket->own + offset, piece.dtype,
                      piece.count);
    offset += align_up(piece.count * size_of(piece.dtype), kAlign);
  }
  publish(*ticket, block);
  sequence = ticket->sequence;
  return {};
}

Status Mailbox::start_reduce(std::uint64_t tag, std::vector<Piece> pieces, std::uint64_t& sequence) {
  return start_reduction(Kind::reduce, tag, std::move(pieces), sequence);
}

Status Mailbox::start_all_reduce(std::uint64_t tag, std::vector<Piece> pieces, std::uint64_t& sequence) {
  return start_reduction(Kind::all_reduce, tag, std::move(pieces), sequence);
}

Status Mailbox::start_reduction(Kind kind, std::uint64_t tag, std::vector<Piece> pieces, std::uint64_t& sequence) {
  std::lock_guard lock(mutex_);
  Ticket* ticket;
  ZG_TRY(open_ticket(kind, tag, std::move(pieces), ticket));
  const std::vector<Piece>& all = ticket->pieces;
  Block* block;
  ZG_TRY(prepare(*ticket, region(all, rank_, world_) - header_bytes(all.size()), false, block));
  for (std::uint32_t rank = 0; rank < world_; ++rank) {
    if (rank == rank_) continue;
    std::byte* to = ticket->own + region(all, rank_, rank);
    for (const Piece& piece : all) {
      const std::size_t size = size_of(piece.dtype), bytes = slice(piece, rank) * size;
      if (bytes == 0) continue;
      memcpy(to, reinterpret_cast<const std::byte*>(piece.address) + rank * piece.chunk * size, bytes);
      to += align_up(bytes, kAlign);
    }
  }
  publish(*ticket, block);
  sequence = ticket->sequence;
  return {};
}

// ---------------------------------------------------------------------------------------------------------------
// Receiving

Status Mailbox::find_ticket(std::uint64_t sequence, Kind kind, std::size_t outs, Ticket*& out) {
  if (closed_) return fail(Code::invalid, "the mailbox is closed");
  const auto found = tickets_.find(sequence);
  const std::string name = name_of(static_cast<std::uint32_t>(kind));
  if (found == tickets_.end() || found->second.kind != kind)
    return fail(Code::invalid, "no " + name + " with ticket " + number(sequence) + " is in flight");
  if (found->second.pieces.size() != outs)
    return fail(Code::invalid, name + " " + number(sequence) + " has " + number(found->second.pieces.size()) +
                                   " pieces, but " + number(outs) + " outputs were given");
  out = &found->second;
  return {};
}

Status Mailbox::check_outs(const Ticket& ticket, const std::vector<ReduceOut>& outs) const {
  for (std::size_t i = 0; i < outs.size(); ++i) {
    const bool empty = ticket.kind == Kind::reduce ? slice(ticket.pieces[i], rank_) == 0 : ticket.pieces[i].count == 0;
    if (!is_float(outs[i].dtype) || (outs[i].address == 0 && !empty))
      return fail(Code::invalid, "output " + number(i) + " needs an address and a floating-point dtype");
  }
  return {};
}

void Mailbox::acknowledge(const Ticket& ticket, std::uint32_t rank) {
  slot_of(control_of(rank), ticket.sequence, ticket.exchanging).acks.fetch_add(1, std::memory_order_release);
}

void Mailbox::close_ticket(Ticket& ticket) { tickets_.erase(ticket.sequence); }

bool Mailbox::posted_by_all(const Ticket& ticket) const {
  for (std::uint32_t rank = 0; rank < world_; ++rank)
    if (ticket.pending[rank] && !posted_by(rank, ticket)) return false;
  return true;
}

bool Mailbox::posted_by(std::uint32_t rank, const Ticket& ticket) const {
  const Slot& slot = slot_of(control_of(rank), ticket.sequence, ticket.exchanging);
  return slot.sequence.load(std::memory_order_acquire) == ticket.sequence + 1;
}

Status Mailbox::check_peers(const Ticket& ticket) const {
  for (std::uint32_t rank = 0; rank < world_; ++rank) {
    if (rank == rank_) continue;
    const Peer& peer = peers_[rank];
    const std::uint32_t state = peer.control->state.load(std::memory_order_acquire);
    const std::string who = "rank " + number(rank) + " (pid " + number(static_cast<std::uint64_t>(peer.pid)) + ") ";
    const std::string what = " while rank " + number(rank_) + " waited in " +
                             name_of(static_cast<std::uint32_t>(ticket.kind)) + " " + number(ticket.sequence) +
                             " (tag " + number(ticket.tag) + ")";
    if (peer.control->aborted.load(std::memory_order_acquire) > generation_.load())
      return fail(Code::peer, who + "failed" + what + ": " + std::string(peer.control->text));
    if (!ticket.pending[rank]) continue;
    const char* gone = nullptr;
    if (state == kClosed) gone = "closed its mailbox";
    else if (!is_alive(peer.pid, peer.watch)) gone = "ended";
    if (gone != nullptr) {
      if (posted_by(rank, ticket)) continue;
      return fail(Code::peer, who + gone + what + "\n\nhint: its own output says why");
    }
  }
  return {};
}

Status Mailbox::describe_mismatch(const Ticket& ticket, std::uint32_t rank, const Slot& slot,
                                  const std::string& detail) const {
  return fail(Code::mismatch,
              "operation " + number(ticket.sequence) + " differs between ranks: rank " + number(rank_) + " runs " +
                  name_of(static_cast<std::uint32_t>(ticket.kind)) + " (tag " + number(ticket.tag) + ", " +
                  number(ticket.pieces.size()) + " pieces), rank " + number(rank) + " runs " + name_of(slot.kind) +
                  " (tag " + number(slot.tag) + ", " + number(slot.pieces) + " pieces)" + detail +
                  "\n\nhint: all ranks must run the same collectives in the same order with the same sizes");
}

// Maps the block of a published message.
Status Mailbox::open_block(const Ticket& ticket, std::uint32_t rank, const Slot& slot,
                           std::shared_ptr<Mapping>& block) const {
  const Peer& peer = peers_[rank];
  Mapping map;
  const Status opened = open_shared(peer.pid, slot.fd, slot.bytes, map);
  if (opened.ok()) {
    block = std::make_shared<Mapping>(std::move(map));
    return {};
  }
  const std::string message = "its message for " + std::string(name_of(slot.kind)) + " " + number(ticket.sequence) +
                              " (tag " + number(ticket.tag) + ")";
  const std::string who = "rank " + number(rank) + " (pid " + number(static_cast<std::uint64_t>(peer.pid)) + ") ";
  if (!is_alive(peer.pid, peer.watch) || peer.control->state.load() != kOpen)
    return fail(Code::peer, who + "ended before " + message + " was read\n\n" +
                                "hint: close() waits for the readers; end a program with it or a barrier");
  return fail(Code::peer, who + "lost " + message + ": " + opened.path + " " + opened.text + kClosedByOthers,
              opened.error, opened.path);
}

// The published message of `rank`: compared with the ticket, its block mapped.
Status Mailbox::take_message(Ticket& ticket, std::uint32_t rank, std::shared_ptr<Mapping>& block) {
  Peer& peer = peers_[rank];
  const Slot& slot = slot_of(*peer.control, ticket.sequence, ticket.exchanging);
  block = nullptr;
  if (slot.kind != static_cast<std::uint32_t>(ticket.kind) || slot.tag != ticket.tag ||
      slot.pieces != ticket.pieces.size())
    return describe_mismatch(ticket, rank, slot, "");
  if (slot.fd < 0) return {};

  // Drop what the peer has closed since; after too long a gap in the list, everything.
  const std::uint64_t retired = peer.control->retired.load(std::memory_order_acquire);
  if (retired - peer.retired_seen > kRetiredRing / 2) peer.blocks.clear();
  else
    for (std::uint64_t i = peer.retired_seen; i < retired; ++i)
      peer.blocks.erase(peer.control->retired_ids[i % kRetiredRing].load());
  peer.retired_seen = retired;

  const auto found = peer.blocks.find(slot.block);
  if (found != peer.blocks.end()) block = found->second;
  else ZG_TRY(open_block(ticket, rank, slot, block));
  const std::byte* data = block->data();
  const BlockHeader& header = *reinterpret_cast<const BlockHeader*>(data);
  if (header.token != token_ || header.sequence != ticket.sequence || header.exchanging != ticket.exchanging ||
      header.pieces != ticket.pieces.size())
    return fail(Code::peer, "what /proc/" + std::to_string(peer.pid) + "/fd/" + std::to_string(slot.fd) +
                                " refers to is not the message of rank " + number(rank) + " for " + name_of(slot.kind) +
                                " " + number(ticket.sequence) + " (tag " + number(ticket.tag) + ")" + kClosedByOthers);
  if (found == peer.blocks.end()) peer.blocks.emplace(slot.block, block);
  const PieceHeader* headers = piece_headers(data);
  for (std::size_t i = 0; i < ticket.pieces.size(); ++i) {
    const Piece& own = ticket.pieces[i];
    const PieceHeader& theirs = headers[i];
    const bool same_size = ticket.kind == Kind::gather || (own.count == theirs.count && own.chunk == theirs.chunk);
    if (same_size && theirs.dtype == static_cast<std::uint64_t>(own.dtype)) continue;
    const auto dtype = static_cast<DType>(theirs.dtype % kDTypes);
    return describe_mismatch(ticket, rank, slot,
                             ": piece " + number(i) + " has " + number(own.count) + " elements of " +
                                 zg::name_of(own.dtype) + " in chunks of " + number(own.chunk) + " here and " +
                                 number(theirs.count) + " of " + zg::name_of(dtype) + " in chunks of " +
                                 number(theirs.chunk) + " there");
  }
  return {};
}

template <typename Take>
Status Mailbox::collect(Ticket& ticket, double timeout, Take take) {
  // A peer that is about to post needs a core: spin only when there is one for every rank.
  static const bool crowded = std::thread::hardware_concurrency() < world_;
  const int spins = crowded ? 20 : 2000, yields = crowded ? 20 : 50;
  Control& own = own_control();
  const auto start = Clock::now();
  auto checked = start;
  for (int round = 0;; ++round) {
    const std::uint32_t seen = own.doorbell.load();
    bool waiting = false, progress = false;
    for (std::uint32_t rank = 0; rank < world_; ++rank) {
      if (!ticket.pending[rank]) continue;
      if (!posted_by(rank, ticket)) {
        waiting = true;
        continue;
      }
      std::shared_ptr<Mapping> block;
      Status status = take_message(ticket, rank, block);
      if (status.ok()) status = take(rank, block);
      if (!status.ok()) {
        failed_ = true;
        return status;
      }
      ticket.pending[rank] = false;
      progress = true;
    }
    if (!waiting) return {};
    if (progress) round = 0;
    if (round < spins) {
      pause();
      continue;
    }
    if (round < spins + yields) {
      sched_yield();
    } else {
      own.sleeping.store(1);
      // Anything posted since `seen` was read has changed the word, and the wait returns at once.
      futex_wait(own.doorbell, seen, std::chrono::milliseconds(20));
      own.sleeping.store(0);
    }
    const auto now = Clock::now();
    const bool aborted = own.doorbell.load() != seen;
    if (now - checked < kCheckInterval && !aborted && round != spins) continue;
    Status peers = check_peers(ticket);
    // A rank may post all that this one waits for and fail in what follows: this operation is complete.
    if (!peers.ok() && posted_by_all(ticket)) continue;
    if (!peers.ok()) {
      failed_ = true;
      return peers;
    }
    if (now - checked >= kCheckInterval) {
      checked = now;
      if (interrupted_ != nullptr && interrupted_()) return fail(Code::interrupted, "interrupted");
    }
    if (std::chrono::duration<double>(now - start).count() > timeout) {
      std::string missing;
      for (std::uint32_t rank = 0; rank < world_; ++rank)
        if (ticket.pending[rank]) missing += (missing.empty() ? "" : ", ") + number(rank);
      return fail(Code::timeout, "rank " + number(rank_) + " waited " + std::to_string(timeout) + " s in " +
                                     name_of(static_cast<std::uint32_t>(ticket.kind)) + " " +
                                     number(ticket.sequence) + " (tag " + number(ticket.tag) + ") for rank " + missing +
                                     "\n\nhint: that rank is slow, stuck, or runs fewer collectives");
    }
  }
}

Status Mailbox::finish_gather(std::uint64_t sequence, const std::vector<GatherOut>& outs, double timeout) {
  std::lock_guard lock(mutex_);
  Ticket* ticket;
  ZG_TRY(find_ticket(sequence, Kind::gather, outs.size(), ticket));
  const auto place = [&](std::uint32_t rank, const std::byte* payload) -> Status {
    const PieceHeader* headers = payload != nullptr ? piece_headers(payload) : nullptr;
    for (std::size_t i = 0; i < outs.size(); ++i) {
      if (headers[i].count > outs[i].chunk)
        return fail(rank == rank_ ? Code::invalid : Code::mismatch,
                    "gather " + number(sequence) + " (tag " + number(ticket->tag) + "), piece " + number(i) + ": rank " +
                        number(rank) + " posted " + number(headers[i].count) + " elements, but the chunk on rank " +
                        number(rank_) + " is " + number(outs[i].chunk));
      const std::size_t size = size_of(ticket->pieces[i].dtype);
      memcpy(reinterpret_cast<std::byte*>(outs[i].address) + rank * outs[i].chunk * size, payload + headers[i].offset,
             headers[i].count * size);
    }
    return {};
  };
  // Its own part while the peers are still copying theirs; again after a timeout is harmless.
  ZG_TRY(place(rank_, ticket->own));
  ZG_TRY(collect(*ticket, timeout, [&](std::uint32_t rank, const Payload& block) -> Status {
    ZG_TRY(place(rank, data_of(block)));
    acknowledge(*ticket, rank);
    return {};
  }));
  acknowledge(*ticket, rank_);
  close_ticket(*ticket);
  return {};
}

// The sum over ranks of this rank's slice of every piece; all blocks are there.
Status Mailbox::reduce_own(Ticket& ticket, const std::vector<void*>& outs, const std::vector<DType>& dtypes,
                           double scale) {
  std::vector<const void*> sources(world_);
  std::vector<const std::byte*> next(world_, nullptr);
  for (std::uint32_t rank = 0; rank < world_; ++rank)
    if (rank != rank_ && ticket.blocks[rank] != nullptr)
      next[rank] = ticket.blocks[rank]->data() + region(ticket.pieces, rank, rank_);
  for (std::size_t i = 0; i < ticket.pieces.size(); ++i) {
    const Piece& piece = ticket.pieces[i];
    const std::size_t size = size_of(piece.dtype);
    const std::uint64_t count = slice(piece, rank_);
    if (count == 0) continue;
    for (std::uint32_t rank = 0; rank < world_; ++rank) {
      if (rank == rank_) {
        sources[rank] = reinterpret_cast<const std::byte*>(piece.address) + rank * piece.chunk * size;
      } else {
        sources[rank] = next[rank];
        next[rank] += align_up(count * size, kAlign);
      }
    }
    kernels().reduce(sources.data(), world_, piece.dtype, count, scale, outs[i], dtypes[i]);
  }
  for (std::uint32_t rank = 0; rank < world_; ++rank) acknowledge(ticket, rank);
  return {};
}

Status Mailbox::finish_reduce(std::uint64_t sequence, const std::vector<ReduceOut>& outs, double scale,
                              double timeout) {
  std::lock_guard lock(mutex_);
  Ticket* ticket;
  ZG_TRY(find_ticket(sequence, Kind::reduce, outs.size(), ticket));
  ZG_TRY(check_outs(*ticket, outs));
  ZG_TRY(collect(*ticket, timeout, [&](std::uint32_t rank, const Payload& block) -> Status {
    ticket->blocks[rank] = block;
    return {};
  }));
  std::vector<void*> addresses;
  std::vector<DType> dtypes;
  for (const ReduceOut& out : outs) {
    addresses.push_back(reinterpret_cast<void*>(out.address));
    dtypes.push_back(out.dtype);
  }
  ZG_TRY(reduce_own(*ticket, addresses, dtypes, scale));
  close_ticket(*ticket);
  return {};
}

Status Mailbox::finish_all_reduce(std::uint64_t sequence, const std::vector<ReduceOut>& outs, double scale,
                                  double timeout) {
  std::lock_guard lock(mutex_);
  Ticket* ticket;
  ZG_TRY(find_ticket(sequence, Kind::all_reduce, outs.size(), ticket));
  ZG_TRY(check_outs(*ticket, outs));
  const auto place = [&](std::uint32_t rank, const std::byte* payload) -> Status {
    const PieceHeader* headers = payload != nullptr ? piece_headers(payload) : nullptr;
    for (std::size_t i = 0; i < outs.size(); ++i) {
      const std::size_t size = size_of(outs[i].dtype);
      const Piece& piece = ticket->pieces[i];
      const std::uint64_t count = slice(piece, rank);
      if (count != 0)
        memcpy(reinterpret_cast<std::byte*>(outs[i].address) + rank * piece.chunk * size, payload + headers[i].offset,
               count * size);
    }
    return {};
  };

  if (!ticket->exchanging) {
    ZG_TRY(collect(*ticket, timeout, [&](std::uint32_t rank, const Payload& block) -> Status {
      ticket->blocks[rank] = block;
      return {};
    }));
    // The own slice goes into the second message, and from there to `outs`, which may be the inputs.
    std::size_t payload = 0;
    for (std::size_t i = 0; i < outs.size(); ++i)
      payload += align_up(slice(ticket->pieces[i], rank_) * size_of(outs[i].dtype), kAlign);
    Block* block;
    ZG_TRY(prepare(*ticket, payload, true, block));
    PieceHeader* headers = ticket->own != nullptr ? piece_headers(ticket->own) : nullptr;
    std::size_t offset = header_bytes(outs.size());
    std::vector<void*> addresses;
    std::vector<DType> dtypes;
    for (std::size_t i = 0; i < outs.size(); ++i) {
      headers[i].dtype = static_cast<std::uint64_t>(outs[i].dtype);
      headers[i].offset = offset;
      addresses.push_back(ticket->own + offset);
      dtypes.push_back(outs[i].dtype);
      offset += align_up(slice(ticket->pieces[i], rank_) * size_of(outs[i].dtype), kAlign);
    }
    ZG_TRY(reduce_own(*ticket, addresses, dtypes, scale));
    ticket->exchanging = true;
    ticket->pending.assign(world_, true);
    ticket->pending[rank_] = false;
    // From here on the message describes the results: `dtype` of a piece is that of its output.
    for (std::size_t i = 0; i < outs.size(); ++i) ticket->pieces[i].dtype = outs[i].dtype;
    publish(*ticket, block);
    ZG_TRY(place(rank_, ticket->own));
  }
  ZG_TRY(collect(*ticket, timeout, [&](std::uint32_t rank, const Payload& block) -> Status {
    ZG_TRY(place(rank, data_of(block)));
    acknowledge(*ticket, rank);
    return {};
  }));
  acknowledge(*ticket, rank_);
  close_ticket(*ticket);
  return {};
}

Status Mailbox::barrier(double timeout) {
  std::lock_guard lock(mutex_);
  Ticket* ticket;
  ZG_TRY(open_ticket(Kind::barrier, 0, {}, ticket));
  publish(*ticket, nullptr);
  Status status = collect(*ticket, timeout, [&](std::uint32_t rank, const Payload&) -> Status {
    acknowledge(*ticket, rank);
    return {};
  });
  if (status.ok()) acknowledge(*ticket, rank_);
  close_ticket(*ticket);
  return status;
}

}  // namespace zg
