#include "proto/wire/ipc_check.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "proto/wire/ipc_op.h"

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
  for (uint8_t& byte : op.u.op.zero) {
    EXPECT_TRUE(Fine(op));
    byte = 1;
    EXPECT_FALSE(Fine(op));
    byte = 0;
  }
}

TEST(IpcProtocolErrorTest, ACancelNamesAMemberAndACall) {
  lh_ipc_request cancel = Request(LH_IPC_CANCEL);
  cancel.member = 3;
  EXPECT_FALSE(Fine(cancel));
  cancel.u.cancel.op = 9;
  EXPECT_TRUE(Fine(cancel));
  cancel.member = 0;
  EXPECT_FALSE(Fine(cancel));
  cancel.member = 3;
  cancel.u.bytes[sizeof(lh_ipc_cancel)] = 1;
  EXPECT_FALSE(Fine(cancel));
}

TEST(IpcProtocolErrorTest, WhyNamesARunAndNoMember) {
  lh_ipc_request request = Request(LH_IPC_WHY);
  lh_ipc_why why = {};
  const auto fine = [&] {
    lh_ipc_put_why(&why, &request);
    return Fine(request);
  };
  EXPECT_FALSE(fine());
  strcpy(why.run, "demo");
  why.group = 3;
  EXPECT_TRUE(fine());
  request.member = 3;
  EXPECT_FALSE(fine());
  request.member = 0;
  why.zero = 1;
  EXPECT_FALSE(fine());
  why.zero = 0;
  strcpy(why.run, "a run");
  EXPECT_FALSE(fine());
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

TEST(IpcProtocolErrorTest, ALookIsEmpty) {
  lh_ipc_request look = Request(LH_IPC_LOOK);
  look.call = 0;
  EXPECT_TRUE(Fine(look));
  EXPECT_FALSE(Fine(look, /*greeted=*/false));
  EXPECT_FALSE(Fine(look, /*greeted=*/true, 1));
  look.u.bytes[0] = 1;
  EXPECT_FALSE(Fine(look));
  look.u.bytes[0] = 0;
  look.member = 1;
  EXPECT_FALSE(Fine(look));
  EXPECT_FALSE(Fine(Request(LH_IPC_LOOK))) << "it has a call";
}

TEST(IpcProtocolErrorTest, AHelloMayHaveOneDescriptor) {
  EXPECT_TRUE(Fine(Hello(), /*greeted=*/false, 0));
  EXPECT_TRUE(Fine(Hello(), /*greeted=*/false, 1));
  EXPECT_FALSE(Fine(Hello(), /*greeted=*/false, 2));
}

TEST(IpcProtocolErrorTest, OneDescriptorComesWithARegion) {
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
  join.member = 1;
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
  tensor.dtype = LH_WIRE_DTYPE_COUNT;
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

// ------------------------------------------------------------------------------ ops

using Regions = std::map<uint64_t, uint64_t>;  // the size of each

// An op with its table, as a trainer sends it.
struct Wish {
  lh_ipc_op op = Op();
  std::vector<uint64_t> participants, gives, gets;
  std::vector<lh_ipc_piece> pieces;
  std::string outline;
  Regions regions = {{1, 4096}, {2, 4096}, {3, 4096}};
};

absl::StatusOr<IpcOp> Take(Wish wish) {
  std::vector<uint8_t> table;
  const auto append = [&](const void* data, size_t bytes) {
    const auto* const from = static_cast<const uint8_t*>(data);
    table.insert(table.end(), from, from + bytes);
  };
  for (const auto* numbers : {&wish.participants, &wish.gives, &wish.gets}) {
    append(numbers->data(), 8 * numbers->size());
  }
  append(wish.pieces.data(), sizeof(lh_ipc_piece) * wish.pieces.size());
  append(wish.outline.data(), wish.outline.size());
  wish.op.outline = static_cast<uint16_t>(wish.outline.size());
  wish.op.participants = static_cast<uint32_t>(wish.participants.size());
  wish.op.gives = static_cast<uint32_t>(wish.gives.size());
  wish.op.gets = static_cast<uint32_t>(wish.gets.size());
  wish.op.pieces = static_cast<uint32_t>(wish.pieces.size());
  EXPECT_EQ(IpcTableBytes(wish.op), table.size());
  return ParseIpcOp(wish.op, table, [&](uint64_t region) -> std::optional<uint64_t> {
    const auto it = wish.regions.find(region);
    return it == wish.regions.end() ? std::nullopt : std::optional(it->second);
  });
}
std::string RefusalOf(const Wish& wish) { return std::string(Take(wish).status().message()); }

absl::StatusOr<IpcOp> TakeOp(const lh_ipc_op& op, uint64_t source_bytes, uint64_t target_bytes) {
  Wish wish;
  wish.op = op;
  wish.regions = {{op.target.region, target_bytes}};
  wish.regions.insert_or_assign(op.source.region, source_bytes);
  if (op.source.region == op.target.region) {
    wish.regions[op.source.region] = std::min(source_bytes, target_bytes);
  }
  return Take(wish);
}

TEST(IpcOpTest, TakesAnOpWithinItsRegions) {
  const auto op = TakeOp(Op(), 128, 128);
  ASSERT_TRUE(op.ok()) << op.status();
  EXPECT_EQ(op->desc.count, 16u);
  EXPECT_EQ(op->desc.bytes(), 64u);
  EXPECT_FALSE(op->root_rank);
  EXPECT_FALSE(op->is_root);
  EXPECT_TRUE(op->participants.empty());
  EXPECT_EQ(op->terms, OpTerms());
  ASSERT_EQ(op->pieces.size(), 1u);
  EXPECT_EQ(op->pieces[0].count, 16u);
  EXPECT_EQ(op->pieces[0].target.offset, 64u);
}

TEST(IpcOpTest, RefusesRangesBeyondTheirRegion) {
  EXPECT_FALSE(TakeOp(Op(), 128, 127).ok());
  lh_ipc_op op = Op();
  op.target.offset = 68;
  EXPECT_FALSE(TakeOp(op, 128, 128).ok());
  op.target.offset = UINT64_MAX - 63;
  EXPECT_EQ(TakeOp(op, 128, 128).status().message(),
            "all-reduce refused: target goes beyond its region");
  op = Op();
  op.count = LH_COUNT_MAX;
  EXPECT_EQ(TakeOp(op, 128, 128).status().message(),
            "all-reduce refused: source goes beyond its region");
  op.count = UINT64_MAX / 4 + 2;
  EXPECT_FALSE(TakeOp(op, UINT64_MAX, UINT64_MAX).ok());
  Wish wish;
  wish.regions.erase(1);
  EXPECT_EQ(RefusalOf(wish), "all-reduce refused: unknown arena region");
}

TEST(IpcOpTest, GarbageInAFieldIsRefusedWithItsName) {
  const auto with = [](auto change) {
    Wish wish;
    change(wish.op);
    return RefusalOf(wish);
  };
  EXPECT_EQ(with([](lh_ipc_op& op) { op.dtype = 99; }),
            "all-reduce refused: dtype is 99, not at most 14");
  EXPECT_EQ(with([](lh_ipc_op& op) { op.reduce = 99; }),
            "all-reduce refused: reduce is 99, not at most 4");
  EXPECT_EQ(with([](lh_ipc_op& op) { op.on_fault = 99; }),
            "all-reduce refused: on_fault is 99, not at most 1");
  EXPECT_EQ(with([](lh_ipc_op& op) { op.quantization = 99; }),
            "all-reduce refused: quantization is 99, not at most 10");
  EXPECT_EQ(with([](lh_ipc_op& op) { op.algorithm = 99; }),
            "all-reduce refused: algorithm is 99, not at most 4");
  EXPECT_EQ(with([](lh_ipc_op& op) { op.algorithm = LH_WIRE_RING + 1; }),
            "all-reduce refused: algorithm is 4, not at most 3");
  EXPECT_EQ(with([](lh_ipc_op& op) { op.order = 99; }),
            "all-reduce refused: order is 99, not at most 1");
  EXPECT_EQ(
      with([](lh_ipc_op& op) { op.weighted = 99; }).find("all-reduce refused: weighted is 99"), 0u);
  EXPECT_EQ(with([](lh_ipc_op& op) { op.unequal = 99; }).find("all-reduce refused: unequal is 99"),
            0u);
  EXPECT_EQ(with([](lh_ipc_op& op) { op.world = 99; }),
            "all-reduce refused: world is 99, not 0 for this kind");
  EXPECT_EQ(with([](lh_ipc_op& op) { op.flags = 99; }),
            "all-reduce refused: flags is 99, not 0 to 3");
  EXPECT_EQ(with([](lh_ipc_op& op) { op.weight = 99; }),
            "all-reduce refused: weight is 99.000000, not 0 without weighted");
  EXPECT_EQ(with([](lh_ipc_op& op) { op.list = 99; }),
            "all-reduce refused: list and pieces do not fit together");
  EXPECT_EQ(with([](lh_ipc_op& op) { op.root = 99; }),
            "all-reduce refused: a root, and this kind has none");
  EXPECT_EQ(with([](lh_ipc_op& op) {
              op.min_world = 65536 + 2;
            }).find("all-reduce refused: min_world is 65538"),
            0u);
  for (const uint8_t kind : {0, LH_WIRE_SEND_RECV + 1, 255}) {
    const std::string message = with([&](lh_ipc_op& op) { op.kind = kind; });
    EXPECT_EQ(message.find("op refused: kind is " + std::to_string(kind) + ", not known"), 0u)
        << message;
  }
}

lh_ipc_op Quantized() {
  lh_ipc_op op = Op();
  op.quantization = LH_WIRE_QUANTIZE_INT8;
  op.block = 32;
  op.error = {1, 256};
  return op;
}

TEST(IpcOpTest, AnErrorIsAFloatForEachElement) {
  lh_ipc_op op = Quantized();
  op.dtype = LH_WIRE_FLOAT16;
  auto taken = TakeOp(op, 256 + 64, 256 + 64);
  ASSERT_TRUE(taken.ok()) << taken.status();
  EXPECT_EQ(taken->desc.quantization, Quantization::kInt8);
  EXPECT_EQ(taken->desc.block, 32);
  EXPECT_EQ(taken->pieces[0].error.offset, 256u);
  EXPECT_EQ(TakeOp(op, 256 + 63, 256 + 63).status().message(),
            "all-reduce refused: error goes beyond its region");
  op.error.offset = 258;
  EXPECT_EQ(TakeOp(op, 512, 512).status().message(),
            "all-reduce refused: error must be aligned to 4 bytes");
  op.error.offset = 64;
  EXPECT_EQ(TakeOp(op, 512, 512).status().message(),
            "all-reduce refused: source, target and error overlap");
  op = Quantized();
  op.quantization = op.block = 0;
  EXPECT_EQ(TakeOp(op, 512, 512).status().message(),
            "all-reduce refused: an error is given, and only a quantized all-reduce or "
            "reduce-scatter keeps one");
}

TEST(IpcOpTest, AnErrorNeedsACodecThatIsNamed) {
  lh_ipc_op op = Quantized();
  op.quantization = LH_WIRE_QUANTIZE_AUTO + 1;
  EXPECT_EQ(TakeOp(op, 512, 512).status().message(),
            "all-reduce refused: an error is given, and peerd chooses the codec; name the codec to "
            "keep its errors");
}

TEST(IpcOpTest, AllPiecesOfAListHaveAnErrorOrNone) {
  Wish wish;
  wish.op = Quantized();
  wish.op.count = 0;
  wish.op.list = 1;
  wish.op.source = wish.op.target = wish.op.error = {0, 0};
  lh_ipc_piece piece = {};
  piece.dtype = LH_WIRE_FLOAT32;
  piece.count = 16;
  piece.source = piece.target = {1, 0};
  piece.error = {2, 0};
  wish.pieces = {piece, piece};
  wish.pieces[1].source = wish.pieces[1].target = {1, 64};
  wish.pieces[1].error = {2, 64};
  EXPECT_EQ(RefusalOf(wish), "");
  wish.pieces[1].error = {0, 0};
  EXPECT_EQ(RefusalOf(wish), "all-reduce refused: an error for some pieces, and none for others");
  wish.pieces[1].error = {2, 64};
  wish.pieces[1].dtype = LH_WIRE_INT32;
  EXPECT_EQ(RefusalOf(wish),
            "all-reduce refused: piece 1: dtype is int32, not float32, float16 or bfloat16 with "
            "quantization int8");
}

TEST(IpcOpTest, ATableTooLargeHasNoSize) {
  lh_ipc_op op = Op();
  EXPECT_EQ(IpcTableBytes(op), 0u);
  op.participants = op.gives = op.gets = LH_MEMBERS_MAX;
  op.pieces = LH_PIECES_MAX;
  EXPECT_EQ(IpcTableBytes(op), 3u * 8 * LH_MEMBERS_MAX + 64u * LH_PIECES_MAX);
  for (uint32_t* field : {&op.participants, &op.gives, &op.gets, &op.pieces}) {
    const uint32_t most = (*field)++;
    EXPECT_EQ(IpcTableBytes(op), UINT64_MAX);
    *field = UINT32_MAX;
    EXPECT_EQ(IpcTableBytes(op), UINT64_MAX);
    *field = most;
  }
}

TEST(IpcOpTest, MinWorldIsBoundedAndOneMeansNone) {
  lh_ipc_op op = Op();
  const auto parsed = [&](uint32_t min_world) {
    op.min_world = min_world;
    return TakeOp(op, 128, 128);
  };
  EXPECT_EQ(parsed(0)->desc.min_world, 0);
  EXPECT_EQ(parsed(1)->desc.min_world, 0);
  EXPECT_EQ(parsed(2)->desc.min_world, 2);
  EXPECT_EQ(parsed(LH_MEMBERS_MAX)->desc.min_world, LH_MEMBERS_MAX);
  EXPECT_FALSE(parsed(LH_MEMBERS_MAX + 1).ok());
  EXPECT_FALSE(parsed(UINT32_MAX).ok());
}

TEST(IpcOpTest, AOneShotOpIsSmall) {
  lh_ipc_op op = Op();
  op.algorithm = LH_WIRE_ONESHOT;
  op.source.region = 1;
  op.target.region = 2;
  op.source.offset = op.target.offset = 0;
  op.count = LH_ONE_SHOT_BYTES_MAX / 4;
  EXPECT_EQ(TakeOp(op, 1 << 20, 1 << 20)->desc.algorithm, Algorithm::kOneShot);
  ++op.count;
  EXPECT_EQ(TakeOp(op, 1 << 20, 1 << 20).status().message(),
            "all-reduce refused: a one-shot op has at most 4096 bytes, this one 4100; leave the "
            "algorithm to Longhaul, or choose mesh or ring");
  op.algorithm = LH_WIRE_MESH;
  EXPECT_EQ(TakeOp(op, 1 << 20, 1 << 20)->desc.algorithm, Algorithm::kMesh);
}

TEST(IpcOpTest, RangesAreEqualOrApart) {
  lh_ipc_op op = Op();
  op.target = op.source;
  EXPECT_TRUE(TakeOp(op, 128, 128).ok());
  op.target.offset = 60;
  EXPECT_EQ(TakeOp(op, 128, 128).status().message(),
            "all-reduce refused: source and target overlap without being equal");
  op.target.region = 2;
  EXPECT_TRUE(TakeOp(op, 128, 128).ok());
}

TEST(IpcOpTest, RangesAreAlignedToTheirElements) {
  lh_ipc_op op = Op();
  op.source.offset = 2;
  op.target.region = 2;
  EXPECT_EQ(TakeOp(op, 128, 128).status().message(),
            "all-reduce refused: source and target must be aligned to their elements");
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

TEST(IpcOpTest, APartIsAsLongAsTheWorldSays) {
  // The whole has 4 parts of 64 bytes.
  const lh_ipc_op scatter = OpOfKind(LH_WIRE_REDUCE_SCATTER, 4);
  EXPECT_EQ(TakeOp(scatter, 256, 64)->desc.bytes(), 256u);
  EXPECT_FALSE(TakeOp(scatter, 255, 64).ok());
  EXPECT_FALSE(TakeOp(scatter, 256, 63).ok());
  const lh_ipc_op gather = OpOfKind(LH_WIRE_ALL_GATHER, 4);
  EXPECT_EQ(TakeOp(gather, 64, 256)->desc.world, 4);
  EXPECT_FALSE(TakeOp(gather, 64, 255).ok());
  for (const lh_wire_kind kind : {LH_WIRE_REDUCE_SCATTER, LH_WIRE_ALL_GATHER}) {
    EXPECT_FALSE(TakeOp(OpOfKind(kind, 0), 4096, 4096).ok());
    EXPECT_FALSE(TakeOp(OpOfKind(kind, LH_MEMBERS_MAX + 1), UINT64_MAX, UINT64_MAX).ok());
    lh_ipc_op op = OpOfKind(kind, 1024);
    op.count = LH_COUNT_MAX / 1024 + 1;
    EXPECT_FALSE(TakeOp(op, UINT64_MAX, UINT64_MAX).ok());
    // A part within the whole, and both at one place.
    op = OpOfKind(kind, 4);
    op.source.region = op.target.region = 1;
    EXPECT_FALSE(TakeOp(op, 4096, 4096).ok());
    (kind == LH_WIRE_ALL_GATHER ? op.source : op.target).offset = 64;
    EXPECT_FALSE(TakeOp(op, 4096, 4096).ok());
    (kind == LH_WIRE_ALL_GATHER ? op.source : op.target).offset = 256;
    EXPECT_TRUE(TakeOp(op, 4096, 4096).ok());
  }
  EXPECT_FALSE(TakeOp(OpOfKind(LH_WIRE_ALL_REDUCE, 4), 4096, 4096).ok());
}

TEST(IpcOpTest, ARootIsAMemberOrARankOfKindsThatHaveOne) {
  lh_ipc_op op = OpOfKind(LH_WIRE_BROADCAST, 0);
  op.root = 7;
  EXPECT_EQ(TakeOp(op, 64, 64)->desc.root, MemberId(7));
  op.target = op.source;
  EXPECT_TRUE(TakeOp(op, 64, 64).ok());
  // A rank is looked up when the op is posted.
  op.flags = LH_IPC_ROOT_IS_RANK;
  EXPECT_EQ(TakeOp(op, 64, 64)->desc.root, MemberId());
  EXPECT_EQ(TakeOp(op, 64, 64)->root_rank, 7u);
  op.root = 0;
  EXPECT_EQ(TakeOp(op, 64, 64)->root_rank, 0u);
  op.flags = 0;
  EXPECT_EQ(TakeOp(op, 64, 64).status().message(), "broadcast refused: root is 0, not a member");
  op.flags = 4;
  EXPECT_FALSE(TakeOp(op, 64, 64).ok());
  for (const lh_wire_kind kind : {LH_WIRE_ALL_REDUCE, LH_WIRE_REDUCE_SCATTER, LH_WIRE_ALL_GATHER,
                                  LH_WIRE_BARRIER, LH_WIRE_ALL_TO_ALL}) {
    op = OpOfKind(kind, IsInParts(static_cast<OpKind>(kind)) ? 2 : 0);
    EXPECT_TRUE(TakeOp(op, 128, 128).ok()) << kind;
    op.root = 7;
    EXPECT_FALSE(TakeOp(op, 128, 128).ok()) << kind;
    op.root = 0;
    for (const uint8_t flags : {LH_IPC_ROOT_IS_RANK, LH_IPC_IS_ROOT}) {
      op.flags = flags;
      EXPECT_FALSE(TakeOp(op, 128, 128).ok()) << kind;
    }
  }
}

TEST(IpcOpTest, WhatMovesOnlyReducesNothing) {
  for (const lh_wire_kind kind : {LH_WIRE_ALL_GATHER, LH_WIRE_BROADCAST}) {
    lh_ipc_op op = OpOfKind(kind, kind == LH_WIRE_ALL_GATHER ? 2 : 0);
    if (kind == LH_WIRE_BROADCAST) op.root = 7;
    op.reduce = LH_WIRE_AVG;
    EXPECT_FALSE(TakeOp(op, 128, 128).ok()) << kind;
    op.reduce = LH_WIRE_SUM;
    for (const lh_wire_algorithm algorithm : {LH_WIRE_MESH, LH_WIRE_RING}) {
      op.algorithm = algorithm;
      EXPECT_TRUE(TakeOp(op, 128, 128).ok()) << kind;
    }
  }
}

// A member of an op of the kind in a world of 3, with exactly the memory that it needs. Parts have
// 64 bytes.
Wish Exactly(lh_wire_kind kind, bool is_root) {
  const auto known = static_cast<OpKind>(kind);
  Wish wish;
  wish.op = OpOfKind(kind, IsInParts(known) ? 3 : 0);
  if (HasRoot(known) || known == OpKind::kSendRecv) {
    wish.op.root = 7;
    if (is_root) wish.op.flags = LH_IPC_IS_ROOT;
  }
  const auto bytes = [&](Extent extent) -> uint64_t {
    return extent == Extent::kNone ? 0 : extent == Extent::kWhole && IsInParts(known) ? 192 : 64;
  };
  wish.regions = {{1, bytes(SourceOf(known, is_root))}, {2, bytes(TargetOf(known, is_root))}};
  if (wish.regions[1] == 0) wish.op.source = {};
  if (wish.regions[2] == 0) wish.op.target = {};
  return wish;
}

TEST(IpcOpTest, EveryKindAndRoleTakesTheTensorsThatItNeedsAndNoOthers) {
  for (int kind = LH_WIRE_ALL_REDUCE; kind <= LH_WIRE_SEND_RECV; ++kind) {
    for (const bool is_root : {false, true}) {
      const auto known = static_cast<OpKind>(kind);
      const Wish wish = Exactly(static_cast<lh_wire_kind>(kind), is_root);
      const std::string name = std::string(Name(known)) + (is_root ? ", root" : "");
      const auto taken = Take(wish);
      ASSERT_TRUE(taken.ok()) << name << ": " << taken.status();
      EXPECT_EQ(taken->desc.kind, known);
      const bool has_roles = HasRoot(known) || known == OpKind::kSendRecv;
      EXPECT_EQ(taken->is_root, is_root && has_roles) << name;
      EXPECT_EQ(taken->partner, known == OpKind::kSendRecv ? MemberId(7) : MemberId()) << name;
      EXPECT_EQ(taken->desc.root, HasRoot(known) ? MemberId(7) : MemberId()) << name;
      for (const bool source : {true, false}) {
        const uint64_t region = source ? 1 : 2;
        const char* const tensor = source ? "source" : "target";
        Wish other = wish;
        lh_ipc_range& range = source ? other.op.source : other.op.target;
        if (wish.regions.at(region) == 0) {
          range = {region, 0};
          EXPECT_NE(RefusalOf(other).find(std::string("a place for its ") + tensor +
                                          ", which has no elements"),
                    std::string::npos)
              << name << ": " << RefusalOf(other);
          range = {0, 64};
          EXPECT_FALSE(Take(other).ok()) << name;
          continue;
        }
        --other.regions[region];
        EXPECT_NE(RefusalOf(other).find(std::string(tensor) + " goes beyond its region"),
                  std::string::npos)
            << name << ": " << RefusalOf(other);
        range = {};
        EXPECT_NE(RefusalOf(other).find("unknown arena region"), std::string::npos) << name;
      }
    }
  }
}

TEST(IpcOpTest, OnlyWholeTensorsOfOneKindAreInPlace) {
  for (int kind = LH_WIRE_ALL_REDUCE; kind <= LH_WIRE_SEND_RECV; ++kind) {
    for (const bool is_root : {false, true}) {
      Wish wish = Exactly(static_cast<lh_wire_kind>(kind), is_root);
      if (wish.regions[1] == 0 || wish.regions[2] == 0) continue;
      wish.op.target = wish.op.source;
      wish.regions[1] = 192;
      const bool may = kind == LH_WIRE_ALL_REDUCE || kind == LH_WIRE_BARRIER ||
                       kind == LH_WIRE_BROADCAST || kind == LH_WIRE_REDUCE;
      EXPECT_EQ(Take(wish).ok(), may) << kind;
      if (!may) {
        EXPECT_NE(RefusalOf(wish).find("source and target overlap"), std::string::npos) << kind;
      }
    }
  }
}

TEST(IpcOpTest, ASendNamesItsPartnerByIdOrRank) {
  Wish wish = Exactly(LH_WIRE_SEND_RECV, true);
  EXPECT_FALSE(Take(wish)->root_rank);
  wish.op.flags |= LH_IPC_ROOT_IS_RANK;
  wish.op.root = 0;
  const auto taken = Take(wish);
  ASSERT_TRUE(taken.ok()) << taken.status();
  EXPECT_EQ(taken->root_rank, 0u);
  EXPECT_EQ(taken->partner, MemberId());
  EXPECT_TRUE(taken->is_root);
  wish.op.flags = LH_IPC_IS_ROOT;
  EXPECT_EQ(RefusalOf(wish), "send-recv refused: root is 0, not a member");
  wish.op.root = 7;
  wish.participants = {1, 7};
  EXPECT_EQ(RefusalOf(wish), "send-recv refused: participants besides its two members");
}

TEST(IpcOpTest, ParticipantsComeFromTheTable) {
  Wish wish;
  wish.participants = {2, 5, UINT64_MAX};
  EXPECT_EQ(Take(wish)->participants,
            (std::vector{MemberId(2), MemberId(5), MemberId(UINT64_MAX)}));
}

TEST(IpcOpTest, ParticipantsAreARisingSetThatHasTheRoot) {
  Wish wish = Exactly(LH_WIRE_REDUCE, false);
  const auto refusal = [&](std::vector<uint64_t> ids) {
    wish.participants = std::move(ids);
    return RefusalOf(wish);
  };
  EXPECT_EQ(refusal({2, 7}), "");
  EXPECT_EQ(refusal({0, 7}),
            "reduce refused: its participants have the member id 0, which nobody has");
  EXPECT_EQ(refusal({2, 2, 7}),
            "reduce refused: its participants have member m2 twice; give each id of a member once");
  EXPECT_EQ(refusal({7, 2}), "reduce refused: its participants are not in rising order");
  EXPECT_EQ(refusal({2, 8}), "reduce refused: the root, member m7, is not among its participants");
  wish.op.flags = LH_IPC_ROOT_IS_RANK;
  EXPECT_EQ(refusal({2, 8}), "") << "a rank is looked up when the op is posted";
}

TEST(IpcOpTest, AWeightIsANumberFromZeroOn) {
  Wish wish;
  wish.op.weighted = 1;
  EXPECT_EQ(Take(wish)->terms.weight, 0);
  wish.op.weight = 0.25;
  EXPECT_EQ(Take(wish)->terms.weight, 0.25);
  for (const double weight :
       {-0.5, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    wish.op.weight = weight;
    EXPECT_NE(RefusalOf(wish).find("a finite number, 0 or more"), std::string::npos) << weight;
  }
  wish.op.weighted = 0;
  EXPECT_FALSE(Take(wish).ok());
  wish.op.weight = 0;
  EXPECT_EQ(Take(wish)->terms.weight, 1) << "counts as everybody else";
}

// ---- unequal parts

TEST(IpcOpTest, LengthsSayHowLongTheTensorsAre) {
  // A world of 3: parts of 5, 0 and 11 floats.
  Wish wish;
  wish.op = OpOfKind(LH_WIRE_ALL_GATHER, 3);
  wish.op.count = 0;
  wish.op.unequal = 1;
  wish.gives = {5};
  wish.gets = {5, 0, 11};
  wish.regions = {{1, 20}, {2, 64}};
  const auto taken = Take(wish);
  ASSERT_TRUE(taken.ok()) << taken.status();
  EXPECT_EQ(taken->terms.gives, wish.gives);
  EXPECT_EQ(taken->terms.gets, wish.gets);
  EXPECT_EQ(taken->desc.bytes(), 0u);
  wish.regions[1] = 19;
  EXPECT_EQ(RefusalOf(wish), "all-gather refused: source goes beyond its region");
  wish.regions[1] = 20;
  wish.regions[2] = 63;
  EXPECT_EQ(RefusalOf(wish), "all-gather refused: target goes beyond its region");
  // A member that gives nothing has no source.
  wish.regions[2] = 64;
  wish.gives = {0};
  EXPECT_EQ(RefusalOf(wish), "all-gather refused: a place for its source, which has no elements");
  wish.op.source = {};
  EXPECT_TRUE(Take(wish).ok());
}

TEST(IpcOpTest, EveryKindAndRoleHasItsNumberOfLengths) {
  for (const lh_wire_kind kind : {LH_WIRE_REDUCE_SCATTER, LH_WIRE_ALL_GATHER, LH_WIRE_GATHER,
                                  LH_WIRE_SCATTER, LH_WIRE_ALL_TO_ALL}) {
    for (const bool is_root : {false, true}) {
      Wish wish = Exactly(kind, is_root);
      wish.op.count = 0;
      wish.op.unequal = 1;
      const auto lengths = [&](Extent extent) {
        return std::vector<uint64_t>(extent == Extent::kNone    ? 0
                                     : extent == Extent::kWhole ? 3
                                                                : 1,
                                     16);
      };
      wish.gives = lengths(SourceOf(static_cast<OpKind>(kind), is_root));
      wish.gets = lengths(TargetOf(static_cast<OpKind>(kind), is_root));
      EXPECT_EQ(RefusalOf(wish), "") << kind;
      for (const bool gives : {true, false}) {
        Wish other = wish;
        (gives ? other.gives : other.gets).push_back(16);
        EXPECT_NE(RefusalOf(other).find(std::string(gives ? "gives" : "gets") + " is "),
                  std::string::npos)
            << RefusalOf(other);
        other = wish;
        std::vector<uint64_t>& fewer = gives ? other.gives : other.gets;
        if (fewer.empty()) continue;
        fewer.pop_back();
        EXPECT_NE(RefusalOf(other).find(std::string(gives ? "gives" : "gets") + " is "),
                  std::string::npos)
            << RefusalOf(other);
      }
    }
  }
}

TEST(IpcOpTest, LengthsAreBoundedTogether) {
  Wish wish;
  wish.op = OpOfKind(LH_WIRE_ALL_GATHER, 2);
  wish.op.count = 0;
  wish.op.unequal = 1;
  wish.regions = {{1, UINT64_MAX}, {2, UINT64_MAX}};
  wish.gives = {1};
  wish.gets = {1, LH_COUNT_MAX - 1};
  EXPECT_EQ(RefusalOf(wish), "");
  for (const uint64_t length : {LH_COUNT_MAX, UINT64_MAX}) {
    wish.gets = {1, length};
    EXPECT_EQ(RefusalOf(wish),
              "all-gather refused: its parts have more than 2^48 elements together");
  }
  wish.op.unequal = 0;
  wish.op.count = 1;
  wish.gets = {1, 1};
  EXPECT_EQ(RefusalOf(wish), "all-gather refused: lengths of parts, and unequal is not set");
}

// ---- lists

lh_ipc_piece PieceOf(uint8_t dtype, uint64_t count, lh_ipc_range source, lh_ipc_range target) {
  lh_ipc_piece piece;
  memset(&piece, 0, sizeof piece);
  piece.dtype = dtype;
  piece.count = count;
  piece.source = source;
  piece.target = target;
  return piece;
}

Wish ListOf(lh_wire_kind kind, std::vector<lh_ipc_piece> pieces) {
  Wish wish;
  wish.op = OpOfKind(kind, IsInParts(static_cast<OpKind>(kind)) ? 3 : 0);
  wish.op.count = 0;
  wish.op.list = 77;
  wish.op.source = wish.op.target = {};
  wish.pieces = std::move(pieces);
  return wish;
}

TEST(IpcOpTest, AListHasADigestOfItsPiecesAndItsBytes) {
  const Wish wish = ListOf(LH_WIRE_ALL_REDUCE, {PieceOf(LH_WIRE_BFLOAT16, 33, {1, 0}, {2, 0}),
                                                PieceOf(LH_WIRE_FLOAT64, 8, {1, 128}, {2, 128})});
  const auto taken = Take(wish);
  ASSERT_TRUE(taken.ok()) << taken.status();
  EXPECT_EQ(taken->desc.dtype, DType::kBfloat16);
  EXPECT_EQ(taken->desc.count, 0u);
  EXPECT_EQ(taken->desc.list_bytes, 128u + 64u) << "each piece begins at a multiple of 64";
  ASSERT_EQ(taken->pieces.size(), 2u);
  EXPECT_EQ(taken->pieces[1].dtype, DType::kFloat64);
  EXPECT_EQ(taken->pieces[1].target.offset, 128u);
  std::vector<uint64_t> digests{taken->desc.list};
  EXPECT_NE(digests[0], 0u);
  Wish other = wish;
  other.op.list = 78;
  digests.push_back(Take(other)->desc.list);
  other = wish;
  other.pieces[1].dtype = LH_WIRE_INT64;
  digests.push_back(Take(other)->desc.list);
  other = wish;
  other.pieces[0].count = 32;
  digests.push_back(Take(other)->desc.list);
  other = wish;
  std::swap(other.pieces[0], other.pieces[1]);
  digests.push_back(Take(other)->desc.list);
  for (size_t i = 0; i < digests.size(); ++i) {
    for (size_t k = 0; k < i; ++k) EXPECT_NE(digests[i], digests[k]) << i << " " << k;
  }
  other = wish;
  other.pieces[0].source = {3, 0};
  EXPECT_EQ(Take(other)->desc.list, digests[0]) << "where a tensor lies is nobody's concern";
}

TEST(IpcOpTest, AListMayHaveAnOutline) {
  Wish wish = ListOf(LH_WIRE_ALL_REDUCE, {PieceOf(LH_WIRE_FLOAT32, 16, {1, 0}, {2, 0})});
  wish.outline = "\x02\x7b\x7b";
  ASSERT_EQ(RefusalOf(wish), "");
  EXPECT_EQ(Take(wish)->outline, wish.outline);
  wish.outline.pop_back();
  wish.outline.back() = '\xfb';
  EXPECT_EQ(RefusalOf(wish), "all-reduce refused: the outline of the list is none");
  Wish one;
  one.outline = "\x01\x7b";
  EXPECT_NE(RefusalOf(one).find("an outline, and no list"), std::string::npos);
  wish.op.outline = LH_OUTLINE_BYTES_MAX + 1;
  EXPECT_EQ(IpcTableBytes(wish.op), UINT64_MAX);
}

TEST(IpcOpTest, AListInPartsHasPartsOfEachPiece) {
  Wish wish = ListOf(LH_WIRE_ALL_GATHER, {PieceOf(LH_WIRE_FLOAT32, 16, {1, 0}, {2, 0}),
                                          PieceOf(LH_WIRE_UINT8, 64, {1, 64}, {2, 192})});
  wish.regions = {{1, 128}, {2, 384}};
  EXPECT_EQ(Take(wish)->desc.list_bytes, 384u);
  wish.regions[2] = 383;
  EXPECT_EQ(RefusalOf(wish), "all-gather refused: target goes beyond its region");
  wish.regions[2] = 384;
  wish.pieces[1].target.offset = 191;
  EXPECT_EQ(RefusalOf(wish), "all-gather refused: source and target overlap");
}

TEST(IpcOpTest, AListIsInPlaceWholeOrNotAtAll) {
  Wish wish = ListOf(LH_WIRE_ALL_REDUCE, {PieceOf(LH_WIRE_FLOAT32, 16, {1, 0}, {1, 0}),
                                          PieceOf(LH_WIRE_FLOAT32, 16, {1, 64}, {1, 64})});
  EXPECT_EQ(RefusalOf(wish), "");
  wish.pieces[1].target = {2, 0};
  EXPECT_EQ(RefusalOf(wish), "all-reduce refused: some pieces are in place, and others are not");
  wish.pieces[0].target = {2, 64};
  EXPECT_EQ(RefusalOf(wish), "");
  // A piece without elements is neither.
  wish.pieces[0].target = {1, 0};
  wish.pieces[1] = PieceOf(LH_WIRE_FLOAT32, 0, {}, {});
  EXPECT_EQ(RefusalOf(wish), "");
}

TEST(IpcOpTest, PiecesDoNotOverlapEachOther) {
  const auto refusal = [](lh_ipc_range source, lh_ipc_range target) {
    return RefusalOf(ListOf(LH_WIRE_ALL_REDUCE, {PieceOf(LH_WIRE_FLOAT32, 16, {1, 0}, {2, 0}),
                                                 PieceOf(LH_WIRE_FLOAT32, 16, source, target)}));
  };
  const std::string overlap = "all-reduce refused: source and target overlap without being equal";
  EXPECT_EQ(refusal({1, 64}, {2, 64}), "");
  EXPECT_EQ(refusal({1, 60}, {2, 64}), overlap);
  EXPECT_EQ(refusal({1, 64}, {2, 60}), overlap);
  EXPECT_EQ(refusal({1, 64}, {1, 60}), overlap);
  EXPECT_EQ(refusal({2, 32}, {3, 0}), overlap);
  EXPECT_EQ(refusal({1, 0}, {3, 0}), overlap) << "two sources at one place";
}

TEST(IpcOpTest, APieceIsRefusedByItsNumber) {
  const auto with = [](lh_wire_kind kind, auto change) {
    Wish wish = ListOf(kind, {PieceOf(LH_WIRE_FLOAT32, 16, {1, 0}, {2, 0}),
                              PieceOf(LH_WIRE_FLOAT32, 16, {1, 192}, {2, 192})});
    change(wish);
    return RefusalOf(wish);
  };
  const auto of_sum = [&](auto change) { return with(LH_WIRE_ALL_REDUCE, change); };
  EXPECT_EQ(of_sum([](Wish& wish) { wish.pieces[1].dtype = 99; }),
            "all-reduce refused: piece 1: dtype is 99, not known");
  EXPECT_EQ(of_sum([](Wish& wish) { wish.pieces[0].zero[6] = 1; }),
            "all-reduce refused: piece 0: reserved bytes are not zero");
  EXPECT_EQ(of_sum([](Wish& wish) { wish.pieces[1].dtype = LH_WIRE_FLOAT8_E4M3; }),
            "all-reduce refused: piece 1: dtype is float8_e4m3fn, not one that can be reduced; "
            "float8 can only be moved");
  EXPECT_EQ(
      with(LH_WIRE_ALL_GATHER, [](Wish& wish) { wish.pieces[1].dtype = LH_WIRE_FLOAT8_E4M3; }), "");
  EXPECT_EQ(of_sum([](Wish& wish) {
              wish.pieces[1].dtype = LH_WIRE_BOOL;
              wish.op.reduce = LH_WIRE_AVG;
            }),
            "all-reduce refused: piece 1: reduce is avg, not sum, min or max for bool");
  EXPECT_EQ(of_sum([](Wish& wish) {
              wish.pieces[1].dtype = LH_WIRE_INT32;
              wish.op.weighted = 1;
            }),
            "all-reduce refused: piece 1: dtype is int32, not a float with weights");
  for (const uint64_t count : {LH_COUNT_MAX / 4 + 1, UINT64_MAX / 4 + 2, UINT64_MAX}) {
    EXPECT_EQ(
        of_sum([&](Wish& wish) { wish.pieces[1].count = count; }),
        "all-reduce refused: piece 1: its " + std::to_string(count) + " elements are too many");
  }
  EXPECT_EQ(of_sum([](Wish& wish) {
              wish.pieces[0].count = LH_COUNT_MAX / 4;
              wish.pieces[1].count = 1;
            }),
            "all-reduce refused: piece 1: the tensors are too large together");
  EXPECT_EQ(of_sum([](Wish& wish) { wish.op.list = 0; }),
            "all-reduce refused: list and pieces do not fit together");
  EXPECT_EQ(of_sum([](Wish& wish) { wish.op.count = 5; }),
            "all-reduce refused: count is 5, not 0 with pieces");
  EXPECT_EQ(with(LH_WIRE_ALL_GATHER,
                 [](Wish& wish) {
                   wish.op.unequal = 1;
                   wish.gives = {1};
                   wish.gets = {1, 1, 1};
                 }),
            "all-gather refused: unequal is 1, not 0 for a list of tensors");
}

TEST(IpcOpTest, APieceOfAnAllToAllMayNotOverflowEvenInALargeWorld) {
  Wish wish = ListOf(LH_WIRE_ALL_TO_ALL, {PieceOf(LH_WIRE_UINT8, 1, {1, 0}, {2, 0})});
  wish.op.world = UINT16_MAX;
  wish.regions = {{1, UINT64_MAX}, {2, UINT64_MAX}};
  EXPECT_NE(RefusalOf(wish).find("world is 65535"), std::string::npos) << RefusalOf(wish);
  wish.op.world = 256;
  EXPECT_EQ(RefusalOf(wish), "");
  wish.pieces[0].count = LH_COUNT_MAX / (256 * 256) + 1;
  EXPECT_NE(RefusalOf(wish).find("elements are too many"), std::string::npos) << RefusalOf(wish);
}

TEST(IpcOpTest, ATensorWithoutElementsHasNoPlace) {
  Wish wish;
  wish.op.count = 0;
  EXPECT_EQ(RefusalOf(wish), "all-reduce refused: a place for its source, which has no elements");
  wish.op.source = wish.op.target = {};
  const auto taken = Take(wish);
  ASSERT_TRUE(taken.ok()) << taken.status();
  EXPECT_EQ(taken->desc.bytes(), 0u);
  wish.op.target.offset = 64;
  EXPECT_EQ(RefusalOf(wish), "all-reduce refused: a place for its target, which has no elements");
  Wish list = ListOf(LH_WIRE_ALL_REDUCE, {PieceOf(LH_WIRE_FLOAT32, 0, {}, {})});
  EXPECT_EQ(Take(list)->desc.list_bytes, 0u);
  EXPECT_NE(Take(list)->desc.list, 0u);
}

}  // namespace
}  // namespace longhaul
