"""longhaul.codec, against bytes that peerd's codec made (testdata/block_codec.json), on numpy arrays and torch tensors."""

from __future__ import annotations

import json
import pathlib
from typing import Any, cast

import numpy as np
import pytest
import torch

import longhaul as lh
from longhaul import codec

CASES = json.loads((pathlib.Path(__file__).parent / "testdata" / "block_codec.json").read_text())
QUANTS = {"int8": lh.Quant("int8", 32), "int4": lh.Quant("int4", 32), "bf16": lh.Quant("bf16")}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def floats(text: str) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(text), "<f4").astype(np.float32)


def same(got: np.ndarray, wanted: np.ndarray) -> None:
    """The same bits; a NaN may be any NaN."""
    nan = np.isnan(wanted)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got[~nan].view(np.uint32), wanted[~nan].view(np.uint32))


def on(device: str, array: np.ndarray) -> torch.Tensor:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.from_numpy(array.copy()).to(device)


@pytest.mark.parametrize("name", QUANTS)
@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_numpy_arrays_have_the_bytes_of_peerd(case: dict[str, str], name: str) -> None:
    values, quant = floats(case["values"]), QUANTS[name]
    encoded = codec.encode(values, quant)
    assert encoded.tobytes().hex() == case[name]
    assert encoded.size == codec.encoded_bytes(values.size, quant)
    same(codec.decode(encoded, values.size, quant), floats(case[f"{name} decoded"]))
    same(codec.decode(encoded.tobytes(), values.size, quant), floats(case[f"{name} decoded"]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", QUANTS)
@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_torch_tensors_have_the_bytes_of_peerd(case: dict[str, str], name: str, device: str) -> None:
    values, quant = on(device, floats(case["values"])), QUANTS[name]
    encoded = codec.encode(values, quant)
    assert encoded.device == values.device
    assert encoded.cpu().numpy().tobytes().hex() == case[name]
    decoded = codec.decode(encoded, values.numel(), quant)
    assert decoded.device == values.device
    same(decoded.cpu().numpy(), floats(case[f"{name} decoded"]))


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_what_was_rounded_by_chance_decodes_without_the_seed(case: dict[str, str], name: str) -> None:
    count = len(case["values"]) // 8
    data = np.frombuffer(bytes.fromhex(case[f"{name} stochastic"]), np.uint8)
    wanted = floats(case[f"{name} stochastic decoded"])
    for quant in (QUANTS[name], lh.Quant(name, 32, "stochastic")):
        same(codec.decode(data, count, quant), wanted)
        same(codec.decode(torch.from_numpy(data.copy()), count, quant).numpy(), wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block", [32, 128, 4096])
@pytest.mark.parametrize("name", QUANTS)
def test_arrays_and_tensors_of_many_blocks_agree(name: str, block: int, device: str) -> None:
    rng = np.random.default_rng(5)
    quant = lh.Quant(name, None if name == "bf16" else block)
    for count in (0, 1, block - 1, block, 2 * block + 1, 20_011):
        exponents = rng.uniform(-45, 38, count)
        values = (rng.standard_normal(count) * 10.0**exponents).astype(np.float32)
        encoded = codec.encode(values, quant)
        assert encoded.tobytes() == codec.encode(on(device, values), quant).cpu().numpy().tobytes()
        decoded = codec.decode(encoded, count, quant)
        same(codec.decode(on(device, encoded), count, quant).cpu().numpy(), decoded)
        assert encoded.size == codec.encoded_bytes(count, quant)


def test_halves_are_encoded_as_the_floats_that_they_are() -> None:
    values = np.random.default_rng(6).standard_normal(301).astype(np.float16)
    half = torch.from_numpy(values)
    wanted = codec.encode(values.astype(np.float32), "int4").tobytes()
    assert codec.encode(values, "int4").tobytes() == codec.encode(half, "int4").numpy().tobytes() == wanted
    brain = half.to(torch.bfloat16)
    assert torch.equal(codec.encode(brain, "int4"), codec.encode(brain.float(), "int4"))
    assert torch.equal(codec.decode(codec.encode(brain, "bf16"), 301, "bf16"), brain.float())
    # Its other axis is not contiguous.
    square = np.random.default_rng(7).standard_normal((40, 40)).astype(np.float32).T
    assert codec.encode(square, "int8").tobytes() == codec.encode(square.copy(), "int8").tobytes()
    assert codec.encode(torch.from_numpy(square), "int8").numpy().tobytes() == codec.encode(square, "int8").tobytes()


@pytest.mark.parametrize("name, share", [("int8", 0.258), ("int4", 0.133), ("bf16", 0.5)])
def test_sizes_are_those_that_the_page_names(name: str, share: float) -> None:
    assert codec.encoded_bytes(1_000_000, name) / 4_000_000 == pytest.approx(share, abs=0.0005)
    for pccl in ("min-max", "zero-point-scale"):
        assert codec.encoded_bytes(1_000_000, pccl) == codec.encoded_bytes(1_000_000, "int8")


@pytest.mark.parametrize(
    "text, call",
    [
        ("quantize is None; give a codec", lambda: codec.encode(np.ones(3, np.float32), cast(Any, None))),
        ("quantize is auto; give a codec", lambda: codec.encoded_bytes(3, lh.Quant("auto", among=("int8",)))),
        ("quantize is 'int2'; give one of bf16", lambda: codec.encoded_bytes(3, "int2")),
        ("block of quantize is 100; give a power of two", lambda: codec.encoded_bytes(3, lh.Quant("int8", 100))),
        ("count is -1", lambda: codec.encoded_bytes(-1, "int8")),
        ("values is float64; give float32", lambda: codec.encode(np.ones(3), "int8")),
        ("values is torch.int32; give float32", lambda: codec.encode(torch.ones(3, dtype=torch.int32), "int8")),
        (
            "rounding of quantize is .stochastic.*only peerd knows",
            lambda: codec.encode(np.ones(3, np.float32), lh.Quant("int8", rounding="stochastic")),
        ),
        (r"encoded is uint8 x 8; 3 elements have 7 bytes", lambda: codec.decode(bytes(8), 3, "int8")),
        ("encoded is torch.float32 x 7", lambda: codec.decode(torch.ones(7), 3, "int8")),
    ],
)
def test_what_cannot_be_is_refused(text: str, call: Any) -> None:
    with pytest.raises(lh.InvalidArgument, match=text):
        call()
