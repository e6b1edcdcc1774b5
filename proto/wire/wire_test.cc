#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/string_view.h"
#include "base/prng.h"
#include "gtest/gtest.h"
#include "proto/wire/frame.h"
#include "proto/wire/handshake.h"
#include "proto/wire/op_desc.h"

namespace longhaul {
namespace {

template <class Bytes>
std::string Hex(const Bytes& bytes) {
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
}

std::string Message(const absl::Status& status) { return std::string(status.message()); }

FrameHeader Data() {
  FrameHeader header;
  header.type = FrameType::kData;
  header.group = 0x01020304;
  header.payload_bytes = 4096;
  header.op = OpOrdinal(0x1112131415161718);
  header.attempt = Epoch(0x2122232425262728);
  header.offset = 0x0004324334353637;
  header.phase = Phase::kGather;
  header.stamp = 0x4142434445464748;
  return header;
}

FrameHeader Control(FrameType type) {
  if (IsOfTransfer(type)) return ChunkFrame(type, 7, 5, 6);
  FrameHeader header;
  header.type = type;
  header.group = 7;
  if (type == FrameType::kReady || type == FrameType::kDone) header.op = OpOrdinal(5);
  if (type == FrameType::kReady) header.payload_bytes = kReadyBodyBytes;
  return header;
}

FrameHeader ChunkData() {
  FrameHeader header;
  header.type = FrameType::kChunkData;
  header.group = 7;
  header.payload_bytes = 0x1000;
  header.op = OpOrdinal(0x1112131415161718);
  header.attempt = Epoch(0x2122232425262728);
  header.offset = 0x0003323334353637;
  header.stamp = 0x0003424344454647;
  return header;
}

ChunkRequestBody ChunkRequest() {
  ChunkRequestBody body;
  body.source = MemberId(0x0102030405060708);
  body.root = {0x1112131415161718, 0x2122232425262728};
  body.kind = ChunkKind::kChunk;
  body.tensor = 0x3132;
  body.chunk = 0x4142434445;
  return body;
}

// Sets one byte of the encoded header. Returns the reason why the header is refused then, or "".
std::string RefusalWith(FrameHeader header, LaneKind kind, size_t at, uint8_t value) {
  auto bytes = Encode(header);
  bytes[at] = value;
  return Message(ParseFrameHeader(bytes, kind).status());
}

TEST(FrameTest, HeaderIsGolden) {
  EXPECT_EQ(Hex(Encode(Data())),
            "4c484631"  // magic
            "05"
            "00"
            "0000"  // type, flags, zero
            "04030201"
            "00100000"          // group, payload_bytes
            "1817161514131211"  // op
            "2827262524232221"  // attempt
            "3736353443320400"  // offset
            "01000000"
            "00000000"          // phase, zero
            "4847464544434241"  // stamp
            "0000000000000000");
}

TEST(FrameTest, HeaderRoundTrips) {
  const auto parsed = ParseFrameHeader(Encode(Data()), LaneKind::kData);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, Data());
  for (const FrameType type :
       {FrameType::kPing, FrameType::kPong, FrameType::kReady, FrameType::kDone,
        FrameType::kWantLanes, FrameType::kAck, FrameType::kLaneLost, FrameType::kResume,
        FrameType::kClose, FrameType::kChunkRequest, FrameType::kChunkRefused,
        FrameType::kChunkCancel}) {
    const auto control = ParseFrameHeader(Encode(Control(type)), LaneKind::kControl);
    ASSERT_TRUE(control.ok()) << control.status();
    EXPECT_EQ(*control, Control(type));
  }
}

TEST(FrameTest, RefusesWhatIsNotAFrame) {
  EXPECT_EQ(RefusalWith(Data(), LaneKind::kData, 0, 'X'), "frame magic is 0x31464858, not LHF1");
  EXPECT_EQ(RefusalWith(Data(), LaneKind::kData, 4, 0), "frame type is 0, not one of a data lane");
  EXPECT_EQ(RefusalWith(Data(), LaneKind::kData, 4, 12),
            "frame type is 12, not one of a data lane");
  EXPECT_EQ(RefusalWith(Data(), LaneKind::kData, 4, 17),
            "frame type is 17, not one of a data lane");
  EXPECT_EQ(RefusalWith(Control(FrameType::kPing), LaneKind::kControl, 4, 17),
            "frame type is 17, not one of a control lane");
  EXPECT_EQ(RefusalWith(Control(FrameType::kPing), LaneKind::kControl, 4, 16),
            "frame type is 16, not one of a control lane");
  EXPECT_EQ(RefusalWith(Data(), LaneKind::kData, 5, 1), "flags is 1, not known for this type");
  EXPECT_EQ(RefusalWith(Control(FrameType::kDone), LaneKind::kControl, 5, 3),
            "flags is 3, not known for this type");
  EXPECT_EQ(RefusalWith(Control(FrameType::kDone), LaneKind::kControl, 5, 1), "");
  EXPECT_EQ(RefusalWith(Control(FrameType::kWantLanes), LaneKind::kControl, 5, 1), "");
  EXPECT_EQ(RefusalWith(Data(), LaneKind::kData, 40, 2), "phase is 2, not 0 or 1");
}

TEST(FrameTest, RefusesReservedBytesThatAreNotZero) {
  for (const size_t at : {6, 7, 44, 45, 46, 47}) {
    EXPECT_NE(RefusalWith(Data(), LaneKind::kData, at, 1), "") << at;
  }
}

TEST(FrameTest, TypesStayOnTheirKindOfLane) {
  EXPECT_FALSE(ParseFrameHeader(Encode(Data()), LaneKind::kControl).ok());
  for (const FrameType type :
       {FrameType::kPong, FrameType::kReady, FrameType::kDone, FrameType::kWantLanes,
        FrameType::kAck, FrameType::kLaneLost, FrameType::kResume, FrameType::kChunkRequest,
        FrameType::kChunkRefused, FrameType::kChunkCancel}) {
    EXPECT_FALSE(ParseFrameHeader(Encode(Control(type)), LaneKind::kData).ok());
  }
  EXPECT_TRUE(ParseFrameHeader(Encode(ChunkData()), LaneKind::kData).ok());
  EXPECT_FALSE(ParseFrameHeader(Encode(ChunkData()), LaneKind::kControl).ok());
  for (const FrameType type : {FrameType::kPing, FrameType::kClose}) {
    EXPECT_TRUE(ParseFrameHeader(Encode(Control(type)), LaneKind::kData).ok());
  }
}

TEST(FrameTest, AckIsGoldenAndOnlyWhereItBelongs) {
  FrameHeader ack = Control(FrameType::kAck);
  ack.group = 0;
  ack.acked = 0x5152535455565758;
  EXPECT_EQ(Hex(Encode(ack)),
            "4c484631"
            "08"
            "00"
            "0000" +
                std::string(96, '0') + "5857565554535251");
  for (const FrameType type :
       {FrameType::kPing, FrameType::kPong, FrameType::kAck, FrameType::kResume}) {
    FrameHeader header = Control(type);
    header.acked = 9;
    EXPECT_EQ(ParseFrameHeader(Encode(header), LaneKind::kControl)->acked, 9u);
  }
  for (const FrameType type : {FrameType::kReady, FrameType::kDone, FrameType::kWantLanes,
                               FrameType::kLaneLost, FrameType::kClose, FrameType::kChunkRequest,
                               FrameType::kChunkRefused, FrameType::kChunkCancel}) {
    EXPECT_EQ(RefusalWith(Control(type), LaneKind::kControl, 56, 9),
              "acked is 9, not 0 as this type demands");
  }
  EXPECT_NE(RefusalWith(Data(), LaneKind::kData, 63, 1), "");
}

TEST(FrameTest, LaneLostIsGoldenAndNamesALane) {
  FrameHeader lost;
  lost.type = FrameType::kLaneLost;
  lost.group = 0xfe;
  lost.stamp = 0x0102030405060708;
  lost.offset = 0x0001121314151617;
  EXPECT_EQ(Hex(Encode(lost)),
            "4c484631"
            "09"
            "00"
            "0000"
            "fe000000"
            "00000000"
            "0000000000000000"
            "0000000000000000"
            "1716151413120100"
            "0000000000000000"
            "0807060504030201"
            "0000000000000000");
  EXPECT_EQ(*ParseFrameHeader(Encode(lost), LaneKind::kControl), lost);
  lost.group = LH_LANES_MAX;
  EXPECT_EQ(Message(ParseFrameHeader(Encode(lost), LaneKind::kControl).status()),
            "lane of LANE_LOST is 256, not below 256");
}

TEST(FrameTest, NumberedAreThoseThatMustNotBeLost) {
  for (const FrameType type :
       {FrameType::kReady, FrameType::kDone, FrameType::kWantLanes, FrameType::kLaneLost,
        FrameType::kChunkRequest, FrameType::kChunkRefused, FrameType::kChunkCancel}) {
    EXPECT_TRUE(IsNumbered(type));
  }
  for (const FrameType type :
       {FrameType::kPing, FrameType::kPong, FrameType::kData, FrameType::kChunkData,
        FrameType::kAck, FrameType::kResume, FrameType::kClose}) {
    EXPECT_FALSE(IsNumbered(type));
  }
}

TEST(FrameTest, OpsAreNamed) {
  for (FrameHeader header : {Data(), Control(FrameType::kReady), Control(FrameType::kDone)}) {
    const LaneKind kind = header.type == FrameType::kData ? LaneKind::kData : LaneKind::kControl;
    EXPECT_TRUE(ParseFrameHeader(Encode(header), kind).ok());
    header.op = OpOrdinal();
    EXPECT_EQ(Message(ParseFrameHeader(Encode(header), kind).status()), "op is 0, not an ordinal");
  }
}

bool AcceptsPayload(FrameHeader header, uint32_t bytes) {
  header.payload_bytes = bytes;
  const LaneKind kind = IsSegment(header.type) ? LaneKind::kData : LaneKind::kControl;
  return ParseFrameHeader(Encode(header), kind).ok();
}

TEST(FrameTest, PayloadIsBoundedByType) {
  EXPECT_FALSE(AcceptsPayload(Data(), 0));
  EXPECT_TRUE(AcceptsPayload(Data(), 1));
  EXPECT_TRUE(AcceptsPayload(Data(), LH_SEGMENT_BYTES_MAX));
  EXPECT_FALSE(AcceptsPayload(Data(), LH_SEGMENT_BYTES_MAX + 1));
  EXPECT_FALSE(AcceptsPayload(Data(), UINT32_MAX));
  const FrameHeader ready = Control(FrameType::kReady);
  EXPECT_FALSE(AcceptsPayload(ready, kReadyBodyBytes - 1));
  EXPECT_TRUE(AcceptsPayload(ready, kReadyBodyBytes));
  EXPECT_TRUE(AcceptsPayload(ready, LH_PARTED_PAYLOAD_BYTES_MAX));
  EXPECT_FALSE(AcceptsPayload(ready, LH_PARTED_PAYLOAD_BYTES_MAX + 1));
  for (const FrameType type : {FrameType::kPing, FrameType::kPong, FrameType::kDone,
                               FrameType::kWantLanes, FrameType::kAck, FrameType::kLaneLost,
                               FrameType::kResume, FrameType::kClose, FrameType::kChunkCancel}) {
    EXPECT_TRUE(AcceptsPayload(Control(type), 0));
    EXPECT_FALSE(AcceptsPayload(Control(type), 1));
  }
}

TEST(FrameTest, OffsetIsBoundedByTheLargestTensor) {
  FrameHeader header = Data();
  header.offset = LH_COUNT_MAX * 8 - 1;
  EXPECT_TRUE(ParseFrameHeader(Encode(header), LaneKind::kData).ok());
  header.offset = LH_COUNT_MAX * 8;
  EXPECT_FALSE(ParseFrameHeader(Encode(header), LaneKind::kData).ok());
}

TEST(ChunkTest, DataIsGoldenAndStaysWithinTheAnswer) {
  FrameHeader data = ChunkData();
  EXPECT_EQ(Hex(Encode(data)),
            "4c484631"
            "0d"
            "00"
            "0000"  // type, flags, zero
            "07000000"
            "00100000"          // group, payload_bytes
            "1817161514131211"  // transfer
            "2827262524232221"  // ask
            "3736353433320300"  // offset
            "00000000"
            "00000000"          // phase, zero
            "4746454443420300"  // bytes of the answer
            "0000000000000000");
  EXPECT_EQ(*ParseFrameHeader(Encode(data), LaneKind::kData), data);
  data.stamp = data.offset + data.payload_bytes;
  EXPECT_TRUE(ParseFrameHeader(Encode(data), LaneKind::kData).ok());
  --data.stamp;
  EXPECT_EQ(Message(ParseFrameHeader(Encode(data), LaneKind::kData).status()),
            "end of the piece is 899620430759479, not within the answer");
  data.stamp = LH_COUNT_MAX * 8;
  EXPECT_NE(Message(ParseFrameHeader(Encode(data), LaneKind::kData).status()), "");
}

TEST(ChunkTest, FramesNameTransferAndAskAndLeaveTheRestZero) {
  for (FrameHeader header : {ChunkData(), Control(FrameType::kChunkRequest),
                             Control(FrameType::kChunkRefused), Control(FrameType::kChunkCancel)}) {
    const LaneKind kind = IsSegment(header.type) ? LaneKind::kData : LaneKind::kControl;
    EXPECT_TRUE(ParseFrameHeader(Encode(header), kind).ok());
    EXPECT_EQ(RefusalWith(header, kind, 40, 1), "phase is 1, not 0 as this type demands");
    EXPECT_EQ(RefusalWith(header, kind, 5, 1), "flags is 1, not known for this type");
    FrameHeader without = header;
    without.attempt = Epoch();
    // A cancel with ask 0 cancels the whole transfer.
    EXPECT_EQ(Message(ParseFrameHeader(Encode(without), kind).status()),
              header.type == FrameType::kChunkCancel ? "" : "ask is 0, not a number");
    without.op = OpOrdinal();
    EXPECT_EQ(Message(ParseFrameHeader(Encode(without), kind).status()),
              "transfer is 0, not a number");
  }
}

TEST(ChunkTest, PayloadsHaveTheirSize) {
  EXPECT_FALSE(AcceptsPayload(Control(FrameType::kChunkRequest), 39));
  EXPECT_TRUE(AcceptsPayload(Control(FrameType::kChunkRequest), 40));
  EXPECT_FALSE(AcceptsPayload(Control(FrameType::kChunkRequest), 41));
  EXPECT_FALSE(AcceptsPayload(Control(FrameType::kChunkRefused), 3));
  EXPECT_TRUE(AcceptsPayload(Control(FrameType::kChunkRefused), 4));
  EXPECT_FALSE(AcceptsPayload(Control(FrameType::kChunkRefused), 5));
  FrameHeader data = ChunkData();
  data.stamp = LH_COUNT_MAX * 8 - 1;
  EXPECT_FALSE(AcceptsPayload(data, 0));
  EXPECT_TRUE(AcceptsPayload(data, 1));
  EXPECT_TRUE(AcceptsPayload(data, LH_SEGMENT_BYTES_MAX));
  EXPECT_FALSE(AcceptsPayload(data, LH_SEGMENT_BYTES_MAX + 1));
}

TEST(ChunkTest, RequestIsGoldenAndRoundTrips) {
  EXPECT_EQ(Hex(Encode(ChunkRequest())),
            "0807060504030201"  // source
            "1817161514131211"
            "2827262524232221"  // root
            "03000000"
            "32310000"  // kind, tensor
            "4544434241000000");
  EXPECT_EQ(*ParseChunkRequestBody(Encode(ChunkRequest())), ChunkRequest());
  for (const ChunkKind kind : {ChunkKind::kManifest, ChunkKind::kDigests}) {
    ChunkRequestBody body = ChunkRequest();
    body.kind = kind;
    body.tensor = 0;
    body.chunk = 0;
    EXPECT_EQ(*ParseChunkRequestBody(Encode(body)), body);
  }
}

TEST(ChunkTest, RequestIsBounded) {
  const auto refusal = [](ChunkRequestBody body) {
    return Message(ParseChunkRequestBody(Encode(body)).status());
  };
  ChunkRequestBody body = ChunkRequest();
  body.tensor = LH_STATE_TENSORS_MAX - 1;
  body.chunk = LH_STATE_BYTES_MAX - 1;
  EXPECT_EQ(refusal(body), "");
  body.tensor = LH_STATE_TENSORS_MAX;
  EXPECT_EQ(refusal(body), "tensor is 65536, not below 65536");
  body = ChunkRequest();
  body.chunk = LH_STATE_BYTES_MAX;
  EXPECT_EQ(refusal(body), "chunk is 1125899906842624, not below 2^50");
  body = ChunkRequest();
  body.source = MemberId();
  EXPECT_EQ(refusal(body), "source is 0, not a member");
  for (const uint32_t kind : {0, 4}) {
    body = ChunkRequest();
    body.kind = static_cast<ChunkKind>(kind);
    EXPECT_NE(refusal(body), "");
  }
  body = ChunkRequest();
  body.kind = ChunkKind::kDigests;
  EXPECT_EQ(refusal(body), "tensor is 12594, not 0 as this kind demands");
  body.tensor = 0;
  EXPECT_NE(refusal(body), "");
  const auto bytes = Encode(ChunkRequest());
  EXPECT_FALSE(ParseChunkRequestBody(std::span(bytes).first(39)).ok());
}

TEST(ChunkTest, RefusedIsGoldenAndOneOfFour) {
  EXPECT_EQ(Hex(Encode(ChunkRefusedBody{ChunkRefusal::kChanged})), "02000000");
  for (const ChunkRefusal code :
       {ChunkRefusal::kNotHere, ChunkRefusal::kChanged, ChunkRefusal::kBusy, ChunkRefusal::kOver}) {
    EXPECT_EQ(ParseChunkRefusedBody(Encode(ChunkRefusedBody{code}))->code, code);
  }
  for (const uint32_t code : {0, 5}) {
    EXPECT_FALSE(
        ParseChunkRefusedBody(Encode(ChunkRefusedBody{static_cast<ChunkRefusal>(code)})).ok());
  }
  const auto bytes = Encode(ChunkRefusedBody{});
  EXPECT_FALSE(ParseChunkRefusedBody(std::span(bytes).first(3)).ok());
}

ReadyBody Body() {
  ReadyBody body;
  body.boundary = Epoch(0x0102030405060708);
  body.tag = 0x1112131415161718;
  body.set = 0x3132333435363738;
  body.desc.dtype = DType::kFloat64;
  body.desc.reduce = ReduceOp::kAvg;
  body.desc.on_fault = OnFault::kAbort;
  body.desc.min_world = 0x0203;
  body.desc.algorithm = Algorithm::kMesh;
  body.desc.count = 0x2122232425;
  return body;
}

// A payload of READY, followed by `bytes` of an input or a result.
std::vector<uint8_t> Payload(const ReadyBody& body, size_t bytes = 0) {
  const std::string fixed = Encode(body) + (body.refusal ? Encode(*body.refusal) : "");
  std::vector<uint8_t> payload(fixed.begin(), fixed.end());
  if (body.other_offer) {
    const auto other = Encode(*body.other_offer);
    payload.insert(payload.end(), other.begin(), other.end());
  }
  payload.resize(payload.size() + bytes);
  return payload;
}

absl::StatusOr<ReadyBody> Parse(std::span<const uint8_t> payload) {
  std::span<const uint8_t> rest;
  return ParseReadyBody(payload, &rest);
}
absl::StatusOr<ReadyBody> Parse(const ReadyBody& body, size_t bytes = 0) {
  return Parse(Payload(body, bytes));
}
std::string Refusal(const ReadyBody& body, size_t bytes = 0) {
  return Message(Parse(body, bytes).status());
}

TEST(ReadyTest, BodyIsGolden) {
  ReadyBody body = Body();
  body.desc.order = Order::kRank;
  EXPECT_EQ(Hex(Encode(body)),
            "0807060504030201"  // boundary
            "1817161514131211"  // tag
            "3837363534333231"  // set
            "01"
            "0b"
            "01"
            "01"  // kind, dtype, reduce, on_fault
            "00"
            "02"
            "0302"              // quantization, algorithm, min_world
            "2524232221000000"  // count
            "0000"
            "0000000000000000"  // world, root
            "01"
            "00"
            "00"  // order, weighted, unequal
            "0000000000000000"
            "0000000000000000"  // list, list_bytes
            "0000"
            "00"                  // block, rounding
            "00"                  // follows
            "00"                  // zero
            "0000"                // members
            "00000000"            // result_members
            "0000000000000000");  // result_epoch
}

TEST(ReadyTest, TheFieldsOfAListAreGolden) {
  ReadyBody body = Body();
  body.desc.count = 0;
  body.desc.list = 0x5152535455565758;
  body.desc.list_bytes = 0x0061626364656640;
  const std::string bytes = Encode(body);
  EXPECT_EQ(Hex(std::span(bytes).subspan(53, 16)), "58575655545352514066656463626100");
  body.desc.list_bytes = LH_COUNT_MAX;
  EXPECT_EQ(*Parse(body), body);
}

TEST(ReadyTest, TheOutlineOfAListComesBeforeItsInput) {
  ReadyBody body = Body();
  body.desc = OpDesc();
  body.desc.count = 0;
  body.desc.list = 5;
  body.desc.list_bytes = 64;
  body.outline = "\x02\x3b\x5b";
  std::vector<uint8_t> payload = Payload(body, 128);
  EXPECT_EQ(Hex(std::span(payload).subspan(kReadyBodyBytes, 7)), "0300023b5b0000");
  std::span<const uint8_t> rest;
  auto parsed = ParseReadyBody(payload, &rest);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, body);
  EXPECT_EQ(rest.size(), 128u);
  payload.resize(kReadyBodyBytes + 4);
  EXPECT_EQ(Message(Parse(payload).status()),
            "bytes of READY's outline is 2, not as many as it says");
  payload.resize(kReadyBodyBytes + 1);
  EXPECT_FALSE(Parse(payload).ok());
  body.outline = std::string(LH_OUTLINE_BYTES_MAX + 1, '\x01');
  EXPECT_EQ(Refusal(body, 128), "bytes of an outline is 513, not at most 512");
  // Another offer has its own.
  body.outline = "\x01\x3b";
  body.other_offer = OtherOffer{MemberId(9), body.desc, "\x01\x4b"};
  body.other_offer->desc.list = 6;
  parsed = Parse(body);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, body);
  payload = Payload(body);
  payload.push_back(0);
  EXPECT_EQ(Message(Parse(payload).status()),
            "bytes of READY's other offer is 61, not 56 and an outline");
  payload = Payload(body);
  payload.back() = 0x80;
  EXPECT_EQ(Message(Parse(payload).status()), "the outline of the list is none");
  // A result comes without.
  body.other_offer.reset();
  body.outline.clear();
  body.result_epoch = Epoch(1);
  body.result_members = 1;
  EXPECT_EQ(*Parse(body, 8 + 64), body);
}

TEST(ListDifferenceTest, NamesTheFirstTensorThatDiffers) {
  const auto number = [](uint64_t value) {
    std::string bytes;
    for (; value > 0x7f; value >>= 7) bytes += static_cast<char>(value | 0x80);
    return bytes + static_cast<char>(value);
  };
  using Tensors = std::vector<std::pair<DType, uint64_t>>;
  const auto outline = [&](const Tensors& tensors, uint64_t more = 0) {
    std::string bytes = number(tensors.size() + more);
    for (const auto& [dtype, count] : tensors) {
      bytes += number(count << 4 | static_cast<uint64_t>(dtype));
    }
    EXPECT_EQ(OutlineFault(bytes), "");
    return bytes;
  };
  const DType kFloat = DType::kFloat32;
  const std::string here = outline({{kFloat, 5}, {DType::kInt8, 300}, {kFloat, 6}});
  EXPECT_EQ(ListDifference(outline({{kFloat, 5}, {DType::kInt8, 301}, {kFloat, 7}}), here),
            ": tensor[1] is int8 x 301 there, and int8 x 300 here");
  EXPECT_EQ(ListDifference(outline({{DType::kFloat64, LH_COUNT_MAX}}, 2), here),
            ": tensor[0] is float64 x 281474976710656 there, and float32 x 5 here");
  EXPECT_EQ(ListDifference(outline({{kFloat, 5}, {kFloat, 6}}), here),
            ": 2 tensors there, and 3 here: tensor[1] is float32 x 6 there, and int8 x 300 here");
  EXPECT_EQ(ListDifference(outline({{kFloat, 5}, {DType::kInt8, 300}}), here),
            ": 2 tensors there, and 3 here: the first 2 tensors are equal");
  EXPECT_EQ(ListDifference(outline({{kFloat, 5}}, 2), here),
            ": the first 1 tensors are equal, and a later one differs");
  EXPECT_EQ(ListDifference("", here), "");
  EXPECT_EQ(ListDifference(here, ""), "");
}

TEST(ListDifferenceTest, AnOutlineIsNumbersOfTensors) {
  EXPECT_EQ(OutlineFault(""), "");
  const std::string whole = "\x01\x3b";
  EXPECT_EQ(OutlineFault(whole), "");
  for (const std::string& bytes :
       {std::string(1, '\0'), std::string("\x01\x3f"), std::string("\x01\x3b\x3b"),
        std::string("\x80"), std::string("\x01") + std::string(8, '\x81') + '\x01',
        std::string("\x01\xfb\xff\xff\xff\xff\xff\xff\x7f")}) {
    EXPECT_EQ(OutlineFault(bytes), "the outline of the list is none") << Hex(bytes);
  }
}

TEST(ReadyTest, BodyRoundTrips) {
  const auto parsed = Parse(Body());
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, Body());
}

ReadyBody Disagreement() {
  ReadyBody body = Body();
  body.other_offer = OtherOffer{MemberId(9), body.desc};
  body.other_offer->desc.count = 7;
  return body;
}

TEST(ReadyTest, TheOtherOfferFollowsTheBody) {
  const std::vector<uint8_t> payload = Payload(Disagreement());
  EXPECT_EQ(Hex(std::span(payload).subspan(72)),
            "01"                                  // follows
            "000000"                              // zero, members
            "000000000000000000000000"            // result_members, result_epoch
            "0900000000000000"                    // member
            "010b0101000203020700000000000000" +  // its desc
                std::string(64, '0'));
  const auto parsed = Parse(payload);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, Disagreement());
}

ReadyBody Refused() {
  ReadyBody body = Body();
  body.desc = RefusedDesc(OpKind::kScatter);
  body.refusal = OpRefusal{MemberId(9), 5, "no"};
  return body;
}

TEST(ReadyTest, ARefusalFollowsTheBody) {
  const std::vector<uint8_t> payload = Payload(Refused());
  EXPECT_EQ(Hex(std::span(payload).subspan(72)),
            "02"                        // follows
            "000000"                    // zero, members
            "000000000000000000000000"  // result_members, result_epoch
            "0900000000000000"          // member
            "0500000000000000"          // step
            "6e6f");                    // the text
  const auto parsed = Parse(payload);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, Refused());
}

TEST(ReadyTest, EachKindCanBeRefused) {
  for (uint8_t kind = 1; kind < LH_WIRE_KIND_END; ++kind) {
    ReadyBody body = Refused();
    body.desc = RefusedDesc(static_cast<OpKind>(kind));
    const auto parsed = Parse(Payload(body));
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(*parsed, body);
    EXPECT_EQ(OneShotPayloadBytes(body.desc), 0u);
  }
}

TEST(ReadyTest, ARefusalNamesItsMemberAndIsPlainText) {
  const auto refused = [](const auto& change) {
    ReadyBody body = Refused();
    change(&body);
    return Parse(Payload(body)).status();
  };
  EXPECT_TRUE(refused([](ReadyBody*) {}).ok());
  EXPECT_FALSE(refused([](ReadyBody* body) { body->refusal->member = MemberId(); }).ok());
  for (const char* const why : {"a\nb", "\x1b[2J", "\x7f", "\xc2\x9b", "\xff", "\xc3"}) {
    EXPECT_FALSE(refused([why](ReadyBody* body) { body->refusal->why = why; }).ok()) << why;
    EXPECT_TRUE(refused([why](ReadyBody* body) { body->refusal->why = RefusalText(why); }).ok());
  }
  EXPECT_TRUE(refused([](ReadyBody* body) { body->refusal->why = "die L\xc3\xa4nge"; }).ok());
  EXPECT_EQ(RefusalText(std::string(254, 'a') + "\xc3\xa4"), std::string(254, 'a'));
  EXPECT_FALSE(refused([](ReadyBody* body) { body->refusal->why = std::string(256, 'a'); }).ok());
  EXPECT_FALSE(refused([](ReadyBody* body) { body->desc.count = 1; }).ok());
  EXPECT_FALSE(
      refused([](ReadyBody* body) { body->refusal->why = "", body->desc.count = 1; }).ok());
  std::vector<uint8_t> payload = Payload(Refused());
  payload.resize(kReadyBodyBytes + 15);
  EXPECT_FALSE(Parse(payload).ok());
}

TEST(ReadyTest, AnOtherOfferHasItsSizeKnownNumbersAndADifference) {
  std::vector<uint8_t> payload = Payload(Disagreement());
  payload.push_back(0);
  EXPECT_EQ(Message(Parse(payload).status()), "bytes of READY's other offer is 57, not 56");
  payload.resize(payload.size() - 2);
  EXPECT_EQ(Message(Parse(payload).status()), "bytes of READY's other offer is 55, not 56");
  payload = Payload(Disagreement());
  payload[kReadyBodyBytes + 8] = 0;
  EXPECT_EQ(Message(Parse(payload).status()).rfind("kind is 0, not 1 to ", 0), 0u);
  payload = Payload(Disagreement());
  payload.back() = 1;
  EXPECT_EQ(Message(Parse(payload).status()),
            "rounding is stochastic, not nearest without quantization");
  ReadyBody same = Body();
  same.other_offer = OtherOffer{MemberId(9), same.desc};
  EXPECT_EQ(Message(Parse(same).status()),
            "READY for " + ToString(same.desc) + " carries the same as other offer");
}

absl::Status ParseWith(size_t at, uint8_t value) {
  std::vector<uint8_t> bytes = Payload(Body());
  bytes[at] = value;
  return Parse(bytes).status();
}

TEST(ReadyTest, RefusesUnknownNumbers) {
  const auto kinds = static_cast<uint8_t>(NamesOf(OpKind()).last());
  EXPECT_EQ(Message(ParseWith(24, kinds + 1)),
            "kind is " + std::to_string(kinds + 1) + ", not 1 to " + std::to_string(kinds));
  EXPECT_EQ(Message(ParseWith(25, 15)), "dtype is 15, not at most 14");
  EXPECT_TRUE(ParseWith(25, 11).ok());
  EXPECT_EQ(Message(ParseWith(26, 5)), "reduce is 5, not at most 4");
  EXPECT_TRUE(ParseWith(26, 4).ok());
  EXPECT_EQ(Message(ParseWith(27, 2)), "on_fault is 2, not at most 1");
  EXPECT_EQ(Message(ParseWith(28, 11)), "quantization is 11, not at most 10");
  EXPECT_EQ(Message(ParseWith(28, 1)),
            "dtype is float64, not float32, float16 or bfloat16 with quantization bf16");
  EXPECT_EQ(Message(ParseWith(71, 2)), "rounding is 2, not at most 1");
  EXPECT_EQ(Message(ParseWith(72, 3)), "follows is 3, not 0 to 2");
  EXPECT_EQ(Message(ParseWith(29, 5)), "algorithm is 5, not at most 4");
  EXPECT_EQ(Message(ParseWith(29, 4)), "algorithm is 4, not at most 3");
  EXPECT_TRUE(ParseWith(29, 3).ok());
  EXPECT_EQ(Message(ParseWith(29, 1)),
            "a one-shot op has at most 4096 bytes, this one 1138453193000; leave the algorithm to "
            "Longhaul, or choose mesh or ring");
  EXPECT_EQ(Message(ParseWith(50, 2)), "order is 2, not at most 1");
  EXPECT_TRUE(ParseWith(50, 1).ok());
  EXPECT_EQ(Message(ParseWith(51, 2)), "weighted is 2, not 0 or 1");
  EXPECT_EQ(Message(ParseWith(52, 255)), "unequal is 255, not 0 or 1");
  for (size_t reserved = 24 + OpDescFieldBytes(); reserved < 72; ++reserved) {
    EXPECT_EQ(Message(ParseWith(reserved, 1)), "reserved bytes of the op are not zero");
  }
  EXPECT_EQ(Message(ParseWith(73, 1)),
            "input of READY is 1, which does not fit " + ToString(Body().desc));
  EXPECT_EQ(Message(ParseWith(74, 1)), "members with terms is 1, not 0");
  EXPECT_EQ(Message(ParseWith(75, 1)), "members with terms is 256, not 0");
  EXPECT_EQ(Message(ParseWith(76, 1)), "result_members is 1, not 0 without a result");
  EXPECT_EQ(Message(ParseWith(80, 1)), "result_members is 0, not 1 to 1024");
  ReadyBody body = Body();
  body.desc.min_world = 1;
  EXPECT_EQ(Message(Parse(body).status()), "min_world is 1, not 0 or 2 to 1024");
  body.desc.min_world = LH_MEMBERS_MAX;
  EXPECT_TRUE(Parse(body).ok());
  body.desc.min_world = LH_MEMBERS_MAX + 1;
  EXPECT_FALSE(Parse(body).ok());
  body.desc.min_world = 0;
  EXPECT_TRUE(Parse(body).ok());
  body.boundary = Epoch();
  EXPECT_EQ(Message(Parse(body).status()), "boundary is 0, not an epoch");
}

TEST(ReadyTest, AResultTravelsInPlaceOfASmallInput) {
  ReadyBody body = Body();
  body.desc.algorithm = Algorithm::kAuto;
  body.desc.dtype = DType::kUint8;
  body.desc.count = 3;
  body.result_epoch = Epoch(7);
  body.result_members = 0x0102;
  const auto parse = [](const ReadyBody& body, size_t bytes) { return Parse(body, bytes); };
  const size_t bytes = 8 * size_t{body.result_members} + 3;
  const auto parsed = parse(body, bytes);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, body);
  EXPECT_FALSE(parse(body, bytes - 1).ok());
  body.result_members = LH_MEMBERS_MAX + 1;
  EXPECT_EQ(Message(parse(body, 3).status()), "result_members is 1025, not 1 to 1024");
  body.result_members = 2;
  body.other_offer = Disagreement().other_offer;
  EXPECT_FALSE(parse(body, 0).ok());
  body.other_offer.reset();
  body.desc.count = LH_READY_INPUT_BYTES_MAX + 1;
  EXPECT_EQ(Message(parse(body, 0).status()),
            "READY for " + ToString(body.desc) + " carries a result, and is not one-shot");
}

TEST(ReadyTest, TheInputOfALargerOpTravelsIfReadySaysSo) {
  ReadyBody body;
  body.boundary = Epoch(1);
  body.desc.dtype = DType::kUint8;
  body.desc.count = LH_READY_INPUT_BYTES_MAX;
  EXPECT_TRUE(Parse(body, 0).ok());
  EXPECT_FALSE(Parse(body, LH_READY_INPUT_BYTES_MAX).ok());
  body.input = ReadyInput::kCarried;
  const auto parsed = Parse(body, LH_READY_INPUT_BYTES_MAX);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->input, ReadyInput::kCarried);
  EXPECT_FALSE(Parse(body, 0).ok());
  body.input = ReadyInput::kWithheld;
  EXPECT_TRUE(Parse(body, 0).ok());
  EXPECT_FALSE(Parse(body, LH_READY_INPUT_BYTES_MAX).ok());
  body.input = static_cast<ReadyInput>(3);
  EXPECT_FALSE(Parse(body, 0).ok());
  // Of a result the same is not said, nor of ops that are small, too large, or of another kind.
  body.input = ReadyInput::kWithheld;
  body.result_epoch = Epoch(1);
  body.result_members = 1;
  EXPECT_FALSE(Parse(body, 8 + LH_READY_INPUT_BYTES_MAX).ok());
  body.input = ReadyInput::kSegments;
  EXPECT_TRUE(Parse(body, 8 + LH_READY_INPUT_BYTES_MAX).ok());
  body.result_epoch = Epoch();
  body.result_members = 0;
  body.input = ReadyInput::kWithheld;
  ++body.desc.count;
  EXPECT_FALSE(Parse(body, 0).ok());
  body.desc.count = LH_ONE_SHOT_BYTES_MAX;
  EXPECT_FALSE(Parse(body, LH_ONE_SHOT_BYTES_MAX).ok());
}

TEST(FrameTest, PartsStayWithinTheirPayload) {
  FrameHeader part{.type = FrameType::kPart,
                   .payload_bytes = 100,
                   .op = OpOrdinal(1),
                   .offset = 900,
                   .stamp = 1000};
  const auto ok = [](const FrameHeader& header) {
    return ParseFrameHeader(Encode(header), LaneKind::kData).ok();
  };
  EXPECT_TRUE(ok(part));
  EXPECT_FALSE(ParseFrameHeader(Encode(part), LaneKind::kControl).ok());
  part.offset = 901;
  EXPECT_FALSE(ok(part));
  part.offset = 900;
  part.op = OpOrdinal();
  EXPECT_FALSE(ok(part));
  part.op = OpOrdinal(1);
  part.stamp = LH_PARTED_PAYLOAD_BYTES_MAX + 1;
  EXPECT_FALSE(ok(part));
  const FrameHeader parted{
      .type = FrameType::kParted, .payload_bytes = kFrameHeaderBytes, .op = OpOrdinal(1)};
  EXPECT_TRUE(ParseFrameHeader(Encode(parted), LaneKind::kControl).ok());
  EXPECT_FALSE(ParseFrameHeader(Encode(parted), LaneKind::kData).ok());
  EXPECT_FALSE(
      ParseFrameHeader(Encode({.type = FrameType::kParted, .op = OpOrdinal(1)}), LaneKind::kControl)
          .ok());
}

TEST(ReadyTest, CountIsBounded) {
  ReadyBody body = Body();
  body.desc.count = LH_COUNT_MAX;
  EXPECT_TRUE(Parse(body).ok());
  body.desc.count = LH_COUNT_MAX + 1;
  EXPECT_EQ(Message(Parse(body).status()), "count is 281474976710657, not at most 281474976710656");
}

// A READY for an op of `count` bytes, with `one_shot` bytes of input after the body.
bool AcceptsOneShot(uint64_t count, size_t one_shot, Algorithm algorithm = Algorithm::kAuto) {
  ReadyBody body = Body();
  body.desc.algorithm = algorithm;
  body.desc.dtype = DType::kUint8;
  body.desc.count = count;
  return Parse(body, one_shot).ok();
}

TEST(ReadyTest, InputTravelsInsideExactlyWhenItIsSmall) {
  EXPECT_TRUE(AcceptsOneShot(0, 0));
  EXPECT_TRUE(AcceptsOneShot(10, 10));
  EXPECT_FALSE(AcceptsOneShot(10, 9));
  EXPECT_FALSE(AcceptsOneShot(10, 11));
  EXPECT_FALSE(AcceptsOneShot(10, 0));
  EXPECT_TRUE(AcceptsOneShot(LH_ONE_SHOT_BYTES_MAX, LH_ONE_SHOT_BYTES_MAX));
  EXPECT_TRUE(AcceptsOneShot(LH_ONE_SHOT_BYTES_MAX + 1, 0));
  EXPECT_FALSE(AcceptsOneShot(LH_ONE_SHOT_BYTES_MAX + 1, LH_ONE_SHOT_BYTES_MAX + 1));
  EXPECT_TRUE(AcceptsOneShot(10, 10, Algorithm::kOneShot));
  EXPECT_FALSE(AcceptsOneShot(LH_ONE_SHOT_BYTES_MAX + 1, 0, Algorithm::kOneShot));
  for (const Algorithm algorithm : {Algorithm::kMesh, Algorithm::kRing}) {
    EXPECT_TRUE(AcceptsOneShot(10, 0, algorithm));
    EXPECT_FALSE(AcceptsOneShot(10, 10, algorithm));
  }
}

TEST(ReadyTest, RefusesShortPayload) {
  const std::vector<uint8_t> bytes = Payload(Body());
  for (size_t n = 0; n < bytes.size(); ++n) {
    EXPECT_FALSE(Parse(std::span(bytes).first(n)).ok()) << n;
  }
  EXPECT_EQ(Message(Parse(std::span(bytes).first(87)).status()),
            "bytes of READY's payload is 87, not 88 or more");
}

// ---- terms

// A reduce of unequal parts of three members, with the terms of two of them.
ReadyBody WithTerms(bool weighted = true, bool unequal = true) {
  ReadyBody body = Body();
  body.desc.kind = OpKind::kReduceScatter;
  body.desc.world = 3;
  body.desc.min_world = 0;
  body.desc.count = unequal ? 0 : 1 << 20;
  body.desc.weighted = weighted;
  body.desc.unequal = unequal;
  body.terms.resize(2);
  if (weighted) {
    body.terms[0].weight = 0.5;
    body.terms[1].weight = 0;
  }
  if (unequal) {
    body.terms[0].gives = {1, 0, 0x0102030405};
    body.terms[0].gets = {1};
    body.terms[1].gives = {1, 0, LH_COUNT_MAX};
    body.terms[1].gets = {};
  }
  return body;
}

TEST(ReadyTest, TermsAreGolden) {
  const std::string bytes = Encode(WithTerms());
  EXPECT_EQ(Hex(std::span(bytes).subspan(72)),
            "00"
            "00"
            "0200"  // follows, zero, members
            "000000000000000000000000"
            "000000000000e03f"  // weight
            "0300"
            "0100"  // gives, gets
            "0100000000000000"
            "0000000000000000"
            "0504030201000000"
            "0100000000000000"
            "0000000000000000"  // weight
            "0300"
            "0000"
            "0100000000000000"
            "0000000000000000"
            "0000000000000100");
  EXPECT_EQ(bytes.size(), kReadyBodyBytes + TermsBytes(WithTerms().desc, WithTerms().terms));
}

TEST(ReadyTest, TermsRoundTrip) {
  for (const auto& [weighted, unequal] : {std::pair(true, false), {false, true}, {true, true}}) {
    const ReadyBody body = WithTerms(weighted, unequal);
    const auto parsed = Parse(body);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(*parsed, body);
  }
}

TEST(ReadyTest, AnInputFollowsTheTerms) {
  ReadyBody body = WithTerms(true, false);
  body.desc.algorithm = Algorithm::kAuto;
  body.desc.dtype = DType::kFloat32;
  body.desc.count = 2;
  std::vector<uint8_t> payload = Payload(body, 24);
  payload[kReadyBodyBytes + 16] = 77;
  std::span<const uint8_t> rest;
  const auto parsed = ParseReadyBody(payload, &rest);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  ASSERT_EQ(rest.size(), 24u);
  EXPECT_EQ(rest[0], 77);
  EXPECT_EQ(rest.data() + rest.size(), payload.data() + payload.size());
  EXPECT_NE(Refusal(body, 23), "");
  EXPECT_NE(Refusal(body, 25), "");
}

TEST(ReadyTest, TermsAreOfOneTo64MembersWhereTheOpNeedsThem) {
  ReadyBody body = WithTerms(true, false);
  body.terms.clear();
  EXPECT_EQ(Refusal(body), "members with terms is 0, not 1 to 64");
  body.terms.resize(LH_LOCAL_MEMBERS_MAX);
  EXPECT_EQ(Refusal(body), "");
  body.terms.resize(LH_LOCAL_MEMBERS_MAX + 1);
  EXPECT_EQ(Refusal(body), "members with terms is 65, not 1 to 64");
  // Nobody needs terms with a result, or with another offer.
  body = WithTerms(true, false);
  body.other_offer = OtherOffer{MemberId(9), Body().desc};
  EXPECT_EQ(Refusal(body), "members with terms is 2, not 0");
  body.terms.clear();
  EXPECT_EQ(*Parse(body), body);
  body = WithTerms(true, false);
  body.desc.kind = OpKind::kAllReduce;
  body.desc.world = 0;
  body.desc.algorithm = Algorithm::kAuto;
  body.desc.count = 1;
  body.result_epoch = Epoch(7);
  body.result_members = 1;
  EXPECT_EQ(Refusal(body, 16), "members with terms is 2, not 0");
  body.terms.clear();
  EXPECT_EQ(Refusal(body, 16), "");
}

TEST(ReadyTest, AWeightIsANumberFromZeroOn) {
  for (const double weight :
       {-1.0, -1e-300, std::numeric_limits<double>::infinity(),
        -std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    ReadyBody body = WithTerms(true, false);
    body.terms[1].weight = weight;
    EXPECT_NE(Refusal(body).find("weight is "), std::string::npos) << weight;
  }
  for (const double weight : {0.0, 1e-320, std::numeric_limits<double>::max()}) {
    ReadyBody body = WithTerms(true, false);
    body.terms[1].weight = weight;
    EXPECT_EQ(Refusal(body), "") << weight;
  }
}

TEST(ReadyTest, LengthsAreBounded) {
  ReadyBody body = WithTerms(false, true);
  body.terms[1].gives[2] = LH_COUNT_MAX + 1;
  EXPECT_EQ(Refusal(body), "length of a part is 281474976710657, not at most 2^48 elements");
  body.terms[1].gives[2] = UINT64_MAX;
  EXPECT_NE(Refusal(body), "");
  body = WithTerms(false, true);
  body.terms[1].gives.assign(LH_MEMBERS_MAX, 5);
  EXPECT_EQ(Refusal(body), "");
  body.terms[1].gives.push_back(5);
  EXPECT_EQ(Refusal(body), "lengths in READY is 1025, not at most 1024");
  body.terms[1].gives.clear();
  body.terms[1].gets.assign(LH_MEMBERS_MAX + 1, 5);
  EXPECT_EQ(Refusal(body), "lengths in READY is 1025, not at most 1024");
}

TEST(ReadyTest, TermsThatAreCutOffAreRefused) {
  for (const auto& [weighted, unequal] : {std::pair(true, false), {false, true}, {true, true}}) {
    const std::vector<uint8_t> bytes = Payload(WithTerms(weighted, unequal));
    for (size_t n = 0; n < bytes.size(); ++n) {
      EXPECT_FALSE(Parse(std::span(bytes).first(n)).ok()) << n;
    }
    std::vector<uint8_t> longer = bytes;
    longer.push_back(0);
    EXPECT_NE(Message(Parse(longer).status()).find("carries 1 bytes of input or result, not 0"),
              std::string::npos);
  }
}

TEST(ReadyTest, ALargestResultWithItsMembersFits) {
  ReadyBody body = Body();
  body.desc.algorithm = Algorithm::kAuto;
  body.desc.dtype = DType::kUint8;
  body.desc.count = LH_ONE_SHOT_BYTES_MAX;
  body.result_epoch = Epoch(7);
  body.result_members = LH_MEMBERS_MAX;
  const size_t follows = LH_ONE_SHOT_BYTES_MAX + 8 * LH_MEMBERS_MAX;
  EXPECT_EQ(Refusal(body, follows), "");
  EXPECT_TRUE(AcceptsPayload(Control(FrameType::kReady),
                             static_cast<uint32_t>(Payload(body, follows).size())));
}

TEST(ReadyTest, LargestTermsFit) {
  // Weights of a host that is full, and the largest input in float32.
  ReadyBody body = WithTerms(true, false);
  body.desc.kind = OpKind::kAllReduce;
  body.desc.world = 0;
  body.desc.algorithm = Algorithm::kAuto;
  body.desc.dtype = DType::kBfloat16;
  body.desc.count = LH_ONE_SHOT_BYTES_MAX / 2;
  body.terms.resize(LH_LOCAL_MEMBERS_MAX);
  EXPECT_EQ(Refusal(body, 2 * LH_ONE_SHOT_BYTES_MAX), "");
  EXPECT_TRUE(AcceptsPayload(Control(FrameType::kReady),
                             static_cast<uint32_t>(Payload(body, 8192).size())));
}

TEST(ReadyTest, SumsOfHalvesTravelAsFloat32) {
  ReadyBody body = Body();
  body.desc.algorithm = Algorithm::kAuto;
  body.desc.count = 3;
  for (const DType dtype : {DType::kFloat16, DType::kBfloat16}) {
    body.desc.dtype = dtype;
    for (const ReduceOp reduce : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kProd}) {
      body.desc.reduce = reduce;
      EXPECT_EQ(OneShotPayloadBytes(body.desc), 12u);
      EXPECT_EQ(Refusal(body, 12), "");
      EXPECT_NE(Refusal(body, 6), "");
    }
    body.desc.reduce = ReduceOp::kMax;
    EXPECT_EQ(OneShotPayloadBytes(body.desc), 6u);
    EXPECT_EQ(Refusal(body, 6), "");
  }
  body.desc.dtype = DType::kFloat32;
  body.desc.reduce = ReduceOp::kSum;
  EXPECT_EQ(OneShotPayloadBytes(body.desc), 12u);
  body.desc.kind = OpKind::kBroadcast;
  body.desc.dtype = DType::kFloat16;
  EXPECT_EQ(OneShotPayloadBytes(body.desc), 6u) << "moved only";
  body.desc.kind = OpKind::kAllReduce;
  body.desc.dtype = DType::kFloat32;
  body.desc.list = 1;
  body.desc.list_bytes = 64;
  EXPECT_EQ(OneShotPayloadBytes(body.desc), 128u) << "any piece may be of halves";
}

template <class Array = Digest32>
Array Sequence(uint8_t first) {
  Array array;
  for (uint8_t& byte : array) byte = first++;
  return array;
}

LaneHello Hello() {
  LaneHello hello;
  hello.kind = LaneKind::kData;
  hello.sealed = true;
  hello.run = Sequence<Tag16>(0x20);
  hello.host = Sequence<Tag16>(0x30);
  hello.group = 0x01020304;
  hello.lane = 2;
  hello.lanes = 4;
  hello.epoch = Epoch(9);
  hello.dialer = PeerId(0x1112131415161718);
  hello.acceptor = PeerId(0x2122232425262728);
  hello.relay = PeerId(0x6162636465666768);
  hello.nonce = Sequence(0x80);
  hello.link = 0x3132333435363738;
  hello.serial = 0x4142434445464748;
  return hello;
}

TEST(HandshakeTest, HelloIsGolden) {
  EXPECT_EQ(Hex(Encode(Hello())),
            "4c484831"
            "0d00"
            "01"
            "01"
            "202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f"
            "04030201"
            "0200"
            "0400"
            "6867666564636261"
            "0900000000000000"
            "1817161514131211"
            "2827262524232221"
            "808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9f"
            "3837363534333231"
            "4847464544434241");
  EXPECT_EQ(*ParseLaneHello(Encode(Hello())), Hello());
}

TEST(HandshakeTest, AnswerIsGolden) {
  LaneAnswer answer;
  answer.nonce = Sequence(0x40);
  answer.proof = Sequence(0x60);
  EXPECT_EQ(Hex(Encode(answer)),
            "4c484831"
            "0d00"
            "00"
            "00"
            "404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f"
            "606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f"
            "000000000000000000000000000000000000000000000000");
  EXPECT_EQ(*ParseLaneAnswer(Encode(answer)), answer);
}

TEST(HandshakeTest, ConfirmIsGolden) {
  LaneConfirm confirm;
  confirm.proof = Sequence(0xa0);
  EXPECT_EQ(Hex(Encode(confirm)),
            "4c484831"
            "0d00"
            "0000"
            "a0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebf");
  EXPECT_EQ(*ParseLaneConfirm(Encode(confirm)), confirm);
}

std::string HelloRefusalWith(size_t at, uint8_t value) {
  auto bytes = Encode(Hello());
  bytes[at] = value;
  return Message(ParseLaneHello(bytes).status());
}

TEST(HandshakeTest, HelloIsCheckedFieldByField) {
  EXPECT_EQ(HelloRefusalWith(0, 0), "HELLO: magic is 0x31484800, not LHH1");
  EXPECT_EQ(HelloRefusalWith(4, 4),
            "HELLO: lane protocol version is 4, not 13; run the same release at both ends");
  EXPECT_EQ(HelloRefusalWith(6, 3), "HELLO: lane kind is 3, not 0 to 2");
  EXPECT_EQ(HelloRefusalWith(6, 0), "HELLO: lane is 2, not 0 as for a control lane");
  EXPECT_EQ(HelloRefusalWith(44, 4), "HELLO: lane is 4, not below the number of lanes");
  EXPECT_EQ(HelloRefusalWith(47, 1), "HELLO: lanes is 260, not at most 256");
  EXPECT_EQ(HelloRefusalWith(56, 0), "HELLO: epoch is 0, not an epoch");
  EXPECT_EQ(HelloRefusalWith(7, 2), "HELLO: sealed is 2, not 0 or 1");
  LaneHello nobody = Hello();
  nobody.dialer = PeerId();
  EXPECT_EQ(Message(ParseLaneHello(Encode(nobody)).status()), "HELLO: dialer is 0, not a peer");
  nobody = Hello();
  nobody.acceptor = PeerId();
  EXPECT_EQ(Message(ParseLaneHello(Encode(nobody)).status()), "HELLO: acceptor is 0, not a peer");
  for (const PeerId end : {Hello().dialer, Hello().acceptor}) {
    LaneHello through_itself = Hello();
    through_itself.relay = end;
    EXPECT_EQ(Message(ParseLaneHello(Encode(through_itself)).status()),
              "HELLO: relay is " + std::to_string(end.value()) + ", not a third peer");
  }
  LaneHello straight = Hello();
  straight.relay = PeerId();
  EXPECT_EQ(*ParseLaneHello(Encode(straight)), straight);
}

TEST(HandshakeTest, LinkAndSerialGoTogether) {
  LaneHello hello = Hello();
  hello.link = 0;
  EXPECT_EQ(Message(ParseLaneHello(Encode(hello)).status()),
            "HELLO: link is 0, not that of a link, as for all but a control lane");
  hello.kind = LaneKind::kProbe;
  EXPECT_FALSE(ParseLaneHello(Encode(hello)).ok());
  hello.kind = LaneKind::kControl;
  hello.lane = 0;
  EXPECT_FALSE(ParseLaneHello(Encode(hello)).ok());
  hello.serial = 0;
  EXPECT_TRUE(ParseLaneHello(Encode(hello)).ok()) << "a new link";
  hello.link = 5;
  EXPECT_EQ(Message(ParseLaneHello(Encode(hello)).status()),
            "HELLO: serial is 0, not that of a lane");
  EXPECT_EQ(NewLinkId(hello), 0x8786858483828181u) << "odd, and so never zero";
}

TEST(HandshakeTest, LanesAreBounded) {
  LaneHello hello = Hello();
  hello.lanes = LH_LANES_MAX;
  hello.lane = LH_LANES_MAX - 1;
  EXPECT_TRUE(ParseLaneHello(Encode(hello)).ok());
  hello.lanes = LH_LANES_MAX + 1;
  EXPECT_FALSE(ParseLaneHello(Encode(hello)).ok());
  hello.kind = LaneKind::kProbe;
  EXPECT_EQ(Message(ParseLaneHello(Encode(hello)).status()),
            "HELLO: sealed is 1, not 0 for a probe");
  hello.sealed = false;
  hello.lanes = 2;
  hello.lane = 1;
  EXPECT_EQ(ParseLaneHello(Encode(hello))->kind, LaneKind::kProbe);
  hello.lane = 2;
  EXPECT_FALSE(ParseLaneHello(Encode(hello)).ok());
}

TEST(HandshakeTest, RefusalCarriesNoSecrets) {
  LaneAnswer answer;
  answer.result = LaneResult::kBusy;
  EXPECT_EQ(*ParseLaneAnswer(Encode(answer)), answer);
  answer.proof = Sequence(1);
  EXPECT_FALSE(ParseLaneAnswer(Encode(answer)).ok());
  auto bytes = Encode(LaneAnswer());
  bytes[6] = 8;
  EXPECT_EQ(Message(ParseLaneAnswer(bytes).status()), "ANSWER: result is 8, not at most 7");
  bytes = Encode(LaneAnswer());
  bytes[95] = 1;
  EXPECT_FALSE(ParseLaneAnswer(bytes).ok());
  auto confirm = Encode(LaneConfirm());
  confirm[7] = 1;
  EXPECT_FALSE(ParseLaneConfirm(confirm).ok());
}

// Encoding an accepted value again must give the same bytes. Otherwise a field was overlooked.
TEST(WireTest, AcceptedBytesAreCanonical) {
  Prng prng(1);
  for (int i = 0; i < 20000; ++i) {
    auto frame = Encode(prng.Chance(0.5) ? Data() : Control(FrameType::kDone));
    frame[prng.Below(frame.size())] = static_cast<uint8_t>(prng.Next());
    const LaneKind kind = frame[4] == 5 ? LaneKind::kData : LaneKind::kControl;
    if (const auto parsed = ParseFrameHeader(frame, kind); parsed.ok()) {
      EXPECT_EQ(Encode(*parsed), frame);
    }
    auto request = Encode(ChunkRequest());
    request[prng.Below(request.size())] = static_cast<uint8_t>(prng.Next());
    if (const auto parsed = ParseChunkRequestBody(request); parsed.ok()) {
      EXPECT_EQ(Encode(*parsed), request);
    }
    auto hello = Encode(Hello());
    hello[prng.Below(hello.size())] = static_cast<uint8_t>(prng.Next());
    if (const auto parsed = ParseLaneHello(hello); parsed.ok()) {
      EXPECT_EQ(Encode(*parsed), hello);
    }
    std::vector<uint8_t> body = Payload(prng.Chance(0.5) ? Body() : WithTerms());
    body[prng.Below(body.size())] = static_cast<uint8_t>(prng.Next());
    if (const auto parsed = Parse(body); parsed.ok()) {
      EXPECT_EQ(Payload(*parsed), body);
    }
  }
}

TEST(OpDescTest, TextNamesWhatDiffers) {
  OpDesc desc;
  desc.count = 1048576;
  EXPECT_EQ(ToString(desc), "sum of float32 x 1048576");
  desc.reduce = ReduceOp::kMax;
  desc.dtype = DType::kBfloat16;
  desc.on_fault = OnFault::kAbort;
  EXPECT_EQ(ToString(desc), "max of bfloat16 x 1048576 on_fault abort");
  EXPECT_EQ(desc.bytes(), 2097152u);
  desc.algorithm = Algorithm::kMesh;
  EXPECT_EQ(ToString(desc), "max of bfloat16 x 1048576 on_fault abort algorithm mesh");
}

TEST(OpDescTest, TextNamesKindWorldAndRoot) {
  OpDesc desc;
  desc.count = 8;
  desc.kind = OpKind::kReduceScatter;
  desc.world = 3;
  EXPECT_EQ(ToString(desc), "reduce-scatter, sum of float32 x 8 world 3");
  EXPECT_EQ(desc.bytes(), 96u);
  OpDesc gather = desc;
  gather.kind = OpKind::kAllGather;
  EXPECT_EQ(ToString(gather), "all-gather, float32 x 8 world 3");
  EXPECT_EQ(gather.bytes(), 96u);
  EXPECT_FALSE(gather.SameButForWorld(desc));
  OpDesc other = desc;
  other.world = 4;
  EXPECT_TRUE(other.SameButForWorld(desc));
  OpDesc broadcast;
  broadcast.kind = OpKind::kBroadcast;
  broadcast.root = MemberId(7);
  EXPECT_EQ(ToString(broadcast), "broadcast, float32 x 0 root m7");
}

OpDesc Quantized(Quantization quantization, uint16_t block) {
  OpDesc desc;
  desc.count = 5000;
  desc.quantization = quantization;
  desc.block = block;
  return desc;
}

TEST(OpDescTest, TextNamesTheCodec) {
  OpDesc desc = Quantized(Quantization::kInt8, 128);
  EXPECT_EQ(desc.Fault(), "");
  EXPECT_EQ(ToString(desc), "sum of float32 x 5000 quantization int8 block 128");
  desc.rounding = Rounding::kStochastic;
  EXPECT_EQ(ToString(desc),
            "sum of float32 x 5000 quantization int8 block 128 rounding stochastic");
  EXPECT_EQ(ToString(Quantized(Quantization::kBf16, 0)), "sum of float32 x 5000 quantization bf16");
}

TEST(OpDescTest, ASetOfCodecsHasOneOfThem) {
  constexpr Quantization kCodecs[] = {Quantization::kBf16, Quantization::kInt8,
                                      Quantization::kInt4};
  for (int set = 1; set < 8; ++set) {
    OpDesc desc = Quantized(static_cast<Quantization>(LH_WIRE_QUANTIZE_AUTO + set - 1), 64);
    if (set == 1) desc.block = 0;
    desc.rounding = Rounding::kStochastic;
    EXPECT_EQ(desc.Fault(), "");
    EXPECT_TRUE(desc.Encodes());
    EXPECT_TRUE(IsAmong(desc.quantization, Quantization::kNone));
    std::string names;
    for (int i = 0; i < 3; ++i) {
      const bool is_in = (set >> i & 1) != 0;
      EXPECT_EQ(IsAmong(desc.quantization, kCodecs[i]), is_in);
      if (is_in) names += (names.empty() ? "" : ", ") + std::string(Name(kCodecs[i]));
      if (is_in) {
        EXPECT_EQ(desc.With(kCodecs[i]).Fault(), "");
      }
    }
    EXPECT_EQ(Name(desc.quantization), "auto of " + names);
    EXPECT_EQ(desc.With(Quantization::kNone).Fault(), "");
  }
}

TEST(OpDescTest, CodecsThatCannotBeAreRefused) {
  const auto fault = [](OpDesc desc, auto change) {
    change(&desc);
    return desc.Fault();
  };
  const auto none = [](OpDesc*) {};
  for (const uint16_t block : {0, 31, 48, 8192}) {
    EXPECT_EQ(fault(Quantized(Quantization::kInt4, block), none),
              "block is " + std::to_string(block) + ", not a power of two from 32 to 4096");
  }
  EXPECT_EQ(fault(Quantized(Quantization::kBf16, 64), none),
            "block is 64, not 0 with quantization bf16");
  EXPECT_EQ(fault(Quantized(Quantization::kNone, 64), none),
            "block is 64, not 0 with quantization none");
  const OpDesc fine = Quantized(Quantization::kInt8, 64);
  EXPECT_EQ(fault(fine, [](OpDesc* d) { d->reduce = ReduceOp::kMax; }),
            "reduce is max, not sum or avg with quantization int8");
  EXPECT_EQ(fault(fine, [](OpDesc* d) { d->dtype = DType::kFloat64; }),
            "dtype is float64, not float32, float16 or bfloat16 with quantization int8");
  EXPECT_EQ(fault(fine, [](OpDesc* d) { d->kind = OpKind::kReduce; }),
            "quantization is int8, not none for a reduce");
  EXPECT_EQ(fault(fine, [](OpDesc* d) { d->kind = OpKind::kSendRecv; }),
            "quantization is int8, not none for a send-recv");
  for (const OpKind kind : {OpKind::kReduceScatter, OpKind::kAllGather, OpKind::kBroadcast}) {
    EXPECT_EQ(fault(fine,
                    [&](OpDesc* d) {
                      d->kind = kind;
                      d->world = IsInParts(kind) ? 2 : 0;
                    }),
              "");
  }
}

TEST(OpDescTest, WhatIsSmallIsOneShotUnlessTheCallerWantsItOtherwise) {
  const auto one_shot = [](uint64_t count, DType dtype, Algorithm algorithm = Algorithm::kAuto) {
    OpDesc desc;
    desc.count = count;
    desc.dtype = dtype;
    desc.algorithm = algorithm;
    return IsOneShot(desc);
  };
  EXPECT_TRUE(one_shot(0, DType::kFloat32));
  EXPECT_TRUE(one_shot(LH_ONE_SHOT_BYTES_MAX / 4, DType::kFloat32));
  EXPECT_FALSE(one_shot(LH_ONE_SHOT_BYTES_MAX / 4 + 1, DType::kFloat32));
  EXPECT_TRUE(one_shot(LH_ONE_SHOT_BYTES_MAX, DType::kUint8));
  // count * 4 overflows.
  EXPECT_FALSE(one_shot(uint64_t{1} << 62, DType::kFloat32));
  EXPECT_TRUE(one_shot(4, DType::kFloat32, Algorithm::kOneShot));
  EXPECT_FALSE(one_shot(4, DType::kFloat32, Algorithm::kMesh));
  EXPECT_FALSE(one_shot(4, DType::kFloat32, Algorithm::kRing));
}

TEST(OpDescTest, EveryDtypeHasASizeAndAName) {
  size_t total = 0;
  for (int i = 0; i < LH_WIRE_DTYPE_COUNT; ++i) {
    total += SizeOf(static_cast<DType>(i));
    EXPECT_STRNE(Name(static_cast<DType>(i)), "unknown");
  }
  EXPECT_EQ(total, 5 * 1 + 4 * 2 + 3 * 4 + 3 * 8u);
  for (int i = 0; i < LH_WIRE_REDUCE_COUNT; ++i) {
    EXPECT_STRNE(Name(static_cast<ReduceOp>(i)), "unknown");
  }
}

// ---- the kinds

OpDesc OfKind(OpKind kind, uint16_t world = 3) {
  OpDesc desc;
  desc.kind = kind;
  desc.count = 1 << 20;
  if (desc.InParts()) desc.world = world;
  if (HasRoot(kind)) desc.root = MemberId(7);
  return desc;
}

std::vector<OpKind> AllKinds() {
  std::vector<OpKind> kinds;
  for (int i = NamesOf(OpKind()).first; i <= static_cast<int>(NamesOf(OpKind()).last()); ++i) {
    kinds.push_back(static_cast<OpKind>(i));
  }
  return kinds;
}

TEST(OpKindTest, TensorsAreWholeOrInPartsOrNotThere) {
  struct Row {
    OpKind kind;
    Extent source, root_source, target, root_target;
  };
  constexpr Extent kNone = Extent::kNone, kPart = Extent::kPart, kWhole = Extent::kWhole;
  const std::vector<Row> rows = {
      {OpKind::kAllReduce, kWhole, kWhole, kWhole, kWhole},
      {OpKind::kReduceScatter, kWhole, kWhole, kPart, kPart},
      {OpKind::kAllGather, kPart, kPart, kWhole, kWhole},
      {OpKind::kBroadcast, kWhole, kWhole, kWhole, kWhole},
      {OpKind::kBarrier, kWhole, kWhole, kWhole, kWhole},
      {OpKind::kReduce, kWhole, kWhole, kNone, kWhole},
      {OpKind::kGather, kPart, kPart, kNone, kWhole},
      {OpKind::kScatter, kNone, kWhole, kPart, kPart},
      {OpKind::kAllToAll, kWhole, kWhole, kWhole, kWhole},
      {OpKind::kSendRecv, kNone, kWhole, kWhole, kNone},
  };
  EXPECT_EQ(rows.size(), AllKinds().size());
  std::set<OpKind> seen;
  for (const Row& row : rows) {
    EXPECT_TRUE(seen.insert(row.kind).second);
    EXPECT_EQ(SourceOf(row.kind, false), row.source) << Name(row.kind);
    EXPECT_EQ(SourceOf(row.kind, true), row.root_source) << Name(row.kind);
    EXPECT_EQ(TargetOf(row.kind, false), row.target) << Name(row.kind);
    EXPECT_EQ(TargetOf(row.kind, true), row.root_target) << Name(row.kind);
  }
}

TEST(OpKindTest, WhatReducesAddsUpAndWhatIsDirectOnlyMoves) {
  for (const OpKind kind : AllKinds()) {
    EXPECT_TRUE(Reduces(kind) || Gathers(kind)) << Name(kind);
    EXPECT_FALSE(Reduces(kind) && IsDirect(kind)) << Name(kind);
    EXPECT_EQ(OfKind(kind).Fault(), "") << Name(kind);
    // The bytes that READY carries say the same again.
    ReadyBody body = Body();
    body.desc = OfKind(kind);
    EXPECT_EQ(*Parse(body), body) << Name(kind);
  }
}

TEST(OpKindTest, TheWholeOfAnAllToAllHasAPartForEachPair) {
  EXPECT_EQ(OfKind(OpKind::kAllToAll, 5).bytes(), 25u * (4 << 20));
  EXPECT_EQ(OfKind(OpKind::kScatter, 5).bytes(), 5u * (4 << 20));
  EXPECT_EQ(OfKind(OpKind::kSendRecv).bytes(), 4u << 20);
}

// ---- what is wrong with a description

template <class Change>
std::string FaultWith(OpKind kind, Change change) {
  OpDesc desc = OfKind(kind);
  change(desc);
  return desc.Fault();
}

TEST(OpFaultTest, AWorldIsOfOpsInPartsOnly) {
  for (const OpKind kind : AllKinds()) {
    const bool parts = IsInParts(kind);
    EXPECT_EQ(FaultWith(kind, [&](OpDesc& desc) { desc.world = parts ? 0 : 3; }),
              parts ? "world is 0, not 1 or more" : "world is 3, not 0 for this kind")
        << Name(kind);
  }
}

TEST(OpFaultTest, AnAllToAllHasAtMost256Members) {
  const auto with = [](uint16_t world) {
    return FaultWith(OpKind::kAllToAll, [&](OpDesc& desc) {
      desc.world = world;
      desc.count = 1;
    });
  };
  EXPECT_EQ(with(256), "");
  EXPECT_EQ(with(257), "world is 257, not at most 256 for an all-to-all");
}

TEST(OpFaultTest, AllPartsTogetherAreBounded) {
  for (const OpKind kind : AllKinds()) {
    if (!IsInParts(kind)) continue;
    const uint64_t parts = kind == OpKind::kAllToAll ? 9 : 3;
    EXPECT_EQ(FaultWith(kind, [&](OpDesc& desc) { desc.count = LH_COUNT_MAX / parts; }), "");
    EXPECT_NE(FaultWith(kind, [&](OpDesc& desc) { desc.count = LH_COUNT_MAX / parts + 1; })
                  .find("so that all parts together have at most 281474976710656"),
              std::string::npos)
        << Name(kind);
  }
}

TEST(OpFaultTest, ARootIsOfKindsThatHaveOne) {
  for (const OpKind kind : AllKinds()) {
    EXPECT_EQ(FaultWith(kind, [](OpDesc& desc) { desc.root = MemberId(7); }),
              HasRoot(kind) ? "" : "root is 7, not 0 for this kind")
        << Name(kind);
  }
}

TEST(OpFaultTest, UnequalPartsAreOfOpsInPartsAndHaveNoCount) {
  for (const OpKind kind : AllKinds()) {
    const auto unequal = [](OpDesc& desc) {
      desc.unequal = true;
      desc.count = 0;
    };
    EXPECT_EQ(FaultWith(kind, unequal), IsInParts(kind) ? "" : "unequal is 1, not 0 for this kind")
        << Name(kind);
  }
  EXPECT_EQ(FaultWith(OpKind::kAllGather, [](OpDesc& desc) { desc.unequal = true; }),
            "count is 1048576, not 0 with parts of unequal lengths");
  EXPECT_EQ(FaultWith(OpKind::kAllGather,
                      [](OpDesc& desc) {
                        desc.unequal = true;
                        desc.count = 0;
                        desc.list = 1;
                      }),
            "unequal is 1, not 0 for a list of tensors");
  EXPECT_EQ(FaultWith(OpKind::kAllGather,
                      [](OpDesc& desc) {
                        desc.unequal = true;
                        desc.count = 0;
                        desc.algorithm = Algorithm::kOneShot;
                      }),
            "parts of unequal lengths cannot travel as a one-shot op; choose mesh or ring");
  OpDesc desc = OfKind(OpKind::kAllGather);
  desc.unequal = true;
  desc.count = 0;
  EXPECT_FALSE(IsOneShot(desc)) << "nobody knows how long it is";
}

TEST(OpFaultTest, AListHasBytesAndOneTensorHasNone) {
  EXPECT_EQ(FaultWith(OpKind::kAllReduce, [](OpDesc& desc) { desc.list_bytes = 64; }),
            "list_bytes is 64, not 0 for one tensor");
  const auto with = [](uint64_t bytes) {
    return FaultWith(OpKind::kAllReduce, [&](OpDesc& desc) {
      desc.list = 1;
      desc.list_bytes = bytes;
    });
  };
  EXPECT_EQ(with(0), "");
  EXPECT_EQ(with(LH_COUNT_MAX), "");
  EXPECT_EQ(with(LH_COUNT_MAX + 1), "list_bytes is 281474976710657, not at most 281474976710656");
}

TEST(OpFaultTest, WhatOnlyMovesReducesNothing) {
  for (const OpKind kind : AllKinds()) {
    const bool reduces = Reduces(kind);
    EXPECT_EQ(FaultWith(kind, [](OpDesc& desc) { desc.reduce = ReduceOp::kMax; }),
              reduces ? "" : "reduce is max, not sum, because this kind reduces nothing")
        << Name(kind);
    EXPECT_EQ(FaultWith(kind, [](OpDesc& desc) { desc.order = Order::kRank; }),
              reduces ? "" : "order is rank, not any, because this kind reduces nothing")
        << Name(kind);
    EXPECT_EQ(FaultWith(kind, [](OpDesc& desc) { desc.weighted = true; }),
              reduces ? "" : "weighted is 1, not 0, because this kind reduces nothing")
        << Name(kind);
    for (const DType dtype : {DType::kFloat8E4M3, DType::kFloat8E5M2}) {
      EXPECT_EQ(FaultWith(kind, [&](OpDesc& desc) { desc.dtype = dtype; }),
                reduces ? "dtype is " + std::string(Name(dtype)) +
                              ", not one that can be reduced; float8 can only be moved"
                        : "")
          << Name(kind);
    }
  }
}

TEST(OpFaultTest, BoolHasNoAverageAndNoProduct) {
  for (int i = 0; i < LH_WIRE_REDUCE_COUNT; ++i) {
    const auto reduce = static_cast<ReduceOp>(i);
    const bool refused = reduce == ReduceOp::kAvg || reduce == ReduceOp::kProd;
    EXPECT_EQ(
        ReductionFault(DType::kBool, reduce, false),
        refused ? "reduce is " + std::string(Name(reduce)) + ", not sum, min or max for bool" : "");
  }
}

TEST(OpFaultTest, WeightsAreForSumsAndAveragesOfFloats) {
  for (int i = 0; i < LH_WIRE_DTYPE_COUNT; ++i) {
    const auto dtype = static_cast<DType>(i);
    const bool is_float = IsHalf(dtype) || dtype == DType::kFloat32 || dtype == DType::kFloat64;
    EXPECT_EQ(ReductionFault(dtype, ReduceOp::kSum, true).empty(), is_float) << Name(dtype);
    EXPECT_EQ(ReductionFault(dtype, ReduceOp::kAvg, true).empty(), is_float) << Name(dtype);
  }
  EXPECT_EQ(ReductionFault(DType::kInt32, ReduceOp::kSum, true),
            "dtype is int32, not a float with weights");
  for (const ReduceOp reduce : {ReduceOp::kProd, ReduceOp::kMin, ReduceOp::kMax}) {
    EXPECT_EQ(ReductionFault(DType::kFloat32, reduce, true),
              "reduce is " + std::string(Name(reduce)) + ", not sum or avg with weights");
  }
}

TEST(OpFaultTest, NoRingWhereItCannotKeepTheOrderOrGoStraight) {
  EXPECT_EQ(FaultWith(OpKind::kAllReduce,
                      [](OpDesc& desc) {
                        desc.order = Order::kRank;
                        desc.algorithm = Algorithm::kRing;
                      })
                .find("algorithm is ring, not auto, oneshot or mesh with order rank"),
            0u);
  for (const OpKind kind : AllKinds()) {
    EXPECT_EQ(FaultWith(kind, [](OpDesc& desc) { desc.algorithm = Algorithm::kRing; }),
              IsDirect(kind) ? "algorithm is ring, not auto, oneshot or mesh for this kind" : "")
        << Name(kind);
    EXPECT_EQ(FaultWith(kind, [](OpDesc& desc) { desc.algorithm = Algorithm::kMesh; }), "")
        << Name(kind);
  }
}

TEST(OpDescTest, TextNamesTheNewOptions) {
  OpDesc desc = OfKind(OpKind::kAllReduce);
  desc.order = Order::kRank;
  desc.weighted = true;
  EXPECT_EQ(ToString(desc), "sum of float32 x 1048576 order rank weighted 1");
  desc = OfKind(OpKind::kAllToAll);
  desc.count = 0;
  desc.unequal = true;
  EXPECT_EQ(ToString(desc), "all-to-all, float32 x 0 world 3 unequal 1");
  desc = OfKind(OpKind::kReduce);
  desc.count = 0;
  desc.list = 12;
  desc.list_bytes = 128;
  EXPECT_EQ(ToString(desc), "reduce, sum of tensors of 128 bytes root m7");
}

}  // namespace
}  // namespace longhaul
