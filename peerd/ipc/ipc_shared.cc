// The use of the queues in memory that trainers share with peerd.
#include <algorithm>
#include <string>
#include <utility>

#include "peerd/ipc/ipc_connections.h"
#include "peerd/ipc/ipc_replies.h"

namespace longhaul::peerd::ipc {

bool Connections::Share(Client& client) {
  if (client.descriptors.empty()) return false;
  auto shared = SharedQueues::Map(client.descriptors.front().get());
  if (!shared.ok()) {
    // The trainer gets on with the socket alone.
    CountRefusal("queues in shared memory: " + std::string(shared.status().message()));
    return false;
  }
  client.shared = *std::move(shared);
  client.shared->SetAwake(looking_);
  sharing_.push_back(clients_.at(client.number));
  LookAtShared(client);
  return true;
}

void Connections::LookAtShared(Client& client) {
  if (client.shared == nullptr || client.ending) return;
  // The requests of the socket that are still in the inbox count as read.
  const size_t unread = client.have / sizeof client.request - client.taken;
  if (client.shared->Look(client.frames_taken + unread)) return;
  Cut(client, {Code::kFailedPrecondition, "impossible counts in the queue of requests"});
}

bool Connections::HasShared(const Client& client) {
  return client.pause == 0 && !client.ending && client.shared->HasRequest(client.frames_taken);
}

bool Connections::HasMore(const Client& client) {
  return client.shared != nullptr && (client.pause != 0 || HasShared(client));
}

bool Connections::AnyHasShared() const {
  return std::any_of(sharing_.begin(), sharing_.end(),
                     [](const ClientPtr& client) { return HasShared(*client); });
}

void Connections::SetLooking(bool looking) {
  if (looking_ == looking) return;
  looking_ = looking;
  for (const ClientPtr& client : sharing_) client->shared->SetAwake(looking);
}

bool Connections::Look() {
  SetLooking(true);
  return AnyHasShared();
}

bool Connections::StopLooking() {
  if (!looking_) return false;
  SetLooking(false);
  return AnyHasShared();
}

void Connections::Run() {
  if (sharing_.empty()) return;
  // A request may end connections, and so change sharing_.
  std::vector<ClientPtr> ready;
  for (const ClientPtr& client : sharing_) {
    if (HasShared(*client)) ready.push_back(client);
  }
  for (const ClientPtr& client : ready) TakeRequests(client);
}

void Connections::PutShared(Client& client) {
  if (client.shared == nullptr || client.end_when_flushed) return;
  const size_t before = client.waiting_shared;
  while (client.waiting_shared < client.waiting.size() &&
         client.shared->Put(client.waiting[client.waiting_shared], client.frames_sent)) {
    ++client.waiting_shared;
  }
  if (client.waiting_shared == before) return;
  const bool told = client.shared->Show(client.frames_sent);
  if (client.waiting_shared < client.waiting.size()) return;  // what is left tells the trainer
  client.waiting_first += client.waiting.size();
  client.waiting.clear();
  client.waiting_shared = 0;
  if (!told) client.waiting.push_back(MakeReply(LH_IPC_LOOK, 0, 0, {}));
}

}  // namespace longhaul::peerd::ipc
