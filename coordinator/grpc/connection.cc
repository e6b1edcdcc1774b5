#include "coordinator/grpc/connection.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <map>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/crypto/secrets.h"
#include "base/mutex.h"

namespace longhaul::coordinator {
namespace {

constexpr char kScheme[] = "unix-abstract:";

struct Names {
  // Nobody on this host can take the name of a connection before this process does.
  const std::string secret = absl::BytesToHexString(RandomBytes(16));
  Mutex mutex;
  std::map<uint64_t, std::shared_ptr<const Connection>> all ABSL_GUARDED_BY(mutex);
};
Names& TheNames() {
  static auto* const names = new Names;  // never destroyed: threads of gRPC may outlive main()
  return *names;
}

}  // namespace

std::optional<tls::CertificateCheck> Connection::Refusal() const {
  if (!options_.check) return std::nullopt;
  tls::CertificateCheck verdict = options_.check();
  if (verdict.ok) return std::nullopt;
  return verdict;
}

std::shared_ptr<const Connection> ConnectionOf(const std::string& grpc_peer) {
  uint64_t id = 0;
  const size_t at = grpc_peer.find_last_not_of("0123456789");
  if (grpc_peer.rfind(kScheme, 0) != 0 || at == std::string::npos ||
      !absl::SimpleAtoi(grpc_peer.substr(at + 1), &id)) {
    return nullptr;
  }
  Names& names = TheNames();
  MutexLock lock(&names.mutex);
  const auto it = names.all.find(id);
  return it == names.all.end() ? nullptr : it->second;
}

std::string ClientOf(const std::string& grpc_peer) {
  const std::shared_ptr<const Connection> connection = ConnectionOf(grpc_peer);
  return connection == nullptr ? grpc_peer : connection->client();
}

std::string HostOfUri(const std::string& uri) {
  const std::string text = absl::StrReplaceAll(uri, {{"%5B", "["}, {"%5D", "]"}, {"%25", "%"}});
  const size_t begin = text.find(':');
  const size_t end = text.rfind(':');
  if (begin == std::string::npos || end <= begin) return "";
  std::string host = text.substr(begin + 1, end - begin - 1);
  if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  host = host.substr(0, host.find('%'));
  in6_addr v6;
  if (inet_pton(AF_INET6, host.c_str(), &v6) != 1) return host;
  char address[INET6_ADDRSTRLEN] = "";
  if (IN6_IS_ADDR_V4MAPPED(&v6)) {
    inet_ntop(AF_INET, &v6.s6_addr[12], address, sizeof address);
  } else {
    inet_ntop(AF_INET6, &v6, address, sizeof address);
  }
  return address;
}

std::string NameConnection(uint64_t id, std::shared_ptr<const Connection> connection) {
  Names& names = TheNames();
  MutexLock lock(&names.mutex);
  names.all[id] = std::move(connection);
  return absl::StrCat("longhaul-", names.secret, "-", id);
}

void ForgetConnection(uint64_t id) {
  Names& names = TheNames();
  MutexLock lock(&names.mutex);
  names.all.erase(id);
}

}  // namespace longhaul::coordinator
