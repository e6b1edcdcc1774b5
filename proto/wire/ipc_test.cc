#include "proto/wire/ipc.h"

#include <cstddef>

#include "gtest/gtest.h"

extern "C" size_t IpcRequestBytesInC();
extern "C" size_t IpcReplyBytesInC();
extern "C" size_t IpcReplyUnionOffsetInC();

namespace {

// A client and a daemon of different builds meet on one socket: these numbers never change.
TEST(IpcTest, RequestLayoutIsGolden) {
  EXPECT_EQ(sizeof(lh_ipc_request), 192u);
  EXPECT_EQ(offsetof(lh_ipc_request, magic), 0u);
  EXPECT_EQ(offsetof(lh_ipc_request, type), 4u);
  EXPECT_EQ(offsetof(lh_ipc_request, call), 8u);
  EXPECT_EQ(offsetof(lh_ipc_request, member), 16u);
  EXPECT_EQ(offsetof(lh_ipc_request, u), 24u);
}

TEST(IpcTest, RequestBodiesAreGolden) {
  EXPECT_EQ(sizeof(lh_ipc_hello), 80u);
  EXPECT_EQ(offsetof(lh_ipc_hello, version), 0u);
  EXPECT_EQ(offsetof(lh_ipc_hello, pid), 4u);
  EXPECT_EQ(offsetof(lh_ipc_hello, name), 8u);
  EXPECT_EQ(sizeof(lh_ipc_region), 16u);
  EXPECT_EQ(offsetof(lh_ipc_region, bytes), 8u);
  EXPECT_EQ(sizeof(lh_ipc_join), 160u);
  EXPECT_EQ(offsetof(lh_ipc_join, group), 0u);
  EXPECT_EQ(offsetof(lh_ipc_join, step_deadline_ms), 4u);
  EXPECT_EQ(offsetof(lh_ipc_join, cohort_size), 8u);
  EXPECT_EQ(offsetof(lh_ipc_join, zero), 12u);
  EXPECT_EQ(offsetof(lh_ipc_join, run), 16u);
  EXPECT_EQ(offsetof(lh_ipc_join, cohort), 88u);
  EXPECT_EQ(sizeof(lh_ipc_range), 16u);
  EXPECT_EQ(offsetof(lh_ipc_range, offset), 8u);
  EXPECT_EQ(sizeof(lh_ipc_members), 8u);
  EXPECT_EQ(sizeof(lh_ipc_op), 56u);
  EXPECT_EQ(offsetof(lh_ipc_op, tag), 0u);
  EXPECT_EQ(offsetof(lh_ipc_op, count), 8u);
  EXPECT_EQ(offsetof(lh_ipc_op, source), 16u);
  EXPECT_EQ(offsetof(lh_ipc_op, target), 32u);
  EXPECT_EQ(offsetof(lh_ipc_op, dtype), 48u);
  EXPECT_EQ(offsetof(lh_ipc_op, reduce), 49u);
  EXPECT_EQ(offsetof(lh_ipc_op, on_fault), 50u);
  EXPECT_EQ(offsetof(lh_ipc_op, quantization), 51u);
  EXPECT_EQ(offsetof(lh_ipc_op, min_world), 52u);
}

TEST(IpcTest, ReplyLayoutIsGolden) {
  EXPECT_EQ(sizeof(lh_ipc_reply), 520u);
  EXPECT_EQ(offsetof(lh_ipc_reply, magic), 0u);
  EXPECT_EQ(offsetof(lh_ipc_reply, type), 4u);
  EXPECT_EQ(offsetof(lh_ipc_reply, call), 8u);
  EXPECT_EQ(offsetof(lh_ipc_reply, member), 16u);
  EXPECT_EQ(offsetof(lh_ipc_reply, status), 24u);
  EXPECT_EQ(offsetof(lh_ipc_reply, zero), 28u);
  EXPECT_EQ(offsetof(lh_ipc_reply, world), 32u);
  EXPECT_EQ(offsetof(lh_ipc_reply, u), 64u);
}

TEST(IpcTest, ReplyBodiesAreGolden) {
  EXPECT_EQ(sizeof(lh_ipc_world), 32u);
  EXPECT_EQ(offsetof(lh_ipc_world, member_id), 8u);
  EXPECT_EQ(offsetof(lh_ipc_world, rank), 16u);
  EXPECT_EQ(offsetof(lh_ipc_world, size), 20u);
  EXPECT_EQ(offsetof(lh_ipc_world, pending), 24u);
  EXPECT_EQ(sizeof(lh_ipc_op_info), 48u);
  EXPECT_EQ(offsetof(lh_ipc_op_info, bytes_sent), 8u);
  EXPECT_EQ(offsetof(lh_ipc_op_info, bytes_received), 16u);
  EXPECT_EQ(offsetof(lh_ipc_op_info, seconds_total_ns), 24u);
  EXPECT_EQ(offsetof(lh_ipc_op_info, seconds_wait_ns), 32u);
  EXPECT_EQ(offsetof(lh_ipc_op_info, size), 40u);
  EXPECT_EQ(offsetof(lh_ipc_op_info, retries), 44u);
  EXPECT_EQ(sizeof(lh_ipc_members_page), 240u);
  EXPECT_EQ(offsetof(lh_ipc_members_page, first), 8u);
  EXPECT_EQ(offsetof(lh_ipc_members_page, count), 12u);
  EXPECT_EQ(offsetof(lh_ipc_members_page, member_ids), 16u);
}

TEST(IpcTest, NumbersAreGolden) {
  EXPECT_EQ(LH_IPC_MAGIC, 0x3149484cu);
  EXPECT_EQ(LH_IPC_HELLO, 1);
  EXPECT_EQ(LH_IPC_REGION, 2);
  EXPECT_EQ(LH_IPC_UNREGION, 3);
  EXPECT_EQ(LH_IPC_JOIN, 4);
  EXPECT_EQ(LH_IPC_LEAVE, 5);
  EXPECT_EQ(LH_IPC_STEP, 6);
  EXPECT_EQ(LH_IPC_ALL_REDUCE, 7);
  EXPECT_EQ(LH_IPC_MEMBERS, 8);
  EXPECT_EQ(LH_IPC_DONE, 64);
  EXPECT_EQ(LH_IPC_WORLD, 65);
  EXPECT_EQ(LH_IPC_GONE, 66);
}

TEST(IpcTest, CAndCppSeeOneLayout) {
  EXPECT_EQ(IpcRequestBytesInC(), sizeof(lh_ipc_request));
  EXPECT_EQ(IpcReplyBytesInC(), sizeof(lh_ipc_reply));
  EXPECT_EQ(IpcReplyUnionOffsetInC(), offsetof(lh_ipc_reply, u));
}

}  // namespace
