#include "proto/control/grpc/credentials.h"

#include <grpc/grpc.h>
#include <grpc/grpc_security.h>

#include <utility>

#include "absl/strings/match.h"
#include "base/check.h"
#include "base/mutex.h"

namespace longhaul::control {
namespace {

std::string Property(const grpc_auth_context* context, const char* name) {
  grpc_auth_property_iterator it = grpc_auth_context_find_properties_by_name(context, name);
  const grpc_auth_property* property = grpc_auth_property_iterator_next(&it);
  return property == nullptr ? "" : std::string(property->value, property->value_length);
}

// What gRPC calls back.
class ServerTls {
 public:
  explicit ServerTls(ServerTlsOptions options) : options_(std::move(options)) {}

  // gRPC asks before each handshake, with a lock held: one handshake at a time.
  static grpc_ssl_certificate_config_reload_status Fetch(
      void* self, grpc_ssl_server_certificate_config** config) {
    return static_cast<ServerTls*>(self)->FetchConfig(config);
  }
  // gRPC asks before it hands a call to its service.
  static void Process(void* self, grpc_auth_context* context, const grpc_metadata*, size_t,
                      grpc_process_auth_metadata_done_cb done, void* user_data) {
    const auto [code, why] = static_cast<ServerTls*>(self)->CheckCall(context);
    done(user_data, nullptr, 0, nullptr, 0, code, code == GRPC_STATUS_OK ? nullptr : why.c_str());
  }
  static void Destroy(void* self) { delete static_cast<ServerTls*>(self); }

 private:
  grpc_ssl_certificate_config_reload_status FetchConfig(
      grpc_ssl_server_certificate_config** config) {
    std::shared_ptr<const tls::Material> material = options_.files->Current();
    MutexLock lock(&mutex_);
    if (material == fetched_) return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
    const grpc_ssl_pem_key_cert_pair pair{material->key.c_str(), material->cert.c_str()};
    // gRPC aborts if it gets no CAs of clients. Without --tls-ca it asks no client for a
    // certificate, and never uses them. So any certificate will do.
    const std::string& cas = material->ca.empty() ? material->cert : material->ca;
    *config = grpc_ssl_server_certificate_config_create(cas.c_str(), &pair, 1);
    fetched_ = std::move(material);
    return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
  }

  std::pair<grpc_status_code, std::string> CheckCall(const grpc_auth_context* context) const {
    const tls::CertificateCheck verdict = Judge(context);
    if (verdict.ok) return {GRPC_STATUS_OK, ""};
    if (options_.refused) options_.refused(verdict);
    return {GRPC_STATUS_UNAUTHENTICATED, verdict.why};
  }

  tls::CertificateCheck Judge(const grpc_auth_context* context) const {
    tls::CertificateCheck verdict;
    const std::string certificate = Property(context, GRPC_X509_PEM_CERT_PROPERTY_NAME);
    const std::shared_ptr<const tls::Material> material = options_.files->Current();
    if (certificate.empty() || material->trust == nullptr) {
      verdict.ok = true;
      return verdict;
    }
    const std::string chain = Property(context, GRPC_X509_PEM_CERT_CHAIN_PROPERTY_NAME);
    verdict = material->trust->Check(certificate, chain);
    if (verdict.ok && options_.seen) {
      options_.seen->Saw(verdict.identity.fingerprint, certificate, chain);
    }
    return verdict;
  }

  const ServerTlsOptions options_;
  Mutex mutex_;
  std::shared_ptr<const tls::Material> fetched_ ABSL_GUARDED_BY(mutex_);
};

// gRPC's C++ API cannot fetch certificates at each handshake, its C API can.
class Credentials final : public grpc::ServerCredentials {
 public:
  explicit Credentials(ServerTlsOptions options) {
    const bool asks = options.files->Current()->trust != nullptr;
    // gRPC's own object may live longer than this one. It deletes the state at its end.
    auto* state = new ServerTls(std::move(options));
    c_credentials_ = grpc_ssl_server_credentials_create_with_options(
        grpc_ssl_server_credentials_create_options_using_config_fetcher(
            asks ? GRPC_SSL_REQUEST_CLIENT_CERTIFICATE_BUT_DONT_VERIFY
                 : GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE,
            ServerTls::Fetch, state));
    LH_CHECK(c_credentials_ != nullptr);
    grpc_server_credentials_set_auth_metadata_processor(
        c_credentials_, {ServerTls::Process, ServerTls::Destroy, state});
  }
  ~Credentials() override { grpc_server_credentials_release(c_credentials_); }

  void SetAuthMetadataProcessor(const std::shared_ptr<grpc::AuthMetadataProcessor>&) override {
    LH_CHECK(false);  // the place is taken
  }

 private:
  int AddPortToServer(const std::string& address, grpc_server* server) override {
    return grpc_server_add_http2_port(server, address.c_str(), c_credentials_);
  }

  grpc_server_credentials* c_credentials_ = nullptr;
};

}  // namespace

std::shared_ptr<grpc::ServerCredentials> MakeServerCredentials(ServerTlsOptions options) {
  return std::make_shared<Credentials>(std::move(options));
}

std::shared_ptr<grpc::ChannelCredentials> MakeChannelCredentials(const tls::Material& material) {
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = material.ca;
  options.pem_private_key = material.key;
  options.pem_cert_chain = material.cert;
  return grpc::SslCredentials(options);
}

std::shared_ptr<grpc::ChannelCredentials> MakeChannelCredentials(tls::Files* files) {
  if (files == nullptr) return grpc::InsecureChannelCredentials();
  files->Refresh();
  return MakeChannelCredentials(*files->Current());
}

ServerFault ServerFaultOf(const grpc::Status& status) {
  if (status.error_code() != grpc::StatusCode::UNAVAILABLE) return ServerFault::kNone;
  const std::string& text = status.error_message();
  if (absl::StrContains(text, "not in peer certificate")) return ServerFault::kOtherNames;
  if (absl::StrContains(text, "certificate verify failed")) return ServerFault::kUntrusted;
  return ServerFault::kNone;
}

std::string TlsAdvice(const grpc::Status& status, bool tls) {
  if (status.error_code() != grpc::StatusCode::UNAVAILABLE) return "";
  const std::string& text = status.error_message();
  if (!tls) {
    // Through a tunnel, this end may call an address of loopback.
    return absl::StrContains(text, "Socket closed") || absl::StrContains(text, "reset by peer")
               ? "; if the coordinator speaks TLS there, give --tls-ca"
               : "";
  }
  const ServerFault fault = ServerFaultOf(status);
  if (fault == ServerFault::kOtherNames) {
    return "; the coordinator's certificate is for other names: dial one of these, or issue it "
           "anew with --host";
  }
  if (fault == ServerFault::kUntrusted) {
    return "; no CA in --tls-ca has issued the coordinator's certificate, or it has expired";
  }
  if (absl::StrContains(text, "wrong version number")) {
    return "; the coordinator speaks in clear there: start it with --tls-cert and --tls-key";
  }
  return "";
}

}  // namespace longhaul::control
