// Longhaul for C++17: RAII classes over longhaul.h. Header only. The contracts are in longhaul.h.
//
//   longhaul::Client client;
//   longhaul::Comm comm = client.Join("demo");
//   longhaul::Buffer<float> x(client, 1 << 20);
//   comm.BeginStep();
//   comm.AllReduce(x, LH_AVG);
//
// Errors: a call that fails throws longhaul::Error, unless its comment says otherwise. With
// -fno-exceptions an error prints its text to stderr and aborts the process.
//
// Lifetimes: objects can be moved, not copied. Destroy every Buffer, Comm, Op and State before the
// Client that it came from. The destructor of an Op waits for the outcome, because the buffers
// belong to the operation until then.
//
// Timeouts are in milliseconds. LH_FOREVER waits without limit.
#ifndef LONGHAUL_LONGHAUL_HPP_
#define LONGHAUL_LONGHAUL_HPP_

#include <longhaul/longhaul.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace longhaul {

// A status other than LH_OK, with the text of the call.
class Error : public std::runtime_error {
 public:
  Error(lh_status status, const std::string& text)
      : std::runtime_error(std::string(lh_strerror(status)) + ": " + text), status_(status) {}
  lh_status status() const { return status_; }

 private:
  lh_status status_;
};

// What a collective did; see lh_op_info_t. `members`: the ids of the members whose tensors are in
// the result, in rank order. As an lh_op_info_t it has no ids: its own `members` is NULL.
struct OpInfo : lh_op_info_t {
  std::vector<uint64_t> members;
};

namespace internal {

inline void Check(lh_status status) {
  if (status == LH_OK) return;
#if defined(__cpp_exceptions)
  throw Error(status, lh_last_error());
#else
  std::fprintf(stderr, "longhaul: %s: %s\n", lh_strerror(status), lh_last_error());
  std::abort();
#endif
}

// Calls call(&info), and returns the info that it has filled in.
template <class Call>
OpInfo InfoFrom(Call call) {
  constexpr uint32_t kMembersMax = 1024;
  OpInfo info{LH_OP_INFO_INIT, std::vector<uint64_t>(kMembersMax)};
  info.lh_op_info_t::members = info.members.data();
  info.members_capacity = kMembersMax;
  Check(call(&info));
  info.members.resize(info.world_size);
  // A copy has a vector of its own, and a slice has none.
  info.lh_op_info_t::members = nullptr;
  info.members_capacity = 0;
  return info;
}

template <class T>
struct DTypeOf;
#define LONGHAUL_DTYPE(type, value)             \
  template <>                                   \
  struct DTypeOf<type> {                        \
    static constexpr lh_dtype kValue = (value); \
  }
LONGHAUL_DTYPE(uint8_t, LH_UINT8);
LONGHAUL_DTYPE(int8_t, LH_INT8);
LONGHAUL_DTYPE(uint16_t, LH_UINT16);
LONGHAUL_DTYPE(int16_t, LH_INT16);
LONGHAUL_DTYPE(uint32_t, LH_UINT32);
LONGHAUL_DTYPE(int32_t, LH_INT32);
LONGHAUL_DTYPE(uint64_t, LH_UINT64);
LONGHAUL_DTYPE(int64_t, LH_INT64);
LONGHAUL_DTYPE(float, LH_FLOAT32);
LONGHAUL_DTYPE(double, LH_FLOAT64);
LONGHAUL_DTYPE(bool, LH_BOOL);
#undef LONGHAUL_DTYPE

}  // namespace internal

// An operation in flight. Its buffers belong to it until it has an outcome.
class Op {
 public:
  explicit Op(lh_op* op) : op_(op) {}
  Op(Op&& other) noexcept : op_(std::exchange(other.op_, nullptr)) {}
  Op& operator=(Op&& other) noexcept {
    std::swap(op_, other.op_);
    return *this;
  }
  ~Op() {
    if (op_ != nullptr) (void)lh_op_wait(op_, LH_FOREVER);
    lh_op_free(op_);
  }

  // Waits for the outcome. Returns false if there is none within the timeout; the operation goes on
  // then. Throws if the outcome is not LH_OK.
  bool Wait(int64_t timeout_ms = LH_FOREVER) {
    lh_status status = lh_op_wait(op_, timeout_ms);
    if (status == LH_DEADLINE_EXCEEDED) {
      if (!Finished()) return false;
      // The outcome came between the wait and Finished().
      status = lh_op_wait(op_, 0);
    }
    internal::Check(status);
    return true;
  }
  // Whether there is an outcome. Does not wait for other members.
  bool Finished() {
    int finished = 0;
    internal::Check(lh_op_test(op_, &finished));
    return finished != 0;
  }
  // Asks for the end of the operation; see lh_op_cancel(). Wait() tells the outcome.
  void Cancel() { internal::Check(lh_op_cancel(op_)); }
  // What the operation did. Throws if there is no outcome yet.
  OpInfo Info() const {
    return internal::InfoFrom([this](lh_op_info_t* info) { return lh_op_info(op_, info); });
  }
  lh_op* get() const { return op_; }

 private:
  lh_op* op_;
};

// Waits until one of these operations of one client has an outcome, and returns its index. Throws
// if none has one within the timeout. See lh_wait_any().
inline size_t WaitAny(lh_client* client, const std::vector<const Op*>& ops,
                      int64_t timeout_ms = LH_FOREVER) {
  std::vector<lh_op*> handles;
  handles.reserve(ops.size());
  for (const Op* op : ops) handles.push_back(op->get());
  uint32_t index = 0;
  internal::Check(lh_wait_any(client, handles.data(), static_cast<uint32_t>(handles.size()),
                              timeout_ms, &index));
  return index;
}

class Client;

// `size` elements of T (1 or more) in memory shared with peerd: operations on them copy nothing.
// The content is undefined at first.
template <class T>
class Buffer {
 public:
  inline Buffer(Client& client, size_t size);
  Buffer(Buffer&& other) noexcept
      : client_(other.client_),
        data_(std::exchange(other.data_, nullptr)),
        size_(std::exchange(other.size_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(client_, other.client_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~Buffer() { (void)lh_free(client_, data_); }

  T* data() { return data_; }
  const T* data() const { return data_; }
  size_t size() const { return size_; }
  T* begin() { return data_; }
  T* end() { return data_ + size_; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }
  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }

 private:
  lh_client* client_;
  T* data_ = nullptr;
  size_t size_;
};

// Named tensors that all members keep equal; see lh_state_new(). The memory of the tensors must
// stay valid longer than the State.
class State {
 public:
  inline State(Client& client, const std::vector<lh_tensor>& tensors);
  State(State&& other) noexcept : state_(std::exchange(other.state_, nullptr)) {}
  State& operator=(State&& other) noexcept {
    std::swap(state_, other.state_);
    return *this;
  }
  ~State() { (void)lh_state_free(state_); }

  void Touch(uint32_t tensor = LH_ALL_TENSORS) { internal::Check(lh_state_touch(state_, tensor)); }
  // See lh_state_prepare().
  void Prepare(int64_t timeout_ms = -1) { internal::Check(lh_state_prepare(state_, timeout_ms)); }
  lh_state* get() const { return state_; }

 private:
  lh_state* state_ = nullptr;
};

// Describes `size` elements at `data` as a one-dimensional tensor of a state. `flags` are those of
// lh_tensor. The result points to `name` and `size`: both must stay valid until the State is made.
// A temporary as `size`, such as v.size(), does not compile.
template <class T>
lh_tensor Tensor(const char* name, T* data, const uint64_t&& size, uint32_t flags = 0) = delete;
template <class T>
lh_tensor Tensor(const char* name, T* data, const uint64_t& size, uint32_t flags = 0) {
  lh_tensor tensor = LH_TENSOR_INIT;
  tensor.name = name;
  tensor.dtype = internal::DTypeOf<T>::kValue;
  tensor.data = data;
  tensor.shape = &size;
  tensor.dims = 1;
  tensor.flags = flags;
  return tensor;
}

// A tensor of a list (lh_slice): `count` elements. In kinds in parts, `count` is that of one part.
template <class T>
lh_slice Slice(const T* source, T* target, size_t count) {
  return {source, target, count, internal::DTypeOf<T>::kValue, 0};
}

// One member of one group. A Comm that is destroyed before Leave() makes its member leave, and does
// not wait for that.
class Comm {
 public:
  explicit Comm(lh_comm* comm) : comm_(comm) {}
  Comm(Comm&& other) noexcept : comm_(std::exchange(other.comm_, nullptr)) {}
  Comm& operator=(Comm&& other) noexcept {
    std::swap(comm_, other.comm_);
    return *this;
  }
  ~Comm() { lh_comm_free(comm_); }

  // The group as peerd last reported it; see lh_world().
  lh_world_info World() const {
    lh_world_info info = LH_WORLD_INFO_INIT;
    internal::Check(lh_world(comm_, &info));
    return info;
  }
  // The ids of all members of the current epoch, in rank order.
  std::vector<uint64_t> Members() const { return MembersOf(lh_members); }
  // The ids of the members at this member's last step boundary; see lh_step_members().
  std::vector<uint64_t> StepMembers() const { return MembersOf(lh_step_members); }
  // What is known of a member of the group, also of a former one; see lh_member().
  lh_member_info Member(uint64_t member_id) const {
    lh_member_info info = LH_MEMBER_INFO_INIT;
    internal::Check(lh_member(comm_, member_id, &info));
    return info;
  }
  // Step boundary: waits for all members and admits newcomers; see lh_begin_step().
  void BeginStep(int64_t timeout_ms = LH_FOREVER) {
    internal::Check(lh_begin_step(comm_, timeout_ms));
  }
  // A step boundary and a sync in one call; see lh_begin_step_sync().
  lh_sync_info_t BeginStep(const lh_sync_options& sync, int64_t timeout_ms = LH_FOREVER) {
    lh_sync_info_t info = LH_SYNC_INFO_INIT;
    internal::Check(lh_begin_step_sync(comm_, &sync, timeout_ms, &info));
    return info;
  }
  // Makes the tensors of a state equal at all members; see lh_sync_state().
  lh_sync_info_t SyncState(const lh_sync_options& sync, int64_t timeout_ms = LH_FOREVER) {
    lh_sync_info_t info = LH_SYNC_INFO_INIT;
    internal::Check(lh_sync_state(comm_, &sync, timeout_ms, &info));
    return info;
  }
  // For a member in the background: takes the fetched state into the tensors; see lh_state_take().
  // True: the tensors belong to the caller again. False: call again, after the next step. peerd is
  // still fetching or does not answer, or the sources have changed the state (LH_ABORTED).
  bool Take(State& state, int64_t timeout_ms = 0, lh_sync_info_t* info = nullptr) {
    const lh_status status = lh_state_take(comm_, state.get(), timeout_ms, info);
    if (status == LH_DEADLINE_EXCEEDED || status == LH_ABORTED) return false;
    internal::Check(status);
    return true;
  }
  // With --keep-state, peerd keeps the state of a member that died for the next member of the same
  // name (lh_join_options.name). The revision of that state; nullopt: there is none. See
  // lh_kept_revision().
  std::optional<uint64_t> KeptRevision(State& state) {
    uint64_t revision = LH_NO_REVISION;
    internal::Check(lh_kept_revision(comm_, state.get(), &revision));
    if (revision == LH_NO_REVISION) return std::nullopt;
    return revision;
  }
  lh_sync_info_t SyncState(State& state, uint64_t revision, lh_strategy strategy = LH_POPULAR) {
    lh_sync_options sync = LH_SYNC_OPTIONS_INIT;
    sync.state = state.get();
    sync.revision = revision;
    sync.strategy = strategy;
    return SyncState(sync);
  }
  // Leaves the group once this member's operations have ended; see lh_leave().
  void Leave(int64_t timeout_ms = LH_FOREVER) { internal::Check(lh_leave(comm_, timeout_ms)); }

  // Starts an all-reduce of `count` elements; see lh_all_reduce_start().
  template <class T>
  Op AllReduceStart(const T* source, T* target, size_t count, lh_reduce_op op = LH_SUM,
                    uint64_t tag = 0, lh_on_fault on_fault = LH_AS_JOINED, uint32_t min_world = 0,
                    lh_algorithm algorithm = LH_AUTO) {
    auto options =
        Tensors<T>(lh_all_reduce_options LH_ALL_REDUCE_OPTIONS_INIT, source, target, count, tag);
    options.op = op;
    options.on_fault = on_fault;
    options.min_world = min_world;
    options.algorithm = algorithm;
    return AllReduceStart(options);
  }
  Op AllReduceStart(const lh_all_reduce_options& options) {
    return Start(lh_all_reduce_start, options);
  }
  // All-reduces `data` in place and waits for the outcome. If peerd itself dies (LH_UNAVAILABLE),
  // memory of a Buffer may be partly overwritten. After any other error `data` is unchanged. See
  // lh_all_reduce_start().
  template <class T>
  OpInfo AllReduce(T* data, size_t count, lh_reduce_op op = LH_SUM) {
    auto options =
        Tensors<T>(lh_all_reduce_options LH_ALL_REDUCE_OPTIONS_INIT, data, data, count, 0);
    options.op = op;
    return AllReduce(options);
  }
  OpInfo AllReduce(const lh_all_reduce_options& options) { return Run(lh_all_reduce, options); }
  template <class T>
  OpInfo AllReduce(Buffer<T>& buffer, lh_reduce_op op = LH_SUM) {
    return AllReduce(buffer.data(), buffer.size(), op);
  }
  // The other collectives, with all their options. Each starts the operation (see the function of
  // the same name in longhaul.h), or starts it and waits for the outcome.
  Op ReduceStart(const lh_reduce_options& options) { return Start(lh_reduce_start, options); }
  OpInfo Reduce(const lh_reduce_options& options) { return Run(lh_reduce, options); }
  Op ReduceScatterStart(const lh_reduce_scatter_options& options) {
    return Start(lh_reduce_scatter_start, options);
  }
  OpInfo ReduceScatter(const lh_reduce_scatter_options& options) {
    return Run(lh_reduce_scatter, options);
  }
  Op AllGatherStart(const lh_all_gather_options& options) {
    return Start(lh_all_gather_start, options);
  }
  OpInfo AllGather(const lh_all_gather_options& options) { return Run(lh_all_gather, options); }
  Op BroadcastStart(const lh_broadcast_options& options) {
    return Start(lh_broadcast_start, options);
  }
  OpInfo Broadcast(const lh_broadcast_options& options) { return Run(lh_broadcast, options); }
  Op GatherStart(const lh_gather_options& options) { return Start(lh_gather_start, options); }
  OpInfo Gather(const lh_gather_options& options) { return Run(lh_gather, options); }
  Op ScatterStart(const lh_scatter_options& options) { return Start(lh_scatter_start, options); }
  OpInfo Scatter(const lh_scatter_options& options) { return Run(lh_scatter, options); }
  Op AllToAllStart(const lh_all_to_all_options& options) {
    return Start(lh_all_to_all_start, options);
  }
  OpInfo AllToAll(const lh_all_to_all_options& options) { return Run(lh_all_to_all, options); }
  Op SendStart(const lh_send_options& options) { return Start(lh_send_start, options); }
  OpInfo Send(const lh_send_options& options) { return Run(lh_send, options); }
  Op RecvStart(const lh_recv_options& options) { return Start(lh_recv_start, options); }
  OpInfo Recv(const lh_recv_options& options) { return Run(lh_recv, options); }
  Op BarrierStart(const lh_barrier_options& options = LH_BARRIER_OPTIONS_INIT) {
    return Start(lh_barrier_start, options);
  }
  OpInfo Barrier(const lh_barrier_options& options = LH_BARRIER_OPTIONS_INIT) {
    return Run(lh_barrier, options);
  }

  // The same for one tensor of the whole group, with equal parts of `count` elements. They wait.

  // Combines the sources of all members, and gives the member of rank `root` the result. `target`
  // is not used elsewhere.
  template <class T>
  OpInfo Reduce(const T* source, T* target, size_t count, uint32_t root = 0,
                lh_reduce_op op = LH_SUM, uint64_t tag = 0) {
    auto options = Tensors<T>(lh_reduce_options LH_REDUCE_OPTIONS_INIT, source, target, count, tag);
    options.root = root;
    options.op = op;
    return Reduce(options);
  }
  // Combines the sources of all members, `count` elements for each member of the group, and gives
  // this member its part.
  template <class T>
  OpInfo ReduceScatter(const T* source, T* target, size_t count, lh_reduce_op op = LH_SUM,
                       uint64_t tag = 0) {
    auto options = Tensors<T>(lh_reduce_scatter_options LH_REDUCE_SCATTER_OPTIONS_INIT, source,
                              target, count, tag);
    options.world = World().size;
    options.op = op;
    return ReduceScatter(options);
  }
  // Puts the sources of all members, `count` elements each, side by side in `target`.
  template <class T>
  OpInfo AllGather(const T* source, T* target, size_t count, uint64_t tag = 0) {
    auto options =
        Tensors<T>(lh_all_gather_options LH_ALL_GATHER_OPTIONS_INIT, source, target, count, tag);
    options.world = World().size;
    return AllGather(options);
  }
  // Copies `data` of the member of rank `root` to `data` of all members.
  template <class T>
  OpInfo Broadcast(T* data, size_t count, uint32_t root = 0, uint64_t tag = 0) {
    auto options =
        Tensors<T>(lh_broadcast_options LH_BROADCAST_OPTIONS_INIT, data, data, count, tag);
    options.root = root;
    return Broadcast(options);
  }
  // Puts the sources of all members, `count` elements each, side by side in `target` of the member
  // of rank `root`. `target` is not used elsewhere.
  template <class T>
  OpInfo Gather(const T* source, T* target, size_t count, uint32_t root = 0, uint64_t tag = 0) {
    auto options = Tensors<T>(lh_gather_options LH_GATHER_OPTIONS_INIT, source, target, count, tag);
    options.world = World().size;
    options.root = root;
    return Gather(options);
  }
  // Gives each member its part, `count` elements, of the source of the member of rank `root`.
  // `source` is not used elsewhere.
  template <class T>
  OpInfo Scatter(const T* source, T* target, size_t count, uint32_t root = 0, uint64_t tag = 0) {
    auto options =
        Tensors<T>(lh_scatter_options LH_SCATTER_OPTIONS_INIT, source, target, count, tag);
    options.world = World().size;
    options.root = root;
    return Scatter(options);
  }
  // Gives each member its part of `source`, and puts the parts of all members for this one side by
  // side in `target`.
  template <class T>
  OpInfo AllToAll(const T* source, T* target, size_t count, uint64_t tag = 0) {
    auto options =
        Tensors<T>(lh_all_to_all_options LH_ALL_TO_ALL_OPTIONS_INIT, source, target, count, tag);
    options.world = World().size;
    return AllToAll(options);
  }
  // Sends a tensor to the member of rank `to`, which receives it.
  template <class T>
  OpInfo Send(const T* source, size_t count, uint32_t to, uint64_t tag = 0) {
    lh_send_options options = LH_SEND_OPTIONS_INIT;
    options.dtype = internal::DTypeOf<T>::kValue;
    options.source = source;
    options.count = count;
    options.to = to;
    options.tag = tag;
    return Send(options);
  }
  template <class T>
  OpInfo Recv(T* target, size_t count, uint32_t from, uint64_t tag = 0) {
    lh_recv_options options = LH_RECV_OPTIONS_INIT;
    options.dtype = internal::DTypeOf<T>::kValue;
    options.target = target;
    options.count = count;
    options.from = from;
    options.tag = tag;
    return Recv(options);
  }
  lh_comm* get() const { return comm_; }

 private:
  std::vector<uint64_t> MembersOf(lh_status (*of)(lh_comm*, uint64_t*, uint32_t, uint32_t*)) const {
    std::vector<uint64_t> members(16);
    uint32_t count = 0;
    while (true) {
      internal::Check(of(comm_, members.data(), static_cast<uint32_t>(members.size()), &count));
      const bool fits = count <= members.size();
      members.resize(count);
      if (fits) return members;
    }
  }
  template <class T, class Options>
  static Options Tensors(Options options, const T* source, T* target, size_t count, uint64_t tag) {
    options.dtype = internal::DTypeOf<T>::kValue;
    options.source = source;
    options.target = target;
    options.count = count;
    options.tag = tag;
    return options;
  }
  template <class Options>
  Op Start(lh_status (*start)(lh_comm*, const Options*, lh_op**), const Options& options) {
    lh_op* op_out = nullptr;
    internal::Check(start(comm_, &options, &op_out));
    return Op(op_out);
  }
  template <class Options>
  OpInfo Run(lh_status (*run)(lh_comm*, const Options*, int64_t, lh_op_info_t*, lh_op**),
             const Options& options) {
    return internal::InfoFrom([&](lh_op_info_t* info) {
      lh_op* op_out = nullptr;
      return run(comm_, &options, LH_FOREVER, info, &op_out);
    });
  }

  lh_comm* comm_;
};

// A connection to the peerd on this host, and the memory shared with it; see lh_open().
class Client {
 public:
  // "" and nullopt mean the defaults of lh_open_options.
  explicit Client(const std::string& socket_path = "", const std::string& name = "",
                  std::optional<int64_t> timeout_ms = std::nullopt) {
    lh_open_options options = LH_OPEN_OPTIONS_INIT;
    if (!socket_path.empty()) options.socket_path = socket_path.c_str();
    if (!name.empty()) options.name = name.c_str();
    if (timeout_ms) options.timeout_ms = *timeout_ms;
    internal::Check(lh_open(&options, &client_));
  }
  Client(Client&& other) noexcept : client_(std::exchange(other.client_, nullptr)) {}
  Client& operator=(Client&& other) noexcept {
    std::swap(client_, other.client_);
    return *this;
  }
  ~Client() { lh_close(client_); }

  // Joins a group and waits for admission; see lh_join().
  Comm Join(const std::string& run = "default", uint32_t group = 0, int64_t timeout_ms = 60000) {
    lh_join_options options = LH_JOIN_OPTIONS_INIT;
    options.run = run.c_str();
    options.group = group;
    options.timeout_ms = timeout_ms;
    return Join(options);
  }
  Comm Join(const lh_join_options& options) {
    lh_comm* comm = nullptr;
    internal::Check(lh_join(client_, &options, &comm));
    return Comm(comm);
  }
  lh_client* get() const { return client_; }

 private:
  lh_client* client_ = nullptr;
};

State::State(Client& client, const std::vector<lh_tensor>& tensors) {
  internal::Check(
      lh_state_new(client.get(), tensors.data(), static_cast<uint32_t>(tensors.size()), &state_));
}

template <class T>
Buffer<T>::Buffer(Client& client, size_t size) : client_(client.get()), size_(size) {
  void* data = nullptr;
  const bool fits = size <= std::numeric_limits<size_t>::max() / sizeof(T);
  internal::Check(
      lh_alloc(client_, fits ? size * sizeof(T) : std::numeric_limits<size_t>::max(), &data));
  data_ = static_cast<T*>(data);
}

}  // namespace longhaul

#endif  // LONGHAUL_LONGHAUL_HPP_
