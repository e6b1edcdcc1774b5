"""Whole training states of PyTorch programs: what a newcomer goes on with, checkpoints, and what is refused."""

from __future__ import annotations

import collections
import io
import json
import math
import os
import pathlib
import random
import subprocess
import sys
import time
from typing import Any

import pytest
from conftest import Members
from stand_ins import Counting, Delegating, Extra, Lookahead, Sam

import longhaul as lh
from longhaul.testing import LocalCluster

torch = pytest.importorskip("torch")

TRAINER = pathlib.Path(__file__).with_name("whole_state_trainer.py")


def model_of(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    return model


def train(model: Any, optimizer: Any, fill: float = 0.5) -> None:
    optimizer.zero_grad()
    model(torch.linspace(-1, fill, 24).view(8, 3)).square().sum().backward()
    optimizer.step()


def state_of(model: Any, optimizer: Any = (), *more: Any, **options: Any) -> Any:
    return lh.torch.State(model, optimizer, *more, **{"rng": None, **options})


# ---- acceptance: a newcomer goes on as if nothing had happened


def test_a_newcomer_goes_on_bit_equal_with_an_uninterrupted_run(cluster: LocalCluster, tmp_path: pathlib.Path) -> None:
    """Before the first step of AdamW and after it; with dropout, tied weights, buffers, bfloat16 and a loader."""
    processes = {
        role: subprocess.Popen(
            [sys.executable, str(TRAINER), role, str(tmp_path)],
            env={**os.environ, "LONGHAUL_SOCKET": cluster.socket(socket)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for role, socket in (("uninterrupted", 0), ("founder", 0), ("joiner", 1))
    }
    failed: list[str] = []
    while not failed and any(process.poll() is None for process in processes.values()):
        time.sleep(0.05)
        failed = [role for role, process in processes.items() if process.poll()]
    for process in processes.values():
        process.kill()  # the others would wait in vain for one that failed
    ends = {role: process.communicate() for role, process in processes.items()}
    for role in failed:
        print(f"---- {role}\n{ends[role][1]}")  # pytest would cut it
    assert not failed
    digests = {role: json.loads(out) for role, (out, _) in ends.items()}
    assert len(digests["uninterrupted"]) == 2
    assert digests["joiner"] == digests["uninterrupted"]


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("winner_has_stepped", [True, False])
def test_lazily_made_optimizer_state_comes_and_goes_with_the_state(
    pair: Members, kind: str, winner_has_stepped: bool
) -> None:
    def optimizer_of(model: Any) -> Any:
        if kind == "adamw":
            return torch.optim.AdamW(model.parameters(), lr=0.1)
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    models = [model_of(1), model_of(2)]
    optimizers = [optimizer_of(model) for model in models]
    states = [state_of(*both, revision=revision) for *both, revision in zip(models, optimizers, (5, 4))]
    train(models[1 - winner_has_stepped], optimizers[1 - winner_has_stepped])
    numbers = dict(zip(pair.comms, range(2)))
    infos = pair.all(lambda comm: comm.sync_state(states[numbers[comm]], timeout=60))
    assert infos[1].bytes > 0 and infos[0].bytes == 0
    for model, optimizer in zip(models, optimizers):
        assert bool(optimizer.state) is winner_has_stepped
        train(model, optimizer)
    assert states[0].compute_hash() == states[1].compute_hash()
    assert str(optimizers[0].state_dict()) == str(optimizers[1].state_dict())
    for state in states:
        state.revision = 6
        state.touch()
    assert [info.bytes for info in pair.all(lambda comm: comm.sync_state(states[numbers[comm]], timeout=60))] == [0, 0]


def test_a_newcomer_with_its_own_generators_is_seeded_by_its_member_id(pair: Members) -> None:
    from longhaul.torch._rng import seed_of

    with torch.random.fork_rng([]):
        states = [state_of(model_of(i), rng="member", revision=5 - i) for i in range(2)]
        numbers = dict(zip(pair.comms, range(2)))
        pair.all(lambda comm: comm.sync_state(states[numbers[comm]], timeout=60))
        seeded = torch.get_rng_state()
        assert torch.equal(states[0].tensors["rng.seed"], states[1].tensors["rng.seed"])
        shared = int(states[0].tensors["rng.seed"])
        torch.manual_seed(seed_of(shared + 5, pair.comms[1].member_id, "torch"))
        assert torch.equal(torch.get_rng_state(), seeded)


def test_another_structure_at_a_newcomer_is_named(pair: Members) -> None:
    models = [model_of(1), model_of(2)]
    schedulers = []
    for model, kind in zip(models, (torch.optim.lr_scheduler.StepLR, torch.optim.lr_scheduler.ExponentialLR)):
        schedulers.append(kind(torch.optim.SGD(model.parameters()), 2))
    states = [state_of(*both) for both in zip(models, [s.optimizer for s in schedulers], schedulers)]
    numbers = dict(zip(pair.comms, range(2)))

    def sync(comm: lh.Comm) -> str:
        try:
            comm.sync_state(states[numbers[comm]], timeout=60)
        except lh.StateMismatch as problem:
            return str(problem)
        return ""

    texts = "".join(pair.all(sync))
    assert "scheduler.0 is StepLR" in texts or "scheduler.0 is ExponentialLR" in texts


# ---- the extra state of modules


def extras_of(model: Any) -> Any:
    return [each.extra.getvalue() if isinstance(each.extra, io.BytesIO) else each.extra for each in model]


@pytest.mark.parametrize("late", [False, True])
def test_extra_state_of_modules_comes_with_the_state(pair: Members, tmp_path: pathlib.Path, late: bool) -> None:
    wanted = [{"steps": 3, "scale": 0.5}, io.BytesIO(b"abc"), torch.tensor([1, 2, 3], dtype=torch.uint8)]
    old = torch.nn.Sequential(*map(Extra, [None, io.BytesIO(), torch.zeros(0, dtype=torch.uint8)] if late else wanted))
    new = torch.nn.Sequential(Extra(None), Extra(io.BytesIO()), Extra(torch.zeros(0, dtype=torch.uint8)))
    states = [state_of(old, revision=1), state_of(new)]
    for module, extra in zip(old, wanted):
        module.extra = extra
    numbers = {comm: number for number, comm in enumerate(pair.comms)}
    pair.all(lambda comm: comm.sync_state(states[numbers[comm]], timeout=60))
    assert repr(extras_of(new)) == repr(extras_of(old)) == repr([wanted[0], b"abc", wanted[2]])
    states[0].save(tmp_path / "extra.safetensors")
    third = torch.nn.Sequential(Extra(None), Extra(io.BytesIO()), Extra(torch.zeros(0, dtype=torch.uint8)))
    state_of(third).load(tmp_path / "extra.safetensors")
    assert repr(extras_of(third)) == repr(extras_of(old))


@pytest.mark.parametrize(
    ("extra", "options", "why"),
    [
        (object(), {}, "is a builtins.object, which a state cannot hold without pickle"),
        ({"steps": 3}, {"buffers": "member"}, "each member keeps its own"),
    ],
)
def test_a_warning_names_the_module_whose_extra_state_stays_out(
    caplog: pytest.LogCaptureFixture, extra: Any, options: Any, why: str
) -> None:
    model = torch.nn.ModuleDict({"inner": torch.nn.Sequential(torch.nn.Tanh(), Extra(extra))})
    state_of(model, **options)
    assert "extra state of module model.inner.1 (Extra) is not in the state" in caplog.text and why in caplog.text


# ---- making a state changes nothing, also where an optimizer has another one inside


def all_of(model: Any, *optimizers: Any) -> Any:
    """Everything that training goes on from, as plain values."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return [str(value.device), value.tolist() if value.device.type == "cpu" else None]
        if isinstance(value, torch.Generator):
            return value.get_state().tolist()
        if isinstance(value, dict):
            return {
                repr(plain(key)) if isinstance(key, torch.Tensor) else key: plain(each) for key, each in value.items()
            }
        return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value

    counters = [
        {name: plain(value) for name, value in vars(each).items() if name in ("steps", "counts", "norm", "generator")}
        for each in optimizers
    ]
    return [
        plain(model.state_dict()),
        [plain(each.param_groups) for each in optimizers],
        [plain(dict(each.state)) for each in optimizers],
        counters,
        torch.get_rng_state().tolist(),
    ]


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_an_optimizer_that_delegates_counts_as_the_one_inside(stepped: bool, depth: int) -> None:
    model = model_of(1)
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(inner, 3)
    outer = inner
    for _ in range(depth):
        outer = Delegating(outer)
    if stepped:
        train(model, outer)
    before = all_of(model, inner)
    state = state_of(model, outer)
    assert all_of(model, inner) == before
    assert state.tensors.keys() == state_of(model, inner).tensors.keys()
    weights = [each.detach().clone() for each in model.parameters()]
    train(model, outer)
    assert not any(map(torch.equal, weights, model.parameters()))
    assert state.compute_hash() == state_of(model, inner).compute_hash()


def test_accelerates_optimizer_goes_on_after_a_state_was_made() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = model_of(1)
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared, outer = accelerator.prepare(model, inner)
    before = all_of(model, inner)
    state_of(prepared, outer)
    assert all_of(model, inner) == before
    weights = [each.detach().clone() for each in model.parameters()]
    train(prepared, outer)
    assert not any(map(torch.equal, weights, model.parameters()))


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("kind", ["sam", "lookahead"])
def test_an_optimizer_with_state_beside_the_one_inside_is_refused_untouched(kind: str, stepped: bool) -> None:
    model = model_of(1)
    if kind == "sam":
        outer: Any = Sam(model.parameters(), lr=0.1)
        inner = outer.base_optimizer
    else:
        inner = torch.optim.Adam(model.parameters(), lr=0.1)
        outer = Lookahead(inner)
    if stepped:
        train(model, outer)
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    before = all_of(model, inner, outer)
    with pytest.raises(
        lh.InvalidArgument, match=r"optimizer.0: (Sam|Lookahead) has a Adam inside .*, which this state would"
    ):
        state_of(model, outer)
    both = {"outer": outer, "inner": inner}
    if stepped:
        names = state_of(model, both).tensors.keys()
        assert {
            "optimizer.inner.0.weight.exp_avg",
            f"optimizer.outer.0.weight.{'old_p' if kind == 'sam' else 'slow'}",
        } < names
    else:
        with pytest.raises(
            lh.InvalidArgument, match=r"outer: .* steps the optimizer inside it, too; .* after .* first step"
        ):
            state_of(model, both)
    assert all_of(model, inner, outer) == before
    state_of(model, inner)
    assert all_of(model, inner, outer) == before


def test_what_an_optimizer_keeps_in_attributes_stays_as_it_is() -> None:
    model = model_of(1)
    optimizer = Counting(model.parameters())
    before = all_of(model, optimizer)
    state = state_of(model, optimizer)
    assert all_of(model, optimizer) == before
    assert "optimizer.0.0.weight.momentum_buffer" in state.tensors


def test_hooks_for_all_optimizers_see_no_step() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    model = model_of(1)
    calls: list[Any] = []
    handle = register_optimizer_step_post_hook(lambda each, *_: calls.append(each))
    state_of(model, torch.optim.AdamW(model.parameters()))
    handle.remove()
    assert calls == []


# ---- what optimizers make in their first step


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.AdamW(parameters),
        lambda parameters: torch.optim.AdamW(parameters, fused=True),
        lambda parameters: torch.optim.Adam(parameters, amsgrad=True, foreach=True),
        lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.1), foreach=False),
        lambda parameters: torch.optim.SGD(parameters, momentum=0.9, nesterov=True, lr=0.1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda parameters: torch.optim.Adafactor(parameters),
        lambda parameters: torch.optim.Rprop(parameters),
        lambda parameters: torch.optim.ASGD(parameters),
        lambda parameters: torch.optim.NAdam(parameters),
    ],
)
def test_what_an_optimizer_makes_in_its_first_step_is_known_before(make: Any) -> None:
    model = model_of(1)
    optimizer = make(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # replaces optimizer.step
    weights = model[0].weight.clone()
    state = state_of(model, optimizer)
    before = {name: (tensor.dtype, tensor.shape) for name, tensor in state.tensors.items()}
    assert not optimizer.state and torch.equal(model[0].weight, weights)
    train(model, optimizer)
    state.compute_hash()
    made = [held for values in optimizer.state.values() for held in values.values() if torch.is_tensor(held)]
    addresses = {tensor.data_ptr() for tensor in state.tensors.values()}
    assert all(tensor.data_ptr() in addresses for tensor in made)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in state.tensors.items()} == before


def test_an_optimizer_that_cannot_be_tried_out_is_refused_until_it_has_stepped() -> None:
    model = model_of(1)
    with pytest.raises(lh.InvalidArgument, match=r"optimizer.0: .*LBFGS.* first step"):
        state_of(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(lh.InvalidArgument, match=r"parameter of shape \[4, 3\] that is in no model"):
        state_of(torch.nn.Linear(1, 1), torch.optim.SGD(model.parameters()))


# ---- Python values


def test_python_values_come_back_as_they_were() -> None:
    import numpy as np

    from longhaul.torch._objects import decode, encode

    values = {
        "floats": [0.1, -0.0, math.inf, 5e-324, 1.7976931348623157e308],
        "ints": (1 << 100, -1, True, None),
        1: {"!": "a key like ours", 2.5: "x"},
        "counter": collections.Counter({3: 2}),
        "ordered": collections.OrderedDict(b=1, a=2),
        "bytes": b"\x00\xff",
        "torch": [torch.bfloat16, torch.Size([2, 3]), torch.device("cpu")],
        "numpy": [np.float32(0.1), np.int64(7), np.arange(3, dtype=np.int16)],
        "tensor": torch.arange(4),
    }
    tensors: dict[str, Any] = {}
    text = json.dumps(encode(values, "x", tensors))
    back = decode(json.loads(text), "x", tensors.__getitem__)
    assert repr(back) == repr(values)
    assert [type(item) for item in back["numpy"]] == [type(item) for item in values["numpy"]]
    assert math.isnan(decode(json.loads(json.dumps(encode(math.nan, "x", {}))), "x", tensors.__getitem__))


def test_generators_and_plain_values_are_restored(tmp_path: pathlib.Path) -> None:
    def objects(seed: int) -> dict[str, Any]:
        import numpy as np

        return {
            "torch": torch.Generator().manual_seed(seed),
            "python": random.Random(seed),
            "numpy": np.random.default_rng(seed),
            "progress": {"tokens": seed},
            "history": [seed],
        }

    def draw(of: dict[str, Any]) -> list[Any]:
        generators = [torch.rand(1, generator=of["torch"]).item(), of["python"].random(), of["numpy"].random()]
        return [*generators, of["progress"], of["history"]]

    first, second = objects(1), objects(2)
    state_of(None, objects=first, rng="shared").save(tmp_path / "state")
    outside = [torch.rand(1).item(), random.random()]
    progress = second["progress"]
    state_of(None, objects=second, rng="shared").load(tmp_path / "state")
    assert [torch.rand(1).item(), random.random()] == outside
    assert draw(second) == draw(first)
    assert progress == {"tokens": 1}


@pytest.mark.parametrize(
    "objects, text",
    [
        ({"x": {"y": [1, {3}]}}, r"objects.x.y.1 is a builtins.set"),
        ({"x": {(1, 2): 3}}, r"objects.x has the key \(1, 2\)"),
        ({"x": ["long" * 20000]}, r"the largest is objects.x with 80004 bytes; give objects_bytes_max=\d+"),
    ],
)
def test_values_that_fit_no_state_are_named(objects: Any, text: str) -> None:
    with pytest.raises(lh.InvalidArgument, match=text):
        state_of(None, objects=objects)


def test_an_object_without_state_dict_is_refused() -> None:
    with pytest.raises(TypeError, match="objects.x is a int"):
        state_of(None, objects={"x": 3})
    with pytest.raises(TypeError, match="optimizer 0 is a Linear"):
        state_of(None, torch.nn.Linear(1, 1))


def test_a_tensor_that_comes_later_is_named() -> None:
    values: dict[str, Any] = {"a": torch.ones(2)}
    state = state_of(torch.nn.Linear(2, 2), objects={"x": values})
    values["b"] = torch.ones(2)
    with pytest.raises(lh.InvalidArgument, match=r"objects.x.b has come"):
        state.compute_hash()
    values.pop("b")
    values["a"] = torch.ones(3)
    with pytest.raises(lh.InvalidArgument, match=r"objects.x.a' was declared as float32 \[2\]"):
        state.compute_hash()


# ---- models


def test_tied_weights_are_there_once_and_buffers_may_differ() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2), "n": torch.nn.BatchNorm1d(2)})
    model["b"].weight = model["a"].weight
    model["n"].register_buffer("cache", torch.ones(1), persistent=False)
    state = state_of({"net": model}, buffers="member")
    names = [name for name in state.tensors if name.startswith("model.net.")]
    assert "model.net.a.weight" in names and "model.net.b.weight" not in names
    assert "model.net.n.cache" not in names
    assert state.allow_unequal == {
        f"model.net.n.{each}" for each in ("running_mean", "running_var", "num_batches_tracked")
    }


@pytest.fixture
def mesh(tmp_path: pathlib.Path) -> Any:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_a_dtensor_is_there_with_its_local_part(mesh: Any, tmp_path: pathlib.Path) -> None:
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    def divided(seed: int) -> tuple[Any, Any, Any]:
        model = torch.nn.Linear(4, 3, bias=False)
        whole = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        model.weight = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
        optimizer = torch.optim.AdamW(model.parameters())
        return model, optimizer, state_of(model, optimizer)

    def step(model: Any, optimizer: Any) -> None:
        model.weight.square().sum().backward()
        optimizer.step()

    model, optimizer, state = divided(1)
    step(model, optimizer)
    state.save(tmp_path / "state")
    other, other_optimizer, other_state = divided(2)
    other_state.load(tmp_path / "state")
    assert isinstance(other_optimizer.state[other.weight]["exp_avg"], DTensor)
    for each in (model, other):
        each.weight.grad = None
    step(model, optimizer)
    step(other, other_optimizer)
    assert state.compute_hash() == other_state.compute_hash()
    saved = state.state_dict()
    assert isinstance(saved["model.weight"], DTensor)
    assert isinstance(saved["optimizer.0.weight.exp_avg"], DTensor)
    other_state.load_state_dict(saved)


# ---- checkpoints


def test_checkpoints_hold_everything(tmp_path: pathlib.Path) -> None:
    import torch.distributed.checkpoint as dcp

    def trainer(seed: int) -> tuple[Any, Any, Any]:
        model = model_of(seed)
        optimizer = torch.optim.AdamW(model.parameters())
        return model, optimizer, state_of(model, optimizer, objects={"progress": {"seed": seed}}, revision=seed)

    model, optimizer, state = trainer(7)
    train(model, optimizer)
    state.save(tmp_path / "state.safetensors")
    torch.save(state.state_dict(), tmp_path / "state.pt")
    dcp.save({"state": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)  # type: ignore[attr-defined]

    def with_safetensors(target: Any) -> None:
        target.load(tmp_path / "state.safetensors")

    def with_torch(target: Any) -> None:
        target.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))

    def with_dcp(target: Any) -> None:
        dcp.load({"state": target}, checkpoint_id=tmp_path / "dcp", no_dist=True)  # type: ignore[attr-defined]

    for load in (with_safetensors, with_torch, with_dcp):
        fresh_model, fresh_optimizer, fresh = trainer(3)
        load(fresh)
        assert (fresh.revision, fresh.compute_hash()) == (7, state.compute_hash()), load
        assert str(fresh_optimizer.state_dict()) == str(optimizer.state_dict())
    damaged = torch.load(tmp_path / "state.pt", weights_only=True)
    damaged["model.0.weight"][0, 0] += 1
    before = fresh.compute_hash()
    with pytest.raises(lh.InvalidArgument, match="load_state_dict: the hash of the tensors is"):
        fresh.load_state_dict(damaged)
    with pytest.raises(lh.InvalidArgument, match="there is no tensor 'model.0.weight'"):
        fresh.load_state_dict({})
    assert fresh.compute_hash() == before
    with pytest.raises(lh.InvalidArgument, match="progress"):
        state_of(fresh_model, fresh_optimizer).load(tmp_path / "state.safetensors")


@pytest.mark.parametrize(
    "wrong", ["revision below 0", "revision of two", "a meta tensor", "a sparse tensor", "expanded"]
)
def test_load_state_dict_changes_nothing_before_all_is_checked(wrong: str) -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "z": torch.nn.Linear(3, 3)})
    state = lh.torch.State(model, revision=1)
    other = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "z": torch.nn.Linear(3, 3)})
    values = {name: value.clone() for name, value in lh.torch.State(other, revision=5).state_dict().items()}
    if wrong == "revision below 0":
        values["longhaul.revision"] = torch.tensor(-1)
    elif wrong == "revision of two":
        values["longhaul.revision"] = torch.tensor([1, 2])
    elif wrong == "a meta tensor":
        values["model.z.bias"] = torch.zeros(3, device="meta")
    elif wrong == "a sparse tensor":
        values["model.z.weight"] = values["model.z.weight"].to_sparse()
    else:
        model["z"].bias.data = torch.full((1,), 7.0).expand(3)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(lh.InvalidArgument):
        state.load_state_dict(values)
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before))
    assert state.revision == 1


def test_load_state_dict_takes_tensors_that_lie_in_each_others_places() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3, bias=False), "z": torch.nn.Linear(3, 3, bias=False)})
    a, z = (model[name].weight.detach().clone() for name in "az")
    state = lh.torch.State(model, rng=None)
    values = state.state_dict()
    del values["longhaul.hash"]
    values["model.a.weight"], values["model.z.weight"] = values["model.z.weight"], values["model.a.weight"].t()
    state.load_state_dict(values)
    assert torch.equal(model["a"].weight, z)
    assert torch.equal(model["z"].weight, a.t())


# ---- what was seen before is not looked at anew, and what has changed is


def digest_after(change: Any) -> tuple[str, str]:
    """The hash of a state before and after a change of the program's objects, and that of a fresh state after it."""
    import torch

    model = model_of(1)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    state = state_of(model, optimizer)
    before = state.compute_hash()
    assert state.compute_hash() == before
    change(model, optimizer)
    after = state.compute_hash()
    assert after == state_of(model, optimizer).compute_hash()
    return before, after


def test_a_state_sees_tensors_that_an_optimizer_or_model_has_replaced() -> None:
    import torch

    def replace_moment(model: Any, optimizer: Any) -> None:
        held = optimizer.state[next(model.parameters())]
        held["exp_avg"] = held["exp_avg"] + 1

    def replace_scalar(model: Any, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.25

    def add_scalar(model: Any, optimizer: Any) -> None:
        optimizer.state[next(model.parameters())]["note"] = 1.5

    def swap_memory(model: Any, optimizer: Any) -> None:
        parameter = next(model.parameters())
        parameter.data = parameter.data + 1

    def change_in_place(model: Any, optimizer: Any) -> None:
        with torch.no_grad():
            next(model.parameters()).add_(1)

    for change in (replace_moment, replace_scalar, add_scalar, swap_memory, change_in_place):
        before, after = digest_after(change)
        assert before != after, change.__name__


def test_a_state_sees_values_inside_what_an_optimizer_holds() -> None:
    def nest(model: Any, optimizer: Any) -> None:
        optimizer.state[next(model.parameters())]["history"] = [1]

    import torch

    model = model_of(1)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    nest(model, optimizer)
    state = state_of(model, optimizer)
    before = state.compute_hash()
    optimizer.state[next(model.parameters())]["history"].append(2)
    assert state.compute_hash() != before


def test_a_model_that_gained_or_lost_a_tensor_is_refused() -> None:
    import torch

    model = model_of(1)
    state = state_of(model)
    first = next(module for module in model.modules() if module._parameters)
    first.register_buffer("more", torch.zeros(2))
    with pytest.raises(lh.InvalidArgument, match="more has come"):
        state.compute_hash()
    del first.more
    state.compute_hash()
    first.register_buffer("more", torch.zeros(2), persistent=False)
    state.compute_hash()
    first._non_persistent_buffers_set.clear()
    with pytest.raises(lh.InvalidArgument, match="more has come"):
        state.compute_hash()
    del first.more
    name = next(iter(first._parameters))
    delattr(first, name)
    with pytest.raises(lh.InvalidArgument, match="has gone"):
        state.compute_hash()
