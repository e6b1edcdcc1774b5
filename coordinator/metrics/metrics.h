// The coordinator's metrics for Prometheus. No other part of the coordinator knows prometheus-cpp.
//
// Any thread may call any method. Nothing here blocks or can fail. Each On...() method counts one
// thing that happened.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "coordinator/core/records.h"

namespace longhaul::coordinator {

// The page shows so many groups (in the order of runs and numbers) and so many links of rings (the
// slowest). So its length has a limit, whatever names peers bring.
inline constexpr size_t kGroupsShownMax = 64;
inline constexpr size_t kLinksShownMax = 8;

// What made an epoch necessary. kAdmit: a newcomer. kRemoval: a removed member. kRing: a better
// order of the ring. kRepair: anything else, such as a lost link or a member that leaves the
// background.
enum class EpochCause { kAdmit, kRemoval, kRepair, kRing };

class CoordinatorMetrics {
 public:
  CoordinatorMetrics();
  ~CoordinatorMetrics();
  CoordinatorMetrics(const CoordinatorMetrics&) = delete;
  CoordinatorMetrics& operator=(const CoordinatorMetrics&) = delete;

  void OnEpochCommitted(EpochCause cause);
  // A change was committed; it took this long from its first PrepareEpoch to its commit.
  void OnPreparation(std::chrono::duration<double> took);
  void OnPreparationAborted();
  // An epoch that froze ops was committed. `detect`: the silence before the first report of the
  // fault. `agree`: from that report to the commit. (The agree_ms of a peer's log begins at its
  // freeze.)
  void OnFault(std::chrono::duration<double> detect, std::chrono::duration<double> agree);
  void OnVote();
  // A sync was committed. `took`: since the first member voted for it. `bytes`: what members
  // received that had to fetch the state.
  void OnSync(std::chrono::duration<double> took, uint64_t bytes);
  void OnSyncFailed();
  // A sync refused one member; the other members went on.
  void OnSyncRefused();
  void OnStateCorrupt();
  // `cause`: as FaultRecord::cause.
  void OnRemoval(const std::string& cause);
  void OnStreamOpened();
  void OnStreamClosed();
  // A message broke the protocol, or a stream was turned away.
  void OnRefused();
  // A stream named a peer whose own stream is alive, without that peer's secret.
  void OnStrangerRefused();
  void OnJoinRefused();
  // `reason`: as NameOf(TokenRefusal).
  void OnCallerRefused(const std::string& reason);
  // A call was refused for its certificate. `reason`: as tls::RefusalName() gives it.
  void OnCertificateRefused(const std::string& reason);
  // New TLS files came: good ones, which are in use now, or broken ones, which are not.
  void OnTlsFiles(bool good);
  void SetTlsFilesRefused(bool refused);
  void SetStreamsWithoutHello(size_t count);
  void OnStoreWrite(std::chrono::duration<double> took);
  // The loop took up mail that had waited so long.
  void OnMail(std::chrono::duration<double> waited);
  // How much mail waits for the loop now.
  void SetQueue(size_t mails);
  // The core handled one event, and all its actions were carried out.
  void OnStep(std::chrono::duration<double> took);

  // Sets the gauges that an overview gives: of runs, groups, members, and links of rings. One
  // thread calls this.
  void SetOverview(const Overview& overview);

  // All metrics, in Prometheus' text format.
  std::string Text() const;

 private:
  struct Impl;
  static void ShowGroups(const Overview& overview, Impl* impl);
  static void ShowLinks(const Overview& overview, Impl* impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace longhaul::coordinator
