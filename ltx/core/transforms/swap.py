"""Tensors in the places of a module's own, for a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils._named_member_accessor import NamedMemberAccessor

from ltx.core.base.errors import InputError, TreeError, UnsupportedError
from ltx.core.base.placements import is_fully_sharded

#: What ltx.functional_call has put into modules in this thread, the outermost call first.
placed: ContextVar[tuple[Swap, ...]] = ContextVar("placed", default=())


class Buffer(NamedTuple):
    """A buffer of a module at one time: its path, where it is kept, and the count of writes to it."""

    path: str
    kept_in: dict[str, Any]
    name: str
    tensor: torch.Tensor
    version: int
    persistent: bool

    def written(self) -> bool:
        """Whether it has been written to, or replaced if it is one that is saved; others are caches."""
        now = self.kept_in.get(self.name)
        return version_of(now) != self.version if now is self.tensor else self.persistent


def version_of(tensor: torch.Tensor) -> int:
    """The count of writes to it, where torch counts them."""
    return 0 if tensor.is_inference() else tensor._version


def same_values(xs: Sequence[torch.Tensor], ys: Sequence[torch.Tensor]) -> bool:
    """Whether tensors are equal pair by pair, to the last bit and below all transforms; the host reads that once."""

    def bits(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        return torch.cat([x.reshape(-1).view(torch.uint8) for x in tensors if x.device == device])

    with torch._C._DisableFuncTorch(), torch.no_grad():
        return all(torch.equal(bits(xs, device), bits(ys, device)) for device in {x.device for x in xs})


class Members:
    """The names of a module's tensors, from one walk through it."""

    def __init__(self, module: nn.Module):
        if not isinstance(module, nn.Module):
            raise TreeError(f"functional_call takes a torch.nn.Module, got {type(module).__name__}.")
        if isinstance(module, torch.jit.ScriptModule | nn.DataParallel):
            raise UnsupportedError(f"functional_call can't put tensors into a {type(module).__name__}.")
        self.module = module
        self.slots: dict[str, tuple[dict[str, Any], str]] = {}  # path -> the dict that holds the tensor, and its key
        self.tied: dict[int, list[str]] = {}  # of tensors with several names, by id
        self.buffers: list[Buffer] = []
        slots, first = self.slots, dict[int, str]()
        rest: list[tuple[str, nn.Module]] = [("", module)]
        while rest:
            prefix, part = rest.pop()
            if is_fully_sharded(part):
                which = f"{prefix[:-1]!r} of " if prefix else ""
                raise UnsupportedError(
                    f"functional_call: {which}{type(module).__name__} is under torch's fully_shard, which puts "
                    "parameters of its own into it. Call the module itself, and reduce its gradients: "
                    "loss.backward(), then ltx.sync_gradients({name: p.grad for name, p in "
                    "module.named_parameters()}, axis=...)."
                )
            for kept_in in (part._parameters, part._buffers):
                for name, tensor in kept_in.items():
                    if tensor is None:
                        continue
                    path, key = prefix + name, id(tensor)
                    slots[path] = kept_in, name
                    if (other := first.setdefault(key, path)) is not path:
                        self.tied.setdefault(key, [other]).append(path)
                    if kept_in is not part._parameters:
                        persistent = name not in part._non_persistent_buffers_set
                        self.buffers.append(Buffer(path, kept_in, name, tensor, version_of(tensor), persistent))
            rest.extend([(f"{prefix}{name}.", child) for name, child in part._modules.items() if child is not None])

    def untied(self, given: dict[str, torch.Tensor], tie_weights: bool) -> dict[str, torch.Tensor]:
        """`given`, checked, with the other names of tensors that the module has under several."""
        filled = dict(given)
        for name, tensor in given.items():
            if not isinstance(tensor, torch.Tensor):
                raise TreeError(f"functional_call: {name!r} must be a tensor, got {type(tensor).__name__}.")
            if name not in self.slots:
                self._check_attribute(name)
        for group in self.tied.values() if tie_weights else ():
            among = [name for name in group if name in given]
            for name in group if among else ():
                if filled.setdefault(name, given[among[0]]) is not given[among[0]]:
                    raise InputError(
                        f"functional_call: {among[0]!r} and {name!r} are one tensor in {type(self.module).__name__}, "
                        "but two were given. Give one of them; or tie_weights=False, if they are to be apart."
                    )
        return filled

    def _check_attribute(self, name: str) -> None:
        """A parametrized tensor, such as ``weight``, has a name that isn't among those of parameters."""
        part: Any = self.module
        for step in name.split("."):
            part = getattr(part, step, None)
        if not isinstance(part, torch.Tensor):
            known = ", ".join(repr(path) for path in list(self.slots)[:4])
            raise InputError(
                f"functional_call: {type(self.module).__name__} has no parameter or buffer {name!r}. Of its "
                f"{len(self.slots)} the first are {known or 'none'}."
            )


class _Put:
    """What :func:`put` has put into a module, and what it has taken out."""

    def __init__(self, members: Members):
        self.members = members
        self.own: dict[str, torch.Tensor] = {}
        self._parametrized = NamedMemberAccessor(members.module)
        self._others: dict[str, torch.Tensor] = {}

    def put(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put them there."""
        slots = self.members.slots
        apart = {name: x for name, x in tensors.items() if name not in slots}
        self._others, _ = self._parametrized.swap_tensors_dict(apart)
        for name, tensor in tensors.items():
            if name in slots:
                kept_in, key = slots[name]
                self.own[name] = kept_in[key]
                kept_in[key] = tensor

    def take_out(self) -> dict[str, torch.Tensor]:
        """Give the module its own tensors back; those that it held instead, by name."""
        held = {}
        for name, tensor in self.own.items():
            kept_in, key = self.members.slots[name]
            held[name] = kept_in[key]
            kept_in[key] = tensor
        apart, _ = self._parametrized.swap_tensors_dict(self._others)
        return held | apart


#: What is in modules for functional calls that are under way in this thread, the outermost call's first.
_under_way: ContextVar[tuple[_Put, ...]] = ContextVar("_under_way", default=())


@contextmanager
def put(members: Members, tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Put `tensors` into a module; its own, which it gets back afterwards, by name."""
    placing = _Put(members)
    token = _under_way.set((*_under_way.get(), placing))
    try:
        placing.put(tensors)
        yield placing.own
    finally:
        _under_way.reset(token)
        placing.take_out()


def set_placed_aside() -> Callable[[], None]:
    """Give modules their own tensors back for a while, in which another rank of this process runs.

    What comes back puts those of the functional calls that are under way in this thread there again.
    """
    held = [(placing, placing.take_out()) for placing in reversed(_under_way.get())]

    def undo() -> None:
        for placing, tensors in reversed(held):
            placing.put(tensors)

    return undo


class Swap:
    """Tensors in the places of a module's own.

    Args:
        members: the module's.
        tensors: by name, tied names included.
        before: those of them that are copies of given buffers, as they were given.
    """

    def __init__(self, members: Members, tensors: dict[str, torch.Tensor], before: Mapping[str, torch.Tensor]):
        self.members = members
        self.tensors = tensors
        self.after: dict[str, torch.Tensor] = {}
        # Of each buffer: the tensor, the count of writes to it, and the value that it had then.
        self._kept = {name: (tensors[name], version_of(tensors[name]), value) for name, value in before.items()}

    @classmethod
    def of_call(cls, module: nn.Module, given: Mapping[str, torch.Tensor]) -> Swap:
        """Of torch's functional_call of `module`, which is under way: what of `given` is in the module now."""
        members, ids = Members(module), {id(x) for x in given.values()}
        tensors = {path: x for path, (kept_in, key) in members.slots.items() if id(x := kept_in[key]) in ids}
        return cls(members, tensors, {b.path: b.tensor.clone() for b in members.buffers if b.path in tensors})

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the tensors there, and the module's own back afterwards."""
        module, slots = self.members.module, self.members.slots
        token = placed.set((*placed.get(), self))
        lost: list[str] = []
        try:
            with put(self.members, self.tensors) as own:
                try:
                    yield
                finally:
                    self.after = {name: slots[name][0][slots[name][1]] for name in self._kept}
                    now = {name: slots[name][0].get(slots[name][1]) for name in own}
                    lost = [name for name, was in own.items() if now[name] is was is not self.tensors[name]]
        finally:
            placed.reset(token)
        if lost:
            raise UnsupportedError(
                f"functional_call: {type(module).__name__} lost the {lost[0]!r} that it was given, during the call. "
                "Two threads called it at a time: give each a module of its own (copy.deepcopy)."
            )

    def again(self) -> Callable[[], AbstractContextManager[None]]:
        """What puts them there once more, for a second pass through a part of this call. Buffers begin as they are now.

        What the second pass writes to them is thrown away: it was written in the first.
        """
        if not self._kept:
            return self.in_place
        # Batch norm counts its calls in one buffer and writes past the count of writes to the others.
        found = {name: kept_in[key] for name in self._kept for kept_in, key in [self.members.slots[name]]}
        written = {
            _module_of(name)
            for name, (tensor, version, _) in self._kept.items()
            if found[name] is not tensor or version_of(tensor) != version
        }
        for name, tensor in found.items():
            if _module_of(name) in written:
                self._kept[name] = tensor, version_of(tensor), tensor.detach().clone()
        now = dict(self._kept)

        def in_place() -> AbstractContextManager[None]:
            copies: dict[int, torch.Tensor] = {}
            buffers = {}
            for name, (tensor, version, value) in now.items():
                constant = not tensor.is_floating_point() and version_of(tensor) == version
                buffers[name] = tensor if constant else copies.setdefault(id(tensor), value.clone())
            return Swap(self.members, {**self.tensors, **buffers}, buffers).in_place()

        return in_place


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]
