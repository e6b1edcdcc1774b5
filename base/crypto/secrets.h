// What is needed to make secrets and to check them. OpenSSL does the work; no OpenSSL type appears
// here. Pure functions but for RandomBytes(); any thread. Each aborts the process if OpenSSL cannot
// do it, which only a broken installation causes.
#pragma once

#include <cstddef>
#include <string>

namespace longhaul {

inline constexpr size_t kSha256Bytes = 32;

// Bytes that nobody can guess.
std::string RandomBytes(size_t size);

std::string Sha256(const std::string& data);

// The HMAC of `data` with SHA-256 (RFC 2104): kSha256Bytes bytes. Who does not know `key` can
// neither compute it nor tell it from random bytes, however many others were seen.
std::string HmacSha256(const std::string& key, const std::string& data);

// Whether the two are equal. If they have the same size, the time that this takes says nothing
// about their contents.
bool SameBytes(const std::string& a, const std::string& b);

}  // namespace longhaul
