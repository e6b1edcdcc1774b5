"""lh.torch.TopK: its bytes, its errors, SparseLoCo against a plain reference, and what faults leave unchanged."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pathlib
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import diloco_reference as reference
import pytest
import test_diloco as dense
import torch
from conftest import Gated, Members, wait_for_open_ops, wait_until

import longhaul as lh
from longhaul.testing import LocalCluster
from longhaul.torch import AsyncDiLoCo, DiLoCo, TopK
from longhaul.torch import _sparse as sparse

K, CHUNK, BETA = 6, 64, 0.9  # for the model of test_diloco: six full chunks, and one of 53 elements
KINDS = ["DiLoCo", "StreamingDiLoCo"]


def small(**more: Any) -> TopK:
    return TopK(**{"k": K, "chunk": CHUNK, "error_decay": BETA, **more})


# ------------------------------------------------------------------ the bytes of a chunk


@pytest.mark.parametrize("width", range(1, 17))
def test_packed_numbers_come_back(width: int) -> None:
    for count in (1, 7, 8, 9, 64):
        numbers = torch.randint(0, 1 << width, (5, count), dtype=torch.int32)
        packed = sparse.pack(numbers, width)
        assert packed.shape == (5, math.ceil(count / 8) * width)
        assert torch.equal(sparse.unpack(packed, width, count), numbers)


def test_packed_numbers_are_one_stream_of_bits() -> None:
    numbers = [0xABC, 0x123, 0x456, 0x789, 0xDEF, 0x012, 0x345, 0x678]
    stream = sum(number << 12 * i for i, number in enumerate(numbers))
    packed = sparse.pack(torch.tensor([numbers], dtype=torch.int32), 12)
    assert bytes(packed[0].tolist()) == stream.to_bytes(12, "little")


def test_a_record_has_these_bytes() -> None:
    """The form on the wire. A change of it needs another version in the header."""
    form = sparse.form_of(8, 3, 8, 2)
    record = sparse.encode(torch.tensor([[0.0, -4.0, 1.0, 2.0, 0.5, 1.0, 0.0, 0.0]]), form)
    low_high = "0000c03f 00008040"  # 1.5 and 4: the mean of the three is 7 / 3
    # indices 1, 3, 2 in three bits each; codes 0b11 (high, negative), 0b00, 0b00
    assert bytes(record[0].tolist()) == bytes.fromhex(low_high + "990000" + "0300")
    assert sparse.decode(record, form).values.tolist() == [[-4.0, 1.5, 1.5]]


def test_the_share_of_float32() -> None:
    form = sparse.form_of(4096, 64, 4096, 2)
    assert form.index_bits == 12 and form.nbytes == 8 + 64 * 12 // 8 + 64 * 2 // 8 == 120
    assert form.nbytes < 0.01 * 4 * 4096
    assert sparse.form_of(100, 64, 4096, 2).k == 2  # as large a share, rounded up
    assert sparse.form_of(1, 64, 4096, 2).k == 1


@pytest.mark.parametrize("length, k", [(4096, 64), (53, 6), (8, 8), (1, 1), (5000, 100)])
def test_the_largest_come_first_and_ties_go_to_the_lower_index(length: int, k: int) -> None:
    random = torch.Generator().manual_seed(length)
    for chunks in (
        torch.randn(7, length, generator=random),
        torch.randint(-3, 4, (7, length), generator=random).float(),  # ties everywhere
        torch.zeros(2, length),
        torch.full((2, length), -1e-42),  # denormal
    ):
        want = torch.sort(chunks.abs(), dim=1, descending=True, stable=True).indices[:, :k]
        assert torch.equal(sparse.largest(chunks, k, max(1, (length - 1).bit_length())), want)


def decoded(chunks: torch.Tensor, form: sparse.Form) -> torch.Tensor:
    whole = torch.zeros_like(chunks)
    sparse.add(sparse.decode(sparse.encode(chunks, form), form), whole)
    return whole


def test_two_bits_are_a_sign_and_one_of_two_means() -> None:
    chunks = torch.randn(20, CHUNK, generator=torch.Generator().manual_seed(1))
    feedback = reference.ErrorFeedback(K, CHUNK, 1.0)
    worker: Any = None
    for chunk, got in zip(chunks, decoded(chunks, sparse.form_of(CHUNK, K, CHUNK, 2))):
        feedback.errors.clear()
        [want] = feedback.sent(worker, [chunk], [0])
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
        assert len(got.abs().unique()) == 3


@pytest.mark.parametrize("bits", range(2, 9))
def test_what_is_lost_gets_less_with_more_bits(bits: int) -> None:
    chunks = torch.randn(10, 4096, generator=torch.Generator().manual_seed(2))
    form = sparse.form_of(4096, 64, 4096, bits)
    got = decoded(chunks, form)
    sent = got != 0
    assert (sent.sum(1) == 64).all()
    steps = 2 * (2 ** (bits - 1) - 1)  # nearest of equal steps; with two bits the means are better still
    spread = (chunks * sent).abs().amax(1) - chunks.abs()[sent].view(10, 64).amin(1)
    lost = (got - chunks * sent).abs().amax(1)
    assert (lost <= (spread if bits == 2 else spread / steps * 1.0001)).all()
    assert (got[sent].sign() == chunks[sent].sign()).all()
    assert ((chunks - got).norm(dim=1) < chunks.norm(dim=1)).all()


def test_chunks_of_equal_elements_and_of_zeros_are_exact() -> None:
    for bits in (2, 4, 8):
        form = sparse.form_of(CHUNK, CHUNK, CHUNK, bits)
        for value in (0.0, 0.1, -3.0, 1e-42):
            same = torch.full((2, CHUNK), value)
            torch.testing.assert_close(decoded(same, form), same, rtol=2e-7, atol=0)
        one = torch.zeros(1, CHUNK)
        one[0, 17] = -5
        assert torch.equal(decoded(one, form), one)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bits", [2, 8])
def test_a_chunk_that_is_not_finite_is_all_nan(bits: int, bad: float) -> None:
    chunks = torch.randn(3, CHUNK)
    chunks[1, 40] = bad
    form = sparse.form_of(CHUNK, K, CHUNK, bits)
    got = decoded(chunks, form)
    assert got[1].isnan().all() and not got[[0, 2]].isnan().any()
    left = chunks.clone()
    sparse.take_out(sparse.decode(sparse.encode(chunks, form), form), left)
    assert torch.equal(left[1], torch.zeros(CHUNK)) and torch.equal(left[0], chunks[0] - got[0])


def test_a_sum_that_overflows_is_nan_and_not_wrong() -> None:
    assert decoded(torch.full((1, CHUNK), 3e38), sparse.form_of(CHUNK, K, CHUNK, 2)).isnan().all()


# ------------------------------------------------------------------ errors


class Wire:
    """Members in this thread. Stands for the all-gather."""

    def __init__(self, rules: list[TopK], lengths: list[int]) -> None:
        [self.exchanges] = zip(*[rule._exchanges_of([lengths]) for rule in rules])
        for exchange in self.exchanges:
            exchange._packed = torch.empty(exchange._nbytes, dtype=torch.uint8)

    def exchange(self, *progress: list[torch.Tensor]) -> None:
        """One op: replaces each member's progress by the mean."""
        for exchange, own in zip(self.exchanges, progress):
            exchange.pack(own)
        gathered = torch.cat([exchange._packed for exchange in self.exchanges])
        for exchange, own in zip(self.exchanges, progress):
            exchange._gathered = gathered
            exchange.unpack(info_of(len(progress)), own)


def info_of(world: int) -> lh.OpInfo:
    return lh.OpInfo(world, 1, 0, False, 0, 0, 0.0, 0.0, tuple(range(1, world + 1)), 0)


def errors_of(rule: TopK) -> list[torch.Tensor]:
    return [error.clone() for error in rule.state_dict().values()]


@pytest.mark.parametrize("bits", [2, 4])
def test_in_the_mean_over_time_everything_is_sent(bits: int) -> None:
    """Without decay, nothing is lost: the sum of what was sent is the sum of all progress, minus the error."""
    rule = small(error_decay=1.0, bits=bits)
    wire = Wire([rule], [1000])
    progress = torch.randn(1000, generator=torch.Generator().manual_seed(3))
    total, distance = torch.zeros(1000), {}
    for step in range(1, 401):
        flat = progress.clone()
        wire.exchange([flat])
        total += flat
        distance[step] = ((total / step - progress).norm() / progress.norm()).item()
    [error] = errors_of(rule)
    torch.testing.assert_close(total + error, 400 * progress, rtol=1e-4, atol=1e-3)
    assert distance[400] < 0.05 and distance[400] < 0.3 * distance[100]


def test_the_errors_follow_the_published_rule() -> None:
    rule, feedback, worker = small(), reference.ErrorFeedback(K, CHUNK, BETA), object()
    wire = Wire([rule], [437, 30])
    random = torch.Generator().manual_seed(4)
    for _ in range(10):
        progress = [torch.randn(437, generator=random), torch.randn(30, generator=random)]
        want = [feedback.sent(worker, progress, [i])[i] for i in range(2)]  # type: ignore[arg-type]
        wire.exchange(progress)
        for i, error in enumerate(errors_of(rule)):
            torch.testing.assert_close(progress[i], want[i], rtol=0, atol=1e-5)
            torch.testing.assert_close(error, torch.tensor(feedback.errors[id(worker), (i,)]), rtol=0, atol=1e-5)


def test_sums_are_made_in_the_order_of_the_members() -> None:
    """1e8 + 1 - 1e8 is 0 in float32, and 1e8 - 1e8 + 1 is 1."""
    for values, want in (((1e8, 1.0, -1e8), 0.0), ((1e8, -1e8, 1.0), 1.0)):
        wire = Wire([small(k=CHUNK) for _ in values], [CHUNK])
        progress = [[torch.full((CHUNK,), value)] for value in values]
        wire.exchange(*progress)
        for [flat] in progress:
            torch.testing.assert_close(flat, torch.full((CHUNK,), want / 3))
            assert torch.equal(flat, progress[0][0])


def test_members_get_the_same_bits_in_any_dtype() -> None:
    random = torch.Generator().manual_seed(5)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        rules = [small() for _ in range(3)]
        wire = Wire(rules, [437])
        progress = [[torch.randn(437, generator=random).to(dtype)] for _ in rules]
        given = [own.clone() for [own] in progress]
        wire.exchange(*progress)
        mean = torch.zeros(437)
        for rule, own in zip(rules, given):
            mean += own.float() - errors_of(rule)[0]
        for [flat] in progress:
            assert flat.dtype == dtype and torch.equal(flat, progress[0][0])
        torch.testing.assert_close(progress[0][0].float(), (mean / 3), rtol=1e-2, atol=1e-5)


def test_a_members_nan_reaches_all_and_stays_in_no_error() -> None:
    rules = [small(), small()]
    wire = Wire(rules, [2 * CHUNK])
    bad, good = torch.randn(2 * CHUNK), torch.randn(2 * CHUNK)
    bad[3] = math.nan
    flats = [[bad], [good]]
    wire.exchange(*flats)
    for [flat] in flats:
        assert flat[:CHUNK].isnan().all() and not flat[CHUNK:].isnan().any()
    assert torch.equal(errors_of(rules[0])[0][:CHUNK], torch.zeros(CHUNK))
    assert not errors_of(rules[1])[0].isnan().any()


def test_errors_do_not_change_before_the_op_has_ended_well() -> None:
    rule = small()
    wire = Wire([rule], [437])
    wire.exchange([torch.randn(437)])
    before, progress = errors_of(rule), [torch.randn(437)]
    kept = progress[0].clone()
    [exchange] = wire.exchanges
    exchange.pack(progress)
    packed = exchange._packed.clone()
    assert all(map(torch.equal, errors_of(rule), before)) and torch.equal(progress[0], kept)
    exchange.pack(progress)
    assert torch.equal(exchange._packed, packed), "a round that is made again sends other bytes"


def test_members_whose_arguments_differ_are_told_so() -> None:
    rules = [TopK(k=8, chunk=64), TopK(k=8, chunk=50)]
    wire = Wire(rules, [40])  # records of the same length
    flats = [[torch.randn(40)], [torch.randn(40)]]
    with pytest.raises(lh.InvalidArgument, match=r"member 2 sent TopK\(k=8, chunk=50, bits=2\)"):
        wire.exchange(*flats)
    assert not errors_of(rules[0])[0].any()


def test_a_model_of_nothing_and_large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    Wire([small()], [0]).exchange([torch.zeros(0)])
    whole, blocks = small(), small()
    progress = torch.randn(1000)
    one, other = [progress.clone()], [progress.clone()]
    Wire([whole], [1000]).exchange(one)
    monkeypatch.setattr("longhaul.torch._topk._BLOCK", 3 * CHUNK)
    Wire([blocks], [1000]).exchange(other)
    assert torch.equal(one[0], other[0])


# ------------------------------------------------------------------ arguments, checkpoints of errors


def test_what_is_refused(cluster: LocalCluster) -> None:
    for text, options in (
        ("k is 0; give a whole number from 1 to 4096", {"k": 0}),
        ("k is 65; give a whole number from 1 to 64", {"k": 65, "chunk": 64}),
        ("k is 1.5", {"k": 1.5}),
        ("chunk is 65537; give a whole number from 2 to 65536", {"chunk": 65537}),
        ("bits is 1; give a whole number from 2 to 8", {"bits": 1}),
        ("error_decay is 1.01; give a number from 0 to 1", {"error_decay": 1.01}),
        ("error_decay is nan", {"error_decay": math.nan}),
        ("error_decay is 'much'", {"error_decay": "much"}),
    ):
        with pytest.raises(lh.InvalidArgument, match=re.escape(text)):
            TopK(**options)
    topk = TopK()
    for call in (topk.state_dict, topk.reset, lambda: topk.load_state_dict({})):
        with pytest.raises(lh.FailedPrecondition, match="give this TopK to a DiLoCo first"):
            call()
    trainer = dense.Trainer(0)
    with lh.join("refused-topk", peerd=cluster.socket(0)) as comm:
        wrong: list[tuple[str, Callable[[], Any]]] = [
            ("compress is 64", lambda: DiLoCo(comm, trainer.model, None, sync_every=1, compress=64)),  # type: ignore[arg-type]
            ("use DiLoCo, or", lambda: AsyncDiLoCo(comm, trainer.model, None, sync_every=1, compress=topk)),
            ("2 of 4 parameters", lambda: DiLoCo(comm, trainer.model, None, half, sync_every=1, compress=topk)),
        ]
        half = torch.optim.SGD(trainer.model[0].parameters(), lr=1.0)
        for text, refused in wrong:
            with pytest.raises(lh.InvalidArgument, match=re.escape(text)):
                refused()
        DiLoCo(comm, trainer.model, None, sync_every=1, compress=topk)  # the refused calls have not used it
        with pytest.raises(lh.InvalidArgument, match="belongs to another DiLoCo"):
            DiLoCo(comm, trainer.model, None, sync_every=1, compress=topk)
        with pytest.raises(
            lh.InvalidArgument, match=re.escape("'error.0.0' has the shape [3] in the checkpoint and [437]")
        ):
            topk.load_state_dict({"error.0.0": torch.zeros(3)})
        with pytest.raises(
            lh.InvalidArgument, match=re.escape("'error.0.1' has the shape [1] in the checkpoint and None")
        ):
            topk.load_state_dict({"error.0.0": torch.zeros(437), "error.0.1": torch.zeros(1)})
        topk.load_state_dict({"error.0.0": torch.ones(437)})
        assert torch.equal(topk.state_dict()["error.0.0"], torch.ones(437))
        topk.reset()
        assert torch.equal(topk.state_dict()["error.0.0"], torch.zeros(437))


# ------------------------------------------------------------------ training


def plain(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.8)


def wanted(kind: str, workers: list[reference.Worker], feedback: reference.ErrorFeedback) -> Any:
    if kind == "DiLoCo":
        return reference.sparseloco(workers, 0.8, dense.SYNC_EVERY, feedback)
    return reference.streaming_diloco(
        workers, plain, dense.SYNC_EVERY, dense.FRAGMENTS, dense.DELAY, dense.ALPHA, feedback
    )


def check(kind: str, histories: list[dense.History], want: list[reference.Values]) -> None:
    """Members are equal bit by bit, and the reference, which counts in float64, is near."""
    dense.check(kind, histories, want, exact=False)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_sparseloco(kind: str, count: int, cluster: LocalCluster) -> None:
    members = Members([cluster.socket(i) for i in range(count)])
    try:
        histories = members.all(lambda comm: dense.train(comm, comm.rank, kind, plain, compress=small()))
    finally:
        members.close()
    workers = [dense.worker(number) for number in range(count)]
    rounds = wanted(kind, workers, reference.ErrorFeedback(K, CHUNK, BETA))
    check(kind, histories, list(itertools.islice(rounds, dense.ROUNDS)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_default_outer_optimizer_has_no_momentum(kind: str, pair: Members) -> None:
    def outer(comm: lh.Comm) -> list[dict[str, Any]]:
        trainer = dense.Trainer(0)
        options: dict[str, Any] = {"sync_every": 2, "compress": TopK()}
        if kind == "StreamingDiLoCo":
            options["model_fragments"] = [trainer.model[0], trainer.model[2]]
        diloco = getattr(lh.torch, kind)(comm, trainer.model, trainer.inner, **options)
        groups: list[dict[str, Any]] = diloco._outer._optimizers[0].param_groups
        return groups

    for [group] in pair.all(outer):
        assert group["lr"] == 0.7 and group["momentum"] == 0 and not group["nesterov"]


class Wide(torch.nn.Module):
    """A million parameters, one forward step of which is cheap."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 1 << 20))
        self.bias = torch.nn.Parameter(torch.zeros(1000))


@pytest.mark.parametrize("compressed", [True, False])
def test_less_than_a_hundredth_of_the_bytes_travels(compressed: bool, pair: Members) -> None:
    def bytes_of(comm: lh.Comm) -> int:
        model = Wide()
        with DiLoCo(comm, model, None, sync_every=1, compress=TopK() if compressed else None) as diloco:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(comm.rank)))
            diloco.step()
            assert diloco.info is not None
            return diloco.info.bytes_sent

    floats = 4 * ((1 << 20) + 1000)
    for sent in pair.all(bytes_of):
        print(f"{sent} bytes, {sent / floats:.3%} of float32")
        assert 0.007 * floats < sent <= 0.01 * floats if compressed else sent >= floats


def test_a_newcomer_begins_without_errors(cluster: LocalCluster) -> None:
    """The third member comes in after round 1. From there on it equals the reference, whose new worker has no error."""
    members = Members([cluster.socket(0), cluster.socket(1)])
    begun = threading.Barrier(3)

    def trained(diloco: Any, trainer: dense.Trainer, comm: lh.Comm, old: bool) -> dense.History:
        history: dense.History = {}
        while diloco.round < dense.ROUNDS:
            if old and diloco.round == dense.JOINS_AT - 1:
                wait_until(lambda: comm.pending == 1)
            trainer.inner_step()
            if diloco.round > max(history, default=0):
                history[diloco.round] = dense.global_values(diloco)
        return history

    def old(comm: lh.Comm) -> dense.History:
        trainer = dense.Trainer(comm.rank)
        with dense.make("DiLoCo", comm, trainer, plain, compress=small()) as diloco:
            begun.wait(60)
            return trained(diloco, trainer, comm, True)

    def new() -> dense.History:
        trainer = dense.Trainer(2)
        diloco = dense.make("DiLoCo", None, trainer, plain, compress=small())
        begun.wait(60)
        with lh.join(members.run, peerd=cluster.socket(2), state=diloco.state) as diloco.comm, diloco:
            assert diloco.round == dense.JOINS_AT
            return trained(diloco, trainer, diloco.comm, False)

    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(new)
        try:
            histories = [*members.all(old), joining.result(60)]
        finally:
            members.close()
    workers = [dense.worker(0), dense.worker(1)]
    rounds = wanted("DiLoCo", workers, reference.ErrorFeedback(K, CHUNK, BETA))
    want = [next(rounds) for _ in range(dense.JOINS_AT)]
    workers.append(dense.worker(2))
    want += [next(rounds) for _ in range(dense.ROUNDS - dense.JOINS_AT)]
    check("DiLoCo", histories, want)


def test_a_run_goes_on_from_a_checkpoint_bit_by_bit(
    cluster: LocalCluster, pair: Members, tmp_path: pathlib.Path
) -> None:
    """The shared state, and each member's own: its model, inner optimizer, data, and errors."""

    def first(comm: lh.Comm) -> reference.Values:
        trainer, topk = dense.Trainer(comm.rank), small()
        with dense.make("DiLoCo", comm, trainer, plain, compress=topk) as diloco:
            while diloco.round < 2:
                trainer.inner_step()
            if comm.rank == 0:
                diloco.state.save(tmp_path / "shared")
            own = {"inner": trainer.inner.state_dict(), "data": trainer._data.get_state(), "errors": topk.state_dict()}
            torch.save(own, tmp_path / f"own-{comm.rank}")
            while diloco.round < 4:
                trainer.inner_step()
            return dense.global_values(diloco)

    def again(comm: lh.Comm) -> reference.Values:
        trainer, topk = dense.Trainer(comm.rank), small()
        diloco = dense.make("DiLoCo", comm, trainer, plain, compress=topk)
        diloco.state.load(tmp_path / "shared")
        own = torch.load(tmp_path / f"own-{comm.rank}")
        trainer.inner.load_state_dict(own["inner"])
        trainer._data.set_state(own["data"])
        topk.load_state_dict(own["errors"])
        with diloco:
            while diloco.round < 4:
                trainer.inner_step()
            return dense.global_values(diloco)

    want = pair.all(first)[0]
    pair.close()
    fresh = Members([cluster.socket(0), cluster.socket(1)])
    try:
        for values in fresh.all(again):
            assert all(map(torch.equal, values, want))
    finally:
        fresh.close()


# ------------------------------------------------------------------ faults


def test_a_host_dies_while_an_op_is_in_flight() -> None:
    """The others go on without its part, equal bit by bit. The dead host's trainer has the errors of before the op."""
    with LocalCluster(peers=2) as cluster:
        for kind in KINDS:
            doomed = cluster.add_peer()
            members = Members([cluster.socket(0), cluster.socket(1), cluster.socket(doomed)])
            gate = threading.Event()
            rules = [small() for _ in range(3)]
            before: list[list[torch.Tensor]] = []

            def trained(comm: lh.Comm) -> dense.History | lh.Error:
                late = comm.rank == 1
                gated: Any = Gated(comm, "all_gather", 1, gate) if late else comm  # noqa: B023
                try:
                    return dense.train(gated, comm.rank, kind, plain, compress=rules[comm.rank])  # noqa: B023
                except lh.Error as problem:
                    return problem

            with ThreadPoolExecutor(1) as pool:
                running = pool.submit(members.all, trained)
                try:
                    # The first op has ended, and the second one waits for the late member.
                    wait_until(lambda: rules[2]._errors is not None and any(map(torch.any, errors_of(rules[2]))))  # noqa: B023
                    wait_for_open_ops([cluster.peers[0], cluster.peers[doomed]])
                    before.append(errors_of(rules[2]))
                    cluster.kill_peer(doomed)
                    # Before that, the op would still end with the dead member's part, which the others have already.
                    wait_until(lambda: all(comm.world_size == 2 for comm in members.comms[:2]))  # noqa: B023
                finally:
                    gate.set()
                first, second, dead = running.result(120)
            members.close()
            assert isinstance(dead, lh.Unavailable), dead
            assert any(error.any() for error in before[0])
            assert all(map(torch.equal, errors_of(rules[2]), before[0]))
            assert isinstance(first, dict) and isinstance(second, dict), (first, second)
            assert first.keys() == second.keys() == set(range(1, dense.ROUNDS + 1))
            for number, values in first.items():
                assert all(map(torch.equal, values, second[number])), f"{kind}: members differ in round {number}"
            if kind == "DiLoCo":  # the second op is that of round 2, and the mean is that of two members
                workers = [dense.worker(number) for number in range(3)]
                rounds = wanted(kind, workers, reference.ErrorFeedback(K, CHUNK, BETA))
                want = [next(rounds)]
                workers.pop()
                check(kind, [first], want + [next(rounds) for _ in range(dense.ROUNDS - 1)])


def test_an_aborted_op_leaves_the_errors_and_is_started_again(pair: Members) -> None:
    """The op of the second turn is cancelled. The result is that of a run without a fault."""
    gate = threading.Event()
    kind = "StreamingDiLoCo"

    def cancels(comm: lh.Comm) -> dense.History:
        trainer, topk = dense.Trainer(comm.rank), small()
        counted: Any = Gated(comm, "all_gather", -1, gate)
        history: dense.History = {}
        cancelled = False
        with dense.make(kind, counted, trainer, plain, compress=topk) as diloco:
            while diloco.round < dense.ROUNDS:
                before = errors_of(topk)
                trainer.inner_step()
                work = diloco._fragments[1]._work
                if work is not None and not cancelled:
                    cancelled = True
                    work.cancel()
                    with pytest.raises(lh.Aborted):
                        work.wait(60)
                    assert all(map(torch.equal, errors_of(topk), before))
                    gate.set()
                if diloco.round > max(history, default=0):
                    history[diloco.round] = dense.global_values(diloco)
        assert counted.started == 2 * dense.ROUNDS + 1
        return history

    def late(comm: lh.Comm) -> dense.History:
        gated: Any = Gated(comm, "all_gather", 1, gate)
        return dense.train(gated, comm.rank, kind, plain, compress=small())

    histories = pair.all(lambda comm: (cancels if comm.rank == 0 else late)(comm))
    rounds = wanted(kind, [dense.worker(0), dense.worker(1)], reference.ErrorFeedback(K, CHUNK, BETA))
    check(kind, histories, list(itertools.islice(rounds, dense.ROUNDS)))


def test_members_that_do_not_agree_on_their_number_start_again(pair: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    """One member lays its op out for a member that the other one does not count."""

    def with_three(world: lh.World) -> lh.World:
        return dataclasses.replace(world, step=dataclasses.replace(world.step, world_size=3))

    def train(comm: lh.Comm) -> dense.History:
        trainer = dense.Trainer(comm.rank)
        history: dense.History = {}
        if comm.rank == 0:
            world = comm.world
            monkeypatch.setattr(comm, "world", lambda: with_three(world()))
        with dense.make("DiLoCo", comm, trainer, plain, compress=small()) as diloco:
            for round in range(1, 3):
                while diloco.round < round:
                    trainer.inner_step()
                history[round] = dense.global_values(diloco)
        return history

    first, second = pair.all(train)
    for number, values in first.items():
        assert all(map(torch.equal, values, second[number]))


@pytest.mark.parametrize("kind", KINDS)
def test_churn(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts die and others join while the group trains. Members are equal in each round, and the model learns."""
    make = dense.make

    def compressed(kind: str, comm: lh.Comm | None, trainer: dense.Trainer, *_: Any) -> Any:
        return make(kind, comm, trainer, plain, compress=small(k=16))

    monkeypatch.setattr(dense, "make", compressed)
    rounds = dense.Churn.GAP * (dense.FAULTS + 1) + dense.Churn.TAIL
    with LocalCluster(peers=0) as cluster:
        churn = dense.Churn(cluster, kind, dense.FAULTS, rounds)
        losses = churn.train(20250821)
    first = dense.Trainer(0).judge()
    print(f"{kind}: loss {first:.4f} at first, {losses[0]:.4f} with {dense.FAULTS} faults")
    assert len(losses) == 3 and len(set(losses)) == 1
    assert all(len(hashes) == 1 for hashes in churn.hashes.values()), "members differ"
    assert churn.hashes.keys() == set(range(1, rounds + 1))
    assert losses[0] < 0.8 * first
