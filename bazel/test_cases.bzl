"""The source of several tests that differ in their arguments or environment only.

Such a source is compiled once. Each of the tests is a cc_test without srcs:

    cc_test_cases(name = "lane_cases", srcs = ["lane_test.cc"], deps = [...])
    cc_test(name = "lane_test", deps = [":lane_cases"])
    cc_test(name = "lane_sealed_test", env = {...}, deps = [":lane_cases"])
"""

load("@rules_cc//cc:defs.bzl", "cc_library")

def cc_test_cases(name, srcs, deps):
    cc_library(
        name = name,
        testonly = True,
        srcs = srcs,
        # Nothing names the cases; they register themselves. Or main() is among them.
        alwayslink = True,
        # Otherwise a build of all targets compiles them once more, for a shared object that nobody uses.
        linkstatic = True,
        visibility = ["//visibility:private"],
        deps = deps + ["//bazel:sanitizer_defaults"],
    )
