// Owners of OpenSSL's objects, and OpenSSL's last error as text. For files of this library and
// lhctl ca only.
#pragma once

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include <memory>
#include <string>

namespace longhaul::tls {

template <auto kFree>
struct Freer {
  template <class T>
  void operator()(T* object) const {
    kFree(object);
  }
};

using BioPtr = std::unique_ptr<BIO, Freer<BIO_free>>;
using CertificatePtr = std::unique_ptr<X509, Freer<X509_free>>;
using CrlPtr = std::unique_ptr<X509_CRL, Freer<X509_CRL_free>>;
using KeyPtr = std::unique_ptr<EVP_PKEY, Freer<EVP_PKEY_free>>;
using StorePtr = std::unique_ptr<X509_STORE, Freer<X509_STORE_free>>;
using StoreContextPtr = std::unique_ptr<X509_STORE_CTX, Freer<X509_STORE_CTX_free>>;
using NamesPtr = std::unique_ptr<GENERAL_NAMES, Freer<GENERAL_NAMES_free>>;
struct FreeStack {
  void operator()(STACK_OF(X509) * stack) const { sk_X509_pop_free(stack, X509_free); }
};
using StackPtr = std::unique_ptr<STACK_OF(X509), FreeStack>;

// Reads from memory. `text` must outlive the result.
inline BioPtr Reader(const std::string& text) {
  return BioPtr(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

// What was written to a BIO in memory.
inline std::string Written(BIO* bio) {
  char* text = nullptr;
  const long size = BIO_get_mem_data(bio, &text);
  return std::string(text, static_cast<size_t>(size > 0 ? size : 0));
}

// An encrypted key must never make a daemon ask for a password.
inline int NoPassword(char*, int, int, void*) { return -1; }

inline CertificatePtr ReadCertificate(BIO* bio) {
  return CertificatePtr(PEM_read_bio_X509(bio, nullptr, NoPassword, nullptr));
}

inline KeyPtr ReadKey(const std::string& pem) {
  return KeyPtr(PEM_read_bio_PrivateKey(Reader(pem).get(), nullptr, NoPassword, nullptr));
}

// Whether reading stopped because nothing more came. Clears OpenSSL's errors.
inline bool AtEnd() {
  const unsigned long error = ERR_peek_last_error();
  ERR_clear_error();
  return ERR_GET_LIB(error) == ERR_LIB_PEM && ERR_GET_REASON(error) == PEM_R_NO_START_LINE;
}

// The last error of this thread. Clears OpenSSL's errors.
inline std::string LastError() {
  const char* text = ERR_reason_error_string(ERR_peek_last_error());
  ERR_clear_error();
  return text != nullptr ? text : "unknown error of OpenSSL";
}

}  // namespace longhaul::tls
