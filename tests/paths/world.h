// Hosts that exchange the bytes of ops over modelled TCP connections, with the controllers of
// peerd/paths deciding how. What peerd's transport, daemon and op runner do around these
// controllers, and what the coordinator does with their reports, is written here once more, as
// little as possible:
//
//   Link        as transport/link.cc: segments wait for lanes, lanes ask for them; PING
//   Host        as daemon.cc: looks ten times in a second while bytes move, reports rates
//   Op          as collective/mesh_attempt.cc: an all-reduce over the mesh, by shares
//   LinkTable   the coordinator's own; new shares come between two ops, as in ring_choice.h
//
// All hosts begin an op at the same time, when all have ended the one before.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "coordinator/core/link_table.h"
#include "peerd/paths/host_paths.h"
#include "peerd/paths/link_path.h"
#include "peerd/paths/path_reports.h"
#include "proto/wire/shares.h"
#include "tests/paths/tcp_model.h"

namespace longhaul::paths_model {

struct WorldOptions {
  std::vector<AccessRates> hosts;
  Between between;
  Nanos queue = 50'000'000;
  uint64_t op_bytes = uint64_t{16} << 20;
  bool offers_bbr = false;  // the systems do
  // Another program on the first host sends to the second one all the time.
  bool rival = false;
  // The first data lane of each link from the first host carries only so much. 0: as the others.
  double slow_lane_mbit = 0;
  uint64_t seed = 1;
};

class World final : public TcpModel::User {
 public:
  explicit World(const WorldOptions& options);
  ~World() override;

  // Does one op, and returns its seconds: from its begin until the last host has ended it.
  double DoOp();
  // Lets time pass without an op.
  void Pause(double seconds);
  void SetRates(int host, const AccessRates& rates) { tcp_.SetRates(host, rates); }

  // The least seconds of an op with any shares, without latencies and headers.
  double Bound() const;
  // The shares with which it takes so long.
  Shares BestShares() const;
  const Shares& shares() const { return shares_; }
  const TcpModel& tcp() const { return tcp_; }
  const peerd::HostPaths& paths(int host) const;
  // How many lanes each link of the host uses: the fewest and the most.
  std::pair<uint32_t, uint32_t> Lanes(int host) const;
  double seconds() const { return static_cast<double>(tcp_.now()) * 1e-9; }

 private:
  struct Segment {
    uint32_t bytes = 0;
    bool result = false;
    uint32_t grain = 0;
  };
  struct Lane;
  struct Link;
  struct Host;

  void OnWritable(int connection) override;
  void OnReceived(int connection, uint64_t bytes) override;

  void AddLanes(Link* link, uint32_t lanes);
  void Pull(Lane* lane);
  bool NextSegment(Lane* lane, bool anew, Segment* segment);
  void PullAll(Link* link);
  void Send(Link* link, const Segment& segment);
  // Sends a frame on the control lane. `arrive` is called when it has come.
  void Tell(Link* link, uint32_t bytes, std::function<void()> arrive);

  void Turn(Host* host);
  void LookAt(Host* host);
  void WatchLinks(Host* host);

  void BeginOp(Host* host);
  void HandFresh(Host* host);
  void OnSegment(Host* host, const Segment& segment);
  void MaybeComplete(Host* host);
  void MaybeOver(Host* host);
  void ChooseShares();

  WorldOptions options_;
  TcpModel tcp_;
  std::vector<std::unique_ptr<Host>> hosts_;
  std::vector<Lane*> lanes_;  // by connection; nullptr: the rival's

  coordinator::LinkTable table_;
  std::vector<PeerId> ring_;
  Shares shares_;
  Tick shares_at_{INT64_MIN / 2};
  bool measured_ = false;  // since the shares were chosen last

  uint64_t op_ = 0;
  std::vector<uint32_t> owner_of_;  // of each grain
  int over_ = 0;                    // hosts that have ended the op
};

}  // namespace longhaul::paths_model
