// Collectives between processes of one host through shared memory.
//
// Every rank owns a control page (who it is, a ring of message slots) and a pool of payload blocks, all anonymous
// memory. start_* copies this rank's data into a block of its own and publishes a slot; it never waits for anyone.
// finish_* waits until the peers' slots of the same operation are there and reads their blocks. The calling thread
// does all the work: there are no threads here.
//
// Operations are numbered per mailbox by start_*, and ranks run the same sequence. A slot carries kind, tag and the
// sizes, so a rank whose sequence differs gets an error that names the difference, and so do its peers.
//
// A block is found as /proc/PID/fd/N, and N may have become another file's if the sender's process closed it. Each
// block therefore begins with the mailbox's token and the operation's number, compared where it is read.
//
// Errors. abort() ends a generation: whoever waits in it, or will, raises. Once every rank has stopped working in it
// (the caller knows; see runtime/comm/rendezvous.py), each calls recover() with the next generation: what was in flight is
// dropped, and numbers go on in a range of their own, so that no message of an older generation is taken for a new one.
//
// Memory. A block returns to the pool when all ranks have read it, and is used again by best fit. Blocks unused for
// kIdleMessages messages are closed; peers drop their mappings with the next message they read.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "dtype.h"
#include "memory.h"
#include "status.h"

namespace zg {

enum class Kind : std::uint32_t { gather = 1, reduce = 2, all_reduce = 3, barrier = 4 };

// One buffer of an operation. gather: `count` elements of `source` type, sent as `dtype`; `chunk` is unused.
// reduce and all_reduce: `count` elements of `dtype`, of which rank r gets [r * chunk, min((r + 1) * chunk, count)).
struct Piece {
  std::uint64_t address;
  std::uint64_t count;
  std::uint64_t chunk;
  DType dtype;
  DType source;
};

struct GatherOut {
  std::uint64_t address;  // room for world * chunk elements of the piece's dtype
  std::uint64_t chunk;
};

struct ReduceOut {
  std::uint64_t address;
  DType dtype;
};

// Called now and then while waiting; true ends the wait with Code::interrupted.
using Interrupted = bool (*)();

struct Control;
struct Slot;

class Mailbox {
 public:
  static constexpr std::uint64_t kRing = 2048;          // operations in flight
  static constexpr std::uint64_t kIdleMessages = 1024;  // a block unused for so many messages is closed

  static Status create(std::uint32_t rank, std::uint32_t world, std::uint64_t token, Interrupted interrupted,
                       std::unique_ptr<Mailbox>& out);
  ~Mailbox();

  int control_fd() const { return control_.file.get(); }
  pid_t pid() const { return pid_; }
  std::uint64_t bytes() const;  // shared memory this rank holds now

  // (pid, control_fd) of every rank, in rank order.
  Status connect(const std::vector<std::pair<pid_t, int>>& ranks);

  Status start_gather(std::uint64_t tag, std::vector<Piece> pieces, std::uint64_t& ticket);
  Status finish_gather(std::uint64_t ticket, const std::vector<GatherOut>& outs, double timeout);
  Status start_reduce(std::uint64_t tag, std::vector<Piece> pieces, std::uint64_t& ticket);
  Status finish_reduce(std::uint64_t ticket, const std::vector<ReduceOut>& outs, double scale, double timeout);
  Status start_all_reduce(std::uint64_t tag, std::vector<Piece> pieces, std::uint64_t& ticket);
  Status finish_all_reduce(std::uint64_t ticket, const std::vector<ReduceOut>& outs, double scale, double timeout);
  Status barrier(double timeout);

  // Ends the generation: peers that wait in it, or will, for a message this rank has not posted raise with `text`.
  // Safe from any thread, while others wait, connect or close.
  void abort(const std::string& text);

  // Whether a rank, this one included, has ended the generation.
  bool aborted() const;

  // The ranks whose part of an operation in flight has not come, after a timeout.
  std::vector<std::uint32_t> missing(std::uint64_t ticket) const;

  // False once `rank` has ended or closed its mailbox.
  bool is_present(std::uint32_t rank) const;

  // Drops everything in flight and goes on in `generation`, which must be a later one. To be called when no rank works
  // in the current one any more; ranks may then start operations of the new one before others have called this.
  Status recover(std::uint64_t generation);

  // Waits up to `linger` seconds until the peers have read what was posted (not after an error), then lets go.
  void close(double linger);

 private:
  struct Block {
    std::uint64_t id = 0;
    SharedMemory memory;
    std::uint64_t last_used = 0;  // message count
    bool busy = false;
  };
  struct Posted {
    Slot* slot;
    Block* block;
  };
  struct Peer {
    pid_t pid = 0;
    FileDescriptor watch;
    Mapping page;
    Control* control = nullptr;
    std::unordered_map<std::uint64_t, std::shared_ptr<Mapping>> blocks;
    std::uint64_t retired_seen = 0;
  };
  struct Ticket {
    std::uint64_t sequence;
    Kind kind;
    std::uint64_t tag;
    std::vector<Piece> pieces;
    std::byte* own = nullptr;   // payload of this rank's message
    std::vector<bool> pending;  // ranks whose message of this phase has not been taken
    std::vector<std::shared_ptr<Mapping>> blocks;  // theirs, by rank: mapped for as long as the ticket is open
    bool exchanging = false;  // all_reduce: the second phase
  };

  Mailbox(std::uint32_t rank, std::uint32_t world, std::uint64_t token, Interrupted interrupted);

  Status check_pieces(Kind kind, const std::vector<Piece>& pieces) const;
  Status start_reduction(Kind kind, std::uint64_t tag, std::vector<Piece> pieces, std::uint64_t& ticket);
  Status open_ticket(Kind kind, std::uint64_t tag, std::vector<Piece> pieces, Ticket*& out);
  Status find_ticket(std::uint64_t sequence, Kind kind, std::size_t outs, Ticket*& out);
  Status check_outs(const Ticket& ticket, const std::vector<ReduceOut>& outs) const;
  void close_ticket(Ticket& ticket);

  Status acquire(std::size_t bytes, Block*& out);
  void reclaim();
  void retire_idle();
  Status prepare(Ticket& ticket, std::size_t payload, bool second, Block*& block);
  void publish(const Ticket& ticket, Block* block);
  void ring_peers();

  // Waits for the ranks pending in the ticket and calls take(rank, block) for each as it arrives.
  template <typename Take>
  Status collect(Ticket& ticket, double timeout, Take take);
  Status take_message(Ticket& ticket, std::uint32_t rank, std::shared_ptr<Mapping>& block);
  Status open_block(const Ticket& ticket, std::uint32_t rank, const Slot& slot, std::shared_ptr<Mapping>& block) const;
  Status describe_mismatch(const Ticket& ticket, std::uint32_t rank, const Slot& slot,
                           const std::string& detail) const;
  bool posted_by(std::uint32_t rank, const Ticket& ticket) const;
  bool posted_by_all(const Ticket& ticket) const;
  Status check_peers(const Ticket& ticket) const;
  Status reduce_own(Ticket& ticket, const std::vector<void*>& outs, const std::vector<DType>& dtypes, double scale);
  void acknowledge(const Ticket& ticket, std::uint32_t rank);

  Control& own_control() const;
  Control& control_of(std::uint32_t rank) const;
  Slot& slot_of(Control& control, std::uint64_t sequence, bool second) const;
  std::uint64_t slice(const Piece& piece, std::uint32_t rank) const;
  // Where the slices for `receiver` begin in the payload that `sender` posted for a reduction.
  std::size_t region(const std::vector<Piece>& pieces, std::uint32_t sender, std::uint32_t receiver) const;
  std::size_t region_bytes(const std::vector<Piece>& pieces, std::uint32_t receiver) const;

  std::uint32_t rank_, world_;
  std::uint64_t token_;
  Interrupted interrupted_;
  pid_t pid_;
  bool connected_ = false, closed_ = false, failed_ = false;
  SharedMemory control_;
  mutable std::mutex peers_mutex_;  // around changes of the list, which hold mutex_ too, and around reads that do not
  std::vector<Peer> peers_;
  std::vector<std::unique_ptr<Block>> pool_;
  std::vector<Posted> posted_;
  std::unordered_map<std::uint64_t, Ticket> tickets_;
  std::uint64_t next_sequence_ = 0, next_block_ = 1, messages_ = 0;
  std::atomic<std::uint64_t> generation_ = 0;
  mutable std::mutex mutex_;
};

}  // namespace zg
