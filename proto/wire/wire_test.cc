#include <algorithm>
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
  EXPECT_EQ(RefusalWith(Data(), LaneKind::kData, 4, 16),
            "frame type is 16, not one of a data lane");
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
  EXPECT_TRUE(AcceptsPayload(ready, kReadyBodyBytes + LH_ONE_SHOT_BYTES_MAX));
  EXPECT_FALSE(AcceptsPayload(ready, kReadyBodyBytes + LH_ONE_SHOT_BYTES_MAX + 1));
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

TEST(ChunkTest, RefusedIsGoldenAndOneOfThree) {
  EXPECT_EQ(Hex(Encode(ChunkRefusedBody{ChunkRefusal::kChanged})), "02000000");
  for (const ChunkRefusal code :
       {ChunkRefusal::kNotHere, ChunkRefusal::kChanged, ChunkRefusal::kBusy}) {
    EXPECT_EQ(ParseChunkRefusedBody(Encode(ChunkRefusedBody{code}))->code, code);
  }
  for (const uint32_t code : {0, 4}) {
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
  const auto fixed = Encode(body);
  std::vector<uint8_t> payload(fixed.begin(), fixed.end());
  if (body.other_offer) {
    const auto other = Encode(*body.other_offer);
    payload.insert(payload.end(), other.begin(), other.end());
  }
  payload.resize(payload.size() + bytes);
  return payload;
}

TEST(ReadyTest, BodyIsGolden) {
  EXPECT_EQ(Hex(Encode(Body())),
            "0807060504030201"  // boundary
            "1817161514131211"  // tag
            "01"
            "0b"
            "01"
            "01"  // kind, dtype, reduce, on_fault
            "00"
            "02"
            "0302"                                    // quantization, algorithm, min_world
            "2524232221000000"                        // count
            "00000000000000000000000000000000000000"  // room for more fields
            "00"                                      // has_other_offer
            "00000000"                                // result_members
            "0000000000000000");                      // result_epoch
}

TEST(ReadyTest, BodyRoundTrips) {
  const auto parsed = ParseReadyBody(Encode(Body()));
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
  EXPECT_EQ(Hex(std::span(payload).subspan(51)),
            "01"                                        // has_other_offer
            "000000000000000000000000"                  // result_members, result_epoch
            "0900000000000000"                          // member
            "010b0101000203020700000000000000"          // its desc
            "00000000000000000000000000000000000000");  // room for more fields
  const auto parsed = ParseReadyBody(payload);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, Disagreement());
}

TEST(ReadyTest, AnOtherOfferHasItsSizeKnownNumbersAndADifference) {
  std::vector<uint8_t> payload = Payload(Disagreement());
  payload.push_back(0);
  EXPECT_EQ(Message(ParseReadyBody(payload).status()),
            "bytes of READY's other offer is 44, not 43");
  payload.resize(payload.size() - 2);
  EXPECT_EQ(Message(ParseReadyBody(payload).status()),
            "bytes of READY's other offer is 42, not 43");
  payload = Payload(Disagreement());
  payload[kReadyBodyBytes + 8] = 0;
  EXPECT_EQ(Message(ParseReadyBody(payload).status()).rfind("kind is 0, not 1 to ", 0), 0u);
  payload = Payload(Disagreement());
  payload.back() = 1;
  EXPECT_EQ(Message(ParseReadyBody(payload).status()), "reserved bytes of the op are not zero");
  ReadyBody same = Body();
  same.other_offer = OtherOffer{MemberId(9), same.desc};
  EXPECT_EQ(Message(ParseReadyBody(Payload(same)).status()),
            "READY for " + ToString(same.desc) + " carries the same as other offer");
}

absl::Status ParseWith(size_t at, uint8_t value) {
  auto bytes = Encode(Body());
  bytes[at] = value;
  return ParseReadyBody(bytes).status();
}

TEST(ReadyTest, RefusesUnknownNumbers) {
  const auto kinds = static_cast<uint8_t>(NamesOf(OpKind()).last());
  EXPECT_EQ(Message(ParseWith(16, kinds + 1)),
            "kind is " + std::to_string(kinds + 1) + ", not 1 to " + std::to_string(kinds));
  EXPECT_EQ(Message(ParseWith(17, 12)), "dtype is 12, not at most 11");
  EXPECT_TRUE(ParseWith(17, 11).ok());
  EXPECT_EQ(Message(ParseWith(18, 5)), "reduce is 5, not at most 4");
  EXPECT_TRUE(ParseWith(18, 4).ok());
  EXPECT_EQ(Message(ParseWith(19, 2)), "on_fault is 2, not at most 1");
  EXPECT_EQ(Message(ParseWith(20, 1)), "quantization is 1, not at most 0");
  EXPECT_EQ(Message(ParseWith(51, 2)), "has_other_offer is 2, not 0 or 1");
  EXPECT_EQ(Message(ParseWith(21, 5)), "algorithm is 5, not at most 4");
  EXPECT_EQ(Message(ParseWith(21, 4)), "algorithm is 4, not at most 3");
  EXPECT_TRUE(ParseWith(21, 3).ok());
  EXPECT_EQ(Message(ParseWith(21, 1)),
            "a one-shot op has at most 4096 bytes, this one 1138453193000; leave the algorithm to "
            "Longhaul, or choose mesh or ring");
  for (size_t reserved = 16 + OpDescFieldBytes(); reserved < 51; ++reserved) {
    EXPECT_EQ(Message(ParseWith(reserved, 1)), "reserved bytes of the op are not zero");
  }
  EXPECT_EQ(Message(ParseWith(52, 1)), "result_members is 1, not 0 without a result");
  EXPECT_EQ(Message(ParseWith(56, 1)), "result_members is 0, not 1 to 1024");
  ReadyBody body = Body();
  body.desc.min_world = 1;
  EXPECT_EQ(Message(ParseReadyBody(Encode(body)).status()), "min_world is 1, not 0 or 2 to 1024");
  body.desc.min_world = LH_MEMBERS_MAX;
  EXPECT_TRUE(ParseReadyBody(Encode(body)).ok());
  body.desc.min_world = LH_MEMBERS_MAX + 1;
  EXPECT_FALSE(ParseReadyBody(Encode(body)).ok());
  body.desc.min_world = 0;
  EXPECT_TRUE(ParseReadyBody(Encode(body)).ok());
  body.boundary = Epoch();
  EXPECT_EQ(Message(ParseReadyBody(Encode(body)).status()), "boundary is 0, not an epoch");
}

TEST(ReadyTest, AResultTravelsInPlaceOfASmallInput) {
  ReadyBody body = Body();
  body.desc.algorithm = Algorithm::kAuto;
  body.desc.dtype = DType::kUint8;
  body.desc.count = 3;
  body.result_epoch = Epoch(7);
  body.result_members = 0x0102;
  const auto parse = [](const ReadyBody& body, size_t bytes) {
    return ParseReadyBody(Payload(body, bytes));
  };
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
  body.desc.count = LH_ONE_SHOT_BYTES_MAX + 1;
  EXPECT_EQ(Message(parse(body, 0).status()),
            "READY for " + ToString(body.desc) + " carries a result, and is not one-shot");
}

TEST(ReadyTest, CountIsBounded) {
  ReadyBody body = Body();
  body.desc.count = LH_COUNT_MAX;
  EXPECT_TRUE(ParseReadyBody(Encode(body)).ok());
  body.desc.count = LH_COUNT_MAX + 1;
  EXPECT_EQ(Message(ParseReadyBody(Encode(body)).status()),
            "count is 281474976710657, not at most 281474976710656");
}

// A READY for an op of `count` bytes, with `one_shot` bytes of input after the body.
bool AcceptsOneShot(uint64_t count, size_t one_shot, Algorithm algorithm = Algorithm::kAuto) {
  ReadyBody body = Body();
  body.desc.algorithm = algorithm;
  body.desc.dtype = DType::kUint8;
  body.desc.count = count;
  return ParseReadyBody(Payload(body, one_shot)).ok();
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
  const auto bytes = Encode(Body());
  for (size_t n = 0; n < bytes.size(); ++n) {
    EXPECT_FALSE(ParseReadyBody(std::span(bytes).first(n)).ok()) << n;
  }
}

Digest32 Sequence(uint8_t first) {
  Digest32 digest;
  for (uint8_t& byte : digest) byte = first++;
  return digest;
}

LaneHello Hello() {
  LaneHello hello;
  hello.kind = LaneKind::kData;
  hello.run_digest = Sequence(0x20);
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
            "0600"
            "01"
            "00"
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
            "0600"
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
            "0600"
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
            "HELLO: lane protocol version is 4, not 6; run the same release at both ends");
  EXPECT_EQ(HelloRefusalWith(6, 3), "HELLO: lane kind is 3, not 0 to 2");
  EXPECT_EQ(HelloRefusalWith(6, 0), "HELLO: lane is 2, not 0 as for a control lane");
  EXPECT_EQ(HelloRefusalWith(44, 4), "HELLO: lane is 4, not below the number of lanes");
  EXPECT_EQ(HelloRefusalWith(47, 1), "HELLO: lanes is 260, not at most 256");
  EXPECT_EQ(HelloRefusalWith(56, 0), "HELLO: epoch is 0, not an epoch");
  EXPECT_EQ(HelloRefusalWith(7, 1), "HELLO: reserved bytes are not zero");
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
  bytes[6] = 7;
  EXPECT_EQ(Message(ParseLaneAnswer(bytes).status()), "ANSWER: result is 7, not at most 6");
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
    auto body = Encode(Body());
    body[prng.Below(body.size())] = static_cast<uint8_t>(prng.Next());
    if (const auto parsed = ParseReadyBody(body); parsed.ok()) {
      EXPECT_EQ(Encode(*parsed), body);
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
  EXPECT_EQ(desc.target_bytes(), 32u);
  OpDesc gather = desc;
  gather.kind = OpKind::kAllGather;
  EXPECT_EQ(ToString(gather), "all-gather, float32 x 8 world 3");
  EXPECT_EQ(gather.source_bytes(), 32u);
  EXPECT_FALSE(gather.SameButForWorld(desc));
  OpDesc other = desc;
  other.world = 4;
  EXPECT_TRUE(other.SameButForWorld(desc));
  OpDesc broadcast;
  broadcast.kind = OpKind::kBroadcast;
  broadcast.root = MemberId(7);
  EXPECT_EQ(ToString(broadcast), "broadcast, float32 x 0 root m7");
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
  EXPECT_EQ(total, 2 * 1 + 4 * 2 + 3 * 4 + 3 * 8u);
  for (int i = 0; i < LH_WIRE_REDUCE_COUNT; ++i) {
    EXPECT_STRNE(Name(static_cast<ReduceOp>(i)), "unknown");
  }
}

}  // namespace
}  // namespace longhaul
