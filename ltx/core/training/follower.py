"""The module of ``train.init(module)``, which has the tensors of the newest state.

Its parameters lie in the state's memory, so a step in place changes both. Other tensors that a step makes are put under
the module's Parameters, which stay the same objects: whoever holds them (an average, a metric) sees the new values.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import attrgetter
from typing import Any, cast

import torch
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from ltx.core import comm
from ltx.core.base import private, traced, tree
from ltx.core.base.errors import StepError
from ltx.core.training.train_state import DonatedTensor, TrainState, followers, give_away
from ltx.core.transforms.compare import tensors_by_path

# {a parameter or buffer of a module: a weak reference to the Follower that has it, or had it last}
_followers = WeakTensorKeyDictionary()
_PROCESS, _count = os.urandom(8).hex(), itertools.count()

_ENDED = (
    "this TrainState has ended: train.init was called once more, with its module or one that shares weights with it. "
    "Go on with that one. To keep an older one, dataclasses.replace(copy.deepcopy(state), module=None) before."
)
_COMPILED = (
    "compiled steps don't move a module: this {} has no present values, the train state has. Give it the state's by "
    "ltx.to_module(module, state); inside a step call ltx.functional_call(module, params, (inputs,))."
)
_SHAPES = (
    "the train state has parameters of other shapes than this {}, whose parameters train.init(module) took: it can't "
    "follow. Put the parameters together first, and give it them by ltx.to_module(module, params)."
)
_INSTEAD = (
    "Which parameters are trained is settled by train.init. To go on with the module as it is now: state = "
    "train.init(module); to train others of the same ones: train_step(step, optimizer, trainable=).adopt(state)."
)
_FLAGS, _PLACES = attrgetter("requires_grad"), torch.Tensor.data_ptr

# The train steps that were compiled, whose states move no module.
_compiled = WeakIdKeyDictionary()


def begins(parameters: Iterable[torch.Tensor]) -> None:
    """A state is to train these parameters of a module: end the state that trains them, which keeps its memory."""
    for x in parameters:
        if (found := _followers.get(x)) is not None:
            x.data = x.detach().clone()
            if (last := found()) is not None and any(x is own for own in last.trained):
                last.ended = _ENDED
                if last.last is not None and last.last[0] is None:
                    last.last[0] = _ENDED


class Follower:
    """The tensors of a module, and the state that they show (its lease). Copies of the state have the same one."""

    def __init__(self, module: torch.nn.Module, trained: Sequence[str], buffers: Sequence[str], key: tuple[str, int]):
        self.kind, self.ended, self.key = type(module).__name__, "", key
        followers[key] = self
        self.shows: Any = None  # the lease of the state that it shows; None after something else was put into it
        self.apart = dict[int, tuple[int, int]]()  # where copies lie that were put into it, and their versions, by id
        self.last: Any = None  # the lease of the state that it has shown last
        own = dict(module.named_buffers(remove_duplicate=False))
        self.buffers = {path: own[path] for path in buffers if path in own}
        self._params, self._module = dict(module.named_parameters()), module
        self.trained, self._trained = [self._params[path] for path in trained], trained
        self._own = self._params | self.buffers
        self._flags, self._note = [*map(_FLAGS, self._own.values())], self._noted()
        for x in self._own.values():
            _followers[x] = weakref.ref(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Follower:
        module = memo.get(id(self._module))  # it was copied together with the state
        if module is None or self.ended or not {*self._trained} <= dict(module.named_parameters()).keys():
            return self
        return Follower(module, self._trained, [*self.buffers], (_PROCESS, next(_count)))

    def __reduce__(self) -> Any:
        return tuple, ((self.key, self.kind),)  # TrainState.__setstate__ looks it up

    def show(self, state: TrainState, moved: bool = True) -> None:
        """The module shows `state`, whose parameters are in other memory than those that it shows if `moved`."""
        if self.ended or private.in_transform():
            return
        parts = (state.held_params, state.frozen, state.held_buffers) if moved else (state.held_buffers,)
        for path, value in (pair for part in parts if part for pair in tensors_by_path(part)):
            if (x := self._own.get(path)) is not None and x.shape != value.shape and path in self._params:
                self.spoil(_SHAPES.format(self.kind))
                return
            if x is not None:
                _set(x, value)
        self.shows = self.last = state.lease
        self.apart.clear()
        self._note = (*self._note[:3], [*map(_PLACES, self._own.values())])

    def _noted(self) -> tuple[list[Any], list[str], list[int], list[int]]:
        """Where the module has parameters, buffers and parts (dicts, keys, ids of what is there), and their memory."""
        kinds = ("_parameters", "_buffers", "_modules") if self.buffers else ("_parameters", "_modules")
        dicts = [getattr(part, kind) for part in self._module.modules() for kind in kinds]
        found = [(there, name) for there in dicts for name in there]
        ids = [id(there[name]) for there, name in found]
        return [there for there, _ in found], [name for _, name in found], ids, [*map(_PLACES, self._own.values())]

    def look(self, state: TrainState, training: bool) -> None:
        """Take over into the `state` that it shows what the program has put under the module's tensors: ``p.data = x``.
        Before a step of `training` it raises if the module has become something that the step would pass over.
        """
        if traced.recording() or private.in_transform():
            return
        if self.shows is None and training:
            self._refuse_written(state)
        if self.shows is not state.lease:
            return
        dicts, names, ids, places = self._note
        same = [*map(id, map(dict.get, dicts, names))] == ids and [*map(_PLACES, self._own.values())] == places
        if same and [*map(_FLAGS, self._own.values())] == self._flags:
            return
        there = {*map(id, self._module.parameters())}
        parts = (state.held_params, state.frozen, state.held_buffers)
        values = {path: value for part in parts if part for path, value in tensors_by_path(part)}
        for (path, x), flag in zip(self._own.items(), self._flags, strict=True):
            what = "was replaced" if path in self._params and id(x) not in there else ""
            if path in self.buffers:
                now = reduce(lambda part, name: getattr(part, name, None), path.split("."), cast(Any, self._module))
                what = "was removed" if now is None else ""
                x = self._own[path] = x if now is None else now
            if x.requires_grad is not flag:
                what = f"requires {'a' if x.requires_grad else 'no'} gradient now, other than at train.init"
            value = values.get(path, x)
            if (x.shape, x.dtype, x.device) != (value.shape, value.dtype, value.device):
                what = f"is {tree.describe(x.detach())} now, and {tree.describe(value)} in the state"
            if what and training:
                raise StepError(f"{path!r} of {self.kind} {what}. {_INSTEAD}")
            if not what and x.data_ptr() != value.data_ptr():
                # The program may hold what was there before, to put it back.
                value.data = x.detach().clone(memory_format=torch.preserve_format)
                _set(x, value)
        self._note = self._noted() if training else (*self._note[:3], [*map(_PLACES, self._own.values())])

    def _refuse_written(self, state: TrainState) -> None:
        """Raise if the program has written to the copies that the module has: the next step puts the state's back."""
        values = dict(tensors_by_path(state.held_params))
        for path, x in self._params.items():
            written = id(x) in self.apart and self.apart[id(x)] != (x.data_ptr(), x._version)
            if written and path in values and not torch.equal(x, values[path]):
                raise StepError(
                    f"{path!r} of {self.kind} was written to since ltx.to_module put copies into it, and this step "
                    "would put back what its state has. Give the step a state with these values, state = "
                    "dataclasses.replace(state, params=...), or begin with them: train.init(module). To drop them: "
                    "ltx.to_module(module, state)."
                )

    def spoil(self, why: str) -> None:
        """The module has no values until a state is shown again: its use raises with `why`."""
        give_away([x for x in self._params.values() if not isinstance(x, DonatedTensor)], why)
        self.shows = None


def follow(train: Any, module: torch.nn.Module, state: TrainState) -> TrainState:
    """`state`, made of the parameters of `module`, with the module following it. All ranks call this."""
    ranks, said = comm.resolve(train.step.axis).ranks, comm.Signature("train.init of a module", ())
    process, number = ranks.by_rank(said, lambda *_: [_PROCESS, next(_count)])[0]
    paths = tree.leaf_paths(state.held_params), tree.leaf_paths(state.held_buffers)
    state.__dict__["module"] = Follower(module, *paths, (process, number))
    if train in _compiled:
        state.module.spoil(_COMPILED.format(state.module.kind))
    return state


@traced.at_trace_time
def compiled(train: Any, module: Any) -> None:
    """Steps of `train` are compiled: their module can't follow, and says so when it is used."""
    _compiled[train] = True
    if module is not None and not module.ended:
        module.spoil(_COMPILED.format(module.kind))


def put_apart(x: torch.Tensor, value: torch.Tensor) -> bool:
    """Put something else into `x`, if it is a tensor of a module that follows: the next step puts the state's back."""
    if (found := _followers.get(x)) is None:
        return False
    _set(x, value)
    if (last := found()) is not None:
        last.shows, last.apart[id(x)] = None, (x.data_ptr(), x._version)
    return True


def _set(x: torch.Tensor, value: torch.Tensor) -> None:
    if isinstance(x, DonatedTensor):
        x.__class__ = torch.nn.Parameter  # type: ignore[assignment]
    x.data = value
