"""States in files: nothing here needs a peerd."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import longhaul as lh

safetensors = pytest.importorskip("safetensors")
torch = pytest.importorskip("torch")

DTYPES = "uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 float32 float64 bool".split()


def tensors(fill: int = 1) -> dict[str, Any]:
    made: dict[str, Any] = {dtype: np.full((3, 4), fill).astype(dtype) for dtype in DTYPES}
    made["bfloat16"] = torch.full((1_000_000,), fill, dtype=torch.bfloat16)
    made["scalar"] = np.array(float(fill))
    made["empty"] = np.zeros((0, 3))
    made["gaps"] = np.arange(100.0)[::2] * fill
    made["transposed"] = (torch.arange(12.0).reshape(3, 4) * fill).t()
    return made


def same(a: Any, b: Any) -> bool:
    return bool(torch.equal(torch.as_tensor(a), torch.as_tensor(b)))


def test_a_state_comes_back_with_its_revision(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "state.safetensors"
    saved = lh.State(tensors(3), revision=1 << 63, allow_unequal={"scalar"})
    saved.save(path)
    loaded = lh.State(tensors(5), allow_unequal={"scalar"})
    assert loaded.compute_hash() != saved.compute_hash()
    before = loaded.tensors["float32"]
    loaded.load(str(path))
    assert loaded.revision == 1 << 63
    assert loaded.compute_hash() == saved.compute_hash()
    assert loaded.tensors["float32"] is before, "the tensors are filled, not replaced"
    for name, tensor in saved.tensors.items():
        assert same(loaded.tensors[name], tensor), name
    assert os.listdir(tmp_path) == ["state.safetensors"]


def test_an_older_package_writes_the_same_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = lh.State(tensors(3), revision=7)
    state.save(tmp_path / "newer")
    spec = safetensors.TensorSpec
    write = safetensors.serialize_file

    def old(tensors: dict[str, dict[str, Any]], path: str, metadata: dict[str, str]) -> None:
        buffers = {name: np.frombuffer(tensor.pop("data"), np.uint8) for name, tensor in tensors.items()}
        specs = {
            name: spec(**tensor, data_ptr=buffers[name].ctypes.data, data_len=buffers[name].nbytes)
            for name, tensor in tensors.items()
        }
        write(specs, path, metadata)

    monkeypatch.delattr(safetensors, "TensorSpec")
    monkeypatch.setattr(safetensors, "serialize_file", old)
    state.save(tmp_path / "older")
    assert (tmp_path / "older").stat().st_size == (tmp_path / "newer").stat().st_size
    loaded = lh.State(tensors(5))
    loaded.load(tmp_path / "older")
    assert loaded.compute_hash() == state.compute_hash()


def test_order_and_what_may_be_unequal_may_be_others(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "state.safetensors"
    lh.State({"a": np.ones(3), "b": np.full(4, 2)}).save(path)
    state = lh.State({"b": np.zeros(4, int), "a": np.zeros(3)}, allow_unequal={"a"})
    state.load(path)
    assert state.tensors["b"].tolist() == [2] * 4


def test_any_tool_reads_it(tmp_path: pathlib.Path) -> None:
    from safetensors.numpy import load_file

    path = tmp_path / "state.safetensors"
    state = lh.State({"w": np.arange(5.0)}, revision=7)
    state.save(path)
    assert load_file(path)["w"].tolist() == [0, 1, 2, 3, 4]
    with safetensors.safe_open(path, framework="np") as file:
        assert file.metadata()["longhaul.revision"] == "7"
        assert file.metadata()["longhaul.hash"] == state.compute_hash()


def test_numpy_alone_is_enough(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "state.safetensors"
    lh.State({"w": np.arange(5.0)}, revision=7).save(path)
    program = f"""
import sys
import numpy as np, longhaul as lh
state = lh.State({{"w": np.zeros(5)}})
state.load({str(path)!r})
assert state.revision == 7 and state.tensors["w"][4] == 4
assert "torch" not in sys.modules
state.save({str(path)!r})
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"w": np.zeros(5), "b": np.zeros(2)}, "no tensor 'b'"),
        ({"w": np.zeros(4)}, r"shape \[5\] in the file and \[4\] in the state"),
        ({"w": np.zeros(5, np.float32)}, "is float64 in the file and float32 in the state"),
        ({"v": np.zeros(5)}, "no tensor 'v'"),
    ],
)
def test_another_manifest_is_refused_and_nothing_changes(
    tmp_path: pathlib.Path, declared: dict[str, Any], said: str
) -> None:
    path = tmp_path / "state.safetensors"
    lh.State({"w": np.ones(5)}, revision=3).save(path)
    state = lh.State(declared, revision=1)
    before = state.compute_hash()
    with pytest.raises(lh.InvalidArgument, match=said):
        state.load(path)
    assert (state.revision, state.compute_hash()) == (1, before)


def test_a_tensor_too_many_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "state.safetensors"
    lh.State({"w": np.ones(5), "extra": np.ones(5)}).save(path)
    with pytest.raises(lh.InvalidArgument, match="'extra', which the state has not"):
        lh.State({"w": np.zeros(5)}).load(path)


@pytest.mark.parametrize("name", ["w", "rng"])
def test_a_flipped_bit_is_found_and_nothing_changes(tmp_path: pathlib.Path, name: str) -> None:
    path = tmp_path / "state.safetensors"
    lh.State({"w": np.ones(500_000), "rng": np.full(5, 7)}, allow_unequal={"rng"}).save(path)
    content = bytearray(path.read_bytes())
    at = content.rindex((np.ones(1) if name == "w" else np.full(1, 7)).tobytes())
    content[at] ^= 1
    path.write_bytes(content)
    state = lh.State({"w": np.zeros(500_000), "rng": np.zeros(5, int)}, allow_unequal={"rng"})
    with pytest.raises(lh.InvalidArgument, match="damaged"):
        state.load(path)
    assert not state.tensors["w"].any()


def test_no_flipped_bit_changes_what_is_loaded(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "state.safetensors"
    lh.State({"w": np.arange(3.0), "m": np.arange(3.0) + 7}, revision=1000).save(path)
    content = path.read_bytes()
    accepted = []
    for bit in range(0, 8 * len(content), 3):  # each third, so of each byte two or three
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        state = lh.State({"w": np.zeros(3), "m": np.zeros(3)})
        try:
            state.load(path)
        except lh.InvalidArgument:
            continue
        accepted.append((bit, state.revision))
    assert accepted == []


def test_what_is_no_checkpoint_is_said(tmp_path: pathlib.Path) -> None:
    from safetensors.numpy import save_file

    state = lh.State({"w": np.ones(5)})
    with pytest.raises(FileNotFoundError, match="nothing-here"):
        state.load(tmp_path / "nothing-here")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(lh.InvalidArgument, match="no safetensors file"):
        state.load(tmp_path / "text")
    save_file({"w": np.ones(5)}, tmp_path / "foreign")
    with pytest.raises(lh.InvalidArgument, match="not written by State.save"):
        state.load(tmp_path / "foreign")
    state.save(tmp_path / "short")
    (tmp_path / "short").write_bytes((tmp_path / "short").read_bytes()[:-8])
    with pytest.raises(lh.InvalidArgument, match="no safetensors file"):
        state.load(tmp_path / "short")


def test_a_save_that_fails_leaves_the_old_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "state.safetensors"
    state = lh.State({"w": np.ones(5)}, revision=1)
    state.save(path)
    with pytest.raises(lh.InvalidArgument, match="__metadata__"):
        lh.State({"w": np.ones(5), "__metadata__": np.ones(1)}).save(path)
    with pytest.raises(OSError):
        state.save(tmp_path / "no" / "such" / "directory")
    state.load(path)
    assert os.listdir(tmp_path) == ["state.safetensors"]


def overlapping(kind: str) -> Any:
    """A tensor with elements that share memory."""
    if kind == "expanded":
        return torch.full((1,), 7.0).expand(4)
    if kind == "strided":
        return torch.zeros(5).as_strided((3, 3), (1, 1))
    return np.lib.stride_tricks.as_strided(np.zeros(5), (3, 3), (8, 8))


@pytest.mark.parametrize("kind", ["expanded", "strided", "array"])
def test_elements_that_share_memory_are_refused(tmp_path: pathlib.Path, kind: str) -> None:
    tensor = overlapping(kind)
    with pytest.raises(lh.InvalidArgument, match=r"'w' has elements that share memory.*contiguous\(\)"):
        lh.State({"v": np.zeros(3), "w": tensor})
    lh.State({"w": np.zeros((6, 4)).T[::2, ::3], "x": torch.zeros(6, 1).expand(6, 1), "y": np.zeros((0, 3))})
    # Places 0 2 3 5: no two are the same, though the strides alone do not say so.
    lh.State({"w": torch.zeros(9).as_strided((2, 2), (2, 3))})


def spoiled(how: str, tensor: Any) -> str:
    """Makes the tensor one that cannot be written. Returns what is said then."""
    if how == "expanded":
        tensor.data = torch.full((1,), 7.0).expand(4)
        return "share memory"
    if how == "resized":
        tensor.data = torch.zeros(5)
        return "make a new lh.State"
    if how == "converted":
        tensor.data = torch.zeros(4, dtype=torch.float64)
        return "make a new lh.State"
    return ""


@pytest.mark.parametrize("how", ["expanded", "resized", "converted"])
def test_nothing_changes_before_all_can_be_written(tmp_path: pathlib.Path, how: str) -> None:
    path = tmp_path / "state.safetensors"
    lh.State({"a": np.ones(3), "b": torch.ones(4)}, revision=3).save(path)
    last = torch.zeros(4)
    state = lh.State({"a": np.zeros(3), "b": last}, revision=1)
    said = spoiled(how, last)
    with pytest.raises(lh.InvalidArgument, match=said):
        state.load(path)
    assert not state.tensors["a"].any()
    assert state.revision == 1


def test_an_array_that_became_read_only_changes_nothing(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "state.safetensors"
    lh.State({"a": np.ones(3), "b": np.ones(4)}).save(path)
    last = np.zeros(4)
    state = lh.State({"a": np.zeros(3), "b": last})
    last.flags.writeable = False
    with pytest.raises(lh.InvalidArgument, match="'b' is read-only"):
        state.load(path)
    assert not state.tensors["a"].any()


def test_a_tensor_of_inference_mode_changes_nothing(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "state.safetensors"
    lh.State({"a": np.ones(3), "b": torch.ones(4)}).save(path)
    with torch.inference_mode():
        last = torch.zeros(4)
        state = lh.State({"a": np.zeros(3), "b": last})
    with pytest.raises(lh.InvalidArgument, match="inference mode"):
        state.load(path)
    assert not state.tensors["a"].any()
    with torch.inference_mode():
        state.load(path)
    assert last.tolist() == [1] * 4


def test_tensors_that_share_memory_are_filled_if_the_file_agrees(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "state.safetensors"
    lh.State({"a": np.ones(6), "b": np.full(3, 2.0)}).save(path)
    memory = np.zeros(6)
    tied = {"a": memory, "b": memory[2:5]}
    with pytest.raises(lh.InvalidArgument, match="'a' and 'b' of the state share memory, and differ"):
        lh.State(tied).load(path)
    assert not memory.any()
    lh.State({"a": np.ones(6), "b": np.ones(3)}).save(path)
    lh.State(tied).load(path)
    assert memory.tolist() == [1] * 6


def test_the_mode_of_a_file_follows_the_umask(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "state.safetensors"
    program = f"""
import os, numpy as np, longhaul as lh
state = lh.State({{"w": np.ones(5)}})
for umask, mode in ((0o022, 0o644), (0o077, 0o600), (0o002, 0o664)):
    os.umask(umask)
    state.save({str(path)!r})
    assert os.stat({str(path)!r}).st_mode & 0o777 == mode, (oct(umask), oct(os.stat({str(path)!r}).st_mode))
"""
    subprocess.run([sys.executable, "-c", program], check=True)


class HeldWriter:
    """Has save() stop in the middle of its file, after half of the bytes, in the threads that it is told of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        self._write = safetensors.serialize_file
        self._first = True
        monkeypatch.setattr(safetensors, "serialize_file", self._held)

    def _held(self, specs: Any, path: str, metadata: dict[str, str]) -> None:
        first, self._first = self._first, False
        self._write(specs, path, metadata)
        if first:
            with open(path, "r+b") as file:
                whole = file.read()
                file.truncate(len(whole) // 2)
                self.reached.set()
                assert self.go.wait(60)
                file.seek(0)
                file.write(whole)


def test_threads_that_save_to_one_path_do_not_meet(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.safetensors"
    held = HeldWriter(monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(lh.State({"w": np.full(5, 1.0)}, revision=1).save, path)
        assert held.reached.wait(60)
        lh.State({"w": np.full(5, 2.0)}, revision=2).save(path)
        state = lh.State({"w": np.zeros(5)})
        state.load(path)
        assert (state.revision, state.tensors["w"].tolist()) == (2, [2] * 5)
        held.go.set()
        first.result(60)
    state.load(path)
    assert (state.revision, state.tensors["w"].tolist()) == (1, [1] * 5)
    assert os.listdir(tmp_path) == ["state.safetensors"]


def test_what_a_dead_writer_left_is_removed_and_nothing_else(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the writer has had the process id of one that lives, as in a container."""
    path = tmp_path / "state.safetensors"
    program = f"""
import os, sys, pathlib, safetensors, numpy as np, longhaul as lh
write = safetensors.serialize_file
def die(specs, path, metadata):
    pathlib.Path(path).with_name(".tmpAbCdEf").write_bytes(b"half a file")
    os.kill(os.getpid(), 9)
safetensors.serialize_file = die
lh.State({{"w": np.ones(5)}}).save({str(path)!r})
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    (left,) = os.listdir(tmp_path)
    assert "unfinished" in left
    (tmp_path / ".state.safetensors.unfinished-x").mkdir()  # of a writer that died at once
    (tmp_path / ".other.unfinished-x").mkdir()
    held = HeldWriter(monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        living = pool.submit(lh.State({"w": np.full(5, 1.0)}).save, path)
        assert held.reached.wait(60)
        assert left not in os.listdir(tmp_path)
        lh.State({"w": np.full(5, 2.0)}).save(path)  # removes nothing of the one that lives
        held.go.set()
        living.result(60)
    state = lh.State({"w": np.zeros(5)})
    state.load(path)
    assert state.tensors["w"].tolist() == [1] * 5
    assert sorted(os.listdir(tmp_path)) == [".other.unfinished-x", "state.safetensors"]


def test_a_long_name_can_be_saved(tmp_path: pathlib.Path) -> None:
    path = tmp_path / ("\N{SNOWMAN}" * 85)  # 255 bytes
    lh.State({"w": np.ones(5)}, revision=2).save(path)
    state = lh.State({"w": np.zeros(5)})
    state.load(path)
    assert state.revision == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (({},), "at least one"),
        (({"w": np.ones(3)}, -1), "revision"),
        (({"w": np.ones(3)}, "7"), "revision"),
        (({"w": np.ones(3)}, True), "revision"),
        (({"": np.ones(3)},), "1 to 256 bytes"),
        (({"n" * 257: np.ones(3)},), "1 to 256 bytes"),
        (({"a\nb": np.ones(3)},), "control characters"),
        (({"a\x85b": np.ones(3)},), "control characters"),
        (({"\ud800": np.ones(3)},), "UTF-8"),
        (({7: np.ones(3)},), "state tensor 7"),
        (({"w": np.ones((1,) * 9)},), "9 dimensions"),
        (({"w": np.ma.masked_array(np.ones(3), [False, True, False])},), "filled"),
        (({"w": np.ones(3, complex)},), "dtype complex128"),
        (({"w": np.ones(3, ">f4")},), "byte order"),
        (({"w": torch.ones(3, dtype=torch.complex64)},), "dtype complex64"),
        (({"w": torch.ones(3).to_sparse()},), "layout"),
    ],
)
def test_states_are_checked_where_they_are_made(arguments: Any, said: str) -> None:
    with pytest.raises(lh.InvalidArgument, match=said):
        lh.State(*arguments)


def test_options_are_checked_where_they_are_made() -> None:
    with pytest.raises(lh.InvalidArgument, match="hash is 'never'"):
        lh.State({"w": np.ones(3)}, hash="never")
    with pytest.raises(lh.InvalidArgument, match="'x', which is no tensor"):
        lh.State({"w": np.ones(3)}, allow_unequal={"x"})
    with pytest.raises(lh.InvalidArgument, match="read-only"):
        lh.State({"w": np.broadcast_to(np.ones(1), (3,))})
    with pytest.raises(TypeError, match="'w' is a list"):
        lh.State({"w": [1, 2]})
    with pytest.raises(lh.InvalidArgument, match="'v' is no tensor"):
        lh.State({"w": np.ones(3)}).touch("v")


def test_the_bar_says_how_far_a_transfer_is(capsys: pytest.CaptureFixture[str]) -> None:
    from longhaul._progress import Bar

    bar = Bar()
    bar.close()
    assert capsys.readouterr().err == "", "nothing was fetched"
    bar(lh.Progress(0, 0, 0, 0))
    bar(lh.Progress(1_500_000_000, 3_000_000_000, 250_000_000, 3))
    bar.close()
    line = capsys.readouterr().err
    assert line == "state [############............]  50 % of 3 GB, 250 MB/s from 3, 6 s left\n"
