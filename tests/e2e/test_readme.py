"""Tests that programs and commands in README and docs run as they are written there, and that links work."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import sqlite3
import subprocess
import sys
import time

import pytest
from forks import forks

import longhaul as lh
from longhaul.testing import LocalCluster, find_binary

ROOT = pathlib.Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]


def test_every_word_has_one_meaning() -> None:
    table = (README.parent / "docs" / "concepts.md").read_text().split("\n## ")[0]
    words = [
        word for row in re.findall(r"^\| (.*?) \|", table, re.MULTILINE) for word in re.findall(r"\*\*(.*?)\*\*", row)
    ]
    assert len(words) > 20
    assert sorted(words) == sorted(set(words))


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of the headings. Links may name them after `#`."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: pathlib.Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[[^\]]+\]: (\S+)$", text, re.MULTILINE)
    for link in links:
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_have_at_most_120_columns(page: pathlib.Path) -> None:
    assert [line for line in page.read_text().splitlines() if len(line) > 120] == []


def test_the_loop_of_the_readme_trains_two_hosts_with_equal_weights(tmp_path: pathlib.Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 1
    script = tmp_path / "diloco.py"
    script.write_text(blocks[0])
    with LocalCluster(peers=2) as cluster:
        # This member is there before the trainers. So both of them wait, and are admitted at the same boundary.
        first = lh.join("diloco", peerd=cluster.socket(0))
        trainers = [
            subprocess.Popen(
                [sys.executable, str(script)],
                env={**os.environ, "LONGHAUL_SOCKET": cluster.socket(i), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for i in range(2)
        ]
        deadline = time.monotonic() + 300
        while first.pending < len(trainers):
            assert all(trainer.poll() is None for trainer in trainers), [t.communicate() for t in trainers]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        first.begin_step(60)
        first.leave(60)
        rounds = []
        for trainer in trainers:
            out, err = trainer.communicate(timeout=300)
            assert trainer.returncode == 0, err
            rounds.append(re.findall(r"^round (\d+)  loss (\S+)  members (\d+)  state (\w{8})$", out, re.MULTILINE))
    of_one, of_other = rounds
    assert [int(number) for number, _, _, _ in of_one] == list(range(1, 21))
    assert [(number, state) for number, _, _, state in of_one] == [(number, state) for number, _, _, state in of_other]
    assert float(of_one[-1][1]) < float(of_one[0][1])
    assert {members for _, _, members, _ in of_one} == {"2"}


# What the blocks of the pages need: a member, and the tensors that the blocks name.
PRELUDE = """
import time
import numpy as np
import longhaul as lh

weights = lh.empty(1000)
momentum = lh.empty(1000)
rng = np.zeros(4, np.uint64)
for tensor in (weights, momentum):
    tensor[:] = 0
state = lh.State({"weights": weights})
state.save("run.safetensors")

def train(*tensors):
    for tensor in tensors:
        tensor += 0.5

def inner_steps(tensor):
    return np.full_like(tensor, 0.25)
"""
# What torchrun tells the only trainer of a host.
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
# The same for pages whose blocks run one after the other in one program, each after this.
PRELUDES = {
    "gradients": """
import contextlib
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
import longhaul as lh

dataset = TensorDataset(torch.randn(200, 8), torch.randint(3, (200,)))
model = torch.nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
comm = lh.join("page", timeout=None)
step = comm.begin_step(60)
sampler = lh.torch.ElasticSampler(dataset, comm, batch_size=16)
batches = sampler.batches(DataLoader(dataset, batch_sampler=sampler))
state = lh.torch.State(model, optimizer, objects={"sampler": sampler})
inputs, labels = batches.next(step)
loss = cross_entropy(model(inputs), labels)
""",
    "torch_distributed": """
import uuid as uuids
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import longhaul as lh
import longhaul.torch

class comm:
    leave = staticmethod(lambda seconds: dist.destroy_process_group())

class manager:
    collect = staticmethod(lambda handle: (str(uuids.uuid4()), [handle]))

replicas = shards = 1
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = [torch.ones(8, 4)] * 3
""",
}
# For blocks that use longhaul.torch.
TORCH_PRELUDE = """
import torch

model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
inner = torch.optim.AdamW(model.parameters())
data = [torch.randn(16, 4) for _ in range(15)]

def next_batch():
    return torch.randn(16, 4)

def loss_of(model, batch):
    return torch.nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True))

def evaluate(model):
    assert loss_of(model, next_batch()) > 0
"""
# Pages whose blocks are signatures, or run elsewhere: in a test above, and in tests/packaging.
NOT_HERE = ("README", "python_api", "tutorial")
JOINS = 'comm = lh.join("page", timeout=None)\n'


def programs_of(page: pathlib.Path) -> list[str]:
    """The programs that run the Python blocks of a page."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    prelude = PRELUDES.get(page.stem)
    if prelude is not None:
        return ["".join(f"{prelude}{block}comm.leave(60)\n" for block in blocks)]
    joins = ["" if "lh.join(" in block or "HSDP(" in block else JOINS for block in blocks]
    torch = [TORCH_PRELUDE if "lh.torch." in block else "" for block in blocks]
    return ["".join((PRELUDE, *parts)) for parts in zip(torch, joins, blocks)]


PROGRAMS = [
    pytest.param(program, id=f"{page.stem}-{i}")
    for page in PAGES
    if page.stem not in NOT_HERE
    for i, program in enumerate(programs_of(page), 1)
]


@pytest.mark.parametrize("block", PROGRAMS)
def test_the_python_of_the_pages_runs(block: str, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(block)
    waits_for = re.search(r"members=(\d+)", block)
    count = int(waits_for[1]) if waits_for else 1
    with LocalCluster(peers=1) as cluster:
        settings = {**TORCHRUN, "LONGHAUL_SOCKET": cluster.socket(0)}
        with forks([[str(script)]] * count, [settings] * count, tmp_path) as programs:
            for program in programs:
                program.succeeds(300)


def commands(page: pathlib.Path) -> list[list[str]]:
    """Our commands on a page, without comments. Each is a list of words; the first is the path of the program."""
    lines = re.findall(r"^ *(out/bin/.*?)(?: +#.*)?$", page.read_text(), re.MULTILINE)
    return [[str(find_binary(line.split()[0].removeprefix("out/bin/"))), *line.split()[1:]] for line in lines]


def with_values(command: list[str], values: dict[str, str]) -> list[str]:
    for name, value in values.items():
        command = [word.replace(name, value) for word in command]
    return command


def succeeds(command: list[str]) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, (command, ended.stderr)
    return ended.stdout


def test_the_commands_of_readme_and_operations_run(tmp_path: pathlib.Path) -> None:
    coordinator, peerd, lhctl = commands(README)
    store = tmp_path / "store" / "coordinator.db"
    flags = with_values(coordinator[1:], {"0.0.0.0:29600": "127.0.0.1:0"})
    # The last one of equal flags counts. The default store is a file, too, but not in a directory of the test.
    with LocalCluster(peers=0, coordinator_flags=[*flags, f"--store=sqlite:{store}"]) as cluster:
        address = with_values(peerd[1:], {"COORDINATOR_HOST:29600": cluster.coordinator})
        cluster.add_peer(address)
        with lh.join("page", peerd=cluster.socket(0)) as comm:
            comm.begin_step(60)
            asked = ["members", "ring", "why", "events"]
            for command in (lhctl, *([lhctl[0], question] for question in asked)):
                assert succeeds([*command, f"--coordinator={cluster.admin}"])
            (statement,) = re.findall(r"`(SELECT .*?)`", (ROOT / "docs" / "operations.md").read_text())
            with contextlib.closing(sqlite3.connect(store)) as database:
                assert [row[0] for row in database.execute(statement)] == ["page"]
