"""Errors of a member: what its pseudo-gradients have lost on the way, to be added to the next ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from .._errors import FailedPrecondition, InvalidArgument


class MemberErrors:
    """Errors of the buckets of one DiLoCo. They belong to the member, like the state of the inner optimizer."""

    _errors: list[list[torch.Tensor]] | None = None  # by fragment and bucket

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This member's errors by name: flat float32 CPU tensors, in all as many elements as there are parameters.

        They are the tensors in use, not copies, as those of an optimizer: torch.save() them when `diloco.round` has
        just changed. Raises FailedPrecondition before the object is given to a DiLoCo.
        """
        return dict(self._named("state_dict"))

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Sets this member's errors to those of a checkpoint. The object has been given to a DiLoCo before.

        Raises InvalidArgument if the names or the lengths are not those of this model with these buckets; nothing is
        changed then. Raises FailedPrecondition before the object is given to a DiLoCo.
        """
        named = dict(self._named("load_state_dict"))
        have = {name: list(error.shape) for name, error in named.items()}
        given = {name: list(error.shape) for name, error in state.items()}
        if have != given:
            name = next(name for name in [*have, *given] if have.get(name) != given.get(name))
            raise InvalidArgument(
                f"load_state_dict: error {name!r} has the shape {given.get(name)} in the checkpoint and "
                f"{have.get(name)} here (None: not there); use the model, fragments and buckets of the checkpoint, or "
                "begin with errors of zero"
            )
        for name, error in named.items():
            error.copy_(state[name])

    def reset(self) -> None:
        """Sets this member's errors to zero, for instance when it joins again after a long time.

        Raises FailedPrecondition before the object is given to a DiLoCo.
        """
        for _, error in self._named("reset"):
            error.zero_()

    def _named(self, what: str) -> Iterator[tuple[str, torch.Tensor]]:
        if self._errors is None:
            raise FailedPrecondition(
                f"{what}: give this {type(self).__name__} to a DiLoCo first, which knows the model"
            )
        for i, errors in enumerate(self._errors):
            for j, error in enumerate(errors):
                yield f"error.{i}.{j}", error

    def _make_errors(self, lengths: Sequence[Sequence[int]]) -> list[list[torch.Tensor]]:
        """Makes errors of zero. lengths: the elements of each bucket of each fragment."""
        if self._errors is not None:
            raise InvalidArgument(
                f"this {type(self).__name__} belongs to another DiLoCo, whose errors it holds; make a new one"
            )
        self._errors = [[torch.zeros(length) for length in buckets] for buckets in lengths]
        return self._errors
