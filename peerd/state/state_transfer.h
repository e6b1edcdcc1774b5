// The side of a transfer that fetches: brings one local state to an elected root. All that it
// writes goes to the inbox of the state (memory_state.h).
//
//   digests --(one source's add up to the root)--> chunks --(all here)--> done
//   chunks --(tensors that may be unequal are wanted, too)--> digests of a source for those
//   any --(no hope | Stop())--> ending --(nothing writes any more)--> done, with the reason
//
// Chunks whose digest is right already are not asked for. What to ask of whom is TransferPlan's;
// this class moves the bytes: has the memory of a chunk touched, asks over the links, receives
// straight into the inbox, hashes what is complete, and takes the result to the plan. A source on
// this host is read from memory, and while there is one others are not asked.
//
// A source that does not have the state is asked again for detect_ms: the one that fetches may have
// been told before the one that serves. Where no source is left, or none can be reached, others may
// be named, those that fetch beside this one and are done above all, or a link may come back: it
// gives up when nothing was heard from anybody for 4 * detect_ms.
//
// Until result() there may be writes to the inbox, and the state, server, hasher and transport
// have to stay. Whatever is read of the source's own memory happens within Work().
//
// Threads: the reactor's. Calls of the transport's listener go to those methods that have their
// names; each is followed by Work(), soon. Nothing here reads a clock: `now` comes from the caller.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/hash128.h"
#include "base/ids.h"
#include "base/tick.h"
#include "peerd/state/hasher.h"
#include "peerd/state/memory_state.h"
#include "peerd/state/state_server.h"
#include "peerd/state/transfer_plan.h"
#include "peerd/transport/transport.h"
#include "proto/wire/frame.h"

namespace longhaul::peerd {

struct StateSource {
  MemberId member;
  PeerId peer;  // may be this one
  friend bool operator==(const StateSource&, const StateSource&) = default;
};

struct TransferSpec {
  uint64_t id = 0;  // of this peer, never used before
  PeerId self;
  GroupKey group;
  Hash128 root;
  // What is to get this root, with an inbox; its digests say what is there now.
  std::shared_ptr<MemoryState> state;
  std::vector<StateSource> sources;
  bool unequal_too = false;  // also the tensors that may be unequal
  // Sources go on writing to what they have: chunks that have changed at all of them are left out,
  // and the transfer fails for that when all the others are here.
  bool background = false;
  uint32_t detect_ms = 1500;
};

struct TransferResult {
  std::string error;   // "": the state has the root
  uint64_t bytes = 0;  // of chunks that came and were right
  // That came for nothing: wrong, again, or parts of answers that were broken off.
  uint64_t bytes_repeated = 0;
  std::vector<MemberId> sources;  // that sent them
  std::vector<MemberId> corrupt;  // that sent bits that were not what they should be
};

class StateTransfer {
 public:
  // Which links are up now; the transfer is told of changes.
  using LinkUp = std::function<bool(const LinkKey&)>;

  // `detach_cookies`: where to draw cookies for DetachReceives() from.
  StateTransfer(TransferSpec spec, Transport* transport, Hasher* hasher, const StateServer* server,
                LinkUp link_up, uint64_t* detach_cookies, Tick now);
  ~StateTransfer();
  StateTransfer(const StateTransfer&) = delete;
  StateTransfer& operator=(const StateTransfer&) = delete;

  // Those not named are gone, others have come.
  void ChangeSources(const std::vector<StateSource>& sources, Tick now);
  // Gives up. The result follows when nothing writes any more.
  void Stop(const std::string& reason);

  // ---- of the transport; header.op is our id.
  absl::StatusOr<uint8_t*> OnDataHeader(const LinkKey& link, const FrameHeader& header);
  absl::Status OnDataReceived(const FrameHeader& header);
  void OnDataAbandoned(const FrameHeader& header);
  absl::Status OnRefused(const LinkKey& link, const FrameHeader& header,
                         std::span<const uint8_t> payload, Tick now);
  // True: the cookie was ours.
  bool OnReceivesDetached(uint64_t cookie);
  // A link came up, or went.
  void OnLinkChange(const LinkKey& link, Tick now);

  void Work(Tick now);
  // When to call Work() at the latest; in the past: there is something to do now.
  Tick NextDeadline() const;

  // Set once, when nothing is written any more.
  const std::optional<TransferResult>& result() const { return result_; }
  const TransferSpec& spec() const { return spec_; }

  struct Progress {
    uint64_t bytes_total = 0;  // 0 until the digests are known
    uint64_t bytes_done = 0;
    uint64_t bytes_received = 0;
    uint64_t bytes_repeated = 0;
    uint32_t sources = 0;   // that may be asked now
    bool measured = false;  // bytes_total of the tensors that are compared is known
  };
  Progress progress() const;

 private:
  enum class Phase { kDigests, kChunks, kEnding };
  struct Source {
    PeerId peer;
    bool out = false;    // not asked any more
    bool left = false;   // out, since it is not named; it may be again
    std::string reason;  // of that, or what it said last
    Tick since;          // known, or its link is back
    Tick retry;          // not asked for digests before
    int64_t retry_us = 0;
    bool tried_unequal = false;
    std::set<uint64_t> asks;  // open
  };
  struct Ask {
    MemberId source;
    PeerId peer;
    AskId plan;  // 0: for digests
    ChunkToFetch chunk;
    uint8_t* place = nullptr;
    std::vector<uint8_t> buffer;  // of digests
    uint64_t bytes = 0;           // of the answer
    uint64_t placed = 0;          // of that, a place was given for
    uint64_t got = 0;
    Tick heard;         // digests: asked, or a piece came
    bool news = false;  // digests: a piece came
    bool hashing = false;
    bool dropped = false;    // while it was being hashed
    uint64_t detaching = 0;  // by this cookie
    // What the plan is told when it is detached.
    enum class Then { kDropped, kRefused, kChanged, kBusy } then = Then::kDropped;
    std::string reason;
  };
  using Asks = std::map<uint64_t, Ask>;
  // An ask of the plan that is no Ask yet.
  struct Touching {
    AskChunk action;
    bool dropped = false;
  };

  bool Local(const Source& source) const { return source.peer == spec_.self; }
  bool Reachable(MemberId member, const Source& source) const;
  LinkKey LinkTo(PeerId peer) const { return {spec_.group.run, peer}; }
  // Those that may be asked: of this host if there is one.
  std::vector<MemberId> Usable() const;
  void PutOut(MemberId member, const std::string& reason);

  void LookForNews(Tick now);
  void WorkDigests(Tick now);
  void AskForDigests(MemberId member, Tick now);
  void AcceptDigests(MemberId member, ChunkDigests digests, Tick now);
  void MakePlan(MemberId only, Tick now);

  void WorkChunks(Tick now);
  void UpdatePlanSources();
  void EndPlan();
  // It is over; its figures stay.
  void RetirePlan();
  void Do(const AskChunk& action, Tick now);
  void Do(const DropAsk& action);
  void OnTouched(AskId plan, Tick now);
  void AskFor(const AskChunk& action, Tick now);
  void CopyLocal();

  uint64_t NewAsk(Ask ask);
  void SendRequest(uint64_t id, const Ask& ask);
  void SendCancel(PeerId peer, uint64_t ask);
  // The ask is over for the other side, and for us once nothing is received for it.
  void Close(Asks::iterator it, Ask::Then then, const std::string& reason);
  void Closed(Asks::iterator it);
  void Erase(Asks::iterator it);
  void OnComplete(uint64_t id, Ask* ask);
  void Hash(uint64_t id, Ask* ask);
  void OnHashed(uint64_t id, Hash128 digest, Tick now);
  void Wrong(MemberId member, const std::string& what);

  void Fail(const std::string& reason);
  void MaybeEnd();
  std::string WhatSourcesSaid() const;

  const TransferSpec spec_;
  Transport* const transport_;
  Hasher* const hasher_;
  const StateServer* const server_;
  const LinkUp link_up_;
  uint64_t* const detach_cookies_;

  Phase phase_ = Phase::kDigests;
  bool unequal_ = false;  // this round is for the tensors that may be unequal
  std::map<MemberId, Source> sources_;
  MemberId digests_from_;  // who sent expected_
  ChunkDigests expected_;
  std::unique_ptr<TransferPlan> plan_;
  MemberId plan_only_;  // the plan has this source alone; 0: all
  Asks asks_;
  std::map<AskId, uint64_t> by_plan_;
  std::map<AskId, Touching> touching_;  // the pages of their memory are being made
  std::vector<AskId> touched_;
  std::deque<uint64_t> local_;        // asks of a source on this host, to be copied
  std::vector<uint64_t> digests_in_;  // asks for digests that are complete
  std::vector<std::pair<uint64_t, Hash128>> hashed_;
  std::vector<std::pair<AskId, uint32_t>> pieces_;  // of chunks, that came since the last Work()
  uint64_t next_ask_ = 1;
  Tick now_;  // of the last call that had it
  Tick last_news_;
  std::optional<uint64_t> arrived_;  // over the links of the sources, when it was looked last
  bool dirty_ = true;                // Work() has something to do
  Tick due_;                         // else then
  std::string error_;
  std::set<PeerId> asked_;  // hear of the end

  TransferPlan::Progress past_;  // of plans that are over, and what came and is not of any
  std::set<MemberId> used_;
  std::set<MemberId> corrupt_;
  bool measured_ = false;
  std::optional<TransferResult> result_;
  std::shared_ptr<StateTransfer*> self_;  // digests that come later find out if we are gone
};

}  // namespace longhaul::peerd
