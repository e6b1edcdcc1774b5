// The two services, each behind its own translation unit: gRPC's headers cost seconds.
#pragma once

#include <memory>

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
  // Ends all streams with UNAVAILABLE and refuses new ones. Any thread.
  virtual void EndStreams() = 0;
};

std::unique_ptr<DrainableService> MakeAttachService(CoordinatorLoop* loop,
                                                    CoordinatorMetrics* metrics);
std::unique_ptr<DrainableService> MakeAdminService(CoordinatorLoop* loop);

}  // namespace longhaul::coordinator
