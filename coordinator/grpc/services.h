// The two gRPC services of the coordinator, without gRPC's headers: those take seconds to compile.
// A service owns its streams; gRPC's threads call it. The loop, the metrics and the desk must
// outlive it.
#pragma once

#include <memory>

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
};

// For peers: the service Coordinator.
std::unique_ptr<DrainableService> MakeAttachService(CoordinatorLoop* loop,
                                                    CoordinatorMetrics* metrics,
                                                    RecordingDesk* desk);
// For operators: the service Admin.
std::unique_ptr<DrainableService> MakeAdminService(CoordinatorLoop* loop, RecordingDesk* desk);

}  // namespace longhaul::coordinator
