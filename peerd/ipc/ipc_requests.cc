// Requests of trainers. Each one is checked, then handed to the handler or refused with the reason.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/log.h"
#include "peerd/ipc/ipc_replies.h"
#include "peerd/ipc/ipc_server_impl.h"
#include "peerd/ipc/ipc_states.h"
#include "proto/wire/ipc_check.h"
#include "proto/wire/ipc_fields.h"
#include "proto/wire/ipc_op.h"
#include "proto/wire/ipc_why.h"
#include "proto/wire/limits.h"

namespace longhaul::peerd::ipc {
namespace {

static_assert(static_cast<uint32_t>(control::SyncStrategy::kPopular) == LH_WIRE_POPULAR);
static_assert(static_cast<uint32_t>(control::SyncStrategy::kReceive) == LH_WIRE_RECEIVE);
static_assert(static_cast<uint32_t>(control::SyncStrategy::kSend) == LH_WIRE_SEND);

}  // namespace

void TrainerServer::OnRequest(const ClientPtr& client) {
  Client& c = *client;
  const lh_ipc_request& request = c.request;
  const std::string wrong = IpcProtocolError(request, c.greeted, c.descriptors.size());
  if (!wrong.empty()) return connections_.Cut(c, {Code::kFailedPrecondition, wrong});
  // With a LOOK the queue has been looked at.
  if (connections_.closing() || request.type == LH_IPC_LOOK) return;
  if (!c.calls.insert(request.call).second) {
    return connections_.Cut(
        c, {Code::kFailedPrecondition, absl::StrCat("call ", request.call, " is in use")});
  }
  switch (request.type) {
    case LH_IPC_HELLO:
      return Greet(c);
    case LH_IPC_REGION:
      return AddRegion(c);
    case LH_IPC_UNREGION:
      return RemoveRegion(c);
    case LH_IPC_JOIN:
      return Join(c);
    case LH_IPC_LEAVE:
      return Leave(c);
    case LH_IPC_STEP:
      return Step(c);
    case LH_IPC_OP:
      return Op(c);
    case LH_IPC_MEMBERS:
      return Members(c);
    case LH_IPC_CANCEL:
      return Cancel(c);
    case LH_IPC_MEMBER:
      return About(c);
    case LH_IPC_STATE:
      return AddState(c);
    case LH_IPC_UNSTATE:
      return RemoveState(c);
    case LH_IPC_SYNC:
      return Sync(c);
    case LH_IPC_KEPT:
      return Kept(c);
    case LH_IPC_TAKE:
      return Take(c);
    case LH_IPC_PREPARE:
      return Prepare(c);
    case LH_IPC_WHY:
      return Why(c);
    default:
      LH_CHECK(false) << "request " << request.type << " passed the check";
  }
}

void TrainerServer::Greet(Client& client) {
  lh_ipc_reply reply = MakeReply(LH_IPC_DONE, client.request.call, 0, {});
  if (connections_.Greet(client)) reply.flags = LH_IPC_SHARED;
  client.calls.erase(client.request.call);
  connections_.Push(client, reply);
}

void TrainerServer::Deny(Client& client, Code code, const std::string& text) {
  ++requests_refused_;
  Answer(client, client.request.call, {code, text});
}

void TrainerServer::DenyLimit(Client& client, const std::string& text) {
  ++limits_reached_;
  Deny(client, Code::kUnavailable, text);
}

void TrainerServer::AddRegion(Client& client) {
  const lh_ipc_region& wanted = client.request.u.region;
  const std::string what = absl::StrCat("arena region of ", wanted.bytes, " bytes refused: ");
  if (wanted.bytes == 0 || wanted.bytes > LH_REGION_BYTES_MAX) {
    return Deny(client, Code::kInvalidArgument, what + "1 to 2^40 are possible");
  }
  if (client.regions.count(wanted.region) != 0) {
    return Deny(client, Code::kInvalidArgument,
                absl::StrCat(what, "region ", wanted.region, " exists already"));
  }
  auto region = regions_.Map(client.descriptors.front().get(), wanted.bytes, client.account.get());
  if (absl::IsResourceExhausted(region.status())) {
    return DenyLimit(client, what + std::string(region.status().message()));
  }
  if (!region.ok()) {
    return Deny(client,
                absl::IsUnavailable(region.status()) ? Code::kUnavailable : Code::kInvalidArgument,
                what + std::string(region.status().message()));
  }
  if (wanted.flags == 0) handler_->OnRegionAdded((*region)->data, (*region)->bytes);
  client.regions[wanted.region].region = *std::move(region);
  Answer(client, client.request.call, {});
}

void TrainerServer::RemoveRegion(Client& client) {
  const uint64_t id = client.request.u.region.region;
  const auto it = client.regions.find(id);
  if (it == client.regions.end()) {
    return Deny(client, Code::kInvalidArgument, absl::StrCat("no arena region ", id));
  }
  if (it->second.posts > 0) {
    return Deny(client, Code::kFailedPrecondition,
                absl::StrCat("arena region ", id, " is used by ", it->second.posts,
                             " operations in flight; wait for them"));
  }
  if (it->second.states > 0) {
    return Deny(client, Code::kFailedPrecondition,
                absl::StrCat("arena region ", id, " holds ", it->second.states,
                             " states; free them first"));
  }
  client.regions.erase(it);
  Answer(client, client.request.call, {});
}

void TrainerServer::Join(Client& client) {
  const lh_ipc_join& asked = client.request.u.join;
  LocalJoin join{{}, {asked.run, asked.group}, asked.name, {}};
  join.wish.named = !join.name.empty();
  if (!join.wish.named) join.name = client.name;
  std::string fault = TakeFields(asked, &join.wish);
  if (fault.empty()) fault = FaultIn(join.wish);
  if (!fault.empty()) return Deny(client, Code::kInvalidArgument, "join refused: " + fault);
  absl::StatusOr<Hold> held = client.account->Take(Resource::kMembers, 1);
  if (!held.ok()) {
    return DenyLimit(client, "join refused: " + std::string(held.status().message()));
  }
  join.local = LocalId(next_local_++);
  Member& member = members_[join.local];
  member.client = &client;
  member.held = *std::move(held);
  member.join_call = client.request.call;
  client.locals.insert(join.local);
  handler_->OnJoin(join);
}

void TrainerServer::Leave(Client& client) {
  LocalId local(client.request.member);
  if (!local) {
    for (const LocalId own : client.locals) {
      if (members_.at(own).join_call == client.request.u.leave.join) local = own;
    }
  }
  if (client.locals.count(local) == 0) {
    return DenyUnknown(client, local);
  }
  Member& member = members_.at(local);
  if (member.leave_call != 0) {
    return Deny(client, Code::kFailedPrecondition, "the member is leaving already");
  }
  member.leave_call = client.request.call;
  handler_->OnLeave(local);
}

void TrainerServer::DenyUnknown(Client& client, LocalId local) {
  for (const auto& [gone, outcome] : client.gone) {
    if (gone != local) continue;
    if (outcome.ok()) return Deny(client, Code::kFailedPrecondition, "the member has left");
    return Deny(client, outcome.code, outcome.text);
  }
  Deny(client, Code::kFailedPrecondition, "no such member on this connection");
}

Member* TrainerServer::ActiveMember(Client& client) {
  const LocalId local(client.request.member);
  if (client.locals.count(local) == 0) {
    DenyUnknown(client, local);
    return nullptr;
  }
  Member& member = members_.at(local);
  if (!member.admitted) {
    Deny(client, Code::kFailedPrecondition, "the member is not admitted yet; wait for its join");
    return nullptr;
  }
  if (member.leave_call != 0) {
    Deny(client, Code::kFailedPrecondition, "the member is leaving");
    return nullptr;
  }
  return &member;
}

void TrainerServer::Step(Client& client) {
  Member* const member = ActiveMember(client);
  if (member == nullptr) return;
  if (member->step_call != 0) {
    return Deny(client, Code::kFailedPrecondition, "the member waits at a step boundary already");
  }
  if (member->sync_call != 0) {
    return Deny(client, Code::kFailedPrecondition, "the member is in a sync; wait for its end");
  }
  if (member->take_call != 0) {
    return Deny(client, Code::kFailedPrecondition, "the member takes its state; wait for that");
  }
  StateSync sync;
  const bool with_sync = client.request.u.sync.state != 0;
  if (with_sync && !ReadSync(client, *member, &sync)) return;
  member->step_call = client.request.call;
  handler_->OnStep(LocalId(client.request.member), with_sync ? &sync : nullptr);
}

void TrainerServer::Sync(Client& client) {
  Member* const member = ActiveMember(client);
  if (member == nullptr) return;
  if (member->step_call != 0 || member->sync_call != 0) {
    return Deny(client, Code::kFailedPrecondition,
                member->sync_call != 0 ? "the member is in a sync already; wait for its end"
                                       : "the member waits at a step boundary; wait for it first");
  }
  if (member->take_call != 0) {
    return Deny(client, Code::kFailedPrecondition, "the member takes its state; wait for that");
  }
  StateSync sync;
  if (!ReadSync(client, *member, &sync)) return;
  member->sync_call = client.request.call;
  handler_->OnSync(LocalId(client.request.member), sync);
}

bool TrainerServer::ReadSync(Client& client, Member& member, StateSync* sync) {
  const lh_ipc_sync& wish = client.request.u.sync;
  const auto refuse = [&](Code code, const std::string& why) {
    Deny(client, code, "sync refused: " + why);
    return false;
  };
  const auto it = client.states.find(wish.state);
  if (it == client.states.end()) {
    return refuse(Code::kInvalidArgument, absl::StrCat("no state ", wish.state));
  }
  if (member.held_state != 0 && member.held_state != wish.state) {
    return refuse(
        Code::kFailedPrecondition,
        "another state is fetched for this member in the background; take that one first");
  }
  if (it->second.syncing && member.held_state == 0) {
    return refuse(Code::kFailedPrecondition, "another sync uses this state; wait for its end");
  }
  if (wish.revision > LH_REVISION_MAX) {
    return refuse(Code::kInvalidArgument,
                  absl::StrCat("revision ", wish.revision, "; at most 2^63 are possible"));
  }
  if (wish.touched.region != 0) {
    const size_t bytes = it->second.state->manifest.size();
    const uint8_t* const from = Locate(client, wish.touched, bytes);
    if (from == nullptr) {
      return refuse(Code::kInvalidArgument, "what was touched lies outside of the arena");
    }
    sync->touched.assign(from, from + bytes);
  }
  sync->state = it->second.state;
  sync->strategy = static_cast<control::SyncStrategy>(wish.strategy);
  sync->revision = wish.revision;
  it->second.syncing = true;
  member.sync_state = wish.state;
  member.step_sync.reset();
  // A PROGRESS frame of this sync must not overwrite one of an earlier sync that still waits.
  member.progress_frame = 0;
  return true;
}

void TrainerServer::AddState(Client& client) {
  const lh_ipc_state wish = client.request.u.state;
  const auto refuse = [&](Code code, const std::string& why) {
    Deny(client, code, absl::StrCat("state of ", wish.count, " tensors refused: ", why));
  };
  if (client.states.count(wish.state) != 0) {
    return refuse(Code::kInvalidArgument, absl::StrCat("state ", wish.state, " exists already"));
  }
  if (client.states.size() >= LH_STATES_MAX) {
    ++limits_reached_;
    return refuse(Code::kUnavailable,
                  absl::StrCat("a client has at most ", LH_STATES_MAX, "; free some"));
  }
  if (wish.count == 0 || wish.count > LH_STATE_TENSORS_MAX) {
    return refuse(Code::kInvalidArgument,
                  absl::StrCat("1 to ", LH_STATE_TENSORS_MAX, " are possible"));
  }
  absl::StatusOr<Hold> tensors = client.account->Take(Resource::kTensors, wish.count);
  if (!tensors.ok()) {
    ++limits_reached_;
    return refuse(Code::kUnavailable, std::string(tensors.status().message()));
  }
  Client::State made;
  const absl::StatusOr<std::vector<lh_ipc_tensor>> table = CopyTable(client, wish);
  absl::Status status = table.status();
  if (status.ok()) {
    auto state = MakeState(client, wish, *table, &made.regions);
    status = state.status();
    if (state.ok()) {
      made.state = *std::move(state);
      // The tensors count as long as anything uses the state, even after the end of the connection.
      using Kept = std::pair<std::shared_ptr<const void>, Hold>;
      made.state->memory = std::make_shared<Kept>(made.state->memory, *std::move(tensors));
    }
  }
  if (!status.ok()) return refuse(Code::kInvalidArgument, std::string(status.message()));
  for (const uint64_t region : made.regions) ++client.regions.at(region).states;
  client.states[wish.state] = std::move(made);
  Answer(client, client.request.call, {});
}

void TrainerServer::RemoveState(Client& client) {
  const auto it = client.states.find(client.request.u.state.state);
  if (it == client.states.end()) {
    return Deny(client, Code::kInvalidArgument,
                absl::StrCat("no state ", client.request.u.state.state));
  }
  if (it->second.syncing) {
    return Deny(client, Code::kFailedPrecondition, "a sync uses this state; wait for its end");
  }
  for (const uint64_t region : it->second.regions) --client.regions.at(region).states;
  client.states.erase(it);
  Answer(client, client.request.call, {});
}

void TrainerServer::Prepare(Client& client) {
  const uint64_t state = client.request.u.state.state;
  const auto it = client.states.find(state);
  if (it == client.states.end()) {
    return Deny(client, Code::kInvalidArgument, absl::StrCat("no state ", state));
  }
  if (it->second.syncing) {
    return Deny(client, Code::kFailedPrecondition, "a sync uses this state; wait for its end");
  }
  it->second.syncing = true;
  handler_->OnPrepare(it->second.state,
                      [this, number = client.number, state, call = client.request.call] {
                        Prepared(number, state, call);
                      });
}

void TrainerServer::Prepared(uint64_t client, uint64_t state, uint64_t call) {
  Client* const found = connections_.Find(client);
  if (found == nullptr) return;
  found->states.at(state).syncing = false;
  Answer(*found, call, {});
}

void TrainerServer::Why(Client& client) {
  const lh_ipc_why why = lh_ipc_get_why(&client.request);
  handler_->OnWhy({why.run, why.group}, [this, number = client.number,
                                         call = client.request.call](const std::string& text) {
    Client* const found = connections_.Find(number);
    if (found == nullptr) return;
    // Only a reply with an error has a text, but for this one.
    lh_ipc_reply reply = MakeReply(LH_IPC_DONE, call, 0, {Code::kInternal, text});
    reply.status = static_cast<int32_t>(Code::kOk);
    found->calls.erase(call);
    connections_.Push(*found, reply);
  });
}

void TrainerServer::Take(Client& client) {
  Member* const member = ActiveMember(client);
  if (member == nullptr) return;
  if (member->step_call != 0 || member->sync_call != 0 || member->take_call != 0) {
    return Deny(client, Code::kFailedPrecondition,
                "the member waits in another call; wait for its end");
  }
  member->take_call = client.request.call;
  handler_->OnTake(LocalId(client.request.member), client.request.u.take.timeout_ms);
}

void TrainerServer::Kept(Client& client) {
  if (ActiveMember(client) == nullptr) return;
  const auto it = client.states.find(client.request.u.state.state);
  if (it == client.states.end()) {
    return Deny(client, Code::kInvalidArgument,
                absl::StrCat("no state ", client.request.u.state.state));
  }
  lh_ipc_reply reply = MakeReply(LH_IPC_DONE, client.request.call, client.request.member, {});
  uint64_t revision = 0;
  if (handler_->OnKept(LocalId(client.request.member), *it->second.state, &revision)) {
    reply.u.kept.kept = 1;
    reply.u.kept.revision = revision;
  }
  client.calls.erase(client.request.call);
  connections_.Push(client, reply);
}

void TrainerServer::Op(Client& client) {
  Member* const member = ActiveMember(client);
  if (member == nullptr) return;
  const lh_ipc_op& wish = client.request.u.op;
  const uint64_t table_bytes = IpcTableBytes(wish);
  std::vector<uint8_t> table;
  if (table_bytes > 0) {
    const uint8_t* const from =
        table_bytes == UINT64_MAX ? nullptr : Locate(client, wish.table, table_bytes);
    if (from == nullptr) {
      return Deny(client, Code::kInvalidArgument,
                  table_bytes == UINT64_MAX
                      ? "op refused: its table has too many participants, lengths or pieces"
                      : "op refused: its table lies outside of the arena");
    }
    table.assign(from, from + table_bytes);
  }
  // Tells the other participants that this call was refused, if they can know which it was.
  const auto refuse = [&](const std::string& why) {
    std::optional<IpcOpName> name = NameOf(wish, table);
    if (!name) return;
    LocalRefusal refusal;
    refusal.op.post = {LocalId(client.request.member), client.request.call};
    refusal.op.tag = wish.tag;
    refusal.op.desc.kind = name->kind;
    refusal.op.root_rank = name->root_rank;
    refusal.op.is_root = name->is_root;
    refusal.op.partner = name->partner;
    refusal.op.participants = std::move(name->participants);
    refusal.why = why.empty() ? name->refusal : why;
    handler_->OnRefusal(std::move(refusal));
  };
  if (wish.refusal != 0) {
    refuse("");
    return Answer(client, client.request.call, {});
  }
  absl::StatusOr<IpcOp> op =
      ParseIpcOp(wish, table, [&client](uint64_t id) -> std::optional<uint64_t> {
        const auto it = client.regions.find(id);
        if (it == client.regions.end()) return std::nullopt;
        return it->second.region->bytes;
      });
  if (!op.ok()) {
    const std::string why(op.status().message());
    refuse(why);
    return Deny(client, Code::kInvalidArgument, why);
  }
  absl::StatusOr<Hold> pieces = client.account->Take(Resource::kPieces, op->pieces.size());
  if (!pieces.ok()) {
    return DenyLimit(client, "op refused: " + std::string(pieces.status().message()));
  }
  PostBuffers buffers;
  buffers.holders.push_back(std::make_shared<Hold>(*std::move(pieces)));
  std::set<uint64_t>& regions = member->posts[client.request.call];
  const auto place = [&](const lh_ipc_range& range) -> uint8_t* {
    if (range.region == 0) return nullptr;
    regions.insert(range.region);
    return client.regions.at(range.region).region->data + range.offset;
  };
  for (const IpcPiece& piece : op->pieces) {
    buffers.pieces.push_back({piece.dtype, piece.count});
    buffers.sources.push_back(place(piece.source));
    buffers.targets.push_back(place(piece.target));
    uint8_t* const error = place(piece.error);
    if (error == nullptr) continue;
    buffers.errors.resize(op->pieces.size());
    // A range is a multiple of 4 bytes from the beginning of its region, which is a page.
    buffers.errors[buffers.pieces.size() - 1] = reinterpret_cast<float*>(error);
  }
  for (const uint64_t id : regions) {
    Client::Region& region = client.regions.at(id);
    ++region.posts;
    buffers.holders.push_back(region.region);
  }
  ++posts_open_;
  LocalPost post{{LocalId(client.request.member), client.request.call}, wish.tag, op->desc};
  post.root_rank = op->root_rank;
  post.is_root = op->is_root;
  post.partner = op->partner;
  post.participants = std::move(op->participants);
  post.terms = std::move(op->terms);
  post.outline = std::move(op->outline);
  handler_->OnPost(post, std::move(buffers));
}

void TrainerServer::Cancel(Client& client) {
  const uint64_t op = client.request.u.cancel.op;
  const LocalId local(client.request.member);
  // A member that is leaving may cancel what its leave waits for. An op of a member that is gone is
  // over.
  const bool open = client.locals.contains(local) && members_.at(local).posts.contains(op);
  Answer(client, client.request.call, {});
  if (open) handler_->OnCancel({local, op});
}

void TrainerServer::Members(Client& client) {
  if (ActiveMember(client) == nullptr) return;
  const PeerCore::MembersView members = handler_->OnMembers(
      LocalId(client.request.member),
      client.request.u.members.of_step != 0 ? PeerCore::AsOf::kStep : PeerCore::AsOf::kNow);
  lh_ipc_reply reply = MakeReply(LH_IPC_DONE, client.request.call, client.request.member, {});
  lh_ipc_members_page& page = reply.u.members;
  const size_t first = std::min<size_t>(client.request.u.members.first, members.members.size());
  page.epoch = members.epoch.value();
  page.first = static_cast<uint32_t>(first);
  page.count =
      static_cast<uint32_t>(std::min<size_t>(LH_IPC_MEMBERS_PAGE, members.members.size() - first));
  for (uint32_t i = 0; i < page.count; ++i) {
    page.member_ids[i] = members.members[first + i].value();
  }
  client.calls.erase(client.request.call);
  connections_.Push(client, reply);
}

void TrainerServer::About(Client& client) {
  if (ActiveMember(client) == nullptr) return;
  const MemberId wanted(client.request.u.about.member_id);
  const auto found = handler_->OnMember(LocalId(client.request.member), wanted);
  if (!found) {
    return Deny(client, Code::kInvalidArgument,
                absl::StrCat("member ", ToString(wanted),
                             " is no member of the group, and none of its last former ones"));
  }
  // The reply is zero, so the text ends with a NUL.
  const auto put = [](const std::string& text, char* to, size_t bytes) {
    text.copy(to, bytes - 1);
  };
  lh_ipc_reply reply = MakeReply(LH_IPC_DONE, client.request.call, client.request.member, {});
  lh_ipc_member_info& info = reply.u.about;
  info.member_id = wanted.value();
  info.peer_id = found->member.info.peer.value();
  info.current = found->rank >= 0 ? 1 : 0;
  info.rank = found->rank >= 0 ? static_cast<uint32_t>(found->rank) : 0;
  put(found->member.info.name, info.name, sizeof info.name);
  put(found->member.info.cohort, info.cohort, sizeof info.cohort);
  put(found->member.host, info.host, sizeof info.host);
  client.calls.erase(client.request.call);
  connections_.Push(client, reply);
}

}  // namespace longhaul::peerd::ipc
