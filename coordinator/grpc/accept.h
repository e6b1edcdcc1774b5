// Accepts connections such that a lack of descriptors does no lasting harm.
//
// gRPC 1.51 gives a listening port up for good once accept4() fails for another reason than EAGAIN:
// strangers who use up the descriptors of the coordinator would shut its ports until a restart. So
// accept.cc defines accept4() for this process, in place of the C library's. It never tells gRPC of
// such an error, and resets connections that would take one of the last kDescriptorsReserved
// descriptors, which stores, logs and certificates need. It logs that at most once a minute.
//
// Threads: any.
#pragma once

namespace longhaul::coordinator {

inline constexpr int kDescriptorsReserved = 32;

}  // namespace longhaul::coordinator
