"""The tensors of a functional call in the places of a module's own, for the time of a call.

Bound methods, patched forwards and lists of layers refer to the original, and would miss a copy of the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils._named_member_accessor import NamedMemberAccessor

from ltx.core.base import private
from ltx.core.base.arguments import brief
from ltx.core.base.errors import StepError
from ltx.core.gradients.marker import Marker
from ltx.core.ranks.axis import axes_in_scope
from ltx.core.transforms.closure_check import Members, hooked_text, own_written, placed, same_values, version_of

#: A buffer, the count of writes to it, and its value at that count.
Kept = tuple[torch.Tensor, int, torch.Tensor]

_THREADS = "Two threads called it at a time: give each a module of its own (copy.deepcopy)."
_ASSIGNED = (
    "It was assigned another tensor, which would be lost. Values that follow the batch are buffers: register_buffer, "
    "and return_buffers=True. Or assign it between two calls."
)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor, to which also simulated ranks can write different values."""
    copied = tensor.clone()
    if private.in_transform():
        for axis in axes_in_scope():
            if (index := axis.batch_index) is not None:
                copied = torch.where(index >= 0, copied, copied)
    return copied


def _value(copy: torch.Tensor, given: torch.Tensor, training: bool) -> torch.Tensor | None:
    """The value of `copy`, if it is a buffer to which batch norm may write without torch counting the write."""
    if private.in_transform():
        with private.below_transforms():
            return private.unwrapped(copy).clone()
    return given if training and copy.ndim == 1 and copy.is_floating_point() else None  # batch norm's are vectors


class Swap:
    """Replaces a module's tensors by others during a call. `tensors`: {name: tensor}, with all tied names. `first`: of
    each buffer among them that the call may write to the tensor, the count of writes to it, and the value given for it.
    """

    def __init__(self, members: Members, tensors: dict[str, torch.Tensor], first: dict[str, Kept]):
        self.members, self.tensors, self.first = members, tensors, first
        self.gone: dict[str, Any] = {}  # of tensors that nobody has kept since: where they were
        self._after: dict[str, Any] = {}  # what is in the places of `first` after the call
        self._values: dict[str, torch.Tensor | None] = {}  # as :func:`_value` of these
        self._own: dict[str, torch.Tensor] = {}
        # Tensors that are other attributes of the module aren't kept in a dict of it.
        self._others = {name: tensors[name] for name in others} if (others := tensors.keys() - members.slots) else {}
        self._kept = dict(first)  # as `first`, of the last checkpoint

    @classmethod
    def of_call(
        cls, module: nn.Module, given: dict[str, Any], what: str, tie_weights: bool = True, returns: bool = False
    ) -> Swap:
        """What a call puts into a module: the `given` tensors, and copies of those that are buffers."""
        members, copies, first = Members(module, what, given), dict[str, torch.Tensor](), dict[str, Kept]()
        copied: dict[int, torch.Tensor] = {}  # a buffer with several names has one copy
        for buffer in members.buffers:
            if isinstance(x := given.get(buffer.path), torch.Tensor):
                copies[buffer.path] = copy = copied.setdefault(id(x), _copied(x))
                first[buffer.path] = copy, version_of(copy), x
        swap = cls(members, members.untied({**given, **copies} if copies else given, tie_weights), first)
        for name, (copy, _, x) in {} if returns else first.items():
            swap._values[name] = _value(copy, x, module.training)
        for name in members.hooked:
            put, (kept_in, key) = swap.tensors.get(name), members.slots[name]
            if put is None or put is kept_in[key]:
                continue
            node: Any = put.grad_fn  # a train step differentiates with respect to nothing above its markers
            if put.is_leaf or (Marker.made(node) and not node.schedule.fenced):
                raise StepError(hooked_text(f"{what}: parameter {name!r} of {type(module).__name__}"))
        return swap

    def done(self, returns: bool = False) -> dict[str, torch.Tensor]:
        """The values of the given buffers after the call. Raises if what it wrote to one would be lost."""
        after, self._after = self._after, {}  # one may be the output itself, whose graph mustn't hold it
        members, name = self.members, type(self.members.module).__name__
        if members.buffers:
            own_written((b for b in members.buffers if b.path not in self.tensors), name)
        if not self.first:
            return {}
        if removed := next((at for at, x in after.items() if not isinstance(x, torch.Tensor)), None):
            raise StepError(
                f"{members.what}: {name} set {removed!r}, a buffer that it was given, to {brief(after[removed])}, "
                "which no next call could be given. Write a tensor to it, or keep such values outside of its buffers."
            )
        if returns:
            # If the module itself called requires_grad_() on a copy, that is a leaf, and no gradient may go on from it.
            return {name: x.detach() if x.is_leaf and x.requires_grad else x for name, x in after.items()}
        values = {name: (private.unwrapped(self.tensors[name]), x) for name, x in self._values.items() if x is not None}
        written = next((name for name, (x, version, _) in self.first.items() if version_of(x) != version), None)
        if written is None and values and not same_values(*zip(*values.values(), strict=True)):
            written = next(name for name, (now, was) in values.items() if not same_values([now], [was]))
        if written is not None:
            raise StepError(
                f"{members.what}: {name} wrote to {written!r}, a buffer that it was given, and what it wrote would "
                "be lost. Take it: output, buffers = ltx.functional_call(module, (params, buffers), inputs, "
                "return_buffers=True), and return the buffers from the step. Or leave them as they are: module.eval()."
            )
        return {}

    def put(self) -> None:
        if self._others:
            self._exchange()
        slots = self.members.slots
        for name, tensor in self.tensors.items():
            if name in slots:
                kept_in, key = slots[name]
                self._own[name], kept_in[key] = kept_in[key], tensor

    def take_out(self) -> dict[str, Any]:
        """Put the module's own tensors back. Returns what was there."""
        found: dict[str, Any] = {}
        for name, tensor in reversed(self._own.items()):  # a place with several names has its own at the first
            kept_in, key = self.members.slots[name]
            found[name] = kept_in.get(key)
            kept_in[key] = tensor
        if self._others:
            self._exchange()
        return found

    def _exchange(self) -> None:
        self._others, _ = NamedMemberAccessor(self.members.module).swap_tensors_dict(self._others)

    def given(self, name: str) -> torch.Tensor:
        """What the call was given; of a buffer the module got a copy."""
        return self.first[name][2] if name in self.first else self.tensors[name]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the tensors into the module for the block, then put its own tensors back."""
        token = placed.set((*placed.get(), self))
        try:
            self.put()
            yield
        finally:
            placed.reset(token)
            found = self.take_out()
            for name, (x, _, value) in self.first.items():
                self._after[name] = found.get(name)
                if found.get(name) is not x:  # it was replaced, which counts as a write
                    self.first[name] = x, -1, value
        for name, own in self._own.items():
            if found[name] is not self.tensors[name] and name not in self.first:
                raise StepError(
                    f"functional_call: {type(self.members.module).__name__} lost the {name!r} that it was given, "
                    f"during the call. {_THREADS if found[name] is own else _ASSIGNED}"
                )

    def again(self) -> Callable[[], AbstractContextManager[None]]:
        """A function that puts the tensors in again, to compute a part anew; buffers begin with their values of now."""
        if not self._kept:
            return self.in_place
        # Batch norm counts its calls in one buffer, and writes to its other buffers without torch counting it.
        found = {name: kept_in[key] for name in self._kept for kept_in, key in [self.members.slots[name]]}
        written = {
            module_of(name)
            for name, (tensor, version, _) in self._kept.items()
            if found[name] is not tensor or version_of(tensor) != version
        }
        for name, tensor in found.items():
            if module_of(name) in written:
                self._kept[name] = tensor, version_of(tensor), tensor.detach().clone()
        now = dict(self._kept)
        return lambda: self.anew(now).in_place()

    def anew(self, kept: dict[str, Kept]) -> Swap:
        """This swap with copies of the values in `kept` as buffers, or the buffers themselves if they are constant."""
        copies: dict[int, torch.Tensor] = {}
        buffers: dict[str, Kept] = {}
        for name, (tensor, version, value) in kept.items():
            constant = not tensor.is_floating_point() and version_of(tensor) == version
            x = tensor if constant else copies.setdefault(id(tensor), value.clone())
            buffers[name] = x, version_of(x), x
        return Swap(self.members, {**self.tensors, **{name: x for name, (x, _, _) in buffers.items()}}, buffers)


def module_of(name: str) -> str:
    return name.rpartition(".")[0]
