// Tests certificates, the files that hold them, and gRPC with them. lhctl ca makes the
// certificates.
#include <grpcpp/grpcpp.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "base/log.h"
#include "base/tls/certificate.h"
#include "base/tls/openssl.h"
#include "base/tls/tls_files.h"
#include "base/unique_fd.h"
#include "coordinator/grpc/connection.h"
#include "coordinator/grpc/front.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/control/grpc/credentials.h"
#include "proto/control/grpc/support.h"
#include "proto/longhaul/v1/admin.grpc.pb.h"
#include "tools/lhctl/ca.h"

namespace longhaul {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using Change = tls::Files::Change;

std::string Read(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

void Write(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::trunc) << text;
}

// A CA in a directory of its own.
class Ca {
 public:
  explicit Ca(const std::string& name)
      : directory_(::testing::TempDir() + "/" + name + "-" +
                   ::testing::UnitTest::GetInstance()->current_test_info()->name()) {
    std::filesystem::remove_all(directory_);
    EXPECT_TRUE(InitCa(directory_, 30).ok());
  }

  std::string Path(const std::string& file) const { return directory_ + "/" + file; }
  std::string Pem(const std::string& file) const { return Read(Path(file)); }
  const std::string& directory() const { return directory_; }

  void Issue(const std::string& name, const std::string& role, const std::string& run = "",
             std::vector<std::string> hosts = {}) const {
    const absl::Status issued = IssueCertificate(directory_, {name, role, run, hosts, 10});
    EXPECT_TRUE(issued.ok()) << issued;
  }
  // Moves the time in which the certificate is valid. It keeps its key.
  void Shift(const std::string& name, int64_t begin_s, int64_t end_s) const {
    const tls::CertificatePtr certificate =
        tls::ReadCertificate(tls::Reader(Pem(name + ".crt")).get());
    ASN1_TIME_set(X509_getm_notBefore(certificate.get()), time(nullptr) + begin_s);
    ASN1_TIME_set(X509_getm_notAfter(certificate.get()), time(nullptr) + end_s);
    X509_sign(certificate.get(), tls::ReadKey(Pem("ca.key")).get(), EVP_sha256());
    const tls::BioPtr bio(BIO_new_file(Path(name + ".crt").c_str(), "w"));
    PEM_write_bio_X509(bio.get(), certificate.get());
  }

  tls::Paths Files(const std::string& name) const {
    return {Path(name + ".crt"), Path(name + ".key"), Path("ca.crt"), Path("crl.pem")};
  }
  std::shared_ptr<const tls::Trust> Trust() const {
    auto trust = tls::Trust::Make(Pem("ca.crt"), Pem("crl.pem"));
    EXPECT_TRUE(trust.ok()) << trust.status();
    return *trust;
  }
  tls::CertificateCheck Check(const std::string& name) const {
    return Trust()->Check(Pem(name + ".crt"), "");
  }

 private:
  const std::string directory_;
};

// Collects what is logged.
class Logged {
 public:
  Logged() {
    SetLogSink([this](std::string_view line) { text_ += std::string(line) + "\n"; });
  }
  ~Logged() { SetLogSink(nullptr); }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

// ------------------------------------------------------------------------------ lhctl ca

TEST(LhctlCa, CertificatesNameRoleRunAndHosts) {
  const Ca ca("ca");
  ca.Issue("worker", "trainer", "demo");
  const auto identity = tls::SubjectOf(ca.Pem("worker.crt"));
  ASSERT_TRUE(identity.ok());
  EXPECT_EQ(identity->name, "worker");
  EXPECT_EQ(identity->role, "trainer");
  EXPECT_EQ(identity->run, "demo");
  EXPECT_EQ(identity->fingerprint.size(), 64u);
  ca.Issue("anywhere", "trainer");
  EXPECT_EQ(tls::SubjectOf(ca.Pem("anywhere.crt"))->run, tls::kAllRuns);
  ca.Issue("server", "coordinator", "", {"example.org", "10.0.0.5", "fd00::5"});
  const tls::CertificatePtr server = tls::ReadCertificate(tls::Reader(ca.Pem("server.crt")).get());
  EXPECT_EQ(X509_check_host(server.get(), "example.org", 0, 0, nullptr), 1);
  EXPECT_EQ(X509_check_ip_asc(server.get(), "10.0.0.5", 0), 1);
  EXPECT_EQ(X509_check_ip_asc(server.get(), "fd00::5", 0), 1);
  EXPECT_EQ(X509_check_ip_asc(server.get(), "10.0.0.6", 0), 0);
}

TEST(LhctlCa, KeysAreForTheirOwnerAlone) {
  const Ca ca("ca");
  ca.Issue("worker", "trainer");
  const auto mode = [&](const std::string& path) {
    struct stat status {};
    EXPECT_EQ(stat(path.c_str(), &status), 0);
    return status.st_mode & 0777;
  };
  EXPECT_EQ(mode(ca.directory()), 0700u);
  EXPECT_EQ(mode(ca.Path("ca.key")), 0600u);
  EXPECT_EQ(mode(ca.Path("worker.key")), 0600u);
}

TEST(LhctlCa, RefusesWhatWouldMakeAUselessCertificate) {
  const Ca ca("ca");
  const auto refused = [&](IssueOptions options) {
    const absl::Status status = IssueCertificate(ca.directory(), options);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_THAT(refused({"../x", "trainer", "", {}, 1}), HasSubstr("--name"));
  EXPECT_THAT(refused({"ca", "trainer", "", {}, 1}), HasSubstr("--name"));
  EXPECT_THAT(refused({"x", "admin", "", {}, 1}), HasSubstr("--role"));
  EXPECT_THAT(refused({"x", "trainer", "a b", {}, 1}), HasSubstr("--run"));
  EXPECT_THAT(refused({"x", "trainer", "", {"h"}, 1}), HasSubstr("--host"));
  EXPECT_THAT(refused({"x", "coordinator", "", {}, 1}), HasSubstr("--host"));
  EXPECT_THAT(refused({"x", "coordinator", "", {"h:29600"}, 1}), HasSubstr("without a port"));
  EXPECT_THAT(refused({"x", "coordinator", "", {"h,URI:longhaul:role:operator"}, 1}),
              HasSubstr("--host"));
  EXPECT_THAT(refused({"x", "trainer", "", {}, 0}), HasSubstr("--days"));
  EXPECT_EQ(InitCa(ca.directory(), 1).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(IssueCertificate("/nonexistent", {"x", "trainer", "", {}, 1}).code(),
            absl::StatusCode::kNotFound);
}

TEST(LhctlCa, RevokesItsOwnCertificatesOnly) {
  const Ca ca("ca");
  const Ca other("other");
  ca.Issue("a", "trainer");
  ca.Issue("b", "trainer");
  ca.Issue("c", "trainer");
  const std::string replaced = ca.Pem("a.crt");
  ca.Issue("a", "trainer");
  EXPECT_EQ(*RevokeCertificates(ca.directory(), "a"), 2u);
  EXPECT_EQ(*RevokeCertificates(ca.directory(), "a"), 2u);
  EXPECT_EQ(ca.Trust()->Check(replaced, "").refusal, tls::CertificateRefusal::kRevoked);
  EXPECT_TRUE(RevokeCertificates(ca.directory(), ca.Path("b.crt")).ok());
  EXPECT_EQ(ca.Check("a").refusal, tls::CertificateRefusal::kRevoked);
  EXPECT_EQ(ca.Check("b").refusal, tls::CertificateRefusal::kRevoked);
  EXPECT_TRUE(ca.Check("c").ok);
  other.Issue("x", "trainer");
  EXPECT_EQ(RevokeCertificates(ca.directory(), other.Path("x.crt")).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(RevokeCertificates(ca.directory(), "nobody").status().code(),
            absl::StatusCode::kNotFound);
}

// ------------------------------------------------------------------------------ certificates

TEST(Trust, TellsReasonsApart) {
  const Ca ca("ca");
  const Ca other("other");
  ca.Issue("good", "operator");
  EXPECT_TRUE(ca.Check("good").ok);
  EXPECT_EQ(ca.Check("good").identity.role, "operator");
  ca.Issue("late", "trainer");
  ca.Shift("late", -100, -10);
  EXPECT_EQ(ca.Check("late").refusal, tls::CertificateRefusal::kExpired);
  EXPECT_THAT(ca.Check("late").why, HasSubstr("your certificate expired at 20"));
  ca.Issue("early", "trainer");
  ca.Shift("early", 100, 1000);
  EXPECT_EQ(ca.Check("early").refusal, tls::CertificateRefusal::kExpired);
  other.Issue("stranger", "operator");
  EXPECT_EQ(ca.Trust()->Check(other.Pem("stranger.crt"), "").refusal,
            tls::CertificateRefusal::kUntrusted);
  EXPECT_EQ(ca.Trust()->Check(other.Pem("stranger.crt"), other.Pem("ca.crt")).refusal,
            tls::CertificateRefusal::kUntrusted);
  // The certificate of a server is not for clients.
  ca.Issue("server", "coordinator", "", {"h"});
  EXPECT_EQ(ca.Check("server").refusal, tls::CertificateRefusal::kUntrusted);
  EXPECT_EQ(ca.Trust()->Check("garbage", "").refusal, tls::CertificateRefusal::kMalformed);
  EXPECT_EQ(ca.Trust()->Check("", "").refusal, tls::CertificateRefusal::kMalformed);
  std::string chain;
  for (int i = 0; i < 9; ++i) chain += ca.Pem("ca.crt");
  EXPECT_EQ(ca.Trust()->Check(ca.Pem("good.crt"), chain).refusal,
            tls::CertificateRefusal::kMalformed);
}

TEST(Trust, TakesOnlyFilesThatItUnderstands) {
  const Ca ca("ca");
  const Ca other("other");
  EXPECT_FALSE(tls::Trust::Make("", "").ok());
  EXPECT_FALSE(tls::Trust::Make("garbage", "").ok());
  const std::string pem = ca.Pem("ca.crt");
  EXPECT_FALSE(tls::Trust::Make(pem.substr(0, pem.size() / 2), "").ok());
  EXPECT_FALSE(tls::Trust::Make(pem + pem.substr(0, pem.size() / 2), "").ok());
  EXPECT_TRUE(tls::Trust::Make(pem + other.Pem("ca.crt"), "").ok());
  EXPECT_FALSE(tls::Trust::Make(pem, "garbage").ok());
  EXPECT_FALSE(tls::Trust::Make(pem, other.Pem("crl.pem")).ok());
}

TEST(Trust, ACaWithoutACrlHasRevokedNothing) {
  const Ca ca("ca");
  const Ca other("other");
  ca.Issue("a", "trainer");
  other.Issue("b", "trainer");
  const auto both = tls::Trust::Make(ca.Pem("ca.crt") + other.Pem("ca.crt"), ca.Pem("crl.pem"));
  ASSERT_TRUE(both.ok());
  EXPECT_TRUE((*both)->Check(ca.Pem("a.crt"), "").ok);
  EXPECT_TRUE((*both)->Check(other.Pem("b.crt"), "").ok);
}

// Signs the CRL anew, with these times from now on.
void DateCrl(const Ca& ca, int64_t begin_s, int64_t end_s) {
  const tls::CrlPtr crl(
      PEM_read_bio_X509_CRL(tls::Reader(ca.Pem("crl.pem")).get(), nullptr, nullptr, nullptr));
  ASN1_TIME* const at = ASN1_TIME_set(nullptr, time(nullptr) + begin_s);
  X509_CRL_set1_lastUpdate(crl.get(), at);
  ASN1_TIME_set(at, time(nullptr) + end_s);
  X509_CRL_set1_nextUpdate(crl.get(), at);
  ASN1_TIME_free(at);
  X509_CRL_sign(crl.get(), tls::ReadKey(ca.Pem("ca.key")).get(), EVP_sha256());
  const tls::BioPtr bio(BIO_new_file(ca.Path("crl.pem").c_str(), "w"));
  PEM_write_bio_X509_CRL(bio.get(), crl.get());
  BIO_flush(bio.get());
}

TEST(Trust, ACrlCountsAtAnyTime) {
  const Ca ca("ca");
  ca.Issue("a", "trainer");
  ca.Issue("b", "trainer");
  ASSERT_TRUE(RevokeCertificates(ca.directory(), "a").ok());
  for (const int64_t begin_s : {-200, 200}) {
    DateCrl(ca, begin_s, begin_s + 100);
    EXPECT_EQ(ca.Trust()->crl_is_old(), begin_s < 0);
    EXPECT_EQ(ca.Check("a").refusal, tls::CertificateRefusal::kRevoked);
    EXPECT_TRUE(ca.Check("b").ok);
  }
}

// Issues the certificate of a CA anew, by another CA or by itself, without a limit of the chain.
void IssueCa(const Ca& ca, const Ca& issuer) {
  const tls::CertificatePtr certificate = tls::ReadCertificate(tls::Reader(ca.Pem("ca.crt")).get());
  const tls::CertificatePtr by = tls::ReadCertificate(tls::Reader(issuer.Pem("ca.crt")).get());
  const int place = X509_get_ext_by_NID(certificate.get(), NID_basic_constraints, -1);
  X509_EXTENSION_free(X509_delete_ext(certificate.get(), place));
  BASIC_CONSTRAINTS* const constraints = BASIC_CONSTRAINTS_new();
  constraints->ca = 0xff;
  X509_add1_ext_i2d(certificate.get(), NID_basic_constraints, constraints, 1, X509V3_ADD_DEFAULT);
  BASIC_CONSTRAINTS_free(constraints);
  X509_set_issuer_name(certificate.get(), X509_get_subject_name(by.get()));
  X509_sign(certificate.get(), tls::ReadKey(issuer.Pem("ca.key")).get(), EVP_sha256());
  const tls::BioPtr bio(BIO_new_file(ca.Path("ca.crt").c_str(), "w"));
  PEM_write_bio_X509(bio.get(), certificate.get());
  BIO_flush(bio.get());
}

TEST(Trust, ARevokedCaInTheMiddleIsRefused) {
  const Ca root("root");
  const Ca middle("middle");
  IssueCa(root, root);
  IssueCa(middle, root);
  middle.Issue("leaf", "trainer");
  EXPECT_TRUE(root.Trust()->Check(middle.Pem("leaf.crt"), middle.Pem("ca.crt")).ok);
  ASSERT_TRUE(RevokeCertificates(root.directory(), middle.Path("ca.crt")).ok());
  EXPECT_EQ(root.Trust()->Check(middle.Pem("leaf.crt"), middle.Pem("ca.crt")).refusal,
            tls::CertificateRefusal::kRevoked);
}

// ------------------------------------------------------------------------------ files

TEST(TlsFiles, ACrlIsNotLostWhileItsCaIsTrusted) {
  const Ca ca("ca");
  const Ca other("other");
  for (const char* name : {"a", "b", "c"}) ca.Issue(name, "trainer");
  const std::string none = ca.Pem("crl.pem");
  ASSERT_TRUE(RevokeCertificates(ca.directory(), "a").ok());
  const std::string one = ca.Pem("crl.pem");
  ASSERT_TRUE(RevokeCertificates(ca.directory(), "b").ok());
  const std::string two = ca.Pem("crl.pem");
  const std::string crl = ca.Path("crl-in-use.pem");
  const std::string cas = ca.Path("cas-in-use.pem");
  const tls::Paths paths{"", "", cas, crl};
  Write(cas, ca.Pem("ca.crt"));
  Write(crl, "");
  EXPECT_THAT(std::string(tls::Files::Open(paths).status().message()), HasSubstr("is empty"));
  Write(crl, two);
  std::vector<Change> changes;
  const auto files =
      tls::Files::Open(paths, {[&changes](Change change) { changes.push_back(change); }});
  ASSERT_TRUE(files.ok()) << files.status();
  const auto takes = [&](const std::string& text) {
    Write(crl, text);
    for (int look = 0; look < 3; ++look) (*files)->Refresh();
    return (*files)->Current()->crl == text;
  };
  const std::string half = two.substr(0, two.size() / 2);
  for (const std::string& less : {std::string(), half, std::string("# nothing\n"), none, one}) {
    changes.clear();
    EXPECT_FALSE(takes(less)) << less;
    EXPECT_TRUE(takes(two));
    EXPECT_EQ(changes, std::vector({Change::kRefused, Change::kRestored}));
  }
  Write(cas, ca.Pem("ca.crt") + other.Pem("ca.crt"));
  EXPECT_FALSE(takes(other.Pem("crl.pem"))) << "the CRL of another CA";
  EXPECT_TRUE(takes(other.Pem("crl.pem") + two));
  EXPECT_FALSE(takes(two));
  // A later list may take certificates off.
  Write(ca.Path("crl.pem"), one);
  DateCrl(ca, 100, 200);
  EXPECT_TRUE(takes(other.Pem("crl.pem") + ca.Pem("crl.pem")));
  // What nobody trusts any more needs no CRL.
  Write(cas, other.Pem("ca.crt"));
  EXPECT_TRUE(takes(other.Pem("crl.pem")));
}

TEST(TlsFiles, NewContentsAreCheckedBeforeTheyAreUsed) {
  const Ca ca("ca");
  const Ca other("other");
  ca.Issue("a", "coordinator", "", {"h"});
  ca.Issue("b", "coordinator", "", {"h"});
  other.Issue("c", "coordinator", "", {"h"});
  const std::string cert = ca.Pem("a.crt");
  const std::string key = ca.Pem("a.key");
  std::vector<Change> changes;
  Logged log;
  const auto files =
      tls::Files::Open(ca.Files("a"), {[&](Change change) { changes.push_back(change); }});
  ASSERT_TRUE(files.ok()) << files.status();
  const auto look = [&] {
    for (int i = 0; i < 3; ++i) (*files)->Refresh();
    return (*files)->Current();
  };
  EXPECT_EQ(look()->cert, cert);
  EXPECT_TRUE(changes.empty());
  // The certificate comes before its key: nothing is said, and the old pair stays.
  Write(ca.Path("a.crt"), ca.Pem("b.crt"));
  (*files)->Refresh();
  EXPECT_TRUE(changes.empty());
  EXPECT_EQ((*files)->Current()->cert, cert);
  Write(ca.Path("a.key"), ca.Pem("b.key"));
  EXPECT_EQ(look()->cert, ca.Pem("b.crt"));
  EXPECT_THAT(changes, ElementsAre(Change::kUsed));
  // Broken ones: each is reported once, and the good ones stay.
  const std::string good = ca.Pem("b.crt");
  for (const std::string& broken : {std::string(), good.substr(0, good.size() / 2), cert,
                                    std::string("garbage"), other.Pem("c.crt")}) {
    changes.clear();
    Write(ca.Path("a.crt"), broken);
    EXPECT_EQ(look()->cert, good);
    EXPECT_THAT(changes, ElementsAre(Change::kRefused));
  }
  Write(ca.Path("a.crt"), good);
  for (const char* file : {"ca.crt", "crl.pem", "a.key"}) {
    changes.clear();
    const std::string before = ca.Pem(file);
    std::filesystem::remove(ca.Path(file));
    EXPECT_EQ(look()->cert, good);
    EXPECT_THAT(changes, ElementsAre(Change::kRefused)) << file;
    Write(ca.Path(file), before);
  }
  // An expired certificate is broken, too.
  changes.clear();
  ca.Issue("a", "coordinator", "", {"h"});
  ca.Shift("a", -100, -10);
  EXPECT_EQ(look()->cert, good);
  EXPECT_THAT(changes, ElementsAre(Change::kRefused));
  EXPECT_THAT(log.text(), HasSubstr("the certificate expired at"));
  for (const std::string& secret : {key, ca.Pem("a.key"), ca.Pem("b.key")}) {
    EXPECT_THAT(log.text(), Not(HasSubstr(secret.substr(30, 40))));
  }
}

// Each of these is good in itself, and would cut the program off.
TEST(TlsFiles, ACertificateThatLacksANameOfTheOldOneIsRefused) {
  const Ca ca("ca");
  ca.Issue("a", "coordinator", "", {"one.example", "10.0.0.5"});
  ca.Issue("more", "coordinator", "", {"one.example", "10.0.0.5", "two.example"});
  ca.Issue("renamed", "coordinator", "", {"two.example", "10.0.0.5"});
  ca.Issue("moved", "coordinator", "", {"one.example", "two.example", "10.0.0.6"});
  ca.Issue("w", "trainer", "demo");
  ca.Issue("w_other", "trainer", "other");
  Logged log;
  std::vector<Change> changes;
  const auto replace = [&](const std::string& name, const std::string& by) {
    const auto files =
        tls::Files::Open(ca.Files(name), {[&](Change change) { changes.push_back(change); }});
    EXPECT_TRUE(files.ok()) << files.status();
    for (const char* file : {".crt", ".key"}) Write(ca.Path(name + file), ca.Pem(by + file));
    for (int i = 0; i < 3; ++i) (*files)->Refresh();
    return (*files)->Current()->cert == ca.Pem(by + ".crt");
  };
  EXPECT_TRUE(replace("a", "more"));
  EXPECT_FALSE(replace("more", "renamed"));
  EXPECT_THAT(log.text(), HasSubstr("lacks names of the one in use (DNS:one.example)"));
  ca.Issue("a", "coordinator", "", {"one.example", "10.0.0.5"});
  EXPECT_FALSE(replace("a", "moved"));
  EXPECT_THAT(log.text(), HasSubstr("(IP Address:10.0.0.5)"));
  EXPECT_FALSE(replace("w", "w_other"));  // a client's: its run
  EXPECT_THAT(log.text(), HasSubstr("(URI:longhaul:run:demo)"));
  EXPECT_THAT(changes,
              ElementsAre(Change::kUsed, Change::kRefused, Change::kRefused, Change::kRefused));
}

TEST(TlsFiles, ACertificateThatFailsAHandshakeWithOneselfIsRefused) {
  const Ca ca("ca");
  const Ca other("other");
  for (const Ca* issuer : {&ca, &other}) {
    issuer->Issue("server", "coordinator", "", {"h"});
    issuer->Issue("client", "trainer");
  }
  Logged log;
  for (const std::string name : {"server", "client"}) {
    const auto files = tls::Files::Open(ca.Files(name));
    ASSERT_TRUE(files.ok()) << files.status();
    const std::string good = ca.Pem(name + ".crt");
    const auto look = [&] {
      for (int i = 0; i < 3; ++i) (*files)->Refresh();
      return (*files)->Current()->cert == other.Pem(name + ".crt");
    };
    for (const char* file : {".crt", ".key"}) Write(ca.Path(name + file), other.Pem(name + file));
    EXPECT_FALSE(look()) << name;
    EXPECT_THAT(log.text(), HasSubstr("fails a handshake of this program with itself"));
    EXPECT_EQ((*files)->Current()->cert, good);
    // With the CA of both in place, in any order, the new pair is taken.
    const std::string old_ca = ca.Pem("ca.crt");
    Write(ca.Path("ca.crt"), old_ca + other.Pem("ca.crt"));
    EXPECT_TRUE(look()) << name;
    Write(ca.Path("ca.crt"), old_ca);
  }
  // A pair that never belonged together: the coordinator's certificate is from a public CA.
  other.Issue("next", "coordinator", "", {"h"});
  const auto mixed =
      tls::Files::Open({other.Path("server.crt"), other.Path("server.key"), ca.Path("ca.crt"), ""});
  ASSERT_TRUE(mixed.ok()) << mixed.status();
  for (const char* file : {".crt", ".key"}) {
    Write(other.Path(std::string("server") + file), other.Pem(std::string("next") + file));
  }
  (*mixed)->Refresh();
  EXPECT_EQ((*mixed)->Current()->cert, other.Pem("next.crt"));
}

TEST(TlsFiles, OpenNamesTheFileThatIsWrong) {
  const Ca ca("ca");
  ca.Issue("a", "trainer");
  ca.Issue("b", "trainer");
  const auto error = [](const tls::Paths& paths) {
    return std::string(tls::Files::Open(paths).status().message());
  };
  EXPECT_THAT(error({ca.Path("none.crt"), ca.Path("a.key"), "", ""}), HasSubstr("none.crt"));
  EXPECT_THAT(error({ca.Path("a.crt"), ca.Path("b.key"), "", ""}),
              HasSubstr("the key is not the key of the certificate"));
  EXPECT_THAT(error({ca.Path("a.crt"), ca.Path("a.crt"), "", ""}),
              HasSubstr("the key cannot be read"));
  EXPECT_THAT(error({"", "", ca.Path("a.key"), ""}), HasSubstr("no certificate in PEM form"));
}

// ------------------------------------------------------------------------------ gRPC

class Service final : public v1::Admin::Service {
 public:
  grpc::Status ListRuns(grpc::ServerContext* context, const v1::ListRunsRequest*,
                        v1::ListRunsResponse*) override {
    const auto connection = coordinator::ConnectionOf(context->peer());
    if (const std::optional<tls::CertificateCheck> refusal = connection->Refusal()) {
      return {grpc::StatusCode::UNAUTHENTICATED, refusal->why};
    }
    const std::string& pem = connection->certificate();
    callers.push_back(pem.empty() ? tls::Subject() : *tls::SubjectOf(pem));
    return grpc::Status::OK;
  }
  std::vector<tls::Subject> callers;
};

class TlsServer {
 public:
  TlsServer(const Ca& ca, const std::string& name) {
    control::InitGrpc();
    files = *tls::Files::Open(ca.Files(name));
    seen = std::make_shared<tls::SeenCertificates>(files);
    grpc::ServerBuilder builder;
    acceptor = builder.experimental().AddExternalConnectionAcceptor(
        grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
        grpc::InsecureServerCredentials());
    builder.RegisterService(&service);
    server = builder.BuildAndStart();
    coordinator::Front::Options options;
    options.listen = {"127.0.0.1", 0};
    options.files = files;
    options.seen = seen;
    options.refused = [this](const tls::CertificateCheck& v) { refused = v; };
    options.pass = [this](UniqueFd fd) {
      grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
      connection.fd = fd.Release();
      acceptor->HandleNewConnection(&connection);
    };
    front = *coordinator::Front::Start(std::move(options));
    address = "127.0.0.1:" + std::to_string(front->port());
  }
  ~TlsServer() {
    server->Shutdown();
    front = nullptr;
  }

  // Calls over a new connection.
  grpc::Status Call(const tls::Material& material) const {
    grpc::ChannelArguments args;
    args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    const auto channel =
        grpc::CreateCustomChannel(address, control::MakeChannelCredentials(material), args);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    v1::ListRunsResponse response;
    return v1::Admin::NewStub(channel)->ListRuns(&context, {}, &response);
  }

  std::shared_ptr<tls::Files> files;
  std::shared_ptr<tls::SeenCertificates> seen;
  Service service;
  tls::CertificateCheck refused;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor;
  std::unique_ptr<grpc::Server> server;
  std::unique_ptr<coordinator::Front> front;
  std::string address;
};

tls::Material Shown(const Ca& trusted, const Ca& ca, const std::string& name) {
  tls::Material material;
  material.ca = trusted.Pem("ca.crt");
  if (!name.empty()) {
    material.cert = ca.Pem(name + ".crt");
    material.key = ca.Pem(name + ".key");
  }
  return material;
}

TEST(TlsOnGrpc, CallersAreKnownByTheirCertificates) {
  const Ca ca("ca");
  const Ca other("other");
  ca.Issue("server", "coordinator", "", {"127.0.0.1"});
  ca.Issue("worker", "trainer", "demo");
  TlsServer server(ca, "server");
  EXPECT_TRUE(server.Call(Shown(ca, ca, "worker")).ok());
  ASSERT_EQ(server.service.callers.size(), 1u);
  EXPECT_EQ(server.service.callers[0].run, "demo");
  EXPECT_EQ(server.service.callers[0].fingerprint,
            tls::SubjectOf(ca.Pem("worker.crt"))->fingerprint);
  // Without a certificate the caller has no name.
  EXPECT_TRUE(server.Call(Shown(ca, ca, "")).ok());
  EXPECT_EQ(server.service.callers[1].fingerprint, "");
  // Those whose certificate is bad do not reach the service.
  ca.Shift("worker", -100, -10);
  EXPECT_EQ(server.Call(Shown(ca, ca, "worker")).error_code(), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(server.refused.refusal, tls::CertificateRefusal::kExpired);
  other.Issue("worker", "operator");
  EXPECT_THAT(server.Call(Shown(ca, other, "worker")).error_message(),
              HasSubstr("your certificate is not trusted"));
  EXPECT_EQ(server.service.callers.size(), 2u);
}

TEST(TlsOnGrpc, ClientsRefuseOtherServers) {
  const Ca ca("ca");
  const Ca other("other");
  ca.Issue("server", "coordinator", "", {"127.0.0.1"});
  ca.Issue("elsewhere", "coordinator", "", {"10.0.0.5", "example.org"});
  ca.Issue("host", "trainer");
  const auto refusal = [&](const std::string& name, const Ca& trusted) {
    const grpc::Status status = TlsServer(ca, name).Call(Shown(trusted, ca, ""));
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE) << status.error_message();
    return status.error_message() + control::TlsAdvice(status, true);
  };
  EXPECT_THAT(refusal("server", other), HasSubstr("no CA in --tls-ca has issued"));
  EXPECT_THAT(refusal("elsewhere", ca), HasSubstr("certificate is for other names"));
  // The certificate of a host cannot pose as a coordinator.
  EXPECT_THAT(refusal("host", ca), HasSubstr("certificate verify failed"));
  TlsServer running(ca, "server");
  EXPECT_TRUE(running.Call(Shown(ca, ca, "")).ok());
}

TEST(TlsOnGrpc, NewFilesAreUsedByTheNextHandshakeAndTheNextCall) {
  const Ca ca("ca");
  const Ca other("other");
  ca.Issue("server", "coordinator", "", {"127.0.0.1"});
  ca.Issue("worker", "trainer");
  other.Issue("server", "coordinator", "", {"127.0.0.1"});
  TlsServer server(ca, "server");
  EXPECT_TRUE(server.Call(Shown(ca, ca, "worker")).ok());
  const std::string fingerprint = server.service.callers[0].fingerprint;
  EXPECT_EQ(server.seen->WhyNot(fingerprint), "");
  EXPECT_EQ(server.seen->WhyNot("unknown"), "");
  ASSERT_TRUE(RevokeCertificates(ca.directory(), "worker").ok());
  server.files->Refresh();
  EXPECT_THAT(server.seen->WhyNot(fingerprint), HasSubstr("was revoked"));
  EXPECT_THAT(server.Call(Shown(ca, ca, "worker")).error_message(), HasSubstr("was revoked"));
  for (const char* file : {"server.crt", "server.key", "ca.crt", "crl.pem"}) {
    Write(ca.Path(file), other.Pem(file));
  }
  server.files->Refresh();
  const grpc::Status moved = server.Call(Shown(other, other, ""));
  EXPECT_TRUE(moved.ok()) << moved.error_message();
}

}  // namespace
}  // namespace longhaul
