/* The limits of everything that crosses the border of a process. C99, because the C client includes
 * this file, too. */
#ifndef LONGHAUL_PROTO_WIRE_LIMITS_H_
#define LONGHAUL_PROTO_WIRE_LIMITS_H_

/* Names: bytes of [A-Za-z0-9._-], at least one. */
#define LH_RUN_NAME_BYTES_MAX 64
#define LH_MEMBER_NAME_BYTES_MAX 64
#define LH_COHORT_NAME_BYTES_MAX 64
#define LH_ENDPOINT_BYTES_MAX 256
#define LH_ENDPOINTS_MAX 8
/* Error texts that cross the Unix socket or the control stream are cut to this many bytes. */
#define LH_ERROR_TEXT_BYTES_MAX 448

/* Members of one group, local members of one peer (and so of a cohort), groups that one peer takes
 * part in, trainers connected to one peer. */
#define LH_MEMBERS_MAX 1024
#define LH_LOCAL_MEMBERS_MAX 64
#define LH_GROUPS_MAX 256
#define LH_CLIENTS_MAX 256
/* Pairs of peers of one group that cannot reach each other. */
#define LH_BLOCKED_PAIRS_MAX 1024

/* Ops that one member may have in flight, each with its own tag. */
#define LH_OPS_OPEN_MAX 1024
/* READY frames from one peer in one group that belong to no local op yet. A peer without bugs sends
 * fewer. */
#define LH_READY_UNMATCHED_MAX 4096

/* Bytes of tensors that a peer's reactor copies and reduces for its ops in one turn. That takes
 * about 1 ms. The rest waits for the next turn. */
#define LH_OP_TURN_BYTES_MAX (4u << 20)

/* An op of at most this many bytes travels inside its READY frames. Sums of 16-bit floats travel
 * there as float32, so they take twice the bytes. */
#define LH_ONE_SHOT_BYTES_MAX 4096
/* The input of a larger op may travel with READY, too, if links are long. It has at most so many
 * bytes as it travels. */
#define LH_READY_INPUT_BYTES_MAX (1u << 20)
/* Such inputs of one peer in one group for ops that have no READY of the receiver: what a sender
 * sends, and what a receiver takes. (It may have inputs of an earlier attempt, too.) */
#define LH_READY_INPUTS_AHEAD_BYTES_MAX (16u << 20)
#define LH_READY_INPUTS_UNMATCHED_BYTES_MAX (64u << 20)
/* The numbers that only one host knows of an op: weights, and lengths of unequal parts. READY
 * carries those of all members at its peer. */
#define LH_OP_TERMS_BYTES_MAX (8 * LH_MEMBERS_MAX)
/* Pieces of one op on a list of tensors: large tensors, and packed small ones. */
#define LH_PIECES_MAX (65536 + 16)
/* What an op on a list tells of its tensors for errors: the dtypes and lengths of the first ones.
 */
#define LH_OUTLINE_BYTES_MAX 512
/* Pieces of the ops that one client, and all clients, have in flight. An op on one tensor has one.
 */
#define LH_CLIENT_PIECES_MAX (16 * LH_PIECES_MAX)
#define LH_PIECES_OF_ALL_MAX (64 * LH_PIECES_MAX)
/* Members in an all-to-all: it has a part for each pair of them. */
#define LH_ALL_TO_ALL_MEMBERS_MAX 256
/* Payload of one DATA frame. */
#define LH_SEGMENT_BYTES_MAX (4u << 20)
/* Payload of one frame on a control lane. */
#define LH_CONTROL_PAYLOAD_BYTES_MAX (192 + LH_ONE_SHOT_BYTES_MAX + 8 * LH_MEMBERS_MAX)
/* Payload of one frame that travels in parts on data lanes: a READY with its input. */
#define LH_PARTED_PAYLOAD_BYTES_MAX (LH_CONTROL_PAYLOAD_BYTES_MAX + LH_READY_INPUT_BYTES_MAX)
/* Frames of one link that wait for parts of an earlier frame: what a sender sends, and what a
 * receiver keeps. The sender hears a round trip later what has come whole. */
#define LH_PARTED_AHEAD_BYTES_MAX (32u << 20)
#define LH_PARTED_HELD_BYTES_MAX (64u << 20)
/* Elements of one tensor. */
#define LH_COUNT_MAX ((uint64_t)1 << 48)

/* Elements that share a scale if an op is quantized to int8 or int4. */
#define LH_QUANTIZE_BLOCK_MIN 32
#define LH_QUANTIZE_BLOCK_MAX 4096

/* Sources that a sync names to a member that has to fetch the state. */
#define LH_SYNC_SOURCES_MAX 64

/* A shared state: its tensors, the bytes of a tensor's name (UTF-8), the dimensions of a tensor,
 * and the bytes of all tensors together. */
#define LH_STATE_TENSORS_MAX 65536
#define LH_STATE_NAME_BYTES_MAX 256
#define LH_STATE_DIMS_MAX 8
#define LH_STATE_BYTES_MAX ((uint64_t)1 << 50)
/* Transfers that one peer serves at a time. Asks, and bytes of chunks, that one transfer may have
 * open at one source. */
#define LH_STATE_TRANSFERS_MAX 8
#define LH_STATE_ASKS_MAX 1024
#define LH_STATE_WINDOW_BYTES_MAX (64u << 20)

/* The highest revision of a shared state. No run gets so far. */
#define LH_REVISION_MAX ((uint64_t)1 << 63)

/* States that one client has registered at a time. Tensors of the states of one client, and of all
 * clients. A tensor takes up to 1 KiB of a peer's own memory. */
#define LH_STATES_MAX 16
#define LH_CLIENT_TENSORS_MAX (4 * LH_STATE_TENSORS_MAX)
#define LH_TENSORS_OF_ALL_MAX (16 * LH_STATE_TENSORS_MAX)
/* Tensors of a state are hashed and moved in chunks of this size; the last one is short. */
#define LH_STATE_CHUNK_BYTES ((uint64_t)1 << 20)

/* Data lanes of one link. */
#define LH_LANES_MAX 256
/* Segments of one link that were sent and are not acknowledged. The sender keeps them to send them
 * again, and sends no further segment beyond this number. */
#define LH_SEGMENTS_UNACKED_MAX 32768
/* On a data lane the receiver acknowledges after at most this many whole segments. */
#define LH_SEGMENTS_PER_ACK 64
/* The longest silence that a PING on a data lane may announce. */
#define LH_QUIET_MS_MAX (10u * 60 * 1000)
/* Tunnels: lanes that one peer carries as relay for pairs of peers that cannot reach each other.
 * Each has two buffers. The second limit counts tunnels whose handshake is not finished. */
#define LH_TUNNELS_MAX 512
#define LH_TUNNELS_OPENING_MAX 64
/* Connections on the data port whose handshake is not finished. */
#define LH_HANDSHAKES_MAX 256

/* Runs that one coordinator knows, and groups of all its runs together. Runs and groups without
 * members count until they are forgotten. */
#define LH_COORDINATOR_RUNS_MAX 1024
#define LH_COORDINATOR_GROUPS_MAX 4096
/* Control streams on which the peer has not said Hello yet. */
#define LH_STREAMS_WITHOUT_HELLO_MAX 256

/* Connections to a peer's Unix socket that have not said HELLO. */
#define LH_CLIENTS_WITHOUT_HELLO_MAX 64
/* Arena regions of one client and of all clients, and the size of each. The kernel lets a process
 * have 65530 mappings (vm.max_map_count), and each region is one. */
#define LH_REGIONS_MAX 256
#define LH_REGIONS_OF_ALL_MAX 16384
#define LH_REGION_BYTES_MAX ((uint64_t)1 << 40)

/* File descriptors of one user that are no arena regions, that came over the Unix socket, and that
 * are not closed yet: closing some files takes as long as their owner likes. */
#define LH_FOREIGN_DESCRIPTORS_MAX 8

/* The secret of an epoch. */
#define LH_TOKEN_BYTES_MAX 256
/* The secret of a peer at the coordinator. */
#define LH_PUBLIC_KEY_BYTES 32
#define LH_SIGNATURE_BYTES 64
#define LH_SHA256_BYTES 32
/* detect_ms, the one setting of failure detection: at most an hour. */
#define LH_DETECT_MS_MAX 3600000u
/* A member's step deadline: at most a day. */
#define LH_STEP_DEADLINE_MS_MAX 86400000u

/* Bytes of one message on the control stream. The longest message is EpochReady with the ops in
 * flight. An op takes about 16 bytes for each other peer if it is done here, aborts on faults, or
 * has at most LH_ONE_SHOT_BYTES_MAX. Any other op takes at most 40 bytes in all. So about 500 ops
 * of the first kind fit with 1024 peers, and LH_OPS_OPEN_MAX with 400 peers. A peer that reports
 * more loses its control stream at each report, and is then removed as silent. */
#define LH_CONTROL_MESSAGE_BYTES_MAX (8u << 20)

#endif /* LONGHAUL_PROTO_WIRE_LIMITS_H_ */
