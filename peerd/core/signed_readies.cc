#include "peerd/core/signed_readies.h"

#include <array>
#include <span>
#include <utility>

#include "base/bytes.h"
#include "base/crypto/secrets.h"

namespace longhaul::peerd {

std::string AddSignature(PeerId peer, const std::string& key, const ReadySignature& signature,
                         SignedReadies* readies) {
  if (signature.index != readies->name.index) {
    return "is number " + std::to_string(signature.index) + " of its name, not " +
           std::to_string(readies->name.index);
  }
  control::Statement statement{peer, signature.digest, signature.signature};
  if (!control::IsStatementOf(key, readies->name, statement)) return "has a wrong signature";
  readies->others.emplace(peer, std::move(statement));
  return "";
}

Hash128 DigestOf(const SignedReadies& readies, PeerId self, bool refused) {
  std::map<PeerId, const std::string*> digests{{self, &readies.own}};
  for (const auto& [peer, statement] : readies.others) digests.emplace(peer, &statement.digest);
  std::string text(1, refused ? '\1' : '\0');
  for (const auto& [peer, digest] : digests) {
    std::array<uint8_t, 8> id;
    ByteWriter(id).U64(peer.value());
    text.append(id.begin(), id.end());
    text += *digest;
  }
  const std::string hash = Sha256(text);
  ByteReader reader({reinterpret_cast<const uint8_t*>(hash.data()), hash.size()});
  const uint64_t high = reader.U64();
  return {high, reader.U64()};
}

std::vector<control::Statement> StatementsOf(const SignedReadies& readies) {
  std::vector<control::Statement> statements;
  for (const auto& [peer, statement] : readies.others) statements.push_back(statement);
  return statements;
}

}  // namespace longhaul::peerd
