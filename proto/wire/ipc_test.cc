#include "proto/wire/ipc.h"

#include <cstddef>

#include "gtest/gtest.h"

extern "C" size_t IpcRequestBytesInC();
extern "C" size_t IpcReplyBytesInC();
extern "C" size_t IpcReplyUnionOffsetInC();
extern "C" size_t IpcTensorBytesInC();
extern "C" size_t IpcPieceBytesInC();

namespace {

// A client and a daemon of different builds may meet on one socket. So these numbers never change
// within one LH_IPC_VERSION.
TEST(IpcTest, RequestLayoutIsGolden) {
  EXPECT_EQ(sizeof(lh_ipc_request), 256u);
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
  EXPECT_EQ(sizeof(lh_ipc_region), 24u);
  EXPECT_EQ(offsetof(lh_ipc_region, bytes), 8u);
  EXPECT_EQ(offsetof(lh_ipc_region, flags), 16u);
  EXPECT_EQ(offsetof(lh_ipc_region, zero), 20u);
  EXPECT_EQ(sizeof(lh_ipc_join), 232u);
  EXPECT_EQ(offsetof(lh_ipc_join, group), 0u);
  EXPECT_EQ(offsetof(lh_ipc_join, step_deadline_ms), 4u);
  EXPECT_EQ(offsetof(lh_ipc_join, cohort_size), 8u);
  EXPECT_EQ(offsetof(lh_ipc_join, members), 10u);
  EXPECT_EQ(offsetof(lh_ipc_join, background), 12u);
  EXPECT_EQ(offsetof(lh_ipc_join, run), 16u);
  EXPECT_EQ(offsetof(lh_ipc_join, cohort), 88u);
  EXPECT_EQ(offsetof(lh_ipc_join, name), 160u);
  EXPECT_EQ(sizeof(lh_ipc_range), 16u);
  EXPECT_EQ(offsetof(lh_ipc_range, offset), 8u);
  EXPECT_EQ(sizeof(lh_ipc_members), 8u);
  EXPECT_EQ(sizeof(lh_ipc_op), 144u);
  EXPECT_EQ(offsetof(lh_ipc_op, tag), 0u);
  EXPECT_EQ(offsetof(lh_ipc_op, count), 8u);
  EXPECT_EQ(offsetof(lh_ipc_op, source), 16u);
  EXPECT_EQ(offsetof(lh_ipc_op, target), 32u);
  EXPECT_EQ(offsetof(lh_ipc_op, dtype), 48u);
  EXPECT_EQ(offsetof(lh_ipc_op, reduce), 49u);
  EXPECT_EQ(offsetof(lh_ipc_op, on_fault), 50u);
  EXPECT_EQ(offsetof(lh_ipc_op, quantization), 51u);
  EXPECT_EQ(offsetof(lh_ipc_op, min_world), 52u);
  EXPECT_EQ(offsetof(lh_ipc_op, algorithm), 56u);
  EXPECT_EQ(offsetof(lh_ipc_op, kind), 57u);
  EXPECT_EQ(offsetof(lh_ipc_op, world), 58u);
  EXPECT_EQ(offsetof(lh_ipc_op, order), 60u);
  EXPECT_EQ(offsetof(lh_ipc_op, weighted), 61u);
  EXPECT_EQ(offsetof(lh_ipc_op, unequal), 62u);
  EXPECT_EQ(offsetof(lh_ipc_op, flags), 63u);
  EXPECT_EQ(offsetof(lh_ipc_op, root), 64u);
  EXPECT_EQ(offsetof(lh_ipc_op, weight), 72u);
  EXPECT_EQ(offsetof(lh_ipc_op, list), 80u);
  EXPECT_EQ(offsetof(lh_ipc_op, table), 88u);
  EXPECT_EQ(offsetof(lh_ipc_op, participants), 104u);
  EXPECT_EQ(offsetof(lh_ipc_op, gives), 108u);
  EXPECT_EQ(offsetof(lh_ipc_op, gets), 112u);
  EXPECT_EQ(offsetof(lh_ipc_op, pieces), 116u);
  EXPECT_EQ(offsetof(lh_ipc_op, block), 120u);
  EXPECT_EQ(offsetof(lh_ipc_op, rounding), 122u);
  EXPECT_EQ(offsetof(lh_ipc_op, refusal), 123u);
  EXPECT_EQ(offsetof(lh_ipc_op, outline), 124u);
  EXPECT_EQ(offsetof(lh_ipc_op, zero), 126u);
  EXPECT_EQ(offsetof(lh_ipc_op, error), 128u);
  EXPECT_EQ(sizeof(lh_ipc_piece), 64u);
  EXPECT_EQ(offsetof(lh_ipc_piece, source), 8u);
  EXPECT_EQ(offsetof(lh_ipc_piece, target), 24u);
  EXPECT_EQ(offsetof(lh_ipc_piece, error), 40u);
  EXPECT_EQ(offsetof(lh_ipc_piece, dtype), 56u);
  EXPECT_EQ(offsetof(lh_ipc_piece, zero), 57u);
  EXPECT_EQ(sizeof(lh_ipc_cancel), 8u);
  EXPECT_EQ(sizeof(lh_ipc_state), 48u);
  EXPECT_EQ(offsetof(lh_ipc_state, table), 8u);
  EXPECT_EQ(offsetof(lh_ipc_state, changed), 24u);
  EXPECT_EQ(offsetof(lh_ipc_state, count), 40u);
  EXPECT_EQ(offsetof(lh_ipc_state, zero), 44u);
  EXPECT_EQ(sizeof(lh_ipc_sync), 40u);
  EXPECT_EQ(offsetof(lh_ipc_sync, revision), 8u);
  EXPECT_EQ(offsetof(lh_ipc_sync, touched), 16u);
  EXPECT_EQ(offsetof(lh_ipc_sync, strategy), 32u);
  EXPECT_EQ(offsetof(lh_ipc_sync, zero), 36u);
}

TEST(IpcTest, EntryOfAStateIsGolden) {
  EXPECT_EQ(sizeof(lh_ipc_tensor), 376u);
  EXPECT_EQ(offsetof(lh_ipc_tensor, name), 0u);
  EXPECT_EQ(offsetof(lh_ipc_tensor, shape), 264u);
  EXPECT_EQ(offsetof(lh_ipc_tensor, bytes), 328u);
  EXPECT_EQ(offsetof(lh_ipc_tensor, data), 336u);
  EXPECT_EQ(offsetof(lh_ipc_tensor, inbox), 352u);
  EXPECT_EQ(offsetof(lh_ipc_tensor, dtype), 368u);
  EXPECT_EQ(offsetof(lh_ipc_tensor, dims), 369u);
  EXPECT_EQ(offsetof(lh_ipc_tensor, flags), 370u);
  EXPECT_EQ(offsetof(lh_ipc_tensor, zero), 371u);
}

TEST(IpcTest, ReplyLayoutIsGolden) {
  EXPECT_EQ(sizeof(lh_ipc_reply), 544u);
  EXPECT_EQ(offsetof(lh_ipc_reply, magic), 0u);
  EXPECT_EQ(offsetof(lh_ipc_reply, type), 4u);
  EXPECT_EQ(offsetof(lh_ipc_reply, call), 8u);
  EXPECT_EQ(offsetof(lh_ipc_reply, member), 16u);
  EXPECT_EQ(offsetof(lh_ipc_reply, status), 24u);
  EXPECT_EQ(offsetof(lh_ipc_reply, flags), 28u);
  EXPECT_EQ(offsetof(lh_ipc_reply, world), 32u);
  EXPECT_EQ(offsetof(lh_ipc_reply, u), 88u);
}

TEST(IpcTest, ReplyBodiesAreGolden) {
  EXPECT_EQ(sizeof(lh_ipc_world), 56u);
  EXPECT_EQ(offsetof(lh_ipc_world, member_id), 8u);
  EXPECT_EQ(offsetof(lh_ipc_world, rank), 16u);
  EXPECT_EQ(offsetof(lh_ipc_world, size), 20u);
  EXPECT_EQ(offsetof(lh_ipc_world, pending), 24u);
  EXPECT_EQ(offsetof(lh_ipc_world, boundary), 32u);
  EXPECT_EQ(offsetof(lh_ipc_world, step_epoch), 40u);
  EXPECT_EQ(offsetof(lh_ipc_world, step_rank), 48u);
  EXPECT_EQ(offsetof(lh_ipc_world, step_size), 52u);
  EXPECT_EQ(sizeof(lh_ipc_op_info), 456u);
  EXPECT_EQ(offsetof(lh_ipc_op_info, hosts), 56u);
  EXPECT_EQ(offsetof(lh_ipc_op_info, blocks_not_finite), 64u);
  EXPECT_EQ(offsetof(lh_ipc_op_info, member_ids), 72u);
  EXPECT_EQ(sizeof(lh_ipc_member_info), 304u);
  EXPECT_EQ(offsetof(lh_ipc_member_info, host), 168u);
  EXPECT_EQ(offsetof(lh_ipc_op_info, bytes_sent), 8u);
  EXPECT_EQ(offsetof(lh_ipc_op_info, bytes_received), 16u);
  EXPECT_EQ(offsetof(lh_ipc_op_info, seconds_total_ns), 24u);
  EXPECT_EQ(offsetof(lh_ipc_op_info, seconds_wait_ns), 32u);
  EXPECT_EQ(offsetof(lh_ipc_op_info, size), 40u);
  EXPECT_EQ(offsetof(lh_ipc_op_info, retries), 44u);
  EXPECT_EQ(offsetof(lh_ipc_op_info, algorithm), 48u);
  EXPECT_EQ(sizeof(lh_ipc_members_page), 448u);
  EXPECT_EQ(offsetof(lh_ipc_members_page, first), 8u);
  EXPECT_EQ(offsetof(lh_ipc_members_page, count), 12u);
  EXPECT_EQ(offsetof(lh_ipc_members_page, member_ids), 16u);
  EXPECT_EQ(sizeof(lh_ipc_sync_info), 48u);
  EXPECT_EQ(offsetof(lh_ipc_sync_info, hash_high), 8u);
  EXPECT_EQ(offsetof(lh_ipc_sync_info, hash_low), 16u);
  EXPECT_EQ(offsetof(lh_ipc_sync_info, bytes), 24u);
  EXPECT_EQ(offsetof(lh_ipc_sync_info, seconds_ns), 32u);
  EXPECT_EQ(offsetof(lh_ipc_sync_info, sources), 40u);
  EXPECT_EQ(sizeof(lh_ipc_kept), 16u);
  EXPECT_EQ(offsetof(lh_ipc_kept, kept), 8u);
  EXPECT_EQ(sizeof(lh_ipc_progress), 32u);
  EXPECT_EQ(offsetof(lh_ipc_progress, bytes_total), 8u);
  EXPECT_EQ(offsetof(lh_ipc_progress, bytes_per_second), 16u);
  EXPECT_EQ(offsetof(lh_ipc_progress, sources), 24u);
}

TEST(IpcTest, NumbersAreGolden) {
  EXPECT_EQ(LH_IPC_MAGIC, 0x3149484cu);
  EXPECT_EQ(LH_IPC_HELLO, 1);
  EXPECT_EQ(LH_IPC_REGION, 2);
  EXPECT_EQ(LH_IPC_UNREGION, 3);
  EXPECT_EQ(LH_IPC_JOIN, 4);
  EXPECT_EQ(LH_IPC_LEAVE, 5);
  EXPECT_EQ(LH_IPC_STEP, 6);
  EXPECT_EQ(LH_IPC_OP, 7);
  EXPECT_EQ(LH_IPC_MEMBERS, 8);
  EXPECT_EQ(LH_IPC_STATE, 9);
  EXPECT_EQ(LH_IPC_UNSTATE, 10);
  EXPECT_EQ(LH_IPC_SYNC, 11);
  EXPECT_EQ(LH_IPC_KEPT, 12);
  EXPECT_EQ(LH_IPC_TAKE, 13);
  EXPECT_EQ(LH_IPC_PREPARE, 14);
  EXPECT_EQ(LH_IPC_MEMBER, 15);
  EXPECT_EQ(LH_IPC_CANCEL, 16);
  EXPECT_EQ(LH_IPC_DONE, 64);
  EXPECT_EQ(LH_IPC_WORLD, 65);
  EXPECT_EQ(LH_IPC_GONE, 66);
  EXPECT_EQ(LH_IPC_PROGRESS, 67);
  EXPECT_EQ(LH_IPC_OP_MEMBERS, 68);
  EXPECT_EQ(LH_IPC_ROOT_IS_RANK, 1);
  EXPECT_EQ(LH_IPC_IS_ROOT, 2);
  EXPECT_EQ(LH_IPC_ALLOW_UNEQUAL, 1);
  EXPECT_EQ(LH_IPC_REGION_INBOX, 1);
  EXPECT_EQ(LH_IPC_PASSED, 1);
  EXPECT_EQ(LH_IPC_RESUMED, 2);
  EXPECT_EQ(LH_IPC_BACKGROUND, 4);
  EXPECT_EQ(LH_IPC_CHANGED, 8);
  EXPECT_EQ(LH_IPC_NEWCOMER, 32);
  EXPECT_EQ(LH_WIRE_POPULAR, 1);
  EXPECT_EQ(LH_WIRE_RECEIVE, 2);
  EXPECT_EQ(LH_WIRE_SEND, 3);
  EXPECT_EQ(LH_WIRE_BOOL, 12);
  EXPECT_EQ(LH_WIRE_FLOAT8_E4M3, 13);
  EXPECT_EQ(LH_WIRE_FLOAT8_E5M2, 14);
  EXPECT_EQ(LH_WIRE_REDUCE, 6);
  EXPECT_EQ(LH_WIRE_GATHER, 7);
  EXPECT_EQ(LH_WIRE_SCATTER, 8);
  EXPECT_EQ(LH_WIRE_ALL_TO_ALL, 9);
  EXPECT_EQ(LH_WIRE_SEND_RECV, 10);
  EXPECT_EQ(LH_WIRE_ANY_ORDER, 0);
  EXPECT_EQ(LH_WIRE_RANK_ORDER, 1);
  EXPECT_EQ(LH_STATE_CHUNK_BYTES, 1048576u);
}

TEST(IpcTest, CAndCppSeeOneLayout) {
  EXPECT_EQ(IpcRequestBytesInC(), sizeof(lh_ipc_request));
  EXPECT_EQ(IpcReplyBytesInC(), sizeof(lh_ipc_reply));
  EXPECT_EQ(IpcReplyUnionOffsetInC(), offsetof(lh_ipc_reply, u));
  EXPECT_EQ(IpcTensorBytesInC(), sizeof(lh_ipc_tensor));
  EXPECT_EQ(IpcPieceBytesInC(), sizeof(lh_ipc_piece));
}

}  // namespace
