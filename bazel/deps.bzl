"""All external repositories of the build. None of them is downloaded."""

load("//bazel:bazel4_compat.bzl", "bazel4_compat")
load("//third_party:pkg_config.bzl", "system_deps")

# Maps each target in @sysdeps to what it is made of: pkg-config modules (with an
# optional version bound), other targets of @sysdeps (":name"), and flags for
# libraries without a .pc file. No module stands here twice, because pkg-config
# takes seconds for Abseil.
SYSTEM_LIBS = {
    "absl": [
        "absl_flat_hash_map",
        "absl_statusor",
        "absl_str_format",
        "absl_synchronization",
        "absl_time",
    ],
    "absl_flags": [
        "absl_flags_parse",
        "absl_flags_usage",
    ],
    "absl_symbolize": [
        "absl_failure_signal_handler",
        "absl_symbolize",
    ],
    "crypto": ["libcrypto"],
    "ssl": ["libssl"],
    "httplib": ["cpp-httplib"],
    "benchmark": ["benchmark"],
    "gmock": ["gmock", "gtest"],
    "grpcpp": ["grpc++ >= 1.51", ":protobuf"],
    "grpcpp_reflection": ["-lgrpc++_reflection", ":grpcpp"],
    "gtest_main": ["gtest_main", "gtest"],
    "liburing": ["liburing >= 2.3"],
    "prometheus": ["prometheus-cpp-pull"],
    "protobuf": ["protobuf >= 3.21"],
    "sqlite3": ["sqlite3"],
    "tcmalloc": ["libtcmalloc_minimal"],
    "xxhash": ["libxxhash"],
}

SYSTEM_TOOLS = ["protoc", "grpc_cpp_plugin"]

def declare_system_deps(bazel4):
    system_deps(
        name = "sysdeps",
        bazel4 = bazel4,
        libs = SYSTEM_LIBS,
        tools = SYSTEM_TOOLS,
    )

def longhaul_dependencies():
    declare_system_deps(bazel4 = bazel4_compat())
