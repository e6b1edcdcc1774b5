/* The public header is C99, and the library links from C. */
#include <longhaul/longhaul.h>
#include <stdio.h>
#include <string.h>

static int failures = 0;

static void expect(int condition, const char* what) {
  if (condition) return;
  fprintf(stderr, "failed: %s\n", what);
  ++failures;
}

int main(void) {
  lh_open_options open_options = LH_OPEN_OPTIONS_INIT;
  lh_join_options join_options = LH_JOIN_OPTIONS_INIT;
  lh_all_reduce_options op_options = LH_ALL_REDUCE_OPTIONS_INIT;
  lh_reduce_scatter_options scatter = LH_REDUCE_SCATTER_OPTIONS_INIT;
  lh_all_gather_options gather = LH_ALL_GATHER_OPTIONS_INIT;
  lh_broadcast_options broadcast = LH_BROADCAST_OPTIONS_INIT;
  lh_reduce_options reduce = LH_REDUCE_OPTIONS_INIT;
  lh_gather_options to_root = LH_GATHER_OPTIONS_INIT;
  lh_scatter_options from_root = LH_SCATTER_OPTIONS_INIT;
  lh_all_to_all_options all = LH_ALL_TO_ALL_OPTIONS_INIT;
  lh_send_options send = LH_SEND_OPTIONS_INIT;
  lh_recv_options recv = LH_RECV_OPTIONS_INIT;
  lh_barrier_options barrier = LH_BARRIER_OPTIONS_INIT;
  lh_world_info world = LH_WORLD_INFO_INIT;
  lh_op_info_t info = LH_OP_INFO_INIT;
  lh_client* client = (lh_client*)&failures;
  float value = 1.0f;
  lh_sync_options sync = LH_SYNC_OPTIONS_INIT;
  lh_sync_info_t sync_info = LH_SYNC_INFO_INIT;
  lh_tensor tensor = LH_TENSOR_INIT;
  lh_state* state = (lh_state*)&failures;

  expect(strcmp(lh_last_error(), "") == 0, "no error to begin with");
  open_options.socket_path = "/nonexistent/peerd.sock";
  open_options.timeout_ms = 0;
  expect(lh_open(&open_options, &client) == LH_UNAVAILABLE, "open without peerd");
  expect(client == NULL, "no client on failure");
  expect(strstr(lh_last_error(), "/nonexistent/peerd.sock") != NULL, "the path is named");
  expect(join_options.struct_size == sizeof join_options, "join options know their size");
  expect(strcmp(join_options.run, "default") == 0, "default run");
  op_options.source = &value;
  op_options.target = &value;
  expect(op_options.on_fault == LH_AS_JOINED && op_options.dtype == LH_FLOAT32, "default op");
  expect(scatter.on_fault == LH_AS_JOINED && scatter.dtype == LH_FLOAT32 && scatter.world == 0 &&
             gather.on_fault == LH_AS_JOINED && gather.dtype == LH_FLOAT32 &&
             broadcast.on_fault == LH_AS_JOINED && broadcast.root_member == 0 &&
             barrier.struct_size == sizeof barrier && barrier.on_fault == LH_AS_JOINED,
         "defaults of the other collectives");
  expect(reduce.on_fault == LH_AS_JOINED && reduce.dtype == LH_FLOAT32 && reduce.weight == NULL &&
             to_root.on_fault == LH_AS_JOINED && to_root.counts == NULL &&
             from_root.on_fault == LH_AS_JOINED && from_root.counts == NULL &&
             all.on_fault == LH_AS_JOINED && all.target_counts == NULL &&
             send.on_fault == LH_AS_JOINED && send.to_member == 0 &&
             recv.on_fault == LH_AS_JOINED && recv.from_member == 0,
         "defaults of those with roots and partners");
  expect(world.struct_size == sizeof world && info.struct_size == sizeof info,
         "infos know their size");
  expect(lh_dtype_size(LH_FLOAT64) == 8, "dtype size");
  expect(lh_dtype_size(LH_BOOL) == 1, "bool size");
  expect(sync.struct_size == sizeof sync && sync.strategy == LH_POPULAR &&
             sync_info.struct_size == sizeof sync_info && tensor.struct_size == sizeof tensor,
         "default sync");
  expect(lh_state_new(NULL, &tensor, 1, &state) == LH_INVALID_ARGUMENT && state == NULL,
         "state without client");
  expect(lh_state_free(NULL) == LH_OK, "free no state");
  expect(strcmp(lh_version(), "0.1.0") == 0, "version");
  return failures == 0 ? 0 : 1;
}
