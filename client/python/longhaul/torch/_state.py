"""The whole training state of a PyTorch program: models, optimizers, schedulers, other objects, random generators."""

from __future__ import annotations

import io
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from .. import _digest
from .._errors import Error, InvalidArgument, number_of
from .._log import logger
from .._native import REVISION_MAX
from .._state import Holder
from .._state import State as PlainState
from .._state_tensor import tensor_of
from .._sync_info import SyncInfo
from . import _objects, _rng
from ._memory import local_part
from ._objects import Json
from ._optimizer import OptimizerPart
from ._seen import ModelTensors

T = TypeVar("T")

# Names of tensors of the state, and of what state_dict() adds to them.
_TEXT = "python"
_SEED = "rng.seed"
_REVISION = "longhaul.revision"
_HASH = "longhaul.hash"


class State(PlainState):
    """A `longhaul.State` of all that a training program needs to go on: pass it to `Comm.step`, `join(state=)` and so on.

        state = lh.torch.State(model, optimizer, scheduler, objects={"loader": loader, "progress": progress})
        with comm.step(state):
            ...  # forward, backward, average, optimizer.step(), scheduler.step()

    model: a module, or a mapping from name to module. Its parameters, its buffers that are saved with it, and what
        get_extra_state() of its modules gives; a warning names those whose extra state no state can hold. A tensor with
        several names (tied weights) is in the state once. A DTensor is there with its local part.
    optimizers: an optimizer, or a sequence or mapping of them, with all their parameters in `model`. What an optimizer
        makes in its first step is in the state from the beginning: a member whose optimizer has not stepped gets the
        state of one that has, and the other way round. Not for optimizers that step with a closure. One that only
        hands on to the optimizer inside it, as that of accelerate does, counts as that one. One that keeps state beside
        the optimizer inside it (SAM, Lookahead) is refused: pass the inner one, or both after their first step.
    schedulers: objects with state_dict() and load_state_dict(): one, or a sequence or mapping of them.
    objects: a mapping from name to such an object (a data loader, a gradient scaler), to a torch.Generator,
        random.Random or numpy.random.Generator, or to a dict or list of plain values, which is changed in place.
    rng: the generators of torch (CPU, and the CUDA devices of the model), of Python's `random`, and of numpy.
        "member": each member has its own stream. Streams are not compared; checkpoints hold them. A newcomer that
            fetches the state is seeded from the seed of the member it fetches from and from its own member id.
        "shared": all members have the same stream.
        None: the state leaves the generators alone.
    buffers: "shared": the model's buffers are equal at all members, as the parameters. "member": each member has its
        own, as for BatchNorm on different data; a newcomer that fetches gets those of a member once, and checkpoints
        hold them.
    revision, hash: as for `longhaul.State`. With hash="on_change", name tensors of models and optimizers by touch();
        the rest is found without it.
    objects_bytes_max: room for the Python values as JSON, at least 1024. The same at all members.

    Python values are JSON without pickle: None, bool, int, float (exact, also nan and inf), str, bytes, list, tuple,
    dict, OrderedDict and Counter with keys of str, int, float, bool or None, numpy scalars, torch.dtype, torch.Size and
    torch.device. Tensors and numpy arrays among the values become tensors of the state: their shapes must stay.

    Before each sync and save(), values are read from schedulers, optimizers and objects. After a sync that changed them,
    and after load(), they are written there, with load_state_dict() where there is one. Between two steps and inside a
    block the objects are the program's. During a sync nobody may change them.

    Raises InvalidArgument for what cannot be in a state; the message names it. The same, from the calls that read the
    state, for a tensor of another shape or name than at first, and for values that need more than objects_bytes_max.
    TypeError for what is no module, optimizer or object of the kinds above.
    """

    def __init__(
        self,
        model: torch.nn.Module | Mapping[str, torch.nn.Module] | None = None,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer] = (),
        schedulers: Any = (),
        objects: Mapping[str, Any] | None = None,
        *,
        rng: Literal["member", "shared"] | None = "member",
        buffers: Literal["shared", "member"] = "shared",
        revision: int = 0,
        hash: str = "always",
        objects_bytes_max: int = 65536,
    ) -> None:
        if rng not in ("member", "shared", None):
            raise InvalidArgument(f"rng is {rng!r}; give 'member', 'shared' or None")
        if buffers not in ("shared", "member"):
            raise InvalidArgument(f"buffers is {buffers!r}; give 'shared' or 'member'")
        if objects_bytes_max < 1024:
            raise InvalidArgument(f"objects_bytes_max is {objects_bytes_max}; give at least 1024")
        self._model = ModelTensors(_named_modules(model))
        names = {id(tensor): name.removeprefix("model.") for name, tensor in self._model.whole().items()}
        given = _named("optimizer", optimizers, torch.optim.Optimizer, "a torch.optim.Optimizer")
        self._optimizers = [OptimizerPart(name, each, names, [*given.values()]) for name, each in given.items()]
        self._sources = {
            name: _source(name, each) for name, each in _named("scheduler", schedulers, object, "").items()
        }
        for name, each in (objects or {}).items():
            self._sources[f"objects.{name}"] = _source(f"objects.{name}", each)
        self._sources.update(_extra_states(self._model.with_extra_state(), buffers))
        self._rng = rng
        self._text = _objects.Text(objects_bytes_max)
        # Tensors that belong to the state: copies of what objects hold, the states of generators, and placeholders for
        # what an optimizer has not made yet.
        self._own: dict[str, torch.Tensor] = {}
        self._seed = torch.zeros(1, dtype=torch.int64)
        # The member that has finished a sync with this state.
        self._synced_by: weakref.ref[Holder] | None = None
        # By name of an optimizer, scheduler or object: the text that it had when it was last read or written.
        self._texts: dict[str, str] = {}
        tensors = self._declare()
        super().__init__(tensors, revision, allow_unequal=self._unequal(buffers), hash=hash)
        self._refresh()

    def reseed(self, number: int) -> None:
        """Seeds the generators of `rng` from the shared seed, the revision and a number, such as a member id.

        For members that load one checkpoint: after that their generators are equal. With rng=None does nothing.
        """
        shared = int(self._seed)
        for generator in self._generators:
            generator.seed(_rng.seed_of(shared + self.revision, number, generator.name))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The tensors by name, with revision and hash as tensors, too. For torch.save or torch.distributed.checkpoint.

        The tensors are those that the program trains: copy them to keep them. A DTensor is whole, so that a checkpoint
        can be loaded on another mesh; then there is no hash. Needs the package xxhash. Raises FailedPrecondition inside
        the block of a step, during a sync and while `held`.
        """
        self._check_outside("state_dict")
        self._look_again()
        model = self._model.whole()
        values = {
            name: model[name].detach() if name in model else self._whole(name, value)
            for name, value in self.tensors.items()
        }
        # load_state_dict() reads the program's values anew before it looks at these.
        for name in values.keys() & (self._own.keys() - self._made_later | {_TEXT}):
            values[name] = values[name].clone()
        divided = any(hasattr(value, "to_local") for value in values.values())
        values[_REVISION] = torch.tensor(self.revision, dtype=torch.int64)
        if not divided:
            values[_HASH] = torch.tensor(list(bytes.fromhex(self.compute_hash())), dtype=torch.uint8)
        return values

    def load_state_dict(self, values: Mapping[str, torch.Tensor]) -> None:
        """Fills tensors, revision, schedulers, optimizers, objects and generators from what state_dict() returned.

        Names, dtypes, shapes and the hash are checked first: raises InvalidArgument, which names the first thing that
        is wrong, and nothing has been changed then. torch.distributed.checkpoint, however, has filled the tensors by
        then. Raises FailedPrecondition during a sync and while `held`.
        """
        self._check_free("load_state_dict")
        self._look_again()
        self._check_writable()
        given = self._check_values(values)
        revision = _revision_of(values[_REVISION])
        own = {tensor.value.untyped_storage().data_ptr() for tensor in self._tensors}
        with torch.no_grad():
            moved = [
                (tensor.value.detach(), value.clone() if value.untyped_storage().data_ptr() in own else value)
                for tensor, value in zip(self._tensors, given)
                if (tensor.value.data_ptr(), tensor.value.stride()) != (value.data_ptr(), value.stride())
            ]
            for target, value in moved:
                target.copy_(value)
        self.revision = revision
        self.touch()
        self._written(None)

    # ------------------------------------------------------------------ the tensors

    def _unequal(self, buffers: str) -> set[str]:
        names = {f"rng.{generator.name}" for generator in self._generators} if self._rng == "member" else set()
        if self._rng is not None:
            names.add(_SEED)
        if buffers == "member":
            names |= {name for name, tensor in self._model.whole().items() if not _is_parameter(tensor)}
        return names

    def _declare(self) -> dict[str, torch.Tensor]:
        """All tensors of the state, in order. The empty ones say what else has to be alike at all members."""
        tensors = self._model.local()
        self._model_names = tensors.keys() - ()
        self._made_later = {name for part in self._optimizers for name in part.layout}
        for part in self._optimizers:
            tensors[f"{part.name} is {part.structure}"] = torch.empty(0, dtype=torch.uint8)
        for name, source in self._sources.items():
            tensors[f"{name} is {source.kind}"] = torch.empty(0, dtype=torch.uint8)
        for part in self._optimizers:
            live: dict[str, torch.Tensor] = {}
            part.read(live)
            for name, blank in part.layout.items():
                if name not in live:
                    self._own[name] = live[name] = blank.zeros()
                _add(tensors, name, live[name])
        leaves: dict[str, torch.Tensor] = {}
        for name, source in self._sources.items():
            _objects.encode(source.get(), name, leaves)
        for name in sorted(leaves):
            self._own[name] = torch.empty_like(leaves[name], memory_format=torch.contiguous_format).detach()
            _add(tensors, name, self._own[name])
        devices = {tensor.device for tensor in tensors.values()}
        self._generators = [] if self._rng is None else _rng.generators(devices)
        for generator in self._generators:
            self._own[f"rng.{generator.name}"] = tensors[f"rng.{generator.name}"] = generator.get().clone()
        if self._rng is not None:
            self._seed[0] = torch.initial_seed() & ((1 << 63) - 1)
            tensors[_SEED] = self._seed
        tensors[_TEXT] = self._text.tensor
        return tensors

    def _whole(self, name: str, value: torch.Tensor) -> torch.Tensor:
        for part in self._optimizers:
            if name.startswith(f"{part.name}."):
                return part.whole(name, value)
        return value

    def _check_values(self, values: Mapping[str, Any]) -> list[torch.Tensor]:
        """Checks what load_state_dict() got. Returns its tensors, in the order of the state."""
        given = []
        for tensor in self._tensors:
            value = values.get(tensor.name)
            if not isinstance(value, torch.Tensor):
                raise InvalidArgument(f"load_state_dict: there is no tensor {tensor.name!r}, which the state has")
            local = local_part(value.detach())
            found = (str(local.dtype).removeprefix("torch."), tuple(local.shape))
            if found != (tensor.dtype, tensor.shape):
                raise InvalidArgument(
                    f"load_state_dict: tensor {tensor.name!r} is {found[0]} {list(found[1])}, and {tensor.dtype} "
                    f"{list(tensor.shape)} in the state"
                )
            if local.layout != torch.strided or local.device.type == "meta":
                raise InvalidArgument(
                    f"load_state_dict: tensor {tensor.name!r} is {local.layout} on {local.device}; load what state_dict() "
                    "returned"
                )
            given.append(local)
        known = {tensor.name for tensor in self._tensors} | {_REVISION, _HASH}
        unknown = sorted(set(values) - known)
        if unknown or not isinstance(values.get(_REVISION), torch.Tensor):
            what = f"tensor {unknown[0]!r}, which the state has not" if unknown else "no revision"
            raise InvalidArgument(f"load_state_dict: there is {what}; load what state_dict() returned")
        if isinstance(values.get(_HASH), torch.Tensor):
            digests = [_digest.of_tensor(tensor_of(t.name, value).host()) for t, value in zip(self._tensors, given)]
            found_hash, told = _digest.of_state(self._entries(), digests), bytes(values[_HASH].tolist()).hex()
            if found_hash != told:
                raise InvalidArgument(
                    f"load_state_dict: the hash of the tensors is {found_hash}, and {told} was saved: they are damaged, "
                    "or belong to another state; load another checkpoint"
                )
        return given

    # ------------------------------------------------------------------ before the tensors are read

    def _refresh(self) -> Iterable[int]:
        live = self._model.local()
        if live.keys() != self._model_names:
            name = min(live.keys() ^ self._model_names)
            what = "has come" if name in live else "has gone"
            raise InvalidArgument(f"{name} {what} since the state was made; make a new lh.torch.State at all members")
        leaves: dict[str, torch.Tensor] = {}
        trees: dict[str, Json] = {part.name: part.read(live) for part in self._optimizers}
        for name, source in self._sources.items():
            trees[name] = _objects.encode(source.get(), name, leaves)
        for name in self._made_later & live.keys():
            self._own.pop(name, None)  # the optimizer has made it
        live.update((name, self._placeholder(name)) for name in self._made_later - live.keys())
        changed = self._bring_all(live)
        leaves.update((f"rng.{each.name}", each.get()) for each in self._generators)
        changed.update(self._copy(name, tensor) for name, tensor in leaves.items())
        self._texts = {name: _objects.text_of(tree) for name, tree in trees.items()}
        if self._text.write(self._texts):
            changed.add(self._numbers[_TEXT])
        return changed

    def _number_of(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            raise InvalidArgument(
                f"tensor {name} has come since the state was made; make a new lh.torch.State at all members, or keep "
                "the tensor out of it"
            )
        return number

    def _bring_all(self, live: Mapping[str, torch.Tensor]) -> set[int]:
        """Makes these the tensors of their names. Returns the numbers of those that lie elsewhere than before."""
        numbers, tensors = self._numbers, self._tensors
        moved = set()
        for name, tensor in live.items():
            number = numbers.get(name)
            if (number is None or tensors[number].value is not tensor) and self._bring(name, tensor):
                moved.add(numbers[name])
        return moved

    def _bring(self, name: str, tensor: torch.Tensor) -> bool:
        """Makes this the tensor of the name. Returns whether it lies elsewhere than the one before."""
        number = self._number_of(name)
        before = self._tensors[number]
        if before.value is tensor:
            return False
        fresh = tensor_of(name, tensor)
        before.check_is_like(fresh.dtype, fresh.shape)
        self._tensors[number] = fresh
        return bool(before.value.data_ptr() != tensor.data_ptr())

    def _copy(self, name: str, tensor: torch.Tensor) -> int:
        """Copies to the state's own tensor of the name. Returns its number."""
        number = self._number_of(name)
        self._tensors[number].check_is_like(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        with torch.no_grad():
            self._own[name].copy_(tensor)
        return number

    def _placeholder(self, name: str) -> torch.Tensor:
        """Zeros in the place of what an optimizer has not made yet, or holds no more."""
        if name not in self._own:
            part = next(part for part in self._optimizers if name in part.layout)
            self._own[name] = part.layout[name].zeros()
        return self._own[name]

    # ------------------------------------------------------------------ after the tensors were written

    def _written(self, info: SyncInfo | None) -> None:
        first = info is not None and self._is_first_sync()
        if info is not None and info.bytes == 0 and not info.resumed:
            return
        trees = self._text.read()
        for part in self._optimizers:
            if self._text_changed(part.name, trees):
                self._write_optimizer(part, trees[part.name])
        # Options of the optimizers come before schedulers, which may read them.
        for name, source in self._sources.items():
            if self._text_changed(name, trees) or any(self._received(leaf, info) for leaf in self._leaves_of(name)):
                source.set(_objects.decode(trees[name], name, lambda leaf: self._own[leaf].clone()))
        self._texts = {name: _objects.text_of(tree) for name, tree in trees.items()}
        if self._rng != "member" or info is None or info.resumed:
            self._set_generators(info)
        elif first or any(self._received(f"rng.{generator.name}", info) for generator in self._generators):
            self._seed_as_newcomer()

    def _is_first_sync(self) -> bool:
        """Whether no sync of the member that uses the state has ended before."""
        member = None if self._member is None else self._member()
        first = member is not None and (self._synced_by is None or self._synced_by() is not member)
        if member is not None:
            self._synced_by = weakref.ref(member)
        return first

    def _text_changed(self, name: str, trees: Mapping[str, Json]) -> bool:
        return _objects.text_of(trees[name]) != self._texts.get(name)

    def _leaves_of(self, name: str) -> list[str]:
        return [leaf for leaf in self._own if leaf == name or leaf.startswith(f"{name}.")]

    def _received(self, name: str, info: SyncInfo | None) -> bool:
        """Whether the last sync or load() wrote to the tensor."""
        if info is None or self._registration is None:
            return True
        return next(self._registration.changes(self._numbers[name]), None) is not None

    def _write_optimizer(self, part: OptimizerPart, tree: Json) -> None:
        part.write(tree, lambda name: self._tensors[self._numbers[name]].value)
        live: dict[str, torch.Tensor] = {}
        part.read(live)
        for name in part.layout.keys() - live.keys():
            # What the optimizer held is a placeholder from here on.
            self._own[name] = self._tensors[self._numbers[name]].value

    def _seed_as_newcomer(self) -> None:
        member = None if self._member is None else self._member()
        try:
            number = None if member is None else member.member_id
        except Error:
            return  # it was removed meanwhile, and will be a newcomer again
        if number is not None:
            self.reseed(number)

    def _set_generators(self, info: SyncInfo | None) -> None:
        for generator in self._generators:
            name = f"rng.{generator.name}"
            if self._received(name, info):
                generator.set(self._own[name].clone())


def _revision_of(value: torch.Tensor) -> int:
    if value.numel() != 1 or value.is_floating_point() or value.is_complex() or value.device.type == "meta":
        raise InvalidArgument("load_state_dict: the revision is no number; load what state_dict() returned")
    return number_of(int(value), "load_state_dict: the revision", REVISION_MAX)


class _Source(NamedTuple):
    """Where Python values come from and go to: a scheduler, or an object of `objects`."""

    kind: str
    get: Callable[[], Any]  #: the values as they are now
    set: Callable[[Any], object]


def _extra_states(modules: Mapping[str, torch.nn.Module], buffers: str) -> dict[str, _Source]:
    """The sources of what modules keep beside tensors. Warns of those that no state can hold."""
    sources = {}
    for name, module in modules.items():
        key = f"{name}._extra_state"
        # By default arguments: a closure would see the last module of the loop.
        source = _Source(
            type(module).__name__,
            lambda module=module: _from_extra(module.get_extra_state()),  # type: ignore[misc]
            lambda value, module=module: module.set_extra_state(_to_extra(value)),  # type: ignore[misc]
        )
        try:
            if buffers == "member":
                raise InvalidArgument('with buffers="member" each member keeps its own')
            if type(module).set_extra_state is torch.nn.Module.set_extra_state:
                raise InvalidArgument("the module has no set_extra_state()")
            _objects.encode(source.get(), key, {})
        except Exception as problem:  # get_extra_state() may raise anything
            logger.warning(
                "the extra state of module %s (%s) is not in the state, so newcomers and checkpoints lack it: %s",
                *(name, type(module).__name__, problem),
            )
        else:
            sources[key] = source
    return sources


def _from_extra(value: Any) -> Any:
    """What get_extra_state() gave, as a value for a state. Bytes may have any length, and tensors of a state may not."""
    if isinstance(value, io.BytesIO):
        return ("BytesIO", value.getvalue())
    if isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.dim() == 1:
        return ("uint8", bytes(value.tolist()))
    return ("", value)


def _to_extra(value: Any) -> Any:
    kind, content = value
    if kind == "BytesIO":
        return io.BytesIO(content)
    return torch.tensor(list(content), dtype=torch.uint8) if kind == "uint8" else content


def _source(name: str, value: Any) -> _Source:
    kind = type(value).__name__
    if (held := _rng.held_of(value)) is not None:
        kind, get, put = held
        return _Source(kind, lambda: {"state": get()}, lambda values: put(values["state"]))
    if isinstance(value, dict):

        def fill(values: dict[Any, Any]) -> None:
            value.clear()
            value.update(values)

        return _Source(kind, lambda: value, fill)
    if isinstance(value, list):
        return _Source(kind, lambda: value, lambda values: value.__setitem__(slice(None), values))
    if not all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict")):
        raise TypeError(
            f"{name} is a {kind}; pass an object with state_dict() and load_state_dict(), a random generator, or a dict or "
            "list of plain values"
        )

    def values_of() -> Any:
        values = value.state_dict()
        if name.startswith("scheduler.") and type(values) is dict:
            # They come from the attributes of the scheduler, whose order depends on its history.
            return {key: values[key] for key in sorted(values)}
        return values

    return _Source(kind, values_of, value.load_state_dict)


def _named(what: str, values: Any, kind: type[T], wanted: str) -> dict[str, T]:
    """The values by their names in the state: "optimizer.0" and so on, or with the keys of a mapping."""
    if isinstance(values, Mapping):
        pairs = list(values.items())
    elif isinstance(values, (list, tuple)):
        pairs = list(enumerate(values))
    else:
        pairs = [(0, values)]
    for key, value in pairs:
        if not isinstance(value, kind):
            raise TypeError(f"{what} {key} is a {type(value).__name__}; pass {wanted}")
    return {f"{what}.{key}": value for key, value in pairs}


def _named_modules(model: Any) -> dict[str, torch.nn.Module]:
    if model is None:
        return {}
    if isinstance(model, torch.nn.Module):
        return {"model": model}
    if not isinstance(model, Mapping):
        raise TypeError(f"model is a {type(model).__name__}; pass a torch.nn.Module, or a mapping from name to module")
    return _named("model", model, torch.nn.Module, "a torch.nn.Module")


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


def _add(tensors: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
    if name in tensors:
        raise InvalidArgument(f"two tensors of the state have the name {name}; rename one of their owners")
    tensors[name] = tensor
