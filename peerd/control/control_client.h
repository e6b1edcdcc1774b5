// The peer's end of the control stream. Keeps one Attach stream open to a coordinator. When the
// stream ends, the client connects again, for ever.
//
//   connecting --(stream stands)--> connected() --> message()... --(stream ends)--> disconnected()
//   connecting --(the coordinator refuses, or does not answer in time)--> disconnected()
//   connected --(Refuse())--> disconnected()
//   connected --(silence, and a second connection stands)--> disconnected(), connected()
//   disconnected() --(pause)--> connecting
//
// The next try goes to the same one of the given addresses if the coordinator had sent a message on
// the stream and the owner did not call Refuse(). Otherwise it goes to the next address. Pauses
// rise from 50 to 500 ms with each round of failures. They have jitter, so that the peers of a
// large run do not all come back at one moment.
//
// The coordinator answers each heartbeat. If nothing comes for detect_ms, the path may have been
// cut and be back, while TCP waits longer and longer before it repeats what was lost: after a cut
// of 4.3 s the next try of an old connection comes 6.2 s after the first. So the client opens a
// second connection beside the first, and goes over to it if the first one is still silent when the
// second one stands. The first one stays meanwhile: a coordinator that is only slow loses nobody.
//
// Most addresses have a name, and each try looks the name up. If the look-up fails or is silent,
// the next try dials the numeric address at which the coordinator was last reached by that name.
// With TLS its certificate still has to be for the name. So a run outlives a DNS server that is
// away while connections end for their age.
//
// No gRPC type appears in this header.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/counters.h"
#include "base/crypto/identity.h"
#include "base/tls/tls_files.h"
#include "proto/control/messages.h"
#include "proto/control/recording.h"
#include "proto/control/why.h"

namespace longhaul::peerd {

struct ControlClientOptions {
  Identity identity = Identity::New();  // signs Hello
  std::vector<std::string> addresses;   // host:port, tried in turn; at least one
  // Used until a coordinator tells its own detect_ms in Welcome.
  uint32_t detect_ms = 1500;
  uint32_t pause_ms_min = 50;
  uint32_t pause_ms_max = 500;
  // The file of the join token, read anew for each connection. Empty: no token is shown.
  std::string token_file;
  // The files of TLS, read anew for each connection. Null: in clear.
  std::shared_ptr<tls::Files> tls;
};

// The client's thread calls these, with no lock held. A callback puts its news into the owner's
// mailbox and returns. No callback may call Stop().
struct ControlClientCallbacks {
  // These two return false if the owner's mailbox is full. The client then gives the stream up.
  // `address`: where the coordinator was reached, numeric.
  std::function<bool(const std::string& address)> connected;
  std::function<bool(control::CoordinatorMessage)> message;
  // A standing stream has ended, or a try to connect has failed. `reason` names the address.
  std::function<void(std::string reason)> disconnected;
  // Answers a request for the flight recorder's recording that came at `received_us`. May be null:
  // then the peer does not offer it. Unlike the others, this one gives no news to the owner.
  std::function<control::RecordingPiece(const control::ReadRecording&, int64_t received_us)>
      recording;
  // The answer to AskWhy(). Returns false if the owner's mailbox is full, as above. May be null.
  std::function<bool(control::TellWhy)> told_why;
};

// Why no stream came to stand, or why a coordinator ended one.
enum class ControlFailure : uint8_t {
  kLookup,     // the name does not resolve, or nobody answered in time
  kUntrusted,  // the coordinator's certificate is of no CA of ours, or has expired
  kName,       // it is for other names than the one that was dialled
  kRefused,    // the coordinator refuses this peer: UNAUTHENTICATED or PERMISSION_DENIED
  kOther,
};
inline constexpr size_t kControlFailures = 5;

struct ControlStats {
  std::array<uint64_t, kControlFailures> failures{};
  uint64_t by_last_address = 0;  // tries at the address that worked last, for want of a look-up
  uint64_t second = 0;           // streams that were given up for a second connection beside them
};
// Appends the counters that /metrics shows.
void AddTotals(const ControlStats& stats, std::vector<CounterTotal>* totals);

class ControlClient {
 public:
  // Does the same as Stop().
  virtual ~ControlClient() = default;

  // Queues a message on the standing stream. Any thread may call it. Returns false if the message
  // was dropped: no stream stands, the queue is full (the client then gives the stream up), or the
  // rule for Hello forbids the message.
  //
  // The rule: Hello must be the first message on a stream, and comes once. A message before Hello
  // is dropped, and so is a second Hello. The reason: the owner hears of a new stream late, through
  // its mailbox, so it may still send messages that were meant for the stream before.
  virtual bool Send(const control::PeerMessage& message) = 0;

  // Asks the coordinator why a group waits; told_why() gets the answer. Nobody says if none comes.
  // Any thread may call it. Returns false if no stream stands.
  virtual bool AskWhy(const control::AskWhy& ask) = 0;

  // Ends the stream and goes on to the next address. The owner calls this when it does not accept
  // the coordinator at the other end. Any thread may call it.
  virtual void Refuse(const std::string& reason) = 0;

  // Any thread may call it.
  virtual ControlStats GetStats() const = 0;

  // Ends the stream. Once Stop() has returned, no callback is called any more. Safe to repeat.
  virtual void Stop() = 0;
};

std::unique_ptr<ControlClient> MakeControlClient(ControlClientOptions options,
                                                 ControlClientCallbacks callbacks);

}  // namespace longhaul::peerd
