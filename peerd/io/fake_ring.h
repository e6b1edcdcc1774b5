// Ring over a network in memory, for tests: same contract as UringRing, driven by a seed.
//
// Stream sockets with listen and connect by address, all inside one FakeRing. What may happen on a
// real network happens here often, in an order that the seed decides: transfers of a few bytes,
// completions in any order, zero-copy notices that come late, a cancelled operation that succeeds
// after all. Faults are asked for by connection: cut after a byte, stalled.
//
// Time is the ring's own: it stands still while there is something to do, and jumps to the next
// timer (or the end of the wait) when there is not, so a test never sleeps.
//
// Memory that an operation owns is watched: bytes of receives are overwritten with junk at the
// start and must still be junk at the end where nothing was received; bytes of sends must be the
// same from the start to the last callback. A violation ends the process with a message.
//
// Threads: as Ring's. Plain sockets of the system do not work here.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/prng.h"
#include "peerd/io/ring.h"

namespace longhaul::peerd {

struct FakeRingOptions {
  uint64_t seed = 1;
  size_t stream_bytes_max = 64 << 10;  // sent and not received yet, per direction
  bool partial = true;                 // transfers of random lengths; false: as much as fits
  bool send_zero_copy = true;
  bool zero_copy_copies = false;  // notices say that the bytes were copied
  int zero_copy_error = 0;        // errno with which SendZeroCopy() ends at once
  bool registered_buffers = true;
  size_t registered_buffers_max = SIZE_MAX;
};

class FakeRing final : public Ring, private Sockets {
 public:
  explicit FakeRing(FakeRingOptions options);
  ~FakeRing() override;

  // ---- faults and views for tests

  // Connections are numbered from 0 in the order in which they are made. May be called before that.
  // Both ends fail with ECONNRESET once one end (the dialer's, or the other) has sent
  // `after_bytes`: that end at once, the other one when it has read them, or before if the first
  // one closes.
  void CutConnection(int connection, bool from_dialer, uint64_t after_bytes);
  // The lowest bit of the byte that one end sends as its `at`-th, from 0, arrives changed. Before
  // it is sent.
  void FlipBit(int connection, bool from_dialer, uint64_t at);
  // What TCP is to have measured of every connection; none at first. Bytes are counted as they are.
  void SetDelivery(const TcpDelivery& delivery) { delivery_ = delivery; }
  // Nothing arrives in either direction any more, and nobody is told; false: it goes on.
  void StallConnection(int connection, bool stalled);
  // A path on which packets of more than `bytes` vanish: from such a send on nothing arrives in its
  // direction, unless the connection was dialled with segments of at most `bytes`. 0: no more.
  void SwallowLarge(size_t bytes) { swallow_above_ = bytes; }
  // What becomes of SendZeroCopy() from now on, as FakeRingOptions say it for the beginning.
  void SetZeroCopy(bool copies, int error) {
    options_.zero_copy_copies = copies;
    options_.zero_copy_error = error;
  }
  size_t zero_copy_sends() const { return zero_copy_sends_; }
  // Connections to this address are refused, as if its process were gone.
  void Refuse(const std::string& address, bool refused);
  // Connections to this address neither come about nor fail, as if its host were off.
  void Ignore(const std::string& address, bool ignored);
  // Connect() calls from now on come from this host (numeric); at first, from where they go to.
  void DialFrom(const std::string& host);
  int connections() const { return static_cast<int>(links_.size()); }
  // Bytes that one end of a connection has sent.
  uint64_t BytesSent(int connection, bool by_dialer) const;
  // Two connected sockets.
  std::pair<int, int> Pair();
  size_t operations() const { return ops_.size(); }
  size_t open_sockets() const { return sockets_.size(); }
  // Congestion controls of all connected sockets.
  std::set<std::string> congestions() const;
  // Sockets that were set up for a long way, those that are closed included.
  size_t long_ways() const { return long_ways_.size(); }
  // Memory that is registered now, by buffer: where it begins and how long it is.
  const std::map<int, std::pair<const void*, size_t>>& registered() const { return registered_; }
  // RegisterBuffer() finds memory from here on untouched; nullptr: none.
  void SetUntouched(const void* from) { untouched_ = from; }
  // Lets time pass without running anything.
  void AdvanceTime(int64_t us) { now_ = now_ + us; }

  // ---- Ring

  IoId Accept(int listen_fd, IoCallback done) override;
  IoId Connect(int fd, const sockaddr* address, socklen_t length, IoCallback done) override;
  IoId Recv(int fd, void* data, size_t bytes, bool wait_all, IoCallback done) override;
  IoId RecvMsg(int fd, msghdr* message, IoCallback done) override;
  IoId Send(int fd, const void* data, size_t bytes, bool wait_all, IoCallback done) override;
  IoId SendMsg(int fd, const msghdr* message, bool wait_all, IoCallback done) override;
  IoId SendZeroCopy(int fd, const void* data, size_t bytes, int buffer, IoCallback done) override;
  IoId Timeout(Tick at, IoCallback done) override;
  void BeforeSubmit(absl::AnyInvocable<void()> run) override;
  IoId PollIn(int fd, IoCallback done) override;
  void Cancel(IoId id) override;
  absl::StatusOr<int> RegisterBuffer(const void* data, size_t bytes) override;
  void UnregisterBuffer(int buffer) override;
  absl::Status RunOnce(Tick until) override;
  void Wake() override;
  Tick Now() const override { return now_; }
  const RingFeatures& features() const override { return features_; }
  Sockets& sockets() override { return *this; }

 private:
  // One direction of a connection.
  struct Stream {
    std::string data;  // sent and not received: from `head` on
    size_t head = 0;
    uint64_t written = 0;
    uint64_t read = 0;
    uint64_t cut_after = UINT64_MAX;
    uint64_t flip_at = UINT64_MAX;
    bool ended = false;        // the writer will send no more
    bool reader_gone = false;  // the reader has closed
    bool cut = false;          // ECONNRESET: for the writer now, for the reader after `data`
    bool stalled = false;
    uint32_t segment_bytes_max = UINT32_MAX;

    size_t size() const { return data.size() - head; }
    void Drop(size_t bytes);
  };
  using StreamRef = std::shared_ptr<Stream>;
  struct Socket {
    SocketAddress local;
    SocketAddress remote;
    bool listening = false;
    bool closing = false;  // closed by its owner, kept by operations in flight
    bool abort = false;
    std::string congestion;
    uint32_t segment_bytes_max = UINT32_MAX;
    int holds = 0;
    std::deque<int> backlog;
    StreamRef in;
    StreamRef out;
  };
  struct Link {
    StreamRef from_dialer;
    StreamRef to_dialer;
  };
  struct Fault {
    uint64_t cut_from_dialer = UINT64_MAX;
    uint64_t cut_to_dialer = UINT64_MAX;
    bool stalled = false;
  };
  enum class Kind { kAccept, kConnect, kRecv, kSend, kSendZeroCopy, kNotice, kTimeout, kPollIn };
  struct Op {
    Kind kind;
    int fd = -1;
    std::vector<iovec> parts;
    size_t bytes = 0;
    size_t done = 0;
    bool wait_all = false;
    bool cancelled = false;
    std::string snapshot;   // of what is being sent
    SocketAddress address;  // connect
    SocketAddress from;     // the same
    msghdr* message = nullptr;
    StreamRef out;           // notice
    uint64_t notice_at = 0;  // notice: bytes that the reader must have read
    Tick at;
    IoCallback callback;
  };

  // Sockets
  absl::StatusOr<int> Listen(const SocketAddress& address) override;
  absl::StatusOr<SocketAddress> LocalAddress(int fd) override;
  absl::StatusOr<SocketAddress> PeerAddress(int fd) override;
  absl::StatusOr<int> Open(int family) override;
  absl::Status Tune(int fd, const StreamTuning& tuning) override;
  void SetLongWay(int fd) override { long_ways_.insert(fd); }
  std::optional<TcpDelivery> Delivery(int fd) override;
  void ShutdownSend(int fd) override;
  void Close(int fd) override;
  void Abort(int fd) override;

  IoId Start(Op op);
  IoId StartTransfer(Kind kind, int fd, std::vector<iovec> parts, bool wait_all, IoCallback done);
  int NewSocket();
  Socket* Find(int fd);
  void Hold(const Op& op, int change);
  void MaybeRelease(int fd);
  void Join(Socket* dialer, Socket* acceptor);
  Socket* FindListener(const SocketAddress& address);
  size_t Room(const Stream& stream) const;
  bool HasNews(const Stream& in) const;
  bool CanProgress(const Op& op);
  void Progress(IoId id, Op* op);
  void ProgressCancelled(IoId id, Op* op);
  void ProgressAccept(IoId id, Op* op);
  void ProgressConnect(IoId id, Op* op);
  void ProgressRecv(IoId id, Op* op);
  void ProgressSend(IoId id, Op* op);
  void Finish(IoId id, int value);
  void Report(IoId id, IoResult result);
  size_t Amount(size_t bytes);
  uint8_t* At(const Op& op, size_t offset, size_t* contiguous);
  void CheckSend(const Op& op, size_t from, size_t bytes);
  void CheckRecv(const Op& op);
  bool Step();
  bool JumpTo(Tick until);

  FakeRingOptions options_;
  size_t swallow_above_ = 0;
  size_t zero_copy_sends_ = 0;
  RingFeatures features_;
  Prng random_;
  Tick now_{Seconds(1000)};
  IoId next_id_ = 1;
  int next_fd_ = 1 << 20;  // a real system call on one of these fails
  uint16_t next_port_ = 40000;
  int next_buffer_ = 0;
  std::map<int, std::pair<const void*, size_t>> registered_;
  const void* untouched_ = nullptr;
  bool running_ = false;
  std::map<IoId, Op> ops_;
  std::vector<absl::AnyInvocable<void()>> before_submit_;
  std::map<int, Socket> sockets_;
  std::vector<Link> links_;
  std::map<int, Fault> faults_;
  std::set<std::string> refusing_;
  std::optional<SocketAddress> dial_from_;
  std::set<std::string> ignoring_;
  std::optional<TcpDelivery> delivery_;
  std::set<int> long_ways_;
  struct Completion {
    IoId id;
    IoResult result;
    IoCallback callback;  // empty: the operation goes on and keeps its own
  };
  std::vector<Completion> completions_;

  Mutex mutex_;
  CondVar wake_condition_;
  bool woken_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace longhaul::peerd
