/* Numbers that mean the same in the C API, on the Unix socket and on lanes. C99. */
#ifndef LONGHAUL_PROTO_WIRE_TYPES_H_
#define LONGHAUL_PROTO_WIRE_TYPES_H_

enum lh_wire_dtype {
  LH_WIRE_UINT8 = 0,
  LH_WIRE_INT8 = 1,
  LH_WIRE_UINT16 = 2,
  LH_WIRE_INT16 = 3,
  LH_WIRE_UINT32 = 4,
  LH_WIRE_INT32 = 5,
  LH_WIRE_UINT64 = 6,
  LH_WIRE_INT64 = 7,
  LH_WIRE_FLOAT16 = 8,
  LH_WIRE_BFLOAT16 = 9,
  LH_WIRE_FLOAT32 = 10,
  LH_WIRE_FLOAT64 = 11,
  LH_WIRE_BOOL = 12,        /* one byte: 0 is false, anything else is true. No avg, no prod */
  LH_WIRE_FLOAT8_E4M3 = 13, /* the float8 formats are only moved, never reduced */
  LH_WIRE_FLOAT8_E5M2 = 14,
  LH_WIRE_DTYPE_COUNT = 15
};

enum lh_wire_reduce {
  LH_WIRE_SUM = 0,
  LH_WIRE_AVG = 1,
  LH_WIRE_PROD = 2,
  LH_WIRE_MIN = 3,
  LH_WIRE_MAX = 4,
  LH_WIRE_REDUCE_COUNT = 5
};

enum lh_wire_kind {
  LH_WIRE_ALL_REDUCE = 1,
  LH_WIRE_REDUCE_SCATTER = 2,
  LH_WIRE_ALL_GATHER = 3,
  LH_WIRE_BROADCAST = 4,
  LH_WIRE_BARRIER = 5,
  LH_WIRE_REDUCE = 6,
  LH_WIRE_GATHER = 7,
  LH_WIRE_SCATTER = 8,
  LH_WIRE_ALL_TO_ALL = 9,
  LH_WIRE_SEND_RECV = 10, /* one op of two members: one of them sends, the other one receives */
  LH_WIRE_KIND_END = 11
};

/* In which order inputs are added. RANK: an order that depends on the members only. */
enum lh_wire_order { LH_WIRE_ANY_ORDER = 0, LH_WIRE_RANK_ORDER = 1 };

/* What a member wants of a sync. POPULAR: among the states with the highest revision, the state
 * that most members have wins. RECEIVE: the member takes another member's state. SEND: the member's
 * own state is a candidate, and the member never receives. */
enum lh_wire_strategy { LH_WIRE_POPULAR = 1, LH_WIRE_RECEIVE = 2, LH_WIRE_SEND = 3 };

enum lh_wire_on_fault { LH_WIRE_RETRY = 0, LH_WIRE_ABORT = 1 };

/* How the bytes of an op travel. AUTO: peerd chooses by the op's size and the measured links, the
 * same for all members. LOCAL appears only as the algorithm of an op that has ended: all its
 * members were at one peer. */
enum lh_wire_algorithm {
  LH_WIRE_AUTO = 0,
  LH_WIRE_ONESHOT = 1, /* inside READY: at most LH_ONE_SHOT_BYTES_MAX */
  LH_WIRE_MESH = 2,
  LH_WIRE_RING = 3,
  LH_WIRE_ALGORITHM_COUNT = 4,
  LH_WIRE_LOCAL = 4
};

/* How the elements of an op travel between hosts. INT8 and INT4: whole numbers, with one scale for
 * each block of elements. */
enum lh_wire_quantization {
  LH_WIRE_UNQUANTIZED = 0,
  LH_WIRE_QUANTIZE_BF16 = 1,
  LH_WIRE_QUANTIZE_INT8 = 2,
  LH_WIRE_QUANTIZE_INT4 = 3,
  /* peerd chooses, the same for all members: LH_WIRE_UNQUANTIZED, or one of a set of codecs. The
   * set has the bit 1 << (codec - 1) for each, and the value is LH_WIRE_QUANTIZE_AUTO + set - 1. */
  LH_WIRE_QUANTIZE_AUTO = 4,
  LH_WIRE_QUANTIZATION_COUNT = 11
};
enum lh_wire_rounding { LH_WIRE_NEAREST = 0, LH_WIRE_STOCHASTIC = 1 };

#endif /* LONGHAUL_PROTO_WIRE_TYPES_H_ */
