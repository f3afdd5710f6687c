"""TrainState: everything that training changes, as one value; the metrics beside it, and random numbers.

A step with ``donate=True`` writes to the tensors of its state. Their Python objects become :class:`DonatedTensor`,
whose use raises, as in JAX, and the next state gets new objects for the same memory. Only objects that the user may
hold are replaced so: those of parts that were read from the state or put into it.
"""

from __future__ import annotations

import random
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ltx.core.base import private, traced, tree
from ltx.core.base.errors import DonatedStateError, InputError, InvalidStateError
from ltx.core.base.readable import Readable, text_of
from ltx.core.optim import TorchState
from ltx.core.optim.base import advanced, all_of
from ltx.core.transforms.strategy import StateLayout
from ltx.typing import Tree

# The parts that hold tensors. Properties read them, and note that; an instance holds each as "held_" and its name.
_PARTS = ("params", "buffers", "opt_state", "sync_state", "loss_scale")
_HELD = tuple(f"held_{name}" for name in _PARTS)

# The parts that steps write to.
_WRITTEN = ("params", "opt_state", "sync_state")


@dataclass(frozen=True, eq=False)
class LossScale:
    """The loss scale, and the count of steps with or without finite gradients; the same on every rank."""

    scale: Any = ()  # 0-dim float32: the factor of the next loss; () without dynamic loss scaling
    #: 0-dim int32: steps in a row with finite gradients since the scale changed; below 0, so many that were skipped.
    good_steps: torch.Tensor = field(default_factory=lambda: torch.tensor(0, dtype=torch.int32, device="cpu"))

    def run_after(self, finite: torch.Tensor | bool, interval: int = 1) -> torch.Tensor:
        """The next value of `good_steps`, which restarts from 0 when it reaches `interval`."""
        good = self.good_steps.clamp(min=0) + 1
        good = good * (good < interval)
        return torch.where(torch.as_tensor(finite, device=good.device), good, self.good_steps.clamp(max=0) - 1)


tree.register_node(
    LossScale,
    lambda state: ((state.scale, state.good_steps), None),
    lambda children, _: LossScale(*children),
    names=("scale", "good_steps"),
)


# In place of the strategy's pending communication in what pickle, copy.deepcopy and trees make of a state.
_LOST = ...

_INVALID = "this TrainState (step {}) is invalid: {}. {}"
_NEVER_WRITTEN = "Load a checkpoint. With donate=False the tensors of a state are never written to."
# The step to which a state was donated, or why it is invalid: one cell, which copies of the state share. It is a list
# since compiled graphs can't make objects of a class.
_Lease = list[int | str | None]

#: {(rank 0's process, which of its followers): the :class:`ltx.core.training.follower.Follower`}, alike on all ranks.
followers: weakref.WeakValueDictionary[tuple[str, int], Any] = weakref.WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class TrainState(Readable):
    """Parameters, buffers, optimizer state and communication state after `step` steps.

    A pytree node (optree's and torch's) whose structure carries `step`; :mod:`ltx.checkpoint` saves it, and it is a
    Stateful of ``torch.distributed.checkpoint``. ``train.init(params)`` and each step make one.

    A step with ``donate=True`` updates the state's tensors in place, as JAX's donated buffers. Then the old state can't
    be read, copied, printed or pickled any more, and tensors that were read from it can't be used: both raise
    DonatedStateError. Earlier views of these tensors (``x.detach()``, ``x[0]``, ``x.numpy()``) share their memory and
    change silently. To keep values, copy them: ``copy.deepcopy(state)``, or
    ``{name: x.clone() for name, x in state.params.items()}``.

    Attributes:
        params: tree of tensors: the trained and the frozen parameters together, as the step gets them.
        buffers: tree of tensors that each step replaces without differentiating them, or None.
        opt_state: the optimizer's state.
        sync_state: the communication state, an :class:`ltx.SyncState`.
        step: the number of steps done, a Python int.
        layout: for each part, whether it is the same on all ranks.
        loss_scale: the :class:`LossScale` of dynamic loss scaling or of a limit on skipped steps; else ().
        pending: communication of the strategy that isn't complete; None for most. It isn't in the tree, nor saved: no
            step takes a copy that was made meanwhile.
        frozen: the parameters that aren't trained, with None in the places of trained ones; None if all are trained.
        module: the module that follows the steps of this state; None unless ``train.init(module)`` has begun it.
    """

    params: Tree
    buffers: Tree
    opt_state: Tree
    sync_state: Any
    step: int = 0
    layout: StateLayout = field(default_factory=StateLayout, repr=False)
    loss_scale: Any = ()
    pending: Any = field(default=None, repr=False)
    frozen: Tree = field(default=None, repr=False)
    module: Any = field(default=None, repr=False)
    # Of ltx alone. The cell `lease` says whether this state, and others in the same memory, can be used.
    lease: _Lease = field(default_factory=lambda: [None], repr=False)
    seen: tuple[str, ...] = field(default=_PARTS, init=False, repr=False)  # parts whose tensors the user may hold
    of_step: bool = field(default=False, init=False, repr=False)  # a step or init has made it, or what it is a copy of
    made_by: Any = field(default=None, init=False, repr=False)  # the train step that has made this object, or took it
    resolved: Any = field(default=None, init=False, repr=False)  # what that step had asked, a resolved.Resolved
    left: tuple[Any, str] | None = field(default=None, init=False, repr=False)  # a pickled follower's key and class
    # The parts of an instance, read without noting it in `seen`.
    held_params: ClassVar[Tree]
    held_buffers: ClassVar[Tree]
    held_opt_state: ClassVar[Tree]
    held_sync_state: ClassVar[Any]
    held_loss_scale: ClassVar[Any]

    def __post_init__(self) -> None:
        if self.frozen is not None:
            given = self.held_params
            frozen = tree.masked(tree.filled(given, self.frozen), self.frozen)  # Dynamo can't flatten None alone
            object.__setattr__(self, "held_params", tree.masked(given, self.frozen, there=False))
            object.__setattr__(self, "frozen", frozen)

    @property
    def trained(self) -> Tree:
        """The parameters that are trained, with None in the places of frozen ones."""
        self._look_at("params")
        return self.held_params

    def _look_at(self, part: str) -> None:
        """Note that a part was read, so the user may now hold its tensors."""
        if traced.recording():
            return
        self.check_owned()
        self.__dict__["resolved"] = None  # what the part holds may change from now on
        if part not in self.seen:
            self.__dict__["seen"] = (*self.seen, part)

    def __getstate__(self) -> dict[str, Any]:
        for part in _PARTS:
            self._look_at(part)
        # this process alone has what is pending, and the train step
        alone = {"pending": _LOST if self.under_way else None, "made_by": None, "resolved": None}
        return self.__dict__ | alone

    def __setstate__(self, parts: dict[str, Any]) -> None:
        left = parts["module"] or parts.get("left")
        module = followers.get(left[0]) if isinstance(left, tuple) else left
        self.__dict__.update(parts, module=module, left=None if module else left)

    def check_owned(self, training: bool = False) -> None:
        """Raise if this state was donated or is invalid; before a step of `training` also if its module has changed."""
        if isinstance(self.lease[0], str):
            raise InvalidStateError(self.lease[0])
        if self.lease[0] is not None:
            raise DonatedStateError(
                f"this TrainState (step {self.step}) was donated to the step that made state {self.lease[0]}: "
                "its tensors were updated in place and hold other values now. Use the state that the step returned, "
                "state, metrics = train(state, ...); to keep an old one, copy.deepcopy(state) before the step, or "
                "train_step(..., donate=False)."
            )
        if self.module is not None:
            self.module.look(self, training)

    def by(self, train: Any) -> TrainState:
        """Note that `train` has made this state, which its module shows. Returns the state."""
        self.__dict__["made_by"] = train
        if self.module is not None:
            self.module.show(self)
        return self

    @property
    def under_way(self) -> bool:
        """Whether the strategy has an exchange under way between two steps."""
        return getattr(self.pending, "mean", self.pending) is not None

    def check_whole(self, training: bool = False) -> None:
        """:meth:`check_owned`, and raise InputError if this is a copy made while an exchange was under way."""
        self.check_owned(training)
        if self.module is not None and self.module.ended:
            raise InvalidStateError(self.module.ended)
        if self.pending is _LOST:
            raise InputError(
                f"this TrainState (step {self.step}) is a copy (copy.deepcopy, pickle, ltx.tree.map), made while "
                f"{self.layout.strategy} had an exchange under way between two steps, which the copy hasn't got. Copy "
                "what finish gives, called by all ranks: state = train.finish(state)."
            )

    def check_finished(self, what: str) -> None:
        """Raise InputError if communication is pending: its result would be lost, or be added to other values."""
        if self.under_way:
            raise InputError(
                f"{what}: {self.layout.strategy} has an exchange under way between two steps, which a file can't "
                "hold. Finish it first, on all ranks: state = train.finish(state)."
            )

    def begin_writing(self) -> None:
        """Called before a step writes to this state's tensors: the state is invalid until the step has ended."""
        self.lease[0] = _INVALID.format(self.step, "a step was left in its update", _NEVER_WRITTEN)

    def invalidate(self, what: str, error: BaseException, instead: str = _NEVER_WRITTEN) -> None:
        """Mark this state as invalid, because of `what`, when there was an `error`: reading it raises."""
        self.lease[0] = why = _INVALID.format(self.step, f"{what} ({type(error).__name__}: {error})", instead)
        for name in _WRITTEN:
            self.__dict__.pop(f"held_{name}", None)
        if self.module is not None and self.module.shows is self.lease:
            self.module.spoil(f"this {self.module.kind} has the tensors of a TrainState, and {why}")

    def state_dict(self) -> dict[str, Any]:
        """All tensors by path, and the step, for ``torch.distributed.checkpoint``.

        DCP saves one rank's tensor for each path. So paths of tensors that differ between ranks name the rank, such as
        ``params.rank_0_of_2.weight`` with local SGD, and the same number of ranks has to load them.
        """
        self.check_owned()
        self.check_finished("state_dict")
        layout, ranks = self.layout, dist.get_world_size() if dist.is_initialized() else 1
        apart = {
            "params": layout.params != "replicated",
            "opt_state": layout.opt_state == "per_rank",  # the paths of a sharded one name the rank
            "sync_state.leaves": layout.sync_state == "per_rank",
        }

        def named(path: str) -> str:
            part = next((part for part in apart if apart[part] and f"{path}.".startswith(f"{part}.")), "")
            of_rank = part and ranks > 1
            return f"{part}.rank_{dist.get_rank()}_of_{ranks}{path.removeprefix(part)}" if of_rank else path

        return dict(zip(map(named, tree.leaf_paths(self)), tree.flatten(self)[0], strict=True)) | counts_of(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy the values of a :meth:`state_dict` into this state's tensors, in place, and take over its step.

        Nothing else changes a state; the protocol of ``torch.distributed.checkpoint`` needs this.

        Raises:
            InputError: (a ValueError) leaves or their shapes differ; nothing has changed then.
        """
        mine, fix = self.state_dict(), "Build the state as it was when it was saved."
        if missing := sorted(mine.keys() ^ state_dict.keys()):
            raise InputError(f"the checkpoint and this state differ in their leaves: {missing[:8]}. {fix}")
        for path, tensor in mine.items():
            if tensor.shape != state_dict[path].shape:  # copy_ would broadcast dimensions of size 1
                raise InputError(
                    f"leaf {path!r} is {tree.describe(state_dict[path])} in the checkpoint, and "
                    f"{tree.describe(tensor)} in this state. {fix}"
                )
        for path, tensor in mine.items():
            if path not in ("step", "updates"):
                tensor.copy_(state_dict[path])
        now = counted(self, int(state_dict["step"]), int(state_dict["updates"]))
        self.__dict__.update({name: getattr(now, name) for name in ("step", "held_opt_state", "held_sync_state")})


def _part(name: str) -> property:
    """A property for a part of a state; reading it notes that the user may hold the part's tensors."""
    held = f"held_{name}"

    def read(state: TrainState) -> Any:
        state._look_at(name)
        value = getattr(state, held)
        return value if name != "params" or state.frozen is None else tree.filled(value, state.frozen)

    return property(read, lambda state, value: object.__setattr__(state, held, value))


for _name in _PARTS:
    setattr(TrainState, _name, _part(_name))


def counted(state: TrainState, step: int, updates: int) -> TrainState:
    """`state` with other counts, of steps and of the optimizer's updates. The clock restarts from 0."""
    sync_state = replace(state.sync_state, step=step, clock=torch.zeros_like(state.sync_state.clock))
    return replace(state, step=step, opt_state=advanced(state.opt_state, lambda _: updates), sync_state=sync_state)


def updates_of(state: TrainState) -> int:
    """The number of the optimizer's updates: less than steps if the strategy accumulates gradients."""
    counts: list[int] = [node.count for node in all_of(state.opt_state, TorchState)]
    return counts[-1] if counts else state.step


def counts_of(state: TrainState) -> dict[str, torch.Tensor]:
    """The counts of steps and updates, as tensors that can be saved and compared."""
    counts = {"step": state.step, "updates": updates_of(state)}
    return {name: torch.tensor(count, device="cpu") for name, count in counts.items()}


def _children(state: TrainState) -> tuple[str, ...]:
    return _PARTS if state.frozen is None else (*_PARTS, "frozen")


@dataclass(unsafe_hash=True)
class _Beside:
    """A value in a tree's structure; trees are alike whatever it is. It stays in this process."""

    value: Any = field(compare=False)

    def __repr__(self) -> str:
        return "..."

    def __reduce__(self) -> Any:
        return _Beside, (None,)


tree.register_node(
    TrainState,
    # torch's pytrees treat None as a leaf
    lambda s: (
        (s.trained, *(getattr(s, part) for part in _children(s)[1:])),
        (s.step, s.layout, s.under_way, _Beside(s.module)),
    ),
    lambda c, static: TrainState(  # type: ignore[call-arg, misc]
        *c[:4], *static[:2], c[4], _LOST if static[2] else None, *c[5:], module=static[3].value
    ),
    names=_children,
)


# A donated tensor allows these attributes, since none of them reads a value.
_HARMLESS = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "is_sparse")
) | {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point, torch.Tensor.is_complex}


class DonatedTensor(torch.Tensor):
    """A tensor whose memory belongs to a later state. Any use raises, except for its shape, dtype and device."""

    _why: ClassVar[str] = ""
    __repr__ = text_of  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # While Dynamo traces, it looks at all tensors of a module, also at those that functional_call replaces.
        looked_at = not torch.compiler.is_dynamo_compiling() and private.TracingContext.try_get() is not None
        if func in _HARMLESS or looked_at:
            with private.plain_tensors():
                return func(*args, **(kwargs or {}))
        raise DonatedStateError(next(kind._why for kind in types if issubclass(kind, DonatedTensor)))


def give_away(tensors: Iterable[torch.Tensor], why: str) -> None:
    """Make every use of these `tensors` raise DonatedStateError with the text `why`."""
    kind = type("DonatedTensor", (DonatedTensor,), {"_why": why, "__module__": __name__})
    for x in tensors:
        if x.layout is torch.strided and (x.is_floating_point() or x.is_complex()):
            # functorch's wrappers ignore the class: a read through them finds NaN, which needs no memory.
            x.data = torch.full((), float("nan"), dtype=x.dtype, device=x.device).expand(x.shape)
        with suppress(TypeError):  # some tensor subclasses have another memory layout
            x.__class__ = kind


def hand_over(state: TrainState, following: TrainState, seen: Sequence[str]) -> None:
    """Donate `state` to `following`, with new tensor objects for those of the parts that the user has `seen`."""
    following.__dict__["seen"] = ()
    written = [tree.flatten(getattr(state, f"held_{name}"))[0] for name in _WRITTEN if name in seen] if seen else ()
    # one tensor may be parameter and communication state
    held = {id(x): x for x in chain(*written) if isinstance(x, torch.Tensor)} if written else {}
    state.lease[0] = state.step + 1
    for name in _HELD:
        state.__dict__.pop(name, None)
    if held:
        parts = {name: getattr(following, name) for name in _HELD}
        apart = {name: tree.map(lambda x: x.detach() if id(x) in held else x, part) for name, part in parts.items()}
        following.__dict__.update(apart, resolved=None)
        give_away(
            held.values(),
            f"this tensor was read off the TrainState of step {state.step}, and that state was donated to the step "
            f"that made state {state.step + 1}: its memory holds other values now. Read it off the state that the step "
            "returned; to keep old values copy them before the step, such as {name: x.clone() for name, x in "
            "state.params.items()}, or use train_step(..., donate=False).",
        )


@dataclass(frozen=True, eq=False)
class Metrics(Readable):
    """The measurements of a step.

    Attributes:
        loss: 0-dim tensor: the mean over ranks (or samples, for a Weighted step), the same on every rank. If only some
            ranks share gradients in this step, such as those of a node, it is their mean; if none do, it is this rank's
            loss. With outputs="mean" it is always the mean over all ranks.
        aux: the other outputs of the step; None without `has_aux`. It is this rank's, unless the step takes the mean
            itself, ``return loss, {"accuracy": ltx.pmean(accuracy)}``, or ``data_parallel(outputs="mean")`` does.
        grad_norm: 0-dim tensor: the norm of the reduced gradients before clipping, or of this rank's gradients if ranks
            don't share them. None without :func:`ltx.optim.clip_by_global_norm` or
            :func:`ltx.optim.measure_global_norm` in the optimizer, or if only some groups of a partition have one.
        loss_scale: 0-dim tensor: the factor of this step's loss; None without dynamic loss scaling.
        lr: this step's learning rate, a number or 0-dim tensor computed when it is read, or a dict by group. None where
            it isn't known: with :func:`ltx.optim.from_functions`, and from compiled steps.
        skipped: 0-dim bool tensor: whether this step left parameters and optimizer state unchanged, because gradients
            weren't finite, and `grad_norm` is NaN. None without dynamic loss scaling or a guard.
    """

    loss: torch.Tensor
    aux: Any = None
    grad_norm: torch.Tensor | None = None
    loss_scale: torch.Tensor | None = None
    skipped: torch.Tensor | None = None
    rates: Any = field(default=None, repr=False)  # functions that nobody has called yet, or rates that are known

    @property
    def lr(self) -> Any:
        return tree.map(lambda rate: rate() if callable(rate) else rate, self.rates)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"rates": self.lr}  # a schedule needn't be one that can be pickled


tree.register_node(
    Metrics,
    lambda m: ((m.loss, m.aux, m.grad_norm, m.loss_scale, m.skipped), _Beside(m.rates)),
    lambda children, rates: replace(Metrics(*children), rates=rates.value),
    names=("loss", "aux", "grad_norm", "loss_scale", "skipped"),
)


def torch_states() -> dict[str, Any]:
    """The states of torch's random number generators: the CPU's, and the current CUDA device's if one is in use."""
    in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {"torch": torch.get_rng_state()} | ({"cuda": torch.cuda.get_rng_state()} if in_use else {})


def random_states() -> dict[str, Any]:
    """The states of the generators of torch, Python and, if loaded, NumPy, as types that a checkpoint can store."""
    states = torch_states() | {"python": random.getstate()}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = (str(name), [int(key) for key in keys], int(rest[0]), int(rest[1]), float(rest[2]))
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Inverse of :func:`torch_states` and :func:`random_states`. Generators that `states` lacks don't change."""
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        import numpy  # imported here, since NumPy needn't be installed

        numpy.random.set_state(states["numpy"])


@contextmanager
def drawn_again(states: dict[str, Any]) -> Iterator[None]:
    """Use `states` (of :func:`torch_states`) for torch's generators in the block; restore theirs after it."""
    with torch.random.fork_rng([torch.cuda.current_device()] if "cuda" in states else []):
        set_random_states(states)
        yield
