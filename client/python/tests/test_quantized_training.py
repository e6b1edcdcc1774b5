"""Quantized gradients and pseudo-gradients: members keep equal bits, and learn as much."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from conftest import Members

import longhaul as lh
from longhaul.testing import LocalCluster
from longhaul.torch import AsyncDiLoCo, DiLoCo, ErrorFeedback, GradientAverager, StreamingDiLoCo, average_gradients

torch.manual_seed(3)
# More than 4096 bytes: smaller ops are not encoded.
MODEL = torch.nn.Sequential(torch.nn.Linear(24, 64), torch.nn.Tanh(), torch.nn.Linear(64, 40))
TEACHER = torch.randn(24, 40)
SYNC_EVERY, ROUNDS = 5, 6


def loss_of(model: torch.nn.Module, data: torch.Generator) -> torch.Tensor:
    x = torch.randn(64, 24, generator=data)
    return torch.nn.functional.mse_loss(model(x), torch.sin(x @ TEACHER))


def bits_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().view(torch.int32).clone() for parameter in model.parameters()]


def gradients_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def judge(model: torch.nn.Module) -> float:
    with torch.no_grad():
        return loss_of(model, torch.Generator().manual_seed(99)).item()


def train(comm: lh.Comm, kind: Any, quantize: Any) -> tuple[list[torch.Tensor], float]:
    torch.set_num_threads(1)
    model = copy.deepcopy(MODEL)
    inner = torch.optim.SGD(model.parameters(), lr=0.3)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.6, nesterov=True)
    more: dict[str, Any] = {}
    if kind is StreamingDiLoCo:
        more = {"model_fragments": [model[0], model[2]], "fragment_sync_delay": 1}
        sync_every = 2 * SYNC_EVERY
    else:
        sync_every = SYNC_EVERY
    data = torch.Generator().manual_seed(comm.rank)
    with kind(comm, model, inner, outer, sync_every=sync_every, quantize=quantize, **more):
        for _ in range(ROUNDS * sync_every):
            inner.zero_grad()
            loss_of(model, data).backward()
            inner.step()
    return bits_of(model), judge(model)


def trained(cluster: LocalCluster, kind: Any, quantize: Callable[[], Any]) -> list[tuple[list[torch.Tensor], float]]:
    """What two members end with, in a run of their own."""
    members = Members([cluster.socket(0), cluster.socket(1)])
    try:
        return members.all(lambda comm: train(comm, kind, quantize()))
    finally:
        members.close()
        gc.collect()  # peerd has room for 16 states of a client, and those of a DiLoCo go with the object


@pytest.mark.parametrize("kind", [DiLoCo, AsyncDiLoCo, StreamingDiLoCo])
def test_members_have_equal_bits_and_learn(cluster: LocalCluster, kind: Any) -> None:
    exact = trained(cluster, kind, lambda: None)
    assert exact[0][1] < 0.95 * judge(MODEL)
    for codec in ("int8", lh.Quant("int4", 32, "stochastic")):
        for make in (partial(lambda codec: codec, codec), partial(ErrorFeedback, codec)):
            ends = trained(cluster, kind, make)
            for mine, theirs in zip(ends[0][0], ends[1][0]):
                assert torch.equal(mine, theirs)
            assert ends[0][1] == pytest.approx(exact[0][1], rel=0.02)


def test_errors_of_a_member_are_kept_and_can_be_resumed(pair: Members) -> None:
    def run(comm: lh.Comm) -> None:
        feedback = ErrorFeedback("int4")
        with pytest.raises(lh.FailedPrecondition, match="give this ErrorFeedback to a DiLoCo first"):
            feedback.state_dict()
        train(comm, DiLoCo, feedback)
        errors = feedback.state_dict()
        assert sum(error.numel() for error in errors.values()) == sum(p.numel() for p in MODEL.parameters())
        assert any(error.any() for error in errors.values())
        kept = {name: error.clone() for name, error in errors.items()}
        feedback.reset()
        assert not any(error.any() for error in errors.values())
        feedback.load_state_dict(kept)
        assert all(torch.equal(errors[name], kept[name]) for name in kept)
        with pytest.raises(lh.InvalidArgument, match="belongs to another DiLoCo"):
            DiLoCo(comm, copy.deepcopy(MODEL), None, sync_every=1, quantize=feedback)

    pair.all(run)


@pytest.mark.parametrize("wrong", ["auto", lh.Quant("auto", among=("int8",)), None, 8])
def test_feedback_needs_a_codec(wrong: Any) -> None:
    with pytest.raises(lh.InvalidArgument, match="quantize is"):
        ErrorFeedback(wrong)


@pytest.mark.parametrize("overlapped", [False, True])
def test_quantized_gradients_are_near_their_average(three: Members, overlapped: bool) -> None:
    codec = lh.Quant("int8", rounding="stochastic")

    def run(comm: lh.Comm) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        model = copy.deepcopy(MODEL)
        data = torch.Generator().manual_seed(comm.rank)
        averager = GradientAverager(model, comm, quantize=codec) if overlapped else None
        alone = copy.deepcopy(model)
        loss_of(alone, torch.Generator().manual_seed(comm.rank)).backward()
        loss_of(model, data).backward()
        if averager is None:
            average_gradients(model, comm, quantize=codec)
        else:
            averager.finish()
            averager.close()
        return gradients_of(model), gradients_of(alone)

    ends = three.all(run)
    # Gradients lie side by side, so a block may have elements of several.
    largest = max(each.abs().max() for _, own in ends for each in own)
    for i, mine in enumerate(ends[0][0]):
        for gradients, _ in ends[1:]:
            assert torch.equal(mine.view(torch.int32), gradients[i].view(torch.int32))
        exact = sum(own[i] for _, own in ends) / 3
        # Each input and the sum err by less than a step of at most the greatest magnitude / 127.
        assert (mine - exact).abs().max() <= 2 * largest / 127 * 1.01
