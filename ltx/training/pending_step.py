"""A step that completes during the next one: what ``overlap="step"`` leaves pending, and what waits for it.

When a step's backward pass ends, all its reductions have been launched. Instead of waiting for them, the step returns a
state without parameters, and the next forward pass starts with stand-ins: tensors in place of the parameters, with the
marker on them as always, but without their values. Their Python class is :class:`PendingParameter`. Before torch uses
an argument, it asks whether the argument's class overrides torch's functions. That question completes the bucket of the
parameter: the step waits for the reduction, runs the optimizer, puts the values into the stand-ins, and turns these
into plain tensors. Then the answer is no. So the caller, a fused kernel for example, continues as usual; the graph is
the same as without overlap, and from then on the parameter has no overhead. (``nn.UninitializedParameter`` turns into a
parameter in the same way.)

Torch's tree functions, which all of ``torch.func`` uses, ask in another way: they look the class up in a table. That
completes everything. Dynamo guards on classes; it announces that it compiles. Code that bypasses torch, such as a C++
extension, finds NaN in a parameter that nothing has used before.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ltx import comm, tree
from ltx.comm.debug import under_way
from ltx.errors import InvalidStateError, LtxError
from ltx.gradients.process_schedule import ProcessSchedule
from ltx.gradients.reduction import LeafState
from ltx.gradients.schedule import Plan
from ltx.training.completion import UpdateBuckets
from ltx.transforms.closure_check import Seen
from ltx.transforms.sync_state import SyncState
from ltx.typing import Tree

# Steps that call compiled functions, whose guards want plain tensors.
_compiled = Seen()


@contextmanager
def _on_compilation(fn: Any, react: Callable[[], None]) -> Iterator[None]:
    """Call `react` as soon as Dynamo begins to compile something, and remember that `fn` calls compiled functions."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        yield
        return

    def begun(_: Any) -> None:
        _compiled.add(fn)
        react()

    dynamo.callback_handler.register_start_callback(begun)
    try:
        yield
    finally:
        dynamo.callback_handler.remove_start_callback(begun)


_NOTHING_TO_CALL = torch._C._disabled_torch_function_impl


class _Trigger:
    """``PendingParameter.__torch_function__``: reading it completes the parameter's bucket."""

    def __get__(self, tensor: torch.Tensor | None, owner: type[PendingParameter]) -> Any:
        pending_step = owner.pending_step
        if pending_step is None:
            return _NOTHING_TO_CALL
        # Torch takes an error here for a no. So the answer is yes, and the function raises when torch calls it.
        if tensor is not None and pending_step.unseen is None:
            try:
                pending_step.wait_for_parameter(tensor)
            except BaseException as error:
                pending_step.unseen = error
        return _NOTHING_TO_CALL if pending_step.unseen is None else pending_step.raise_unseen


class _Asked(type(torch.Tensor)):  # type: ignore[misc]
    """The metaclass: hashing the class means that torch's tree functions are about to read the tensor."""

    def __hash__(cls) -> int:
        if cls.pending_step is not None:
            if cls.pending_step.unseen is not None:
                cls.pending_step.raise_unseen()
            cls.pending_step.wait_all()
        return type.__hash__(cls)


class PendingParameter(torch.Tensor, metaclass=_Asked):
    """A parameter whose value isn't there yet. Each pending step has a subclass of its own."""

    pending_step: PendingStep | None = None
    __torch_function__ = _Trigger()


class PendingStep:
    """A step whose reductions are pending, and the state that they make, bucket by bucket.

    Args:
        updates: updates the buckets.
        schedule: that of its backward pass.
        sync: the communication state after it, whose leaves are still those before it.
        stand_in: the class of an earlier pending step's stand-ins, to be used again.
    """

    def __init__(
        self,
        updates: UpdateBuckets,
        schedule: ProcessSchedule,
        sync: SyncState,
        stand_in: type[PendingParameter] | None,
    ):
        assert schedule.summary is not None
        self.sync = sync
        self.stand_in = stand_in
        self._updates, self._schedule, self._summary = updates, schedule, schedule.summary
        self._leaves, self.spec = tree.flatten(updates.params)
        members = [[updates.trained[m] for m in bucket.members] for bucket in schedule.plan.buckets]
        self._bucket_of = {place: index for index, places in enumerate(members) for place in places}
        self._left = set(range(len(members)))
        self._hidden: dict[int, list[tuple[torch.Tensor, int]]] = {index: [] for index in self._left}
        self._places: dict[int, int] = {}  # of hidden tensors, by id
        self._result: tuple[Tree, Tree, SyncState] | None = None
        self._error: BaseException | None = None
        self._lock = threading.RLock()
        self.unseen: BaseException | None = None  # what the next use of a parameter raises
        schedule.comm.pending_steps.append(self)
        if schedule.has_later_phases and schedule.plan.buckets[0].device.type == "cpu":
            comm.look_after(self)

    @property
    def over(self) -> bool:
        """Whether all buckets are applied, or never will be."""
        return self._result is not None or self._error is not None

    def may_complete_in(self, fn: Any) -> bool:
        """Whether the step `fn` may begin with stand-ins. Compiled functions and debug checks want the parameters."""
        return not (self.over or _compiled.has(fn) or under_way)

    def result(self) -> tuple[Tree, Tree, SyncState]:
        """(parameters, optimizer state, communication state), once all are there.

        Raises:
            InvalidStateError: something failed before they were complete.
            PeerLostError, RankMismatchError, ...: it fails now.
        """
        self.wait_all()
        assert self._result is not None
        return self._result

    def stand_ins(self) -> list[torch.Tensor]:
        """A tensor for each parameter: itself if it is there, else NaN in its shape, which takes no memory."""
        self._check()
        made: dict[Any, torch.Tensor] = {}
        leaves = list(self._leaves)
        for place, index in self._bucket_of.items():
            if index in self._left:
                leaf = leaves[place]
                kind = (leaf.dtype, leaf.device)
                if kind not in made:
                    made[kind] = torch.full((), float("nan"), dtype=leaf.dtype, device=leaf.device)
                leaves[place] = made[kind].expand(leaf.shape)
        return leaves

    @contextmanager
    def hidden_in(self, leaves: Sequence[torch.Tensor], fn: Any) -> Iterator[None]:
        """While `fn` runs, each of `leaves`, made of the stand-ins, completes where it is first used."""
        stand_in = self.stand_in
        if stand_in is None or stand_in.pending_step not in (None, self):
            stand_in = self.stand_in = _Asked(
                "PendingParameter", (PendingParameter,), {"__module__": __name__, "pending_step": None}
            )
        stand_in.pending_step = self
        for place, index in self._bucket_of.items():
            if index in self._left:
                self._hide(leaves[place], place)
        with _on_compilation(fn, self.wait_all):
            yield

    def _hide(self, leaf: torch.Tensor, place: int) -> None:
        self._hidden[self._bucket_of[place]].append((leaf, place))
        self._places[id(leaf)] = place
        leaf.__class__ = self.stand_in  # type: ignore[assignment]

    def leaf_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A leaf of a new graph in place of a pending `tensor`."""
        with self._lock, torch._C.DisableTorchFunctionSubclass():
            place = self._places.get(id(tensor))
            leaf = tensor.detach().requires_grad_()
            if place is not None:
                self._hide(leaf, place)
            return leaf

    def raise_unseen(self, *_: Any, **__: Any) -> Any:
        """``__torch_function__`` of a parameter whose bucket has failed."""
        assert self.unseen is not None
        error, self.unseen = self.unseen, None
        raise error

    def wait_for_parameter(self, tensor: torch.Tensor) -> None:
        """Complete the bucket of a stand-in."""
        with self._lock:
            place = self._places.get(id(tensor))
            if place is None:
                self.wait_all()
            else:
                self._complete(self._bucket_of[place])

    def wait_all(self) -> None:
        """Complete all buckets."""
        with self._lock:
            self._check()
            if self._result is None:
                if self._left and self._schedule.has_later_phases:
                    self._guarded(self._schedule.pending.flush)
                for index in sorted(self._left):
                    self._complete(index)
                if self._result is None:  # no parameters
                    self._finish()

    def poll(self) -> None:
        """Continue with later phases of the hook, unless another thread does."""
        if self._lock.acquire(blocking=False):
            try:
                if self._left and not self.over:
                    self._guarded(self._schedule.pending.poll)
            finally:
                self._lock.release()

    def _complete(self, index: int) -> None:
        self._check()
        if index in self._left:
            self._guarded(lambda: self._complete_and_update(index))
            if not self._left:
                self._finish()

    def _complete_and_update(self, index: int) -> None:
        self._summary.enqueued()  # ranks that have issued different things: before anything is applied
        bucket, reduced = self._schedule.wait_bucket(index)
        try:
            self._updates.complete(bucket, reduced)
        except BaseException as error:
            self._fail(error)
            raise
        self._left.discard(index)
        for leaf, place in self._hidden.pop(index):
            leaf.__class__ = torch.Tensor
            leaf.data = self._leaves[place]
            self._places.pop(id(leaf), None)

    def _guarded(self, complete: Callable[[], object]) -> None:
        try:
            with _undisturbed(self._leaves):
                complete()
        except BaseException as error:
            # An interrupt during a wait harms nothing: the next read waits again.
            if isinstance(error, LtxError) or not self._schedule.pending.intact:
                self._fail(error)
            raise

    def _finish(self) -> None:
        self._guarded(self._schedule.finish)
        done = self._updates.result()
        self._result = done.params, done.opt_state, replace(self.sync, leaves=done.states)
        self._schedule.comm.pending_steps.remove(self)
        if self.stand_in is not None and self.stand_in.pending_step is self:
            self.stand_in.pending_step = None

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
            self._schedule.comm.pending_steps.remove(self)
            with suppress(LtxError, RuntimeError):  # peers can't be told where the store is gone too
                self._schedule.abandon(error)

    def _check(self) -> None:
        if self._error is None:
            return
        axis_comm, buckets = self._schedule.comm, len(self._schedule.plan.buckets)
        done = buckets - len(self._left)
        raise InvalidStateError(
            f"rank {axis_comm.rank}: step {self._updates.state.step + 1} was still pending when something failed "
            f"({type(self._error).__name__}: {self._error}). {done} of its {buckets} buckets of parameters were "
            f"updated, so this state is neither that before the step nor that after it. Load a checkpoint, or start "
            "from train.init(params) and take the state of a rank whose own is whole: train.broadcast(state, src). "
            'overlap="backward" commits steps whole.'
        ) from self._error

    def states_for(self, plan: Plan, trained: Sequence[int]) -> list[LeafState] | None:
        """The new states of the leaves of `plan`, for a pass whose marker was made before they were there."""
        if not any(plan.state_names):
            return None
        paths, entries = tree.leaf_paths(self._updates.params), self.result()[2].leaves
        return [
            {name: entries[paths[place]][name] for name in names}
            for place, names in zip(trained, plan.state_names, strict=True)
        ]


def leaf_like(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf with the value of `tensor`, for a new graph; a pending one stays pending."""
    pending_step = type(tensor).pending_step if isinstance(tensor, PendingParameter) else None
    return tensor.detach().requires_grad_() if pending_step is None else pending_step.leaf_like(tensor)


@contextmanager
def _undisturbed(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """Without the transforms, modes and autocast that may surround the place where a parameter is used."""
    with (
        torch._C.DisableTorchFunction(),
        torch._C._DisableFuncTorch(),
        torch.inference_mode(False),
        torch.no_grad(),
        ExitStack() as stack,  # each restores what it has found, so the others are left before these
    ):
        for device in {leaf.device.type for leaf in leaves}:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        yield
