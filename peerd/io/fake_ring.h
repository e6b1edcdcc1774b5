// A Ring over a network in memory, for tests. It keeps the contract of UringRing (ring.h). A seed
// decides the order of events.
//
// All sockets live inside one FakeRing: stream sockets that listen and connect by address. Sockets
// of the operating system do not work here. Rare events of a real network happen often: transfers
// of a few bytes, completions in any order, zero-copy notices that come late, a cancelled operation
// that succeeds after all. A test asks for a fault by the number of the connection: the connection
// is cut after a byte, or stalls.
//
// The ring has its own time. Time stands still while an operation can go on. When none can, time
// jumps to the next timer or to the end of the wait. So a test never sleeps.
//
// The ring watches the memory that an operation owns. It fills the buffer of a receive with junk at
// the start. Bytes that were not received must still be junk at the end. The bytes of a send must
// not change between the start and the last callback. A violation ends the process with a message.
//
// Threads: the same as for Ring.
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
  size_t stream_bytes_max = 64 << 10;  // sent and not yet received, per direction
  bool partial = true;                 // true: transfers of random lengths; false: as much as fits
  bool send_zero_copy = true;
  bool zero_copy_copies = false;  // the last callbacks of SendZeroCopy() say `copied`
  int zero_copy_error = 0;        // not 0: SendZeroCopy() fails at once with this errno
  bool registered_buffers = true;
  size_t registered_buffers_max = SIZE_MAX;
};

class FakeRing final : public Ring, private Sockets {
 public:
  explicit FakeRing(FakeRingOptions options);
  ~FakeRing() override;

  // ---- faults and views for tests

  // Connections are numbered from 0 in the order in which they are made. CutConnection(), FlipBit()
  // and StallConnection() may be called before the connection is made.

  // Both ends fail with ECONNRESET once one end has sent `after_bytes`. `from_dialer`: that end is
  // the dialer's. The sending end fails at once. The other end fails when it has read the bytes
  // before the cut, or earlier if the sending end closes.
  void CutConnection(int connection, bool from_dialer, uint64_t after_bytes);
  // Changes the lowest bit of one byte on its way. `at` counts the bytes that the end sends, from
  // 0. Must be called before the end sends the byte.
  void FlipBit(int connection, bool from_dialer, uint64_t at);
  // The bytes from `from` to `to` that one end of an open connection sends arrive again behind the
  // byte `to`. Must be called before the end sends them.
  void RepeatBytes(int connection, bool from_dialer, uint64_t from, uint64_t to);
  // They arrive only behind the byte `at`, which is not before `to`.
  void DelayBytes(int connection, bool from_dialer, uint64_t from, uint64_t to, uint64_t at);
  // From now on keeps what goes over new connections, for Recorded().
  void Record() { record_ = true; }
  // All bytes that one end of a connection has sent.
  const std::string& Recorded(int connection, bool by_dialer) const;
  // sockets().Delivery() gives this for every connection; before the call it gives nothing. The
  // exception: the byte counts of an open connection are the real ones, not those of `delivery`.
  void SetDelivery(const TcpDelivery& delivery) { delivery_ = delivery; }
  // Packets of connections that carry much wait so much longer than SetDelivery() says, as where
  // the network limits each connection.
  void SetQueueOfEach(uint32_t us) { queue_of_each_us_ = us; }
  // With `stalled` nothing arrives in either direction, and neither end is told. Without, the
  // connection goes on.
  void StallConnection(int connection, bool stalled);
  // Acts as a path on which packets of more than `bytes` vanish: after a larger send nothing
  // arrives in its direction any more. The exception: the connection was dialled with segments of
  // at most `bytes`. 0: packets of any size arrive.
  void SwallowLarge(size_t bytes) { swallow_above_ = bytes; }
  // Sets zero_copy_copies and zero_copy_error (FakeRingOptions) from now on.
  void SetZeroCopy(bool copies, int error) {
    options_.zero_copy_copies = copies;
    options_.zero_copy_error = error;
  }
  size_t zero_copy_sends() const { return zero_copy_sends_; }
  // Connections to this address are refused, as if its process were gone.
  void Refuse(const std::string& address, bool refused);
  // Connect() to this address neither succeeds nor fails, as if the host were off.
  void Ignore(const std::string& address, bool ignored);
  // From now on Connect() dials from this host (numeric). Before, it dials from the host that it
  // dials to.
  void DialFrom(const std::string& host);
  int connections() const { return static_cast<int>(links_.size()); }
  // Bytes that one end of a connection has sent.
  uint64_t BytesSent(int connection, bool by_dialer) const;
  // Makes two connected sockets.
  std::pair<int, int> Pair();
  size_t operations() const { return ops_.size(); }
  size_t open_sockets() const { return sockets_.size(); }
  // The congestion controls of all connected sockets.
  std::set<std::string> congestions() const;
  // The number of sockets that SetLongWay() was called for. Closed sockets count too.
  size_t long_ways() const { return long_ways_.size(); }
  // What SetPace() was called with last, by socket. Closed sockets count too.
  const std::map<int, uint64_t>& paces() const { return paces_; }
  // The memory that is registered now: maps a buffer to its start and its bytes.
  const std::map<int, std::pair<const void*, size_t>>& registered() const { return registered_; }
  // RegisterBuffer() takes all memory at and above this address for untouched; nullptr: none.
  void SetUntouched(const void* from) { untouched_ = from; }
  // Moves the time on without running callbacks.
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
  void SetPoll(uint32_t /*us*/) override {}
  void SetSharedWork(SharedWork* /*work*/) override {}
  void Wake() override;
  Tick Now() const override { return now_; }
  const RingFeatures& features() const override { return features_; }
  Sockets& sockets() override { return *this; }

 private:
  // One direction of a connection.
  struct Stream {
    std::string data;  // the bytes from `head` on are sent and not yet received
    size_t head = 0;
    uint64_t written = 0;
    uint64_t read = 0;
    uint64_t cut_after = UINT64_MAX;
    uint64_t flip_at = UINT64_MAX;
    struct Detour {
      uint64_t from;
      uint64_t to;
      uint64_t at;
      bool repeat;
      std::string bytes;
    };
    std::optional<Detour> detour;
    bool record = false;
    std::string recorded;
    bool ended = false;        // the writer will send no more
    bool reader_gone = false;  // the reader has closed
    bool cut = false;          // ECONNRESET: the writer gets it now, the reader after `data`
    bool stalled = false;
    uint32_t segment_bytes_max = UINT32_MAX;

    size_t size() const { return data.size() - head; }
    void Drop(size_t bytes);
    // Returns how many of `bytes` bytes may be sent in one piece.
    size_t Piece(size_t bytes) const;
    // Sends one piece.
    void Add(const std::string& piece);
  };
  using StreamRef = std::shared_ptr<Stream>;
  struct Socket {
    SocketAddress local;
    SocketAddress remote;
    bool listening = false;
    bool closing = false;  // its owner has closed it; operations in flight keep it
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
    uint64_t flip_from_dialer = UINT64_MAX;
    uint64_t flip_to_dialer = UINT64_MAX;
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
    std::string snapshot;   // a copy of the bytes that are being sent
    SocketAddress address;  // kConnect: dials to here
    SocketAddress from;     // kConnect: dials from here
    msghdr* message = nullptr;
    StreamRef out;           // kNotice: the stream that the bytes went to
    uint64_t notice_at = 0;  // kNotice: the notice comes once the reader has read so many bytes
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
  void SetPace(int fd, uint64_t bytes_per_second) override { paces_[fd] = bytes_per_second; }
  std::optional<TcpDelivery> Delivery(int fd) override;
  void ShutdownSend(int fd) override;
  void Close(int fd) override;
  void Abort(int fd) override;

  IoId Start(Op op);
  IoId StartTransfer(Kind kind, int fd, std::vector<iovec> parts, bool wait_all, IoCallback done);
  int NewSocket();
  Stream* FindStream(int connection, bool from_dialer);
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
  bool record_ = false;
  std::set<std::string> refusing_;
  std::optional<SocketAddress> dial_from_;
  std::set<std::string> ignoring_;
  std::optional<TcpDelivery> delivery_;
  uint32_t queue_of_each_us_ = 0;
  std::set<int> long_ways_;
  std::map<int, uint64_t> paces_;
  struct Completion {
    IoId id;
    IoResult result;
    IoCallback callback;  // empty: the operation goes on, and its Op holds the callback
  };
  std::vector<Completion> completions_;

  Mutex mutex_;
  CondVar wake_condition_;
  bool woken_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace longhaul::peerd
