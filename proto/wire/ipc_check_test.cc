#include "proto/wire/ipc_check.h"

#include <cstring>
#include <string>

#include "gtest/gtest.h"

namespace longhaul {
namespace {

lh_ipc_request Request(uint32_t type) {
  lh_ipc_request request;
  memset(&request, 0, sizeof request);
  request.magic = LH_IPC_MAGIC;
  request.type = type;
  request.call = 1;
  return request;
}

lh_ipc_request Hello() {
  lh_ipc_request request = Request(LH_IPC_HELLO);
  request.u.hello.version = LH_IPC_VERSION;
  strcpy(request.u.hello.name, "trainer-1");
  return request;
}

lh_ipc_request Join() {
  lh_ipc_request request = Request(LH_IPC_JOIN);
  strcpy(request.u.join.run, "run.1_a-b");
  return request;
}

lh_ipc_op Op() {
  lh_ipc_op op;
  memset(&op, 0, sizeof op);
  op.kind = LH_WIRE_ALL_REDUCE;
  op.count = 16;
  op.dtype = LH_WIRE_FLOAT32;
  op.source = {1, 0};
  op.target = {1, 64};
  return op;
}

bool Fine(const lh_ipc_request& request, bool greeted = true, size_t descriptors = 0) {
  return IpcProtocolError(request, greeted, descriptors).empty();
}

TEST(IpcProtocolErrorTest, PassesWhatAClientSends) {
  EXPECT_TRUE(Fine(Hello(), /*greeted=*/false));
  EXPECT_TRUE(Fine(Join()));
  lh_ipc_request region = Request(LH_IPC_REGION);
  region.u.region = {7, 4096, 0, 0};
  EXPECT_TRUE(Fine(region, true, 1));
  lh_ipc_request step = Request(LH_IPC_STEP);
  step.member = 3;
  EXPECT_TRUE(Fine(step));
  lh_ipc_request leave = Request(LH_IPC_LEAVE);
  leave.u.leave.join = 9;
  EXPECT_TRUE(Fine(leave));
  lh_ipc_request op = Request(LH_IPC_OP);
  op.member = 3;
  op.u.op = Op();
  EXPECT_TRUE(Fine(op));
}

TEST(IpcProtocolErrorTest, ReservedBytesOfAnOpAreZero) {
  lh_ipc_request op = Request(LH_IPC_OP);
  op.member = 3;
  op.u.op = Op();
  op.u.op.zero1[2] = 1;
  EXPECT_FALSE(Fine(op));
  op.u.op.zero1[2] = 0;
  EXPECT_TRUE(Fine(op));
  op.u.op.zero[7] = 1;
  EXPECT_FALSE(Fine(op));
}

TEST(IpcProtocolErrorTest, AJoinMayNameItsMember) {
  lh_ipc_request join = Join();
  strcpy(join.u.join.name, "trainer-1");
  EXPECT_TRUE(Fine(join));
  strcpy(join.u.join.name, "trainer 1");
  EXPECT_FALSE(Fine(join));
  memset(join.u.join.name, 'x', sizeof join.u.join.name);
  EXPECT_FALSE(Fine(join));
  memset(join.u.join.name, 0, sizeof join.u.join.name);
  join.u.join.name[5] = 'x';
  EXPECT_FALSE(Fine(join));
}

TEST(IpcProtocolErrorTest, KeptNamesAMemberAndAStateAndNothingElse) {
  lh_ipc_request kept = Request(LH_IPC_KEPT);
  kept.member = 3;
  kept.u.state.state = 7;
  EXPECT_TRUE(Fine(kept));
  kept.u.state.count = 1;
  EXPECT_FALSE(Fine(kept));
  kept.u.state.count = 0;
  kept.u.state.state = 0;
  EXPECT_FALSE(Fine(kept));
  kept.u.state.state = 7;
  kept.member = 0;
  EXPECT_FALSE(Fine(kept));
}

TEST(IpcProtocolErrorTest, PrepareNamesAStateAndNothingElse) {
  lh_ipc_request prepare = Request(LH_IPC_PREPARE);
  EXPECT_FALSE(Fine(prepare));
  prepare.u.state.state = 7;
  EXPECT_TRUE(Fine(prepare));
  prepare.u.state.table.offset = 1;
  EXPECT_FALSE(Fine(prepare));
  prepare.u.state.table.offset = 0;
  prepare.member = 3;
  EXPECT_FALSE(Fine(prepare));
}

TEST(IpcProtocolErrorTest, AJoinHasOneOfTwoModes) {
  lh_ipc_request join = Join();
  join.u.join.background = 1;
  EXPECT_TRUE(Fine(join));
  join.u.join.background = 2;
  EXPECT_FALSE(Fine(join));
}

TEST(IpcProtocolErrorTest, ATakeNamesAMemberAndWaitsADayAtMost) {
  lh_ipc_request take = Request(LH_IPC_TAKE);
  EXPECT_FALSE(Fine(take));
  take.member = 3;
  take.u.take.timeout_ms = LH_STEP_DEADLINE_MS_MAX;
  EXPECT_TRUE(Fine(take));
  ++take.u.take.timeout_ms;
  EXPECT_FALSE(Fine(take));
  take.u.take.timeout_ms = 0;
  take.u.take.zero = 1;
  EXPECT_FALSE(Fine(take));
}

TEST(IpcProtocolErrorTest, HelloComesFirstAndOnce) {
  EXPECT_FALSE(Fine(Hello(), /*greeted=*/true));
  EXPECT_FALSE(Fine(Join(), /*greeted=*/false));
}

TEST(IpcProtocolErrorTest, RefusesOtherVersionsWithBothNumbers) {
  lh_ipc_request hello = Hello();
  hello.u.hello.version = LH_IPC_VERSION + 2;
  const std::string text = IpcProtocolError(hello, false, 0);
  for (const int version : {LH_IPC_VERSION, LH_IPC_VERSION + 2}) {
    EXPECT_NE(text.find("version " + std::to_string(version)), std::string::npos) << text;
  }
}

TEST(IpcProtocolErrorTest, RefusesWrongMagicTypeAndCall) {
  lh_ipc_request request = Join();
  request.magic ^= 1;
  EXPECT_FALSE(Fine(request));
  for (const uint32_t type : {0u, 12u, 64u, 65u, 0xffffffffu}) EXPECT_FALSE(Fine(Request(type)));
  request = Join();
  request.call = 0;
  EXPECT_FALSE(Fine(request));
}

TEST(IpcProtocolErrorTest, DescriptorsComeWithRegionsOnlyAndOneEach) {
  lh_ipc_request region = Request(LH_IPC_REGION);
  region.u.region = {7, 4096, 0, 0};
  EXPECT_FALSE(Fine(region, true, 0));
  EXPECT_FALSE(Fine(region, true, 2));
  EXPECT_TRUE(Fine(region, true, 1));
  region.u.region.flags = LH_IPC_REGION_INBOX;
  EXPECT_TRUE(Fine(region, true, 1));
  region.u.region.flags = 2;
  EXPECT_FALSE(Fine(region, true, 1));
  region.u.region = {7, 4096, 0, 1};
  EXPECT_FALSE(Fine(region, true, 1));
  EXPECT_FALSE(Fine(Join(), true, 1));
}

TEST(IpcProtocolErrorTest, RefusesNamesThatAreEmptyUnterminatedOrForeign) {
  for (const char* name : {"", "a b", "a/b", "\x80"}) {
    lh_ipc_request join = Join();
    memset(join.u.join.run, 0, sizeof join.u.join.run);
    strcpy(join.u.join.run, name);
    EXPECT_FALSE(Fine(join)) << name;
  }
  lh_ipc_request join = Join();
  memset(join.u.join.run, 'a', sizeof join.u.join.run);
  EXPECT_FALSE(Fine(join));
  memset(join.u.join.run + LH_RUN_NAME_BYTES_MAX, 0, 8);
  EXPECT_TRUE(Fine(join));
  join.u.join.run[LH_RUN_NAME_BYTES_MAX] = 'a';
  EXPECT_FALSE(Fine(join));
}

TEST(IpcProtocolErrorTest, RefusesBytesThatHaveNoMeaning) {
  lh_ipc_request join = Join();
  join.u.bytes[167] = 1;
  EXPECT_FALSE(Fine(join));
  join = Join();
  join.u.join.run[60] = 'x';
  EXPECT_FALSE(Fine(join));
  join = Join();
  join.u.join.background = 7;
  EXPECT_FALSE(Fine(join));
  join = Join();
  join.member = 1;
  EXPECT_FALSE(Fine(join));
}

TEST(IpcProtocolErrorTest, ACohortHasANameAndASize) {
  lh_ipc_request join = Join();
  strcpy(join.u.join.cohort, "host-7");
  EXPECT_FALSE(Fine(join));
  join.u.join.cohort_size = LH_LOCAL_MEMBERS_MAX;
  EXPECT_TRUE(Fine(join));
  join.u.join.cohort_size = LH_LOCAL_MEMBERS_MAX + 1;
  EXPECT_FALSE(Fine(join));
  join.u.join.cohort_size = 2;
  join.u.join.cohort[1] = '/';
  EXPECT_FALSE(Fine(join));
  join = Join();
  join.u.join.cohort_size = 2;
  EXPECT_FALSE(Fine(join));
  join.u.join.cohort[20] = 'x';
  EXPECT_FALSE(Fine(join));
}

TEST(IpcProtocolErrorTest, AJoinWaitsForAtMostTheMembersOfAGroup) {
  lh_ipc_request join = Join();
  join.u.join.members = LH_MEMBERS_MAX;
  EXPECT_TRUE(Fine(join));
  join.u.join.members = LH_MEMBERS_MAX + 1;
  EXPECT_FALSE(Fine(join));
}

TEST(IpcProtocolErrorTest, LeaveNamesEitherMemberOrJoin) {
  lh_ipc_request leave = Request(LH_IPC_LEAVE);
  EXPECT_FALSE(Fine(leave));
  leave.member = 1;
  EXPECT_TRUE(Fine(leave));
  leave.u.leave.join = 1;
  EXPECT_FALSE(Fine(leave));
}

lh_ipc_request Sync(uint32_t type = LH_IPC_SYNC) {
  lh_ipc_request request = Request(type);
  request.member = 3;
  request.u.sync.state = 7;
  request.u.sync.strategy = LH_WIRE_POPULAR;
  return request;
}

TEST(IpcProtocolErrorTest, ASyncNamesMemberStateAndStrategy) {
  EXPECT_TRUE(Fine(Sync()));
  lh_ipc_request request = Sync();
  request.u.sync.touched = {1, 64};
  EXPECT_TRUE(Fine(request));
  request.u.sync.zero = 1;
  EXPECT_FALSE(Fine(request));
  request = Sync();
  request.u.sync.touched = {0, 64};
  EXPECT_FALSE(Fine(request));
  for (const uint32_t strategy : {0u, 4u, UINT32_MAX}) {
    request = Sync();
    request.u.sync.strategy = strategy;
    EXPECT_FALSE(Fine(request)) << strategy;
  }
  request = Sync();
  request.u.sync.state = 0;
  EXPECT_FALSE(Fine(request));
  request = Sync();
  request.member = 0;
  EXPECT_FALSE(Fine(request));
}

TEST(IpcProtocolErrorTest, AStepHasASyncOrNothing) {
  EXPECT_TRUE(Fine(Sync(LH_IPC_STEP)));
  lh_ipc_request step = Sync(LH_IPC_STEP);
  step.u.sync.state = 0;
  EXPECT_FALSE(Fine(step));
  step.u.sync.strategy = 0;
  EXPECT_TRUE(Fine(step));
  step.u.sync.revision = 1;
  EXPECT_FALSE(Fine(step));
}

TEST(IpcProtocolErrorTest, AStateHasANumberAndNoMember) {
  lh_ipc_request state = Request(LH_IPC_STATE);
  EXPECT_FALSE(Fine(state));
  state.u.state.state = 5;
  EXPECT_TRUE(Fine(state));
  state.type = LH_IPC_UNSTATE;
  EXPECT_TRUE(Fine(state));
  state.u.state.zero = 1;
  EXPECT_FALSE(Fine(state));
  state.u.state.zero = 0;
  state.member = 1;
  EXPECT_FALSE(Fine(state));
}

lh_ipc_tensor Tensor() {
  lh_ipc_tensor tensor;
  memset(&tensor, 0, sizeof tensor);
  strcpy(tensor.name, "layers.0/weight \xc3\xa4");
  tensor.dtype = LH_WIRE_BFLOAT16;
  tensor.dims = 2;
  tensor.shape[0] = 3;
  tensor.shape[1] = 5;
  tensor.bytes = 30;
  tensor.data = {1, 7};
  tensor.inbox = {2, 64};
  return tensor;
}

TEST(IpcTensorErrorTest, TakesTensorsScalarsAndEmptyOnes) {
  EXPECT_EQ(IpcTensorError(Tensor()), "");
  lh_ipc_tensor tensor = Tensor();
  tensor.flags = LH_IPC_ALLOW_UNEQUAL;
  tensor.dtype = LH_WIRE_BOOL;
  tensor.bytes = 15;
  EXPECT_EQ(IpcTensorError(tensor), "");
  tensor.dims = 0;
  tensor.shape[0] = tensor.shape[1] = 0;
  tensor.bytes = 1;
  EXPECT_EQ(IpcTensorError(tensor), "");
  tensor.dims = 2;
  tensor.shape[1] = LH_COUNT_MAX;
  tensor.bytes = 0;
  EXPECT_NE(IpcTensorError(tensor), "") << "it is nowhere";
  tensor.data = {0, 0};
  EXPECT_NE(IpcTensorError(tensor), "") << "it has an inbox";
  tensor.inbox = {0, 0};
  EXPECT_EQ(IpcTensorError(tensor), "");
}

TEST(IpcTensorErrorTest, NamesAreUtf8WithoutControlCharacters) {
  for (const char* name : {"", "a\nb", "\x7f", "\x80", "\xc0\x80", "\xed\xa0\x80",
                           "\xf4\x90\x80\x80", "a\xe2\x82", "\xc2\x85", "\xf8\x88\x80\x80"}) {
    lh_ipc_tensor tensor = Tensor();
    memset(tensor.name, 0, sizeof tensor.name);
    strcpy(tensor.name, name);
    EXPECT_NE(IpcTensorError(tensor), "") << name;
  }
  for (const char* name : {"a", "\xe2\x82\xac", "\xf0\x9f\x9a\x9a", "\xc2\xa0"}) {
    lh_ipc_tensor tensor = Tensor();
    memset(tensor.name, 0, sizeof tensor.name);
    strcpy(tensor.name, name);
    EXPECT_EQ(IpcTensorError(tensor), "") << name;
  }
  lh_ipc_tensor tensor = Tensor();
  memset(tensor.name, 'n', sizeof tensor.name);
  EXPECT_NE(IpcTensorError(tensor), "");
  memset(tensor.name + LH_STATE_NAME_BYTES_MAX, 0, 8);
  EXPECT_EQ(IpcTensorError(tensor), "");
  tensor.name[LH_STATE_NAME_BYTES_MAX + 7] = 'n';
  EXPECT_NE(IpcTensorError(tensor), "");
}

TEST(IpcTensorErrorTest, ShapeAndBytesFitTogether) {
  lh_ipc_tensor tensor = Tensor();
  tensor.bytes = 31;
  EXPECT_NE(IpcTensorError(tensor), "");
  tensor = Tensor();
  tensor.shape[0] = LH_COUNT_MAX;
  tensor.shape[1] = LH_COUNT_MAX;
  EXPECT_NE(IpcTensorError(tensor), "");
  tensor.shape[1] = 1;
  tensor.bytes = LH_COUNT_MAX * 2;
  EXPECT_EQ(IpcTensorError(tensor), "");
  tensor.shape[0] = UINT64_MAX;
  EXPECT_NE(IpcTensorError(tensor), "");
  tensor = Tensor();
  tensor.shape[2] = 1;
  EXPECT_NE(IpcTensorError(tensor), "");
}

TEST(IpcTensorErrorTest, RefusesUnknownNumbers) {
  lh_ipc_tensor tensor = Tensor();
  tensor.dtype = LH_WIRE_BOOL + 1;
  EXPECT_NE(IpcTensorError(tensor), "");
  tensor = Tensor();
  tensor.dims = LH_STATE_DIMS_MAX + 1;
  EXPECT_NE(IpcTensorError(tensor), "");
  tensor = Tensor();
  tensor.flags = 2;
  EXPECT_NE(IpcTensorError(tensor), "");
  tensor = Tensor();
  tensor.zero[4] = 1;
  EXPECT_NE(IpcTensorError(tensor), "");
}

TEST(ParseIpcOpTest, TakesAnOpWithinItsRegions) {
  const auto desc = ParseIpcOp(Op(), 128, 128);
  ASSERT_TRUE(desc.ok()) << desc.status();
  EXPECT_EQ(desc->count, 16u);
  EXPECT_EQ(desc->bytes(), 64u);
}

TEST(ParseIpcOpTest, RefusesRangesBeyondTheirRegion) {
  EXPECT_FALSE(ParseIpcOp(Op(), 128, 127).ok());
  lh_ipc_op op = Op();
  op.target.offset = 68;
  EXPECT_FALSE(ParseIpcOp(op, 128, 128).ok());
  op.target.offset = UINT64_MAX - 63;
  EXPECT_FALSE(ParseIpcOp(op, 128, 128).ok());
  op = Op();
  op.count = LH_COUNT_MAX;
  EXPECT_FALSE(ParseIpcOp(op, 128, 128).ok());
  op.count = UINT64_MAX / 4 + 2;
  EXPECT_FALSE(ParseIpcOp(op, UINT64_MAX, UINT64_MAX).ok());
}

TEST(ParseIpcOpTest, RefusesUnknownNumbers) {
  for (int field = 0; field < 6; ++field) {
    lh_ipc_op op = Op();
    (field == 0   ? op.dtype
     : field == 1 ? op.reduce
     : field == 2 ? op.on_fault
     : field == 3 ? op.quantization
     : field == 4 ? op.kind
                  : op.algorithm) = 99;
    EXPECT_FALSE(ParseIpcOp(op, 128, 128).ok()) << field;
  }
  lh_ipc_op op = Op();
  op.count = 0;
  EXPECT_FALSE(ParseIpcOp(op, 128, 128).ok());
  op.kind = 0;
  const std::string message(ParseIpcOp(op, 128, 128).status().message());
  EXPECT_EQ(message.find("op refused: kind is 0, not 1 to "), 0u) << message;
}

TEST(ParseIpcOpTest, MinWorldIsBoundedAndOneMeansNone) {
  lh_ipc_op op = Op();
  const auto parsed = [&](uint32_t min_world) {
    op.min_world = min_world;
    return ParseIpcOp(op, 128, 128);
  };
  EXPECT_EQ(parsed(0)->min_world, 0);
  EXPECT_EQ(parsed(1)->min_world, 0);
  EXPECT_EQ(parsed(2)->min_world, 2);
  EXPECT_EQ(parsed(LH_MEMBERS_MAX)->min_world, LH_MEMBERS_MAX);
  EXPECT_FALSE(parsed(LH_MEMBERS_MAX + 1).ok());
  EXPECT_FALSE(parsed(UINT32_MAX).ok());
}

TEST(ParseIpcOpTest, AOneShotOpIsSmall) {
  lh_ipc_op op = Op();
  op.algorithm = LH_WIRE_ONESHOT;
  op.source.region = 1;
  op.target.region = 2;
  op.source.offset = op.target.offset = 0;
  op.count = LH_ONE_SHOT_BYTES_MAX / 4;
  EXPECT_EQ(ParseIpcOp(op, 1 << 20, 1 << 20)->algorithm, Algorithm::kOneShot);
  ++op.count;
  EXPECT_EQ(ParseIpcOp(op, 1 << 20, 1 << 20).status().message(),
            "all-reduce refused: a one-shot op has at most 4096 bytes, this one 4100; leave the "
            "algorithm to Longhaul, or choose mesh or ring");
  op.algorithm = LH_WIRE_MESH;
  EXPECT_EQ(ParseIpcOp(op, 1 << 20, 1 << 20)->algorithm, Algorithm::kMesh);
}

TEST(ParseIpcOpTest, RangesAreEqualOrApart) {
  lh_ipc_op op = Op();
  op.target = op.source;
  EXPECT_TRUE(ParseIpcOp(op, 128, 128).ok());
  op.target.offset = 60;
  EXPECT_FALSE(ParseIpcOp(op, 128, 128).ok());
  op.target.region = 2;
  EXPECT_TRUE(ParseIpcOp(op, 128, 128).ok());
}

TEST(ParseIpcOpTest, RangesAreAlignedToTheirElements) {
  lh_ipc_op op = Op();
  op.source.offset = 2;
  op.target.region = 2;
  EXPECT_FALSE(ParseIpcOp(op, 128, 128).ok());
}

// 16 floats at offset 0 of one region and as many of another.
lh_ipc_op OpOfKind(lh_wire_kind kind, uint16_t world) {
  lh_ipc_op op = Op();
  op.kind = kind;
  op.world = world;
  op.source = {1, 0};
  op.target = {2, 0};
  return op;
}

TEST(ParseIpcOpTest, APartIsAsLongAsTheWorldSays) {
  // The whole has 4 parts of 64 bytes.
  const lh_ipc_op scatter = OpOfKind(LH_WIRE_REDUCE_SCATTER, 4);
  EXPECT_EQ(ParseIpcOp(scatter, 256, 64)->bytes(), 256u);
  EXPECT_FALSE(ParseIpcOp(scatter, 255, 64).ok());
  EXPECT_FALSE(ParseIpcOp(scatter, 256, 63).ok());
  const lh_ipc_op gather = OpOfKind(LH_WIRE_ALL_GATHER, 4);
  EXPECT_EQ(ParseIpcOp(gather, 64, 256)->world, 4);
  EXPECT_FALSE(ParseIpcOp(gather, 64, 255).ok());
  for (const lh_wire_kind kind : {LH_WIRE_REDUCE_SCATTER, LH_WIRE_ALL_GATHER}) {
    EXPECT_FALSE(ParseIpcOp(OpOfKind(kind, 0), 4096, 4096).ok());
    EXPECT_FALSE(ParseIpcOp(OpOfKind(kind, LH_MEMBERS_MAX + 1), UINT64_MAX, UINT64_MAX).ok());
    lh_ipc_op op = OpOfKind(kind, 1024);
    op.count = LH_COUNT_MAX / 1024 + 1;
    EXPECT_FALSE(ParseIpcOp(op, UINT64_MAX, UINT64_MAX).ok());
    // A part within the whole, and both at one place.
    op = OpOfKind(kind, 4);
    op.source.region = op.target.region = 1;
    EXPECT_FALSE(ParseIpcOp(op, 4096, 4096).ok());
    (kind == LH_WIRE_ALL_GATHER ? op.source : op.target).offset = 64;
    EXPECT_FALSE(ParseIpcOp(op, 4096, 4096).ok());
    (kind == LH_WIRE_ALL_GATHER ? op.source : op.target).offset = 256;
    EXPECT_TRUE(ParseIpcOp(op, 4096, 4096).ok());
  }
  EXPECT_FALSE(ParseIpcOp(OpOfKind(LH_WIRE_ALL_REDUCE, 4), 4096, 4096).ok());
}

TEST(ParseIpcOpTest, OnlyABroadcastHasARoot) {
  lh_ipc_op op = OpOfKind(LH_WIRE_BROADCAST, 0);
  op.root = 7;
  EXPECT_EQ(ParseIpcOp(op, 64, 64)->root, MemberId(7));
  op.target = op.source;
  EXPECT_TRUE(ParseIpcOp(op, 64, 64).ok());
  // A rank is looked up when the op is posted.
  op.root_is_rank = 1;
  EXPECT_EQ(ParseIpcOp(op, 64, 64)->root, MemberId());
  op.root_is_rank = 2;
  EXPECT_FALSE(ParseIpcOp(op, 64, 64).ok());
  for (const lh_wire_kind kind :
       {LH_WIRE_ALL_REDUCE, LH_WIRE_REDUCE_SCATTER, LH_WIRE_ALL_GATHER, LH_WIRE_BARRIER}) {
    const bool in_parts = kind == LH_WIRE_REDUCE_SCATTER || kind == LH_WIRE_ALL_GATHER;
    op = OpOfKind(kind, in_parts ? 2 : 0);
    EXPECT_TRUE(ParseIpcOp(op, 128, 128).ok()) << kind;
    op.root = 7;
    EXPECT_FALSE(ParseIpcOp(op, 128, 128).ok()) << kind;
    op.root = 0;
    op.root_is_rank = 1;
    EXPECT_FALSE(ParseIpcOp(op, 128, 128).ok()) << kind;
  }
}

TEST(ParseIpcOpTest, WhatMovesOnlyReducesNothingAndHasNoMesh) {
  for (const lh_wire_kind kind : {LH_WIRE_ALL_GATHER, LH_WIRE_BROADCAST}) {
    lh_ipc_op op = OpOfKind(kind, kind == LH_WIRE_ALL_GATHER ? 2 : 0);
    op.reduce = LH_WIRE_AVG;
    EXPECT_FALSE(ParseIpcOp(op, 128, 128).ok()) << kind;
    op.reduce = LH_WIRE_SUM;
    op.algorithm = LH_WIRE_MESH;
    EXPECT_FALSE(ParseIpcOp(op, 128, 128).ok()) << kind;
    op.algorithm = LH_WIRE_RING;
    EXPECT_TRUE(ParseIpcOp(op, 128, 128).ok()) << kind;
  }
}

}  // namespace
}  // namespace longhaul
