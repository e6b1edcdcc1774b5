// The fetching side of a transfer of shared state: brings one local state to the elected root. It
// writes only to the inbox of the state (memory_state.h).
//
//   digests --(the digests from one source add up to the root)--> chunks
//   chunks --(all are here, and unequal_too is set)--> chunks of unequal tensors, from one source
//   chunks --(all are here)--> ending
//   any --(the transfer fails, or Stop())--> ending, with an error
//   ending --(nothing writes to the inbox any more)--> result()
//
// Chunks whose digests are right already are not asked for. TransferPlan decides which source is
// asked for which chunk. This class moves the bytes: it has the pages of a chunk created
// (Hasher::Touch()), asks over the link, receives straight into the inbox, hashes a complete chunk,
// and reports to the plan. If a source is on this host, this class copies from its memory, and no
// other source is asked.
//
// If a source does not have the state yet, it is asked again for detect_ms, because it may hear of
// the election later than this peer. If no source is left or none can be reached, the transfer
// waits: the coordinator may name further sources (for instance members that have just fetched the
// state), and a link may come back. The transfer fails when nothing of use has come from any source
// for 4 * detect_ms. In the background it fails as soon as no source is left: the sources go on to
// the next state, which the member can fetch instead.
//
// Until result() is set, the inbox may be written to, and the state, the server, the hasher and the
// transport must exist. The memory of a source on this host is read inside Work() only.
//
// Threads: the reactor thread. After each report of the transport, Work() must be called soon.
// Nothing here reads a clock: the caller passes `now`.
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

// A member that has the state.
struct StateSource {
  MemberId member;
  PeerId peer;  // may be this peer
  friend bool operator==(const StateSource&, const StateSource&) = default;
};

struct TransferSpec {
  uint64_t id = 0;  // this peer has not used it before
  PeerId self;
  GroupKey group;
  Hash128 root;
  // The state to bring to this root. It must have an inbox. Its digests tell which chunks it holds.
  std::shared_ptr<MemoryState> state;
  std::vector<StateSource> sources;
  bool unequal_too = false;  // fetch the tensors that may be unequal, too
  // For a member in the background: the sources go on writing to their tensors. A chunk that has
  // changed at all sources is left out. Then the transfer fails when all other chunks are here. It
  // also fails when no source is left.
  bool background = false;
  uint32_t detect_ms = 1500;
};

struct TransferResult {
  std::string error;   // "": the state has the root now
  uint64_t bytes = 0;  // received, in right chunks
  // Bytes that came in vain: they were wrong, came twice, or were parts of answers that broke off.
  uint64_t bytes_repeated = 0;
  std::vector<MemberId> sources;  // members that sent `bytes`
  std::vector<MemberId> corrupt;  // members that sent wrong bits
};

class StateTransfer {
 public:
  // Returns whether a link is up. When that changes, the caller calls OnLinkChange().
  using LinkUp = std::function<bool(const LinkKey&)>;

  // `detach_cookies`: the counter that gives the cookies for Transport::DetachReceives().
  StateTransfer(TransferSpec spec, Transport* transport, Hasher* hasher, const StateServer* server,
                LinkUp link_up, uint64_t* detach_cookies, Tick now);
  ~StateTransfer();
  StateTransfer(const StateTransfer&) = delete;
  StateTransfer& operator=(const StateTransfer&) = delete;

  // Replaces the list of sources.
  void ChangeSources(const std::vector<StateSource>& sources, Tick now);
  // Gives up. result() is set when nothing writes to the inbox any more.
  void Stop(const std::string& reason);

  // ---- reports of the transport. header.op is spec().id.
  absl::StatusOr<uint8_t*> OnDataHeader(const LinkKey& link, const FrameHeader& header);
  absl::Status OnDataReceived(const FrameHeader& header);
  void OnDataAbandoned(const FrameHeader& header);
  absl::Status OnRefused(const LinkKey& link, const FrameHeader& header,
                         std::span<const uint8_t> payload, Tick now);
  // Returns whether the cookie belonged to this transfer.
  bool OnReceivesDetached(uint64_t cookie);
  // A link has come up or gone down.
  void OnLinkChange(const LinkKey& link, Tick now);

  void Work(Tick now);
  // When to call Work() at the latest. A time in the past means now.
  Tick NextDeadline() const;

  // Set once, when nothing writes to the inbox any more.
  const std::optional<TransferResult>& result() const { return result_; }
  const TransferSpec& spec() const { return spec_; }

  struct Progress {
    uint64_t bytes_total = 0;  // 0 until the digests are known
    uint64_t bytes_done = 0;
    uint64_t bytes_received = 0;
    uint64_t bytes_repeated = 0;
    uint32_t sources = 0;   // sources that may be asked now
    bool measured = false;  // bytes_total counts all tensors that are compared
  };
  Progress progress() const;

 private:
  enum class Phase { kDigests, kChunks, kEnding };
  struct Source {
    PeerId peer;
    bool out = false;            // the source is not asked any more
    bool left = false;           // out because ChangeSources() did not name it; may be named again
    std::string reason;          // why the source is out, or what it answered last
    Tick since;                  // when the source was named, or its link came back
    Tick retry;                  // the source is not asked for digests before this time
    int64_t retry_us = 0;        // the last pause before `retry`
    bool tried_unequal = false;  // the source could not give the tensors that may be unequal
    std::set<uint64_t> asks;     // open asks
  };
  struct Ask {
    MemberId source;
    PeerId peer;
    AskId plan;  // the ask of the plan; 0: this ask is for digests
    ChunkToFetch chunk;
    uint8_t* place = nullptr;
    std::vector<uint8_t> buffer;  // for digests
    uint64_t bytes = 0;           // length of the answer
    uint64_t placed = 0;          // bytes for which a place was given
    uint64_t got = 0;             // bytes that have come
    Tick heard;                   // for digests: when the ask was sent, or the last piece came
    bool news = false;            // for digests: a piece has come
    bool hashing = false;
    bool dropped = false;    // the plan dropped it while it was hashed
    uint64_t detaching = 0;  // the cookie of the DetachReceives() in progress; 0: none
    // What to tell the plan when nothing is received for this ask any more.
    enum class Then { kDropped, kRefused, kChanged, kBusy } then = Then::kDropped;
    std::string reason;
  };
  using Asks = std::map<uint64_t, Ask>;
  // An ask of the plan that waits until the pages of its memory are created.
  struct Touching {
    AskChunk action;
    bool dropped = false;
  };

  bool Local(const Source& source) const { return source.peer == spec_.self; }
  bool Reachable(MemberId member, const Source& source) const;
  // Puts out sources on this host whose state is over.
  void LookForLocalEnds();
  LinkKey LinkTo(PeerId peer) const { return {spec_.group.run, peer}; }
  // Returns the sources that may be asked now. If any of them is on this host, returns only the
  // sources on this host.
  std::vector<MemberId> Usable() const;
  // From now on the source is not asked any more.
  void PutOut(MemberId member, const std::string& reason);

  void LookForNews(Tick now);
  void WorkDigests(Tick now);
  void AskForDigests(MemberId member, Tick now);
  void AcceptDigests(MemberId member, ChunkDigests digests, Tick now);
  void MakePlan(MemberId only, Tick now);

  void WorkChunks(Tick now);
  void UpdatePlanSources();
  void EndPlan();
  // Deletes the plan, and adds its figures to past_.
  void RetirePlan();
  void Do(const AskChunk& action, Tick now);
  void Do(const DropAsk& action);
  void OnTouched(AskId plan, Tick now);
  void AskFor(const AskChunk& action, Tick now);
  void CopyLocal();

  uint64_t NewAsk(Ask ask);
  void SendRequest(uint64_t id, const Ask& ask);
  void SendCancel(PeerId peer, uint64_t ask);
  // Ends an ask. Tells the source if the ask was dropped. When nothing is received for the ask any
  // more, Closed() frees it and tells the plan.
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
  bool unequal_ = false;  // the tensors that may be unequal are being fetched
  std::map<MemberId, Source> sources_;
  MemberId digests_from_;  // the member that sent expected_
  ChunkDigests expected_;
  std::unique_ptr<TransferPlan> plan_;
  MemberId plan_only_;  // the only source of the plan; 0: all sources
  Asks asks_;
  std::map<AskId, uint64_t> by_plan_;                 // the key in asks_ of each ask of the plan
  std::map<AskId, Touching> touching_;                // pages are being created
  std::vector<AskId> touched_;                        // pages exist; for the next Work()
  std::deque<uint64_t> local_;                        // asks of a source on this host, to be copied
  std::vector<uint64_t> digests_in_;                  // asks for digests that are complete
  std::vector<std::pair<uint64_t, Hash128>> hashed_;  // asks and digests, for the next Work()
  std::vector<std::pair<AskId, uint32_t>> pieces_;    // pieces of chunks since the last Work()
  uint64_t next_ask_ = 1;
  Tick now_;        // `now` of the last call that had it
  Tick last_news_;  // when something of use came last
  // Bytes of state that had arrived over the links of the sources when LookForNews() last looked.
  std::optional<uint64_t> arrived_;
  bool dirty_ = true;  // Work() has something to do now
  Tick due_;           // if not dirty_: when Work() has something to do
  std::string error_;
  std::set<PeerId> asked_;  // peers to tell when the transfer ends

  TransferPlan::Progress past_;  // of plans that have ended, and bytes that belong to no plan
  std::set<MemberId> used_;
  std::set<MemberId> corrupt_;
  bool measured_ = false;
  std::optional<TransferResult> result_;
  // Holds `this`, and nullptr after the end of this object. Callbacks of the hasher look at it.
  std::shared_ptr<StateTransfer*> self_;
};

}  // namespace longhaul::peerd
