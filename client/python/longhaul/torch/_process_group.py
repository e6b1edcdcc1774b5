"""The process group "longhaul" of torch.distributed: the collectives of torch over those of a Comm."""

from __future__ import annotations

import datetime
import functools
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .._errors import InvalidArgument
from .._op_info import OpInfo
from ._pg_core import Call, Core, assemble, held
from ._pg_options import Options
from ._pg_tensors import (
    Plan,
    apart,
    check_reduced,
    lengths_of,
    row_lengths,
    source,
    sources,
    target,
    targets,
)
from ._pg_torch import Base, check_version
from ._pg_work import Work, Works

_Kind: Any = dist.ReduceOp.RedOpType
_OPS = {
    _Kind.SUM: "sum",
    _Kind.AVG: "avg",
    _Kind.PRODUCT: "prod",
    _Kind.MIN: "min",
    _Kind.MAX: "max",
    _Kind.PREMUL_SUM: "sum",
}
_BITWISE: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    _Kind.BAND: torch.bitwise_and,
    _Kind.BOR: torch.bitwise_or,
    _Kind.BXOR: torch.bitwise_xor,
}
_AVG: Any = dist.ReduceOp.AVG
_SUM: Any = dist.ReduceOp.SUM
# For flags, these are the same as bitwise ops and products.
_FLAGS = {_Kind.BAND: "min", _Kind.PRODUCT: "min", _Kind.BOR: "max"}


def create(backend_options: Any, options: Options | None) -> ProcessGroup:
    """What init_process_group() and new_group() call for the name "longhaul"."""
    check_version()
    if options is not None and not isinstance(options, Options):
        raise InvalidArgument(
            f"pg_options is a {type(options).__name__}; for the backend longhaul, give longhaul.torch.Options"
        )
    name = backend_options.group_id
    seconds = backend_options.timeout.total_seconds()
    store, rank, size = backend_options.store, backend_options.group_rank, backend_options.group_size
    ranks = list(backend_options.global_ranks_in_group)
    world = dist.group.WORLD
    if ranks and isinstance(world, ProcessGroup):
        return world.subgroup(ranks, store, name, seconds, options)
    group = ProcessGroup(store, rank, size, seconds, name, options or Options())
    if not group._core.options.reconfigure:
        group._core.use(assemble(store, rank, size, seconds, name), None)
    return group


class ProcessGroup(Base):
    """One group of ranks. Made by init_process_group("longhaul") and by new_group().

    All ranks of the group call its ops in the same order. Threads: any; calls of several threads have no order.
    Wrong arguments raise TypeError or ValueError at the call, and the other ranks hear of it. Everything else raises
    torch.distributed.DistBackendError, at the call if it is synchronous, else from Work.wait().
    """

    def __init__(self, store: Any, rank: int, size: int, seconds: float, name: str, options: Options) -> None:
        super().__init__(store, rank, size, name)
        self._core = Core(name, seconds, options, size)
        self._core.rank = rank
        self._finalizer = held(self, self._core)
        self._coalesced: list[Work] | None = None
        self._warned = options.on_fault != "retry"

    def subgroup(
        self, ranks: Sequence[int], store: Any, name: str, seconds: float, options: Options | None
    ) -> ProcessGroup:
        """A group of some ranks of this one, over the same communicator. No rank waits for another one."""
        core = self._core
        if core.joined is None:
            raise dist.DistBackendError(f"new_group: process group {core.name} has no members yet")
        if list(ranks) != sorted(set(ranks)):
            raise InvalidArgument(f"ranks are {list(ranks)}; give them in ascending order, each once")
        rank = list(ranks).index(core.rank)
        group = ProcessGroup(store, rank, len(ranks), seconds, name, options or core.options)
        group._core.use(core.joined, ranks)
        return group

    # ------------------------------------------------------------------ the group

    def rank(self) -> int:
        return self._core.rank

    def getRank(self) -> int:
        return self._core.rank

    def size(self) -> int:
        return self._core.size

    def getSize(self) -> int:
        return self._core.size

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """The time-out of further ops."""
        self._core.seconds = timeout.total_seconds()

    @property
    def supports_reconfigure(self) -> bool:
        return self._core.options.reconfigure

    def get_reconfigure_handle(self) -> str:
        """What stands for this group of this process in reconfigure()."""
        return self._core.handle

    def reconfigure(self, uuid: Any, handles: Any = None, timeout: datetime.timedelta | None = None) -> Work:
        """Goes on with the processes of these handles, all of which call it. rank() and size() follow.

        Ops in flight end with an error, and so do later ops of subgroups. The old members leave in the background.

        uuid: the same at all, and a new one for each call; or torch's ReconfigureOptions, which hold all arguments.
        handles: a list, in rank order, or a set, which is sorted.
        Raises DistBackendError, also at the time-out, when the text says which handles are missing; call it again with a
        new uuid then. Raises ValueError if the uuid was already used.
        """
        if hasattr(uuid, "handles"):
            uuid, handles, timeout = uuid.uuid, uuid.handles, uuid.timeout
        core = self._core
        if not core.options.reconfigure:
            raise InvalidArgument("reconfigure: the group was made without it; give Options(reconfigure=True)")
        seconds = _seconds(timeout)
        core.reconfigure(uuid, handles, core.seconds if seconds is None else seconds)
        return Work(None, [])

    def info(self) -> OpInfo | None:
        """What the last op did that ended well, such as its members (`OpInfo.members`). None: there was none."""
        return self._core.info

    @property
    def member_ids(self) -> tuple[int, ...]:
        """The ids of the members of the group in rank order, those that died included. `OpInfo.members` has them, too."""
        return self._core.ids

    def errored(self) -> Exception | None:
        """The last error of an op of this rank; None: there was none."""
        return self._core.error

    def get_error(self) -> Any:
        """The kind of errored(): SUCCESS, TIMEOUT or COMM_ERROR of torch's ErrorType."""
        kinds = torch._C._distributed_c10d.ErrorType
        if self._core.error is None:
            return kinds.SUCCESS
        return kinds.TIMEOUT if "Timed out waiting" in str(self._core.error) else kinds.COMM_ERROR

    def check(self) -> None:
        """With errors="defer": raises the error since the last check, if there was one."""
        problem, self._core.deferred = self._core.deferred, None
        if problem is not None:
            raise problem

    def shutdown(self) -> None:
        """Leaves. destroy_process_group() calls it."""
        self._core.leave(wait=True)
        self._finalizer()

    def abort(self) -> None:
        """Ends all ops of this rank with an error at once, and leaves in the background. The other ranks' ops fail, too."""
        self._core.abort()

    def __reduce__(self) -> Any:
        raise TypeError("a process group cannot be pickled: its members are in this process only")

    # ------------------------------------------------------------------ how ops start

    def _run(self, call: Call) -> Any:
        if torch.autograd.profiler._is_profiler_enabled:
            with torch.autograd.profiler.record_function(f"longhaul:{call.name}"):
                work = self._core.run(call)
        else:
            work = self._core.run(call)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _start(
        self,
        name: str,
        build: Callable[[], Plan],
        options: Any,
        *,
        redo: bool = False,
        timeout: datetime.timedelta | None = None,
    ) -> Any:
        if options is not None and not isinstance(options, datetime.timedelta):
            timeout = options.timeout if timeout is None else timeout
            sync = not options.asyncOp
        else:
            timeout, sync = options or timeout, False
        return self._run(Call(name, build, sync and self._coalesced is None, _seconds(timeout), redo))

    def _root(self, rank: int) -> dict[str, Any]:
        """The option that names a root."""
        if not 0 <= rank < self._core.size:
            raise ValueError(f"root is rank {rank}, and the group has {self._core.size} ranks")
        return {"root_member": self._core.ids[rank]}

    # ------------------------------------------------------------------ reductions

    def allreduce(self, tensors: Any, opts: Any = None, timeout: datetime.timedelta | None = None) -> Any:
        options, op = _reduction(opts)
        several = _several(tensors)
        if len(several) != 1:
            return self.allreduce_coalesced(several, opts)
        if not self._warned:
            self._warn(op)
        build = functools.partial(self._all_reduce_plan, several, op)
        return self._start("all_reduce", build, options, redo=True, timeout=timeout)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        options, op = _reduction(opts)
        build = functools.partial(self._all_reduce_plan, _several(tensors), op)
        return self._start("all_reduce", build, options, redo=True)

    def _all_reduce_plan(self, tensors: list[torch.Tensor], op: Any) -> Plan:
        for tensor in tensors:
            check_reduced(tensor, "the tensor")
        if len(tensors) == 1 and tensors[0].layout != torch.strided:
            return self._sparse_plan(tensors[0], op)
        plan = Plan(result=tensors, writes=tensors)
        kind, weight, bitwise = _operation(op, tensors)
        wires = [target(tensor, plan.after, read=True) for tensor in tensors]
        if bitwise is not None:
            return self._fold_plan(plan, wires, bitwise)
        if weight is not None:
            wires = [_premultiplied(wire, weight, plan.after) for wire in wires]
            plan.options["weight"] = abs(weight)
        plan.arguments = (wires[0] if len(wires) == 1 else wires, kind)
        return plan

    def _fold_plan(
        self,
        plan: Plan,
        wires: list[torch.Tensor],
        bitwise: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        then: Callable[[list[torch.Tensor]], object] | None = None,
    ) -> Plan:
        """Bitwise ops: an all-gather, and a fold at each rank. then: gets the results; None: they go to `wires`."""
        size = self._core.size
        gathered = [torch.empty((size, wire.numel()), dtype=wire.dtype, device=wire.device) for wire in wires]

        def fold() -> None:
            results = [functools.reduce(bitwise, rows.unbind()) for rows in gathered]
            if then is not None:
                then(results)
                return
            for wire, result in zip(wires, results):
                wire.view(-1).copy_(result)

        plan.method = "all_gather"
        plan.after.insert(0, fold)
        plan.arguments = (wires,)
        plan.options.update(out=gathered, world=size)
        return plan

    def _sparse_plan(self, tensor: torch.Tensor, op: Any) -> Plan:
        kind, weight, bitwise = _operation(op, [tensor])
        if tensor.layout != torch.sparse_coo or weight is not None or bitwise is not None:
            raise TypeError(f"all_reduce of a {tensor.layout} tensor with {op}; only sparse_coo tensors are reduced")
        dense = tensor.detach().to_dense()
        plan = Plan(result=[tensor])
        wire = target(dense, plan.after, read=True)

        @torch.no_grad()
        def back() -> None:
            tensor.copy_(dense.to_sparse(tensor.sparse_dim()))

        plan.after.append(back)
        plan.arguments = (wire, kind)
        return plan

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: datetime.timedelta | None = None) -> Any:
        options = opts
        if isinstance(opts, int):
            options = dist.ReduceOptions()
            options.rootRank = opts
            options.reduceOp = _SUM if op is None else op
        elif opts is None:
            options = dist.ReduceOptions()
        build = functools.partial(self._reduce_plan, _one(tensors), options)
        return self._start("reduce", build, options, timeout=timeout)

    def _reduce_plan(self, tensor: torch.Tensor, options: Any) -> Plan:
        check_reduced(tensor, "the tensor")
        root = self._root(options.rootRank)
        is_root = options.rootRank == self._core.rank
        plan = Plan(result=[tensor], reads=[tensor], writes=[tensor] if is_root else [])
        kind, weight, bitwise = _operation(options.reduceOp, [tensor])
        wire = target(tensor, plan.after, read=True) if is_root else source(tensor)
        if bitwise is not None:
            return self._fold_plan(plan, [wire], bitwise, None if is_root else _nothing)
        if weight is not None:
            wire = _premultiplied(wire, weight, plan.after if is_root else [])
            plan.options["weight"] = abs(weight)
        plan.arguments = (wire,)
        plan.options.update(root, op=kind)
        return plan

    def reduce_scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: datetime.timedelta | None = None
    ) -> Any:
        options, op = _reduction(opts, dist.ReduceScatterOptions)
        output = _one(output_tensors)
        parts = _parts(input_tensors)
        build = functools.partial(self._reduce_scatter_plan, [output], [parts], op)
        return self._start("reduce_scatter", build, options, timeout=timeout)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        options, op = _reduction(opts, dist.ReduceScatterOptions)
        build = functools.partial(self._reduce_scatter_plan, [output], [input], op)
        return self._start("reduce_scatter", build, options)

    def _reduce_scatter_base(self, output: Any, input: Any, opts: Any = None) -> Any:
        return self.reduce_scatter_single(output, input, opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        options, op = _reduction(opts, dist.ReduceScatterOptions)
        build = functools.partial(self._reduce_scatter_plan, list(outputs), list(inputs), op)
        return self._start("reduce_scatter", build, options)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced(outputs, inputs, opts)

    def _reduce_scatter_plan(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor | list[torch.Tensor]], op: Any
    ) -> Plan:
        for output in outputs:
            check_reduced(output, "the output")
        kind, weight, bitwise = _operation(op, outputs)
        plan = Plan(result=outputs, writes=outputs)
        plan.reads = [part for each in inputs for part in (each if isinstance(each, list) else [each])]
        wholes, counts = [], None
        for output, each in zip(outputs, inputs, strict=True):
            if isinstance(each, list):
                self._check_parts(each, "the list of inputs")
                counts = lengths_of(each)
                wholes.append(sources(each, "the list of inputs"))
            else:
                if each.numel() != output.numel() * self._core.size:
                    raise ValueError(
                        f"the input has {each.numel()} elements and the output {output.numel()}; the input needs "
                        f"{self._core.size} times as many, for {self._core.size} ranks"
                    )
                wholes.append(source(each))
        wholes = apart(wholes) if len(wholes) > 1 else wholes
        if bitwise is not None:
            return self._fold_scatter_plan(plan, outputs, wholes, counts, bitwise)
        if weight is not None:
            if weight < 0:
                wholes = [-whole for whole in wholes]
            plan.options["weight"] = abs(weight)
        outs = [target(output, plan.after, read=False) for output in outputs]
        single = len(outs) == 1
        plan.arguments = (wholes[0] if single else wholes, kind)
        plan.options.update(out=outs[0] if single else outs, counts=counts, world=self._core.size)
        return plan

    def _fold_scatter_plan(
        self,
        plan: Plan,
        outputs: list[torch.Tensor],
        wholes: list[torch.Tensor],
        counts: list[int] | None,
        bitwise: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> Plan:
        rank = self._core.rank

        def pick(results: list[torch.Tensor]) -> None:
            for output, result in zip(outputs, results):
                pieces = result.view(-1).split(output.numel() if counts is None else counts)
                output.detach().copy_(pieces[rank].view(output.shape))

        return self._fold_plan(plan, [whole.view(-1) for whole in wholes], bitwise, pick)

    # ------------------------------------------------------------------ moves

    def broadcast(self, tensors: Any, opts: Any = None, timeout: datetime.timedelta | None = None) -> Any:
        options = _rooted(opts, dist.BroadcastOptions)
        build = functools.partial(self._broadcast_plan, _several(tensors), options)
        return self._start("broadcast", build, options, timeout=timeout)

    def _broadcast_plan(self, tensors: list[torch.Tensor], options: Any) -> Plan:
        plan = Plan(result=tensors, options=self._root(options.rootRank))
        if options.rootRank == self._core.rank:
            wires = apart(tensors)
            plan.reads = tensors
        else:
            wires = [target(tensor, plan.after, read=False) for tensor in tensors]
            plan.writes = tensors
        plan.arguments = (wires[0] if len(wires) == 1 else wires,)
        return plan

    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: datetime.timedelta | None = None
    ) -> Any:
        outputs = output_tensors[0] if isinstance(output_tensors[0], (list, tuple)) else output_tensors
        build = functools.partial(self._all_gather_lists_plan, [list(outputs)], _several(input_tensors))
        return self._start("all_gather", build, opts, timeout=timeout)

    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> Any:
        lists = [list(each) for each in output_lists]
        # torch has lists by tensor, or by rank: output_lists[rank][i] with one list for each rank.
        inputs = list(input_list)
        build = functools.partial(self._all_gather_lists_plan, lists, inputs)
        return self._start("all_gather", build, opts)

    def _all_gather_lists_plan(self, lists: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> Plan:
        plan = Plan(result=[tensor for each in lists for tensor in each], reads=inputs)
        plan.writes = plan.result
        if len(lists) != len(inputs):
            raise ValueError(f"there are {len(lists)} lists of outputs for {len(inputs)} inputs; give one for each")
        counts = None
        wholes = []
        for outputs, tensor in zip(lists, inputs):
            self._check_parts(outputs, "the list of outputs")
            if outputs[0].dtype != tensor.dtype:
                raise TypeError(f"the outputs are {outputs[0].dtype}, and the input is {tensor.dtype}")
            counts = lengths_of(outputs)
            if counts is not None and len(lists) > 1:
                raise ValueError(
                    "the outputs of one of several inputs have different lengths; call all_gather for each"
                )
            wholes.append(targets(outputs, "the list of outputs", plan.after))
        parts = apart(inputs)
        single = len(parts) == 1
        plan.arguments = (parts[0] if single else parts,)
        plan.options.update(out=wholes[0] if single else wholes, counts=counts, world=self._core.size)
        return plan

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [input], opts)

    def _allgather_base(self, output: Any, input: Any, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        build = functools.partial(self._all_gather_plan, list(outputs), list(inputs))
        return self._start("all_gather", build, opts)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced(outputs, inputs, opts)

    def _all_gather_plan(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Plan:
        for output, tensor in zip(outputs, inputs, strict=True):
            if output.dtype != tensor.dtype:
                raise TypeError(f"the output is {output.dtype}, and the input is {tensor.dtype}")
            if output.numel() != tensor.numel() * self._core.size:
                raise ValueError(
                    f"the output has {output.numel()} elements and the input {tensor.numel()}; the output needs "
                    f"{self._core.size} times as many, for {self._core.size} ranks"
                )
        plan = Plan(result=outputs, reads=inputs, writes=outputs)
        parts = apart(inputs)
        outs = [target(output, plan.after, read=False) for output in outputs]
        single = len(outs) == 1
        plan.arguments = (parts[0] if single else parts,)
        plan.options.update(out=outs[0] if single else outs, world=self._core.size)
        return plan

    def gather(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: datetime.timedelta | None = None,
    ) -> Any:
        options = _rooted(opts, dist.GatherOptions)
        outputs = _parts(output_tensors)
        build = functools.partial(self._gather_plan, outputs, _one(input_tensors), options.rootRank)
        return self._start("gather", build, options, timeout=timeout)

    def _gather_plan(self, outputs: list[torch.Tensor], tensor: torch.Tensor, root: int) -> Plan:
        plan = Plan(result=outputs, reads=[tensor], writes=outputs, options=self._root(root))
        plan.arguments = (source(tensor),)
        if root == self._core.rank:
            self._check_parts(outputs, "the list of outputs")
            for i, output in enumerate(outputs):
                if output.dtype != tensor.dtype or output.numel() != tensor.numel():
                    raise ValueError(
                        f"output {i} is {output.dtype} x {output.numel()}, and the input is {tensor.dtype} x "
                        f"{tensor.numel()}; they need the same dtype and number of elements"
                    )
            plan.options["out"] = targets(outputs, "the list of outputs", plan.after)
        elif outputs:
            raise ValueError("outputs are given at a rank that is not the root of the gather; give none there")
        plan.options["world"] = self._core.size
        return plan

    def scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: datetime.timedelta | None = None,
    ) -> Any:
        options = _rooted(opts, dist.ScatterOptions)
        inputs = _parts(input_tensors)
        build = functools.partial(self._scatter_plan, _one(output_tensors), inputs, options.rootRank)
        return self._start("scatter", build, options, timeout=timeout)

    def _scatter_plan(self, output: torch.Tensor, inputs: list[torch.Tensor], root: int) -> Plan:
        plan = Plan(result=[output], reads=inputs, writes=[output], options=self._root(root))
        if root == self._core.rank:
            self._check_parts(inputs, "the list of inputs")
            for i, part in enumerate(inputs):
                if part.dtype != output.dtype or part.numel() != output.numel():
                    raise ValueError(
                        f"input {i} is {part.dtype} x {part.numel()}, and the output is {output.dtype} x "
                        f"{output.numel()}; they need the same dtype and number of elements"
                    )
            plan.options["tensor"] = sources(inputs, "the list of inputs")
        elif inputs:
            raise ValueError("inputs are given at a rank that is not the root of the scatter; give none there")
        plan.options.update(out=target(output, plan.after, read=False), world=self._core.size)
        return plan

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        opts: Any = None,
        timeout: datetime.timedelta | None = None,
    ) -> Any:
        build = functools.partial(
            self._all_to_all_plan, output, input, list(output_split_sizes or ()), list(input_split_sizes or ())
        )
        return self._start("all_to_all", build, opts, timeout=timeout)

    def alltoall_base(
        self, output: Any, input: Any, output_split_sizes: Any, input_split_sizes: Any, opts: Any = None
    ) -> Any:
        return self.all_to_all_single(output, input, output_split_sizes, input_split_sizes, opts)

    def _all_to_all_plan(
        self, output: torch.Tensor, tensor: torch.Tensor, output_splits: list[int], splits: list[int]
    ) -> Plan:
        if output.dtype != tensor.dtype:
            raise TypeError(f"the output is {output.dtype}, and the input is {tensor.dtype}")
        plan = Plan(result=[output], reads=[tensor], writes=[output])
        # Some ranks may have equal parts and others not, so the lengths are always said.
        plan.options["counts"] = row_lengths(splits, tensor, self._core.size, "the input")
        plan.options["out_counts"] = row_lengths(output_splits, output, self._core.size, "the output")
        plan.arguments = (source(tensor),)
        plan.options.update(out=target(output, plan.after, read=False), world=self._core.size)
        return plan

    def alltoall(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: datetime.timedelta | None = None
    ) -> Any:
        build = functools.partial(self._all_to_all_lists_plan, list(output_tensors), list(input_tensors))
        return self._start("all_to_all", build, opts, timeout=timeout)

    def _all_to_all_lists_plan(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Plan:
        self._check_parts(outputs, "the list of outputs")
        self._check_parts(inputs, "the list of inputs")
        plan = Plan(result=outputs, reads=inputs, writes=outputs)
        first = lengths_of(inputs)
        plan.options["counts"] = [inputs[0].numel() * _width(inputs[0])] * len(inputs) if first is None else first
        last = lengths_of(outputs)
        plan.options["out_counts"] = [outputs[0].numel() * _width(outputs[0])] * len(outputs) if last is None else last
        plan.arguments = (sources(inputs, "the list of inputs"),)
        plan.options.update(out=targets(outputs, "the list of outputs", plan.after), world=self._core.size)
        return plan

    def _check_parts(self, tensors: Sequence[torch.Tensor], name: str) -> None:
        if len(tensors) != self._core.size:
            raise ValueError(f"{name} has {len(tensors)} tensors; give one for each of {self._core.size} ranks")

    # ------------------------------------------------------------------ two ranks

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        return self._message("send", _one(tensors), dst, self._core.rank, dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        return self._message("recv", _one(tensors), src, src, self._core.rank, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        raise ValueError("recv: the backend longhaul receives from a given rank only; name the source")

    def _message(
        self, name: str, tensor: torch.Tensor, partner: int, source_rank: int, to: int, tag: int, seconds: Any = None
    ) -> Any:
        core = self._core
        if not 0 <= partner < core.size or partner == core.rank:
            raise ValueError(
                f"{name}: the partner is rank {partner}, this is rank {core.rank} of {core.size}; give another rank of "
                "the group"
            )

        def build() -> Plan:
            if name == "send":
                plan = Plan(result=[tensor], reads=[tensor], options={"to_member": core.ids[partner]})
                plan.arguments = (source(tensor),)
            else:
                plan = Plan(result=[tensor], writes=[tensor], options={"source_member": core.ids[partner]})
                plan.arguments = (target(tensor, plan.after, read=False),)
            return plan

        number = core.tag_between(source_rank, to, tag)
        return self._run(Call(name, build, partner=partner, tag=number, seconds=seconds))

    # ------------------------------------------------------------------ barriers

    def barrier(self, opts: Any = None, timeout: datetime.timedelta | None = None) -> Any:
        return self._start("barrier", Plan, opts, redo=True, timeout=timeout)

    def monitored_barrier(self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier at whose time-out rank 0 names the ranks that have not come."""
        core = self._core
        seconds = _seconds(timeout)
        seconds = core.seconds if seconds is None else seconds
        flag = torch.zeros(1, dtype=torch.uint8)
        if core.rank > 0:
            # Rank 0 may need its whole time for other ranks, so wait a little longer for its answer.
            self._message("send", flag, 0, core.rank, 0, _MONITOR, seconds).wait()
            self._message("recv", flag, 0, 0, core.rank, _MONITOR, 2 * seconds + 1).wait()
            return
        deadline = time.monotonic() + seconds
        works = [
            (rank, self._message("recv", flag.clone(), rank, rank, 0, _MONITOR, seconds))
            for rank in range(1, core.size)
        ]
        late = []
        for rank, work in works:
            while not work.is_completed() and time.monotonic() < deadline:
                time.sleep(0.0005)
            if not work.is_success():
                late.append(rank)
                if not wait_all_ranks:
                    break
        if late:
            names = ", ".join(str(rank) for rank in late)
            assert core.joined is not None
            problem = core.timed_out(
                core.joined, f"monitored_barrier: [Rank 0]: Rank {names} failed to pass monitoredBarrier", seconds
            )
            core.end_ops(lambda _: problem)
            raise problem
        for work in [self._message("send", flag, rank, 0, rank, _MONITOR) for rank in range(1, core.size)]:
            work.wait()

    # ------------------------------------------------------------------ several ops as one

    def _start_coalescing(self, device: Any) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any = None) -> Any:
        works, self._coalesced = self._coalesced or [], None
        return Works(works)

    def _warn(self, op: Any) -> None:
        """DDP divides gradients by the size of the group. After a death that is not the number of those that are left."""
        try:
            caller = sys._getframe(2).f_code.co_name  # of allreduce()
        except ValueError:
            caller = ""  # a thread of autograd, where no Python code runs
        of_autograd = caller in ("", "_engine_run_backward")
        if of_autograd and _kind_of(op) == _Kind.SUM:
            self._warned = True
            warnings.warn(
                "DDP divides gradients by the size of the process group, which is wrong after a death with "
                'on_fault="retry"; call model.register_comm_hook(None, longhaul.torch.ddp_average_hook)',
                stacklevel=2,
            )


# The tag of torch of the messages of monitored_barrier().
_MONITOR = -(1 << 40)


def ddp_average_hook(group: ProcessGroup | None, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Averages gradients over the ranks that are left: `model.register_comm_hook(None, lh.torch.ddp_average_hook)`.

    DDP itself divides by the size of the group at its start, which is wrong after a death with on_fault="retry".
    group: the process group of the model; None: the default group.
    """
    options = dist.AllreduceOptions()
    options.reduceOp = _AVG
    target_group: Any = dist.group.WORLD if group is None else group
    work = target_group.allreduce([bucket.buffer()], options)
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda ended: ended.value()[0])
    return future


# DDP compares these with its own, and not as texts.
ddp_average_hook.__annotations__.update({"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]})  # type: ignore[attr-defined]


# ------------------------------------------------------------------ arguments


def _nothing(_: object) -> None:
    pass


def _width(tensor: torch.Tensor) -> int:
    return row_lengths([1], tensor.reshape(-1)[:1], 1, "a tensor")[0] if tensor.numel() else 1


def _seconds(timeout: datetime.timedelta | None) -> float | None:
    """None: the time-out of the group. torch says so by a negative number."""
    if timeout is None:
        return None
    seconds = timeout.total_seconds()
    return seconds if seconds > 0 else None


def _several(tensors: Any) -> list[torch.Tensor]:
    return list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]


def _rooted(opts: Any, kind: Callable[[], Any]) -> Any:
    """The options of an op with a root. opts: they, or the root's rank alone; None: rank 0."""
    if opts is not None and not isinstance(opts, int):
        return opts
    options = kind()
    options.rootRank = opts or 0
    return options


def _parts(tensors: Any) -> list[torch.Tensor]:
    """One tensor for each rank. torch's older forms have this list within another one."""
    found = list(tensors)
    return list(found[0]) if found and isinstance(found[0], (list, tuple)) else found


def _one(tensors: Any) -> torch.Tensor:
    several = _several(tensors)
    if len(several) != 1:
        raise ValueError(f"{len(several)} tensors are given; give one")
    return several[0]


def _reduction(opts: Any, kind: Callable[[], Any] = dist.AllreduceOptions) -> tuple[Any, Any]:
    """The options of a reduction, and its op. opts: options, an op, or None."""
    if opts is None:
        return None, _SUM
    if hasattr(opts, "reduceOp"):
        return opts, opts.reduceOp
    return None, opts


def _kind_of(op: Any) -> Any:
    return getattr(op, "op", op)


def _operation(
    op: Any, tensors: Sequence[torch.Tensor]
) -> tuple[str, float | None, Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None]:
    """What an op of torch is here: a name, a weight if there is one, and a bitwise function if it is one of those."""
    kind = _kind_of(op)
    if all(tensor.dtype == torch.bool for tensor in tensors) and kind in _FLAGS:
        return _FLAGS[kind], None, None
    if kind in _BITWISE:
        if any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
            raise TypeError(f"{kind} of {tensors[0].dtype}; bitwise ops are for integers and bool")
        return "", None, _BITWISE[kind]
    if kind not in _OPS:
        raise ValueError(f"{kind} is not an op of the backend longhaul")
    if kind not in (_Kind.SUM, _Kind.AVG, _Kind.PREMUL_SUM) and any(tensor.is_complex() for tensor in tensors):
        raise ValueError(f"all_reduce does not support {kind} on complex tensors")
    weight = None
    if kind == _Kind.PREMUL_SUM:
        if not all(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
            raise TypeError(f"{kind} of {tensors[0].dtype}; it is for floating point numbers")
        weight = float(op.__getstate__()[1])
    return _OPS[kind], weight, None


def _premultiplied(wire: torch.Tensor, weight: float, after: list[Callable[[], object]]) -> torch.Tensor:
    """A weight is 0 or more, so a negative factor changes the sign here."""
    if weight >= 0:
        return wire
    negative = -wire
    after.insert(0, lambda: wire.copy_(negative))
    return negative
