"""The C library, called through ctypes. The contracts are in client/include/longhaul/longhaul.h."""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import sys
import time
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_double, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

from ._version import __version__

OK = 0
FAILED_PRECONDITION = 2
ABORTED = 4
DEADLINE_EXCEEDED = 5

FOREVER = -1

# By name, as numpy and torch name them; the values are those of lh_dtype.
DTYPES = {
    "uint8": 0,
    "int8": 1,
    "uint16": 2,
    "int16": 3,
    "uint32": 4,
    "int32": 5,
    "uint64": 6,
    "int64": 7,
    "float16": 8,
    "bfloat16": 9,
    "float32": 10,
    "float64": 11,
    "bool": 12,
    "float8_e4m3fn": 13,
    "float8_e5m2": 14,
}
# The dtypes that a tensor of a state may have.
STATE_DTYPES = {name: code for name, code in DTYPES.items() if not name.startswith("float8")}
ITEM_BYTES = {
    name: 1 if name in ("bool", "int8", "uint8") else int(name.lstrip("abcdefghijklmnopqrstuvwxyz")) // 8
    for name in STATE_DTYPES
}
STATE_TENSORS_MAX = 65536
STATE_NAME_BYTES_MAX = 256
STATE_DIMS_MAX = 8
ALLOW_UNEQUAL = 1
STAGED = 2
REVISION_MAX = 1 << 63
NO_REVISION = (1 << 64) - 1
MEMBERS_MAX = 1024
JOIN_MODES = {"blocking": 0, "background": 1}
STRATEGIES = {"popular": 1, "receive": 2, "send": 3}
HASH_MODES = {"always": 0, "on_change": 1}
REDUCE_OPS = {"sum": 0, "avg": 1, "prod": 2, "min": 3, "max": 4}
ON_FAULT = {"retry": 0, "abort": 1}
AS_JOINED = 2
ORDERS = {"any": 0, "rank": 1}
QUANTIZATIONS = {"bf16": 1, "int8": 2, "int4": 3, "min-max": 2, "zero-point-scale": 2}
QUANTIZE_AUTO = 4
CODEC_NAMES = {0: None, 1: "bf16", 2: "int8", 3: "int4"}
ROUNDINGS = {"nearest": 0, "stochastic": 1}
ALGORITHMS = {"auto": 0, "oneshot": 1, "mesh": 2, "ring": 3}
ALGORITHM_NAMES = {**{code: name for name, code in ALGORITHMS.items()}, 4: "local"}

# Seconds that one call of the library may block. Python handles Ctrl-C only between calls.
SLICE_S = 0.1


class _Sized(ctypes.Structure):
    """A struct of options or infos. Sets struct_size; all other fields are zero."""

    def __init__(self) -> None:
        super().__init__(struct_size=ctypes.sizeof(self))


class OpenOptions(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("socket_path", c_char_p),
        ("name", c_char_p),
        ("timeout_ms", c_int64),
    ]


class JoinOptions(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("run", c_char_p),
        ("group", c_uint32),
        ("timeout_ms", c_int64),
        ("cohort", c_char_p),
        ("cohort_size", c_uint32),
        ("step_deadline_ms", c_uint32),
        ("on_fault", c_int),
        ("name", c_char_p),
        ("mode", c_int),
        ("members", c_uint32),
    ]


class WorldInfo(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("rank", c_uint32),
        ("size", c_uint32),
        ("pending", c_uint32),
        ("epoch", c_uint64),
        ("member_id", c_uint64),
        ("background", c_uint32),
        ("zero", c_uint32),
        ("boundary", c_uint64),
        ("step_epoch", c_uint64),
        ("step_rank", c_uint32),
        ("step_size", c_uint32),
    ]


class MemberInfoStruct(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("current", c_uint32),
        ("member_id", c_uint64),
        ("peer_id", c_uint64),
        ("rank", c_uint32),
        ("zero", c_uint32),
        ("name", ctypes.c_char * 72),
        ("cohort", ctypes.c_char * 72),
        ("host", ctypes.c_char * 136),
    ]


class Slice(ctypes.Structure):
    _fields_ = [("source", c_void_p), ("target", c_void_p), ("count", c_uint64), ("dtype", c_int), ("zero", c_uint32)]


# What the options of several collectives have in common.
_Fields = list[tuple[str, Any]]
_HEAD: _Fields = [("struct_size", c_uint32), ("dtype", c_int)]
_SOURCE: _Fields = [("source", c_void_p)]
_TARGET: _Fields = [("target", c_void_p)]
_LIST: _Fields = [("count", c_uint64), ("slices", POINTER(Slice)), ("slice_count", c_uint64), ("tag", c_uint64)]
_MEMBERS: _Fields = [("participants", POINTER(c_uint64)), ("participant_count", c_uint32), ("min_world", c_uint32)]
_FAULT: _Fields = [("on_fault", c_int), ("algorithm", c_int)]
_COMMON = _HEAD + _SOURCE + _TARGET + _LIST + _MEMBERS + _FAULT
_REDUCTION: _Fields = [("op", c_int), ("order", c_int), ("weight", POINTER(c_double))]
_CODEC: _Fields = [("quantize", c_int), ("rounding", c_int), ("block", c_uint32), ("codecs", c_uint32)]
_ERRORS: _Fields = [("error", c_void_p), ("errors", POINTER(c_void_p))]
_ROOT: _Fields = [("root_member", c_uint64), ("root", c_uint32)]
_ZERO: _Fields = [("zero", c_uint32)]
_WORLD: _Fields = [("world", c_uint32)]
_COUNTS: _Fields = [("counts", POINTER(c_uint64))]


# The options of collectives, by the name of the C function without lh_.
COLLECTIVES: dict[str, type[_Sized]] = {
    name: type(f"{name}_options", (_Sized,), {"_fields_": fields})
    for name, fields in {
        "all_reduce": _COMMON + _REDUCTION + _CODEC + _ERRORS,
        "reduce": _COMMON + _REDUCTION + _ROOT + _ZERO,
        "reduce_scatter": _COMMON + _REDUCTION + _WORLD + _ZERO + _COUNTS + _CODEC + _ERRORS,
        "all_gather": _COMMON + _WORLD + _ZERO + _COUNTS + _CODEC,
        "broadcast": _COMMON + _ROOT + _ZERO + _CODEC,
        "gather": _COMMON + _ROOT + _WORLD + _COUNTS,
        "scatter": _COMMON + _ROOT + _WORLD + _COUNTS,
        "all_to_all": [*_COMMON, *_WORLD, *_ZERO, *_COUNTS, ("target_counts", POINTER(c_uint64))],
        "send": [*_HEAD, *_SOURCE, *_LIST, *_FAULT, ("to_member", c_uint64), ("to", c_uint32), *_ZERO],
        "recv": [*_HEAD, *_TARGET, *_LIST, *_FAULT, ("from_member", c_uint64), ("from", c_uint32), *_ZERO],
        "barrier": [("struct_size", c_uint32), ("on_fault", c_int), ("tag", c_uint64), *_MEMBERS],
    }.items()
}


class RefuseOptions(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("zero", c_uint32),
        ("call", c_char_p),
        ("why", c_char_p),
        ("participants", POINTER(c_uint64)),
        ("participant_count", c_uint32),
        ("partner", c_uint32),
        ("partner_member", c_uint64),
        ("tag", c_uint64),
    ]


class OpInfoStruct(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("world_size", c_uint32),
        ("retries", c_uint32),
        ("staged", c_uint32),
        ("epoch", c_uint64),
        ("bytes_sent", c_uint64),
        ("bytes_received", c_uint64),
        ("seconds", c_double),
        ("seconds_wait", c_double),
        ("algorithm", c_int),
        ("quantize", c_int),
        ("members", POINTER(c_uint64)),
        ("members_capacity", c_uint32),
        ("zero2", c_uint32),
        ("hosts", c_uint64),
        ("blocks_not_finite", c_uint64),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.members = _MemberIds()
        self.members_capacity = MEMBERS_MAX


_MemberIds = c_uint64 * MEMBERS_MAX


class TensorStruct(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("dtype", c_int),
        ("name", c_char_p),
        ("data", c_void_p),
        ("shape", POINTER(c_uint64)),
        ("dims", c_uint32),
        ("flags", c_uint32),
    ]


class ProgressStruct(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("sources", c_uint32),
        ("bytes_done", c_uint64),
        ("bytes_total", c_uint64),
        ("bytes_per_second", c_uint64),
    ]


class SyncOptions(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("strategy", c_int),
        ("state", c_void_p),
        ("revision", c_uint64),
        ("hash", c_int),
        ("zero", c_uint32),
        ("progress", c_void_p),  # not used: an exception in a C callback, such as that of Ctrl-C, would be lost
        ("progress_context", c_void_p),
    ]


class SyncInfoStruct(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("sources", c_uint32),
        ("revision", c_uint64),
        ("hash_high", c_uint64),
        ("hash_low", c_uint64),
        ("bytes", c_uint64),
        ("seconds", c_double),
        ("passed", c_uint32),
        ("resumed", c_uint32),
        ("background", c_uint32),
        ("zero", c_uint32),
    ]


_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "lh_version": (c_char_p, []),
    "lh_strerror": (c_char_p, [c_int]),
    "lh_last_error": (c_char_p, []),
    "lh_open": (c_int, [POINTER(OpenOptions), POINTER(c_void_p)]),
    "lh_close": (None, [c_void_p]),
    "lh_client_check": (c_int, [c_void_p]),
    "lh_why": (c_int, [c_void_p, c_char_p, c_uint32, c_int64, c_char_p, c_size_t]),
    "lh_alloc": (c_int, [c_void_p, c_size_t, POINTER(c_void_p)]),
    "lh_free": (c_int, [c_void_p, c_void_p]),
    "lh_join_start": (c_int, [c_void_p, POINTER(JoinOptions), POINTER(c_void_p), POINTER(c_void_p)]),
    "lh_leave": (c_int, [c_void_p, c_int64]),
    "lh_comm_free": (None, [c_void_p]),
    "lh_world": (c_int, [c_void_p, POINTER(WorldInfo)]),
    "lh_member": (c_int, [c_void_p, c_uint64, POINTER(MemberInfoStruct)]),
    "lh_members": (c_int, [c_void_p, POINTER(c_uint64), c_uint32, POINTER(c_uint32)]),
    "lh_step_members": (c_int, [c_void_p, POINTER(c_uint64), c_uint32, POINTER(c_uint32)]),
    "lh_begin_step_start": (c_int, [c_void_p, POINTER(c_void_p)]),
    "lh_state_new": (c_int, [c_void_p, POINTER(TensorStruct), c_uint32, POINTER(c_void_p)]),
    "lh_state_free": (c_int, [c_void_p]),
    "lh_state_touch": (c_int, [c_void_p, c_uint32]),
    "lh_state_prepare_start": (c_int, [c_void_p, POINTER(c_void_p)]),
    "lh_state_next_change": (c_int, [c_void_p, c_uint32, POINTER(c_uint64), POINTER(c_uint64)]),
    "lh_kept_revision": (c_int, [c_void_p, c_void_p, POINTER(c_uint64)]),
    "lh_sync_state_start": (c_int, [c_void_p, POINTER(SyncOptions), POINTER(c_void_p)]),
    "lh_begin_step_sync_start": (c_int, [c_void_p, POINTER(SyncOptions), POINTER(c_void_p)]),
    "lh_sync_info": (c_int, [c_void_p, POINTER(SyncInfoStruct)]),
    "lh_sync_progress": (c_int, [c_void_p, POINTER(ProgressStruct)]),
    "lh_state_take": (c_int, [c_void_p, c_void_p, c_int64, POINTER(SyncInfoStruct)]),
    "lh_op_wait": (c_int, [c_void_p, c_int64]),
    "lh_op_test": (c_int, [c_void_p, POINTER(c_int)]),
    "lh_wait_any": (c_int, [c_void_p, POINTER(c_void_p), c_uint32, c_int64, POINTER(c_uint32)]),
    "lh_event_fd": (c_int, [c_void_p, POINTER(c_int)]),
    "lh_event_take": (c_int, [c_void_p]),
    "lh_help": (c_int, [c_void_p, c_int64]),
    "lh_op_info": (c_int, [c_void_p, POINTER(OpInfoStruct)]),
    "lh_op_cancel": (c_int, [c_void_p]),
    "lh_refuse": (c_int, [c_void_p, POINTER(RefuseOptions)]),
    "lh_op_free": (None, [c_void_p]),
}
for _name, _options in COLLECTIVES.items():
    _SIGNATURES[f"lh_{_name}_start"] = (c_int, [c_void_p, POINTER(_options), POINTER(c_void_p)])
    _SIGNATURES[f"lh_{_name}"] = (
        c_int,
        [c_void_p, POINTER(_options), c_int64, POINTER(OpInfoStruct), POINTER(c_void_p)],
    )


def _candidates() -> list[pathlib.Path]:
    named = os.environ.get("LONGHAUL_LIBRARY")
    if named:
        return [pathlib.Path(named)]
    package = pathlib.Path(__file__).resolve().parent
    # In an editable install the package has two places: the sources, and what was compiled.
    places = dict.fromkeys([str(package), *sys.modules[__package__].__path__])
    found = [pathlib.Path(place, "liblonghaul.so") for place in places]
    if len(package.parents) > 2:  # a source tree: client/python/longhaul
        found.append(package.parents[2] / "out" / "lib" / "liblonghaul.so")
    return found


@functools.cache
def library() -> ctypes.CDLL:
    """The C library. The first call loads it; ImportError then names every place that was tried."""
    tried = []
    for path in _candidates():
        try:
            lib = ctypes.CDLL(str(path))
        except OSError as problem:
            tried.append(f"{path}: {problem}" if path.exists() else f"{path}: no such file")
            continue
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(lib, name)
            function.restype = result
            function.argtypes = arguments
        version = lib.lh_version().decode()
        if version.split(".")[:2] != __version__.split(".")[:2]:
            raise ImportError(
                f"{path} is Longhaul {version}, but this package is {__version__}: build both from one tree with tools/build"
            )
        return lib
    raise ImportError(
        "liblonghaul.so could not be loaded; build it with tools/build, or install the wheel, or set LONGHAUL_LIBRARY to its "
        "path (" + "; ".join(tried) + ")"
    )


class Deadline:
    """The moment when a timeout (in seconds; None: never) ends. Raises ValueError for a negative timeout."""

    def __init__(self, timeout: float | None) -> None:
        if timeout is not None and not timeout >= 0:
            raise ValueError(f"timeout is {timeout!r}: give seconds, 0 or more, or None to wait for ever")
        self._end = None if timeout is None else time.monotonic() + timeout

    def left(self) -> float | None:
        """Seconds until the deadline, 0 or more; None: there is no deadline."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def slice_ms(self) -> int:
        """Milliseconds that the next call of the library may block."""
        left = self.left()
        return round(1000 * (SLICE_S if left is None else min(SLICE_S, left)) + 0.5)

    def passed(self) -> bool:
        return self.left() == 0.0


# Rule for every handle: create the finalizer first, then make the call that fills the handle. Ctrl-C is raised as soon
# as a call returns; with the other order a handle could be filled and never freed. Freeing NULL does nothing.


def wait(op: c_void_p, deadline: Deadline, look: Callable[[], None]) -> int:
    """lh_op_wait() in slices, so that Ctrl-C can interrupt it. Returns the outcome, or DEADLINE_EXCEEDED.

    look: is called after each slice without an outcome.
    """
    lib = library()
    while True:
        status: int = lib.lh_op_wait(op, deadline.slice_ms())
        if status != DEADLINE_EXCEEDED:
            return status
        look()
        if deadline.passed():
            return status
