/* Numbers that have one meaning on every border: C API, Unix socket, data lanes. C99. */
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
  LH_WIRE_DTYPE_COUNT = 12
};
/* The dtype that only tensors of a state have, next to those that can be reduced. */
#define LH_WIRE_BOOL 12

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
  /* Reserved: reduce-scatter 2, all-gather 3, broadcast 4, send-recv 5, barrier 6. */
};

/* What a member wants of a sync: the state that most have; to receive in any case; to send only. */
enum lh_wire_strategy { LH_WIRE_POPULAR = 1, LH_WIRE_RECEIVE = 2, LH_WIRE_SEND = 3 };

enum lh_wire_on_fault { LH_WIRE_RETRY = 0, LH_WIRE_ABORT = 1 };

/* How an op's bytes travel. AUTO: chosen by its size and the links, the same at all members. LOCAL:
 * of an op that ran, and whose members were all at one peer. */
enum lh_wire_algorithm {
  LH_WIRE_AUTO = 0,
  LH_WIRE_ONESHOT = 1, /* with the announcement: at most LH_ONE_SHOT_BYTES_MAX */
  LH_WIRE_MESH = 2,
  LH_WIRE_RING = 3,
  LH_WIRE_ALGORITHM_COUNT = 4,
  LH_WIRE_LOCAL = 4
};

#endif /* LONGHAUL_PROTO_WIRE_TYPES_H_ */
