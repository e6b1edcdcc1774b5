#include "peerd/core/verdicts.h"

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "base/bytes.h"
#include "base/crypto/secrets.h"

namespace longhaul::peerd {

void Verdicts::BeginSigning(const control::ReadyName& own) { signed_ = Signed{own, "", {}}; }

void Verdicts::SignedOwn(const std::string& digest) {
  if (signed_) signed_->own = digest;
}

std::string Verdicts::TakeSignature(PeerId peer, const std::optional<ReadySignature>& signature,
                                    const std::map<PeerId, std::string>& keys) {
  if (!signed_ && !signature) return "";
  if (!signed_) return "is signed in an attempt without signatures";
  if (!signature) return "is not signed";
  if (signature->index != signed_->name.index) {
    return "is number " + std::to_string(signature->index) + " of its name, not " +
           std::to_string(signed_->name.index);
  }
  control::Statement statement{peer, signature->digest, signature->signature};
  if (!control::IsStatementOf(keys.at(peer), signed_->name, statement)) {
    return "has a wrong signature";
  }
  signed_->others.emplace(peer, std::move(statement));
  return "";
}

std::vector<control::Statement> Verdicts::Statements() const {
  std::vector<control::Statement> statements;
  if (!signed_) return statements;
  for (const auto& [peer, statement] : signed_->others) statements.push_back(statement);
  return statements;
}

std::string Verdicts::TakeDone(const PeerDone& done) {
  if (done.readies_digest.has_value() != signed_.has_value()) {
    return signed_ ? "without a digest of READYs" : "with a digest of READYs";
  }
  dones_.emplace(done.peer, OpVerdict{done.refused, done.readies_digest});
  return "";
}

// All participants that got the same READYs have the same digest. Who wants two sets of READYs to
// have the same digest needs 2^64 tries.
OpVerdict Verdicts::Own(PeerId self, bool refused) const {
  if (!signed_) return {refused, std::nullopt};
  std::map<PeerId, const std::string*> digests{{self, &signed_->own}};
  for (const auto& [peer, statement] : signed_->others) digests.emplace(peer, &statement.digest);
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
  return {refused, Hash128{high, reader.U64()}};
}

PeerId Verdicts::FirstOtherThan(const OpVerdict& own) const {
  const auto other = std::find_if(dones_.begin(), dones_.end(),
                                  [&](const auto& done) { return done.second != own; });
  return other == dones_.end() ? PeerId() : other->first;
}

}  // namespace longhaul::peerd
