// The two gRPC services of the coordinator, without gRPC's headers: those take seconds to compile.
// A service owns its streams; gRPC's threads call it. The loop, the metrics and the desk must
// outlive it, and so must the authorizer, which decides who may call.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>

#include "coordinator/grpc/authorization.h"
#include "coordinator/grpc/recording_desk.h"
#include "coordinator/loop/loop.h"
#include "coordinator/metrics/metrics.h"

namespace grpc {
class Service;
}

namespace longhaul::coordinator {

class DrainableService {
 public:
  virtual ~DrainableService() = default;
  virtual grpc::Service* service() = 0;
  // Ends all streams with UNAVAILABLE and refuses new ones. Any thread may call it.
  virtual void EndStreams() = 0;
  // Ends each stream for whose caller `why` gives a reason, and each that has reached its age. To
  // be called each second. Any thread may call it.
  virtual void EndStreamsOf(const std::function<std::optional<Denial>(const Caller&)>& why) = 0;
  // A connection came from this host (front.h). Any thread may call it.
  virtual void Came(const std::string& host) = 0;
};

// For peers: the service Coordinator. A control stream ends at the age `stream_age`, so that the
// peer connects anew; nullopt: at no age.
std::unique_ptr<DrainableService> MakeAttachService(
    CoordinatorLoop* loop, CoordinatorMetrics* metrics, RecordingDesk* desk, Authorizer* authorizer,
    std::optional<std::chrono::milliseconds> stream_age);
// For operators: the service Admin.
std::unique_ptr<DrainableService> MakeAdminService(CoordinatorLoop* loop, RecordingDesk* desk,
                                                   TokenDesk* tokens, Authorizer* authorizer);

}  // namespace longhaul::coordinator
