// Measures the floor of a step boundary: N processes each send one small message over a gRPC stream
// to a server, which answers all of them once the last one has come. Nothing else is on the way: no
// trainer, no peerd, no store.
//
//   bazel run -c opt //bench:control_floor -- --clients=3 --rounds=5000
//
// The output is one line of JSON per kind of transport:
//   tcp       plain sockets; the server has one thread in epoll_wait()
//   callback  gRPC's callback API at both ends; the coordinator uses it
//   queue     gRPC with a completion queue and one thread at both ends; peerd uses one
// `us` is the median time of a round at a client, `cpu_us` the processor time of a round in all
// processes together.
#include <arpa/inet.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "base/check.h"
#include "base/mutex.h"
#include "proto/control/grpc/support.h"

ABSL_FLAG(int, clients, 3, "how many processes take part");
ABSL_FLAG(int, rounds, 3000, "rounds to measure");

namespace longhaul {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kWarmUp = 200;
constexpr size_t kMessageBytes = 40;  // about that of a Vote
constexpr char kMethod[] = "/bench.Floor/Attach";

double CpuUs(int who) {
  rusage usage;
  LH_CHECK(getrusage(who, &usage) == 0);
  const auto us = [](const timeval& t) {
    return 1e6 * static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec);
  };
  return us(usage.ru_utime) + us(usage.ru_stime);
}

grpc::ByteBuffer Message() {
  const grpc::Slice slice(std::string(kMessageBytes, 'x'));
  return grpc::ByteBuffer(&slice, 1);
}

// What a client tells its parent.
struct Result {
  double median_us = 0;
  double cpu_us = 0;
};

// Measures `rounds` calls of `round`, and writes the result to `out`.
template <class Round>
void Measure(int out, Round round) {
  for (int i = 0; i < kWarmUp; ++i) round();
  std::vector<double> us;
  const double cpu = CpuUs(RUSAGE_SELF);
  const int rounds = absl::GetFlag(FLAGS_rounds);
  for (int i = 0; i < rounds; ++i) {
    const auto begun = Clock::now();
    round();
    us.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begun).count());
  }
  std::nth_element(us.begin(), us.begin() + rounds / 2, us.end());
  const Result result{us[rounds / 2], (CpuUs(RUSAGE_SELF) - cpu) / rounds};
  LH_CHECK(write(out, &result, sizeof result) == sizeof result);
}

// ------------------------------------------------------------------------------ tcp

int Connect(uint16_t port) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  LH_CHECK(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  const int on = 1;
  LH_CHECK(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) == 0);
  return fd;
}

void TcpClient(uint16_t port, int out) {
  const int fd = Connect(port);
  char message[kMessageBytes] = {};
  Measure(out, [&] {
    LH_CHECK(send(fd, message, sizeof message, 0) == sizeof message);
    LH_CHECK(recv(fd, message, sizeof message, MSG_WAITALL) == sizeof message);
  });
  close(fd);
}

// Listens on a free port of loopback.
int Listen(uint16_t* port) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  LH_CHECK(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  LH_CHECK(listen(fd, 64) == 0);
  LH_CHECK(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0);
  *port = ntohs(address.sin_port);
  return fd;
}

// Serves until the first client has gone.
void TcpServe(int listener, int clients) {
  const int epoll = epoll_create1(0);
  std::vector<int> fds;
  for (int i = 0; i < clients; ++i) {
    const int fd = accept(listener, nullptr, nullptr);
    const int on = 1;
    LH_CHECK(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) == 0);
    epoll_event event{EPOLLIN, {.fd = fd}};
    LH_CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0);
    fds.push_back(fd);
  }
  char message[kMessageBytes];
  int come = 0;
  while (true) {
    epoll_event events[64];
    const int got = epoll_wait(epoll, events, 64, -1);
    for (int i = 0; i < got; ++i) {
      if (recv(events[i].data.fd, message, sizeof message, MSG_WAITALL) <= 0) return;
      if (++come < clients) continue;
      come = 0;
      for (const int fd : fds) (void)send(fd, message, sizeof message, MSG_NOSIGNAL);
    }
  }
}

// ------------------------------------------------------------------------------ callback

class CallbackServer final : public grpc::CallbackGenericService {
 public:
  explicit CallbackServer(int clients) : clients_(clients) {}

  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext*) override {
    auto* stream = new Stream(this);
    MutexLock lock(&mutex_);
    streams_.push_back(stream);
    return stream;
  }

 private:
  class Stream final : public grpc::ServerGenericBidiReactor {
   public:
    explicit Stream(CallbackServer* server) : server_(server) { StartRead(&in_); }
    void OnReadDone(bool ok) override {
      if (!ok) return Finish(grpc::Status::OK);
      server_->Come();
      StartRead(&in_);
    }
    void OnWriteDone(bool ok) override {
      MutexLock lock(&mutex_);
      writing_ = false;
      if (ok && std::exchange(owed_, false)) WriteLocked();
    }
    void Answer() {
      MutexLock lock(&mutex_);
      owed_ = writing_;
      if (!writing_) WriteLocked();
    }
    void OnDone() override {}

   private:
    void WriteLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      writing_ = true;
      out_ = Message();
      StartWrite(&out_);
    }

    CallbackServer* const server_;
    Mutex mutex_;
    bool writing_ ABSL_GUARDED_BY(mutex_) = false;
    bool owed_ ABSL_GUARDED_BY(mutex_) = false;  // an answer that waits for the write before it
    grpc::ByteBuffer in_;
    grpc::ByteBuffer out_;
  };

  void Come() {
    MutexLock lock(&mutex_);
    if (++come_ < clients_) return;
    come_ = 0;
    for (Stream* stream : streams_) stream->Answer();
  }

  const int clients_;
  Mutex mutex_;
  int come_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<Stream*> streams_ ABSL_GUARDED_BY(mutex_);
};

class CallbackClient final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  explicit CallbackClient(const std::shared_ptr<grpc::Channel>& channel) : stub_(channel) {
    stub_.PrepareBidiStreamingCall(&context_, kMethod, {}, this);
    StartRead(&in_);
    StartCall();
  }
  void Round() {
    out_ = Message();
    StartWrite(&out_);
    MutexLock lock(&mutex_);
    while (!answered_ || !written_) come_.Wait(&mutex_);
    answered_ = written_ = false;
  }
  void OnWriteDone(bool) override {
    MutexLock lock(&mutex_);
    written_ = true;
    come_.Signal();
  }
  void OnReadDone(bool ok) override {
    if (!ok) return;
    StartRead(&in_);
    MutexLock lock(&mutex_);
    answered_ = true;
    come_.Signal();
  }

 private:
  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  grpc::ByteBuffer in_;
  grpc::ByteBuffer out_;
  Mutex mutex_;
  CondVar come_;
  bool answered_ ABSL_GUARDED_BY(mutex_) = false;
  bool written_ ABSL_GUARDED_BY(mutex_) = false;
};

// ------------------------------------------------------------------------------ queue

void QueueServe(grpc::AsyncGenericService* service, grpc::ServerCompletionQueue* queue,
                int clients) {
  struct Stream {
    grpc::GenericServerContext context;
    std::unique_ptr<grpc::GenericServerAsyncReaderWriter> io;
    grpc::ByteBuffer in;
    grpc::ByteBuffer out;
    bool writing = false;
    bool owed = false;  // an answer that waits for the write before it
  };
  // The tag of a stream's reads is its number from 1, that of its calls 1000 more, of writes 2000.
  std::vector<std::unique_ptr<Stream>> streams;
  const auto tag = [](size_t number) { return reinterpret_cast<void*>(number); };
  const auto ask = [&] {
    auto stream = std::make_unique<Stream>();
    stream->io = std::make_unique<grpc::GenericServerAsyncReaderWriter>(&stream->context);
    streams.push_back(std::move(stream));
    service->RequestCall(&streams.back()->context, streams.back()->io.get(), queue, queue,
                         tag(1000 + streams.size()));
  };
  ask();
  const auto answer = [&](size_t i) {
    Stream& stream = *streams[i];
    stream.owed = stream.writing;
    if (stream.writing) return;
    stream.writing = true;
    stream.out = Message();
    stream.io->Write(stream.out, tag(2001 + i));
  };
  int come = 0;
  int attached = 0;
  void* got = nullptr;
  bool ok = false;
  while (queue->Next(&got, &ok)) {
    const auto number = reinterpret_cast<size_t>(got);
    if (!ok) return;
    if (number > 2000) {
      streams[number - 2001]->writing = false;
      if (streams[number - 2001]->owed) answer(number - 2001);
      continue;
    }
    Stream& stream = *streams[(number - 1) % 1000];
    if (number > 1000) {
      stream.io->Read(&stream.in, tag(number - 1000));
      if (++attached < clients) ask();
      continue;
    }
    if (++come == clients) {
      come = 0;
      for (size_t i = 0; i < streams.size(); ++i) answer(i);
    }
    stream.io->Read(&stream.in, tag(number));
  }
}

void QueueClient(const std::shared_ptr<grpc::Channel>& channel, int out) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  auto io = stub.PrepareCall(&context, kMethod, &queue);
  enum Tag : size_t { kCall = 1, kRead, kWrite };
  const auto tag = [](Tag which) { return reinterpret_cast<void*>(which); };
  io->StartCall(tag(kCall));
  void* got = nullptr;
  bool ok = false;
  LH_CHECK(queue.Next(&got, &ok) && ok);
  grpc::ByteBuffer in;
  Measure(out, [&] {
    const grpc::ByteBuffer message = Message();
    io->Write(message, tag(kWrite));
    io->Read(&in, tag(kRead));
    for (int open = 2; open > 0; --open) LH_CHECK(queue.Next(&got, &ok) && ok);
  });
  _exit(0);
}

// ------------------------------------------------------------------------------ all

enum class Kind { kTcp, kCallback, kQueue };

std::shared_ptr<grpc::Channel> ChannelTo(uint16_t port) {
  return grpc::CreateChannel("127.0.0.1:" + std::to_string(port),
                             grpc::InsecureChannelCredentials());
}

void Client(Kind kind, uint16_t port, int out) {
  if (kind == Kind::kTcp) return TcpClient(port, out);
  control::InitGrpc();
  if (kind == Kind::kQueue) return QueueClient(ChannelTo(port), out);
  auto* const client = new CallbackClient(ChannelTo(port));
  Measure(out, [&] { client->Round(); });
  _exit(0);
}

// Runs the server until it is killed.
void Serve(Kind kind, int clients, int port_out) {
  uint16_t port = 0;
  if (kind == Kind::kTcp) {
    const int listener = Listen(&port);
    LH_CHECK(write(port_out, &port, sizeof port) == sizeof port);
    TcpServe(listener, clients);
  } else {
    control::InitGrpc();
    int chosen = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &chosen);
    CallbackServer callback(clients);
    grpc::AsyncGenericService generic;
    std::unique_ptr<grpc::ServerCompletionQueue> queue;
    if (kind == Kind::kCallback) {
      builder.RegisterCallbackGenericService(&callback);
    } else {
      builder.RegisterAsyncGenericService(&generic);
      queue = builder.AddCompletionQueue();
    }
    const auto server = builder.BuildAndStart();
    port = static_cast<uint16_t>(chosen);
    LH_CHECK(write(port_out, &port, sizeof port) == sizeof port);
    if (queue != nullptr) QueueServe(&generic, queue.get(), clients);
    pause();  // `server` lives until then
  }
  pause();
}

// Every process is forked before gRPC has threads.
void Run(Kind kind, const char* name) {
  const int clients = absl::GetFlag(FLAGS_clients);
  int port_pipe[2];
  int result_pipe[2];
  LH_CHECK(pipe(port_pipe) == 0 && pipe(result_pipe) == 0);
  const pid_t server = fork();
  if (server == 0) {
    Serve(kind, clients, port_pipe[1]);
    _exit(0);
  }
  uint16_t port = 0;
  LH_CHECK(read(port_pipe[0], &port, sizeof port) == sizeof port);
  std::vector<pid_t> children;
  for (int i = 0; i < clients; ++i) {
    children.push_back(fork());
    if (children.back() == 0) {
      Client(kind, port, result_pipe[1]);
      _exit(0);
    }
  }
  std::vector<double> medians;
  double cpu_us = 0;
  for (int i = 0; i < clients; ++i) {
    Result result;
    LH_CHECK(read(result_pipe[0], &result, sizeof result) == sizeof result);
    medians.push_back(result.median_us);
    cpu_us += result.cpu_us;
  }
  for (const pid_t child : children) waitpid(child, nullptr, 0);
  kill(server, SIGKILL);
  rusage before;
  getrusage(RUSAGE_CHILDREN, &before);
  const double others = CpuUs(RUSAGE_CHILDREN);
  waitpid(server, nullptr, 0);
  cpu_us += (CpuUs(RUSAGE_CHILDREN) - others) / (absl::GetFlag(FLAGS_rounds) + kWarmUp);
  std::sort(medians.begin(), medians.end());
  std::printf("{\"kind\": \"%s\", \"clients\": %d, \"us\": %.1f, \"cpu_us\": %.1f}\n", name,
              clients, medians[medians.size() / 2], cpu_us);
  std::fflush(stdout);
}

}  // namespace
}  // namespace longhaul

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  longhaul::Run(longhaul::Kind::kTcp, "tcp");
  longhaul::Run(longhaul::Kind::kCallback, "callback");
  longhaul::Run(longhaul::Kind::kQueue, "queue");
  return 0;
}
