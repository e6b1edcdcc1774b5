#include "tools/lhctl/ca.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/crypto/secrets.h"
#include "base/daemon/host_port.h"
#include "base/status_macros.h"
#include "base/tls/certificate.h"
#include "base/tls/openssl.h"

namespace longhaul {
namespace {

using tls::CertificatePtr;
using tls::CrlPtr;
using tls::KeyPtr;

constexpr std::array kRoles = {"coordinator", "trainer", "observer", "operator"};
constexpr uint32_t kDaysMax = 36500;
constexpr int64_t kDayS = 86400;
// A certificate is valid from some time before it was made: clocks differ.
constexpr int64_t kClocksDifferS = 300;
constexpr size_t kNameBytesMax = 64;  // X.520 allows no longer common name

absl::Status OpensslFailed(const char* what) {
  return absl::InternalError(absl::StrCat("OpenSSL failed to ", what, ": ", tls::LastError()));
}

absl::Status FileError(const char* what, const std::string& path, int error) {
  const std::string text = absl::StrCat("cannot ", what, " ", path, ": ", strerror(error));
  return error == ENOENT ? absl::NotFoundError(text) : absl::UnavailableError(text);
}

// Replaces the file in one step, so that a daemon that watches it never sees half of it.
absl::Status WriteFile(const std::string& path, const std::string& text, mode_t mode) {
  const std::string temporary = absl::StrCat(path, ".new");
  unlink(temporary.c_str());
  const int fd = open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
  if (fd < 0) return FileError("write", temporary, errno);
  size_t written = 0;
  ssize_t put = 1;
  while (put > 0 && written < text.size()) {
    put = write(fd, text.data() + written, text.size() - written);
    if (put > 0) written += static_cast<size_t>(put);
  }
  const bool done = written == text.size() && fchmod(fd, mode) == 0 && fsync(fd) == 0;
  const int error = errno;
  close(fd);
  if (done && rename(temporary.c_str(), path.c_str()) == 0) return absl::OkStatus();
  const int last = done ? errno : error;
  unlink(temporary.c_str());
  return FileError("write", path, last);
}

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) return FileError("read", path, errno != 0 ? errno : EIO);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

template <class Write>
absl::StatusOr<std::string> ToPem(Write write) {
  const tls::BioPtr bio(BIO_new(BIO_s_mem()));
  if (bio == nullptr || write(bio.get()) != 1) return OpensslFailed("write PEM");
  return tls::Written(bio.get());
}

absl::Status SetExtension(X509* certificate, X509* issuer, int nid, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  X509V3_set_ctx_nodb(&context);
  X509_EXTENSION* extension = X509V3_EXT_conf_nid(nullptr, &context, nid, value.c_str());
  const bool added = extension != nullptr && X509_add_ext(certificate, extension, -1) == 1;
  X509_EXTENSION_free(extension);
  return added ? absl::OkStatus() : OpensslFailed("add an extension");
}

absl::Status SetRandomSerial(X509* certificate) {
  BIGNUM* number = BN_new();
  const bool set = number != nullptr &&
                   BN_rand(number, 127, BN_RAND_TOP_ONE, BN_RAND_BOTTOM_ANY) == 1 &&
                   BN_to_ASN1_INTEGER(number, X509_get_serialNumber(certificate)) != nullptr;
  BN_free(number);
  return set ? absl::OkStatus() : OpensslFailed("draw a serial number");
}

absl::Status AddSubjectAltNames(X509* certificate, const IssueOptions& options) {
  // The names go in as values, not as a text for OpenSSL's configuration language: a name with a
  // comma there could smuggle in another name.
  const tls::NamesPtr names(sk_GENERAL_NAME_new_null());
  const auto add = [&](int type, int string_type, const std::string& value) {
    GENERAL_NAME* name = GENERAL_NAME_new();
    ASN1_STRING* text = ASN1_STRING_type_new(string_type);
    ASN1_STRING_set(text, value.data(), static_cast<int>(value.size()));
    GENERAL_NAME_set0_value(name, type, text);
    sk_GENERAL_NAME_push(names.get(), name);
  };
  add(GEN_URI, V_ASN1_IA5STRING, tls::kRoleUri + options.role);
  // A coordinator serves its runs to others, and takes part in none.
  if (options.role != "coordinator") {
    add(GEN_URI, V_ASN1_IA5STRING,
        tls::kRunUri + (options.run.empty() ? tls::kAllRuns : options.run));
  }
  for (const std::string& host : options.hosts) {
    unsigned char bytes[16];
    if (inet_pton(AF_INET, host.c_str(), bytes) == 1) {
      add(GEN_IPADD, V_ASN1_OCTET_STRING, std::string(reinterpret_cast<char*>(bytes), 4));
    } else if (inet_pton(AF_INET6, host.c_str(), bytes) == 1) {
      add(GEN_IPADD, V_ASN1_OCTET_STRING, std::string(reinterpret_cast<char*>(bytes), 16));
    } else {
      add(GEN_DNS, V_ASN1_IA5STRING, host);
    }
  }
  return X509_add1_ext_i2d(certificate, NID_subject_alt_name, names.get(), 0, 0) == 1
             ? absl::OkStatus()
             : OpensslFailed("add names");
}

// A certificate with a new key, without extensions and signature.
struct Draft {
  KeyPtr key;
  CertificatePtr certificate;
};

absl::StatusOr<Draft> MakeDraft(const std::string& name, uint32_t days) {
  Draft draft;
  draft.key = KeyPtr(EVP_EC_gen("P-256"));
  draft.certificate = CertificatePtr(X509_new());
  X509* const certificate = draft.certificate.get();
  if (draft.key == nullptr || certificate == nullptr) return OpensslFailed("make a key");
  LH_RETURN_IF_ERROR(SetRandomSerial(certificate));
  const auto* text = reinterpret_cast<const unsigned char*>(name.data());
  const time_t now = time(nullptr);
  if (X509_set_version(certificate, X509_VERSION_3) != 1 ||
      X509_NAME_add_entry_by_NID(X509_get_subject_name(certificate), NID_commonName, MBSTRING_UTF8,
                                 text, static_cast<int>(name.size()), -1, 0) != 1 ||
      ASN1_TIME_set(X509_getm_notBefore(certificate), now - kClocksDifferS) == nullptr ||
      ASN1_TIME_set(X509_getm_notAfter(certificate), now + int64_t{days} * kDayS) == nullptr ||
      X509_set_pubkey(certificate, draft.key.get()) != 1) {
    return OpensslFailed("make a certificate");
  }
  return draft;
}

absl::Status WriteDraft(const std::string& stem, const Draft& draft) {
  LH_ASSIGN_OR_RETURN(const std::string key, ToPem([&](BIO* bio) {
                        return PEM_write_bio_PKCS8PrivateKey(bio, draft.key.get(), nullptr, nullptr,
                                                             0, nullptr, nullptr);
                      }));
  LH_ASSIGN_OR_RETURN(const std::string certificate, ToPem([&](BIO* bio) {
                        return PEM_write_bio_X509(bio, draft.certificate.get());
                      }));
  LH_RETURN_IF_ERROR(WriteFile(stem + ".key", key, 0600));
  return WriteFile(stem + ".crt", certificate, 0644);
}

struct Ca {
  KeyPtr key;
  CertificatePtr certificate;
};

absl::StatusOr<Ca> OpenCa(const std::string& directory) {
  const std::string stem = directory + "/ca";
  const absl::StatusOr<std::string> certificate = ReadFile(stem + ".crt");
  if (absl::IsNotFound(certificate.status())) {
    return absl::NotFoundError(
        absl::StrCat(directory, " has no CA: make one with lhctl ca init ", directory));
  }
  if (!certificate.ok()) return certificate.status();
  LH_ASSIGN_OR_RETURN(const std::string key, ReadFile(stem + ".key"));
  if (const auto good = tls::CheckKeyPair(*certificate, key); !good.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the CA in ", directory, ": ", good.status().message()));
  }
  Ca ca;
  ca.key = tls::ReadKey(key);
  ca.certificate = tls::ReadCertificate(tls::Reader(*certificate).get());
  return ca;
}

absl::Status SignAndWriteCrl(const std::string& directory, const Ca& ca, X509_CRL* crl) {
  ASN1_TIME* const now = ASN1_TIME_set(nullptr, time(nullptr));
  // Nobody renews this CRL by a clock. It holds as long as the CA.
  const bool set = now != nullptr && X509_CRL_set1_lastUpdate(crl, now) == 1 &&
                   X509_CRL_set1_nextUpdate(crl, X509_get0_notAfter(ca.certificate.get())) == 1 &&
                   X509_CRL_sort(crl) == 1 && X509_CRL_sign(crl, ca.key.get(), EVP_sha256()) > 0;
  ASN1_TIME_free(now);
  if (!set) return OpensslFailed("sign the CRL");
  LH_ASSIGN_OR_RETURN(const std::string pem,
                      ToPem([&](BIO* bio) { return PEM_write_bio_X509_CRL(bio, crl); }));
  return WriteFile(directory + "/crl.pem", pem, 0644);
}

absl::StatusOr<CrlPtr> NewCrl(const Ca& ca) {
  CrlPtr crl(X509_CRL_new());
  if (crl == nullptr || X509_CRL_set_version(crl.get(), X509_CRL_VERSION_2) != 1 ||
      X509_CRL_set_issuer_name(crl.get(), X509_get_subject_name(ca.certificate.get())) != 1) {
    return OpensslFailed("make a CRL");
  }
  return crl;
}

// The CRL as it is, or a new one if there is none.
absl::StatusOr<CrlPtr> OpenCrl(const std::string& directory, const Ca& ca) {
  const absl::StatusOr<std::string> pem = ReadFile(directory + "/crl.pem");
  if (absl::IsNotFound(pem.status())) return NewCrl(ca);
  if (!pem.ok()) return pem.status();
  CrlPtr crl(PEM_read_bio_X509_CRL(tls::Reader(*pem).get(), nullptr, tls::NoPassword, nullptr));
  if (crl == nullptr || X509_CRL_verify(crl.get(), ca.key.get()) != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(directory, "/crl.pem is not a CRL of the CA there: ", tls::LastError()));
  }
  return crl;
}

absl::Status AddToCrl(X509* certificate, X509_CRL* crl) {
  X509_REVOKED* found = nullptr;
  if (X509_CRL_get0_by_cert(crl, &found, certificate) == 1) return absl::OkStatus();
  X509_REVOKED* const entry = X509_REVOKED_new();
  ASN1_TIME* const now = ASN1_TIME_set(nullptr, time(nullptr));
  const bool added =
      entry != nullptr && now != nullptr &&
      X509_REVOKED_set_serialNumber(entry, X509_get_serialNumber(certificate)) == 1 &&
      X509_REVOKED_set_revocationDate(entry, now) == 1 && X509_CRL_add0_revoked(crl, entry) == 1;
  ASN1_TIME_free(now);
  if (added) return absl::OkStatus();
  X509_REVOKED_free(entry);
  return OpensslFailed("add to the CRL");
}

absl::StatusOr<CertificatePtr> OpenCertificate(const std::string& path) {
  LH_ASSIGN_OR_RETURN(const std::string pem, ReadFile(path));
  CertificatePtr certificate = tls::ReadCertificate(tls::Reader(pem).get());
  ERR_clear_error();
  if (certificate == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is no certificate in PEM form"));
  }
  return certificate;
}

std::string IssuedDirectory(const std::string& directory) { return directory + "/issued"; }

// All certificates that were issued for a name, also those that a later one has replaced.
absl::StatusOr<std::vector<CertificatePtr>> IssuedFor(const std::string& directory,
                                                      const std::string& name) {
  std::vector<CertificatePtr> found;
  std::error_code failed;
  for (const auto& entry :
       std::filesystem::directory_iterator(IssuedDirectory(directory), failed)) {
    if (entry.path().extension() != ".crt") continue;
    LH_ASSIGN_OR_RETURN(const std::string pem, ReadFile(entry.path().string()));
    LH_ASSIGN_OR_RETURN(const tls::Subject identity, tls::SubjectOf(pem));
    if (identity.name != name) continue;
    LH_ASSIGN_OR_RETURN(CertificatePtr certificate, OpenCertificate(entry.path().string()));
    found.push_back(std::move(certificate));
  }
  return found;
}

// Keeps a copy of a certificate, before anybody can use it.
absl::Status KeepIssued(const std::string& directory, X509* certificate) {
  const std::string kept = IssuedDirectory(directory);
  if (mkdir(kept.c_str(), 0700) != 0 && errno != EEXIST) {
    return FileError("make the directory", kept, errno);
  }
  LH_ASSIGN_OR_RETURN(const std::string pem,
                      ToPem([&](BIO* bio) { return PEM_write_bio_X509(bio, certificate); }));
  LH_ASSIGN_OR_RETURN(const tls::Subject identity, tls::SubjectOf(pem));
  return WriteFile(absl::StrCat(kept, "/", identity.fingerprint.substr(0, 32), ".crt"), pem, 0644);
}

bool IsName(const std::string& text) {
  if (text.empty() || text.size() > kNameBytesMax || text[0] == '.' || text[0] == '-') return false;
  for (const unsigned char c : text) {
    if (!absl::ascii_isalnum(c) && c != '.' && c != '-' && c != '_') return false;
  }
  return true;
}

absl::Status Check(const IssueOptions& options) {
  if (!IsName(options.name) || options.name == "ca" || absl::EndsWith(options.name, ".crt")) {
    return absl::InvalidArgumentError(
        absl::StrCat("--name='", options.name, "': give at most ", kNameBytesMax,
                     " letters, digits, '.', '-' and '_', not 'ca' and not a name that ends in "
                     "'.crt': files are named so"));
  }
  bool known = false;
  for (const char* role : kRoles) known = known || options.role == role;
  if (!known) {
    return absl::InvalidArgumentError(
        absl::StrCat("--role='", options.role, "': give one of ", absl::StrJoin(kRoles, ", ")));
  }
  for (const unsigned char c : options.run) {
    if (c <= ' ' || c >= 127) {
      return absl::InvalidArgumentError(
          "--run: the name of a run in a certificate has no blanks and only ASCII characters");
    }
  }
  const bool server = options.role == "coordinator";
  if (server == options.hosts.empty()) {
    return absl::InvalidArgumentError(
        server ? "a coordinator's certificate needs --host=NAME_OR_ADDRESS[,...]: what others dial"
               : "--host is for the role coordinator: nobody dials the others");
  }
  for (const std::string& host : options.hosts) {
    unsigned char bytes[16];
    if (inet_pton(AF_INET6, host.c_str(), bytes) == 1) continue;
    if (host.find(':') != std::string::npos || !ParseHostPort(host + ":1").ok()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--host: '", host, "' is neither a DNS name nor an IP address (without a port)"));
    }
  }
  if (options.days == 0 || options.days > kDaysMax) {
    return absl::InvalidArgumentError(absl::StrCat("--days: give 1 to ", kDaysMax));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status InitCa(const std::string& directory, uint32_t days) {
  if (days == 0 || days > kDaysMax) {
    return absl::InvalidArgumentError(absl::StrCat("--days: give 1 to ", kDaysMax));
  }
  if (mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST) {
    return FileError("make the directory", directory, errno);
  }
  for (const char* file : {"/ca.key", "/ca.crt"}) {
    if (access((directory + file).c_str(), F_OK) == 0) {
      return absl::FailedPreconditionError(
          absl::StrCat(directory,
                       " has a CA already: use it, or give another directory. A new CA would make "
                       "the certificates of this one useless"));
    }
  }
  // Two CAs of one name would be mistaken for each other while programs trust both.
  const std::string number = absl::BytesToHexString(RandomBytes(4));
  LH_ASSIGN_OR_RETURN(Draft draft, MakeDraft(absl::StrCat("Longhaul CA ", number), days));
  X509* const certificate = draft.certificate.get();
  X509_set_issuer_name(certificate, X509_get_subject_name(certificate));
  LH_RETURN_IF_ERROR(
      SetExtension(certificate, certificate, NID_basic_constraints, "critical,CA:TRUE,pathlen:0"));
  LH_RETURN_IF_ERROR(
      SetExtension(certificate, certificate, NID_key_usage, "critical,keyCertSign,cRLSign"));
  LH_RETURN_IF_ERROR(SetExtension(certificate, certificate, NID_subject_key_identifier, "hash"));
  if (X509_sign(certificate, draft.key.get(), EVP_sha256()) <= 0) return OpensslFailed("sign");
  LH_RETURN_IF_ERROR(WriteDraft(directory + "/ca", draft));
  const Ca ca{std::move(draft.key), std::move(draft.certificate)};
  LH_ASSIGN_OR_RETURN(const CrlPtr crl, NewCrl(ca));
  return SignAndWriteCrl(directory, ca, crl.get());
}

absl::Status IssueCertificate(const std::string& directory, const IssueOptions& options) {
  LH_RETURN_IF_ERROR(Check(options));
  LH_ASSIGN_OR_RETURN(const Ca ca, OpenCa(directory));
  LH_ASSIGN_OR_RETURN(const Draft draft, MakeDraft(options.name, options.days));
  X509* const certificate = draft.certificate.get();
  X509* const issuer = ca.certificate.get();
  X509_set_issuer_name(certificate, X509_get_subject_name(issuer));
  const char* const use = options.role == "coordinator" ? "serverAuth" : "clientAuth";
  LH_RETURN_IF_ERROR(SetExtension(certificate, issuer, NID_basic_constraints, "critical,CA:FALSE"));
  LH_RETURN_IF_ERROR(SetExtension(certificate, issuer, NID_key_usage, "critical,digitalSignature"));
  LH_RETURN_IF_ERROR(SetExtension(certificate, issuer, NID_ext_key_usage, use));
  LH_RETURN_IF_ERROR(SetExtension(certificate, issuer, NID_authority_key_identifier, "keyid"));
  LH_RETURN_IF_ERROR(AddSubjectAltNames(certificate, options));
  if (X509_sign(certificate, ca.key.get(), EVP_sha256()) <= 0) return OpensslFailed("sign");
  LH_RETURN_IF_ERROR(KeepIssued(directory, certificate));
  return WriteDraft(absl::StrCat(directory, "/", options.name), draft);
}

absl::StatusOr<size_t> RevokeCertificates(const std::string& directory, const std::string& which) {
  LH_ASSIGN_OR_RETURN(const Ca ca, OpenCa(directory));
  std::vector<CertificatePtr> certificates;
  if (IsName(which) && !absl::EndsWith(which, ".crt")) {
    LH_ASSIGN_OR_RETURN(certificates, IssuedFor(directory, which));
    if (certificates.empty()) {
      return absl::NotFoundError(
          absl::StrCat("the CA in ", directory, " has issued no certificate for ", which));
    }
  } else {
    LH_ASSIGN_OR_RETURN(CertificatePtr certificate, OpenCertificate(which));
    certificates.push_back(std::move(certificate));
  }
  LH_ASSIGN_OR_RETURN(const CrlPtr crl, OpenCrl(directory, ca));
  for (const CertificatePtr& certificate : certificates) {
    if (X509_verify(certificate.get(), ca.key.get()) != 1) {
      ERR_clear_error();
      return absl::InvalidArgumentError(
          absl::StrCat(which, " is not a certificate of the CA in ", directory));
    }
    LH_RETURN_IF_ERROR(AddToCrl(certificate.get(), crl.get()));
  }
  LH_RETURN_IF_ERROR(SignAndWriteCrl(directory, ca, crl.get()));
  return certificates.size();
}

}  // namespace longhaul
