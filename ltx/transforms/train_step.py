"""train_step: a whole training step as a function from state to state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ltx import collectives, tree, wire
from ltx.axis import Axis, GroupBacking
from ltx.errors import OptimError, StepError, StrategyError, TreeError, UnsupportedError, WeightError
from ltx.optim import Optimizer, grad_norm
from ltx.strategies.base import Moment, Strategy, Update, Updated
from ltx.sync.schedule import WireSchedule
from ltx.transforms.data_parallel import DataParallel
from ltx.transforms.run import Run
from ltx.transforms.sync_state import Synced, SyncState
from ltx.transforms.train_state import Metrics, TrainState
from ltx.transforms.weighted import Weighted
from ltx.typing import Tree


@dataclass(frozen=True)
class TrainStep:
    """What :func:`train_step` returns: ``init(params) -> state`` and ``(state, *batch) -> (state, metrics)``."""

    step: DataParallel
    optimizer: Optimizer
    donate: bool = True
    guard: Literal["off"] = "off"
    overlap: Literal["backward", "update"] = "backward"
    has_aux: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.step, DataParallel):
            raise StepError(
                f"train_step takes a step made by ltx.data_parallel, got {type(self.step).__name__}. Wrap it: "
                "ltx.train_step(ltx.data_parallel(loss_fn), optimizer)."
            )
        if self.step.blocked:
            raise StepError(
                "train_step: the step's gradients are blocked (block_backward_sync), so ranks would diverge."
            )
        if self.step.returns != "value":
            raise StepError('train_step differentiates the step itself: wrap the loss, without returns="grads".')
        if self.step.argnums != 0:
            raise StepError(
                f"train_step passes the parameters first: the step needs argnums=0, got {self.step.argnums!r}."
            )
        if not isinstance(self.optimizer, Optimizer):
            raise OptimError(
                f"optimizer must be an ltx.optim.Optimizer, got {self.optimizer!r}. Use "
                "ltx.optim.from_torch(torch.optim.AdamW, lr=...) or ltx.optim.from_functions(init, update)."
            )
        if self.guard != "off":
            raise StrategyError(f'guard must be "off", got {self.guard!r}.')
        if self.overlap not in ("backward", "update"):
            raise StrategyError(f'overlap must be "backward" or "update", got {self.overlap!r}.')
        strategy = self.step.strategy
        strategy.check_optimizer(self.optimizer)
        if self.overlap == "update" and not strategy.updates_in_buckets:
            raise StrategyError(
                f'overlap="update" applies the optimizer bucket by bucket, and {type(strategy).__name__} does its part '
                'on all parameters together. Use overlap="backward".'
            )
        if self.overlap == "update" and not self.optimizer.leafwise:
            raise StrategyError(
                f'overlap="update" applies the optimizer bucket by bucket, before other gradients have landed; '
                f'{self.optimizer!r} needs all of them. Use overlap="backward".'
            )

    def init(self, params: Tree, buffers: Tree = None) -> TrainState:
        """The state before the first step: copies, with rank 0's values on every rank.

        Args:
            params: tree of floating or complex tensors; all of them are trained.
            buffers: tree of tensors, or None. With buffers the step is ``(params, buffers, *batch) -> (loss,
                buffers)``, or ``(loss, buffers, aux)`` with `has_aux`.
        """
        tree.check_tensors(params, "params")
        for path, leaf in zip(tree.leaf_paths(params), tree.flatten(params)[0], strict=True):
            if not (leaf.is_floating_point() or leaf.is_complex()):
                raise TreeError(
                    f"params: leaf {path!r} is {tree.describe(leaf)}, and only floating or complex tensors can be "
                    "trained. Pass it in the buffers, or close over it."
                )
        if buffers is not None:
            tree.check_tensors(buffers, "buffers")
        strategy, axis = self.step.strategy, wire.resolve(self.step.axis)
        strategy.check_axis(axis)
        params = tree.map(torch.Tensor.detach, collectives.broadcast(params, axis=axis))
        buffers = tree.map(torch.Tensor.detach, collectives.broadcast(buffers, axis=axis))
        sync_state = self.step.init(params)
        if not torch._C._are_functorch_transforms_active():
            sync_state = replace(sync_state, leaves=_unshared(sync_state.leaves, params))
        opt_state = strategy.init_optimizer(self.optimizer, params, axis)
        return TrainState(params, buffers, opt_state, sync_state, kinds=strategy.kinds)

    def __call__(self, state: TrainState, *batch: Any) -> tuple[TrainState, Metrics]:
        if not isinstance(state, TrainState):
            raise StepError(
                f"the first argument is the TrainState that init or the last step gave, got {type(state).__name__}."
            )
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return self._transformed(state, batch)
        state.check_owned()
        axis = wire.resolve(self.step.axis)
        sync: SyncState = state.sync_state
        strategy, moment = self.step.strategy, Moment(sync.checked_step(), axis)
        strategy.check_axis(axis)
        pending = strategy.begin(state.params, sync.leaves, moment, state.pending)
        late = axis.size > 1 and strategy.talks_late(moment.step)
        try:
            return self._step(state, batch, moment, pending, late)
        except BaseException as error:
            begun = pending is not None and pending is not state.pending
            if (late or begun) and isinstance(axis.backing, GroupBacking):
                axis.backing.line.passes.leave(f"{type(error).__name__}: {error}")
            raise

    def _step(
        self, state: TrainState, batch: Sequence[Any], at: Moment, pending: Any, late: bool
    ) -> tuple[TrainState, Metrics]:
        """The step, once the strategy has begun its own. `late`: ranks talk after the optimizer has run."""
        sync, strategy = state.sync_state, self.step.strategy
        leaves, spec = tree.flatten(state.params)
        leaves = [x.detach().requires_grad_(x.is_floating_point() or x.is_complex()) for x in leaves]
        trained = [i for i, x in enumerate(leaves) if x.requires_grad]
        sync_leaves, sync_spec = tree.flatten(sync.leaves)
        sync_leaves = [x.detach().requires_grad_() for x in sync_leaves]
        given = tree.unflatten(spec, leaves)
        if sync_leaves or strategy.stateful:
            given = Synced(given, replace(sync, leaves=tree.unflatten(sync_spec, sync_leaves)))
        with torch.enable_grad():
            run = self.step.run(self._arguments(given, state.buffers, batch), {}, deferred=True, step=at.step)
            loss, buffers, aux = self._outputs(run, state.buffers)
        _check_weighted(loss, strategy, at.step)
        total, weight = loss.checked() if isinstance(loss, Weighted) else (loss, None)
        schedule = run.schedule if isinstance(run.schedule, WireSchedule) else None
        if schedule is not None:
            schedule.send_header(total.detach(), torch.ones_like(total) if weight is None else weight)
        work = _Work(self, state, [leaves[i] for i in trained], trained, sync_leaves, self.donate and not late)
        if schedule is not None:
            try:
                work.backward(total)
                done, header = work.land(schedule, weighted=weight is not None)
            except BaseException as error:
                schedule.abandon(error)
                raise
            mean = (header.total / header.weight).to(total.dtype)
        else:
            mean, divisor = _mean_at_once(total, weight, at.axis, local=strategy.hook(at.step) is None)
            done = work.at_once(total, divisor)
        states = tree.unflatten(sync_spec, done.sync_flat)
        if done.grads is None:
            params, states = strategy.after_update(done.params, states, at)
            updated = Updated(params, done.opt_state, states, pending)
        else:
            updated = strategy.update(work.update(done.grads), states, at, pending)
        states = updated.states
        if self.donate and done.sync_flat:
            # The next step writes into the parameters; a strategy may have returned one tensor as both.
            states = _unshared(states, updated.params)
        next_sync = SyncState(states, sync.uses, sync.clock, at.step + 1)
        if self.donate:
            state.donate()
        next_state = TrainState(
            updated.params, buffers, updated.opt_state, next_sync, state.step + 1, state.kinds, updated.pending
        )
        return next_state, Metrics(mean, aux, grad_norm(updated.opt_state))

    def settle(self, state: TrainState) -> TrainState:
        """`state` with all landed that its strategy has under way between two steps, as an asynchronous one has.

        Every rank calls it, after its last step or before it looks at the parameters; other strategies give the state
        back as it is. Training may go on afterwards.
        """
        state.check_owned()
        at = Moment(state.sync_state.checked_step(), wire.resolve(self.step.axis))
        if not self.step.strategy.talks_besides:
            return state
        params, states = self.step.strategy.settle(state.params, state.sync_state.leaves, at, state.pending)
        return replace(state, params=params, sync_state=replace(state.sync_state, leaves=states), pending=None)

    def _arguments(self, params: Tree, buffers: Tree, batch: Sequence[Any]) -> tuple[Any, ...]:
        return (params, *batch) if buffers is None else (params, buffers, *batch)

    def _outputs(self, run: Run, buffers: Tree) -> tuple[torch.Tensor | Weighted, Tree, Any]:
        """(loss, next buffers, aux) of what the step returned."""
        output = run.output
        wanted = 1 + (buffers is not None) + self.has_aux
        if wanted == 1:
            parts: tuple[Any, ...] = (output,)
        elif isinstance(output, tuple) and not isinstance(output, Weighted) and len(output) == wanted:
            parts = output
        else:
            names = ["loss", *(["buffers"] if buffers is not None else []), *(["aux"] if self.has_aux else [])]
            raise StepError(f"train_step: the step must return ({', '.join(names)}), got {_what(output)}.")
        loss = parts[0]
        if not isinstance(loss, Weighted) and not (
            isinstance(loss, torch.Tensor) and loss.ndim == 0 and loss.is_floating_point()
        ):
            raise StepError(
                f"train_step: the loss must be a 0-dim floating tensor or ltx.Weighted, got {_what(loss)}. Take its "
                "mean or sum; a step that returns (loss, aux) wants has_aux=True."
            )
        if buffers is not None:
            return loss, tree.map(_detach, parts[1]), tree.map(_detach, parts[2]) if self.has_aux else None
        return loss, None, tree.map(_detach, parts[1]) if self.has_aux else None

    def _transformed(self, state: TrainState, batch: Sequence[Any]) -> tuple[TrainState, Metrics]:
        """The same step, pure: under transforms of torch.func (simulated ranks among them) and in compiled graphs."""
        if not torch.compiler.is_compiling():
            state.check_owned()
        strategy, sync = self.step.strategy, state.sync_state
        if torch.compiler.is_compiling():
            _refuse_in_graph(strategy)
            axis = Axis("data", 1)
        else:
            axis = wire.resolve(self.step.axis)
            strategy.check_axis(axis)
        at = Moment(sync.checked_step(), axis)
        stateful = bool(sync.leaves) or strategy.stateful
        others: list[Any] = []

        def mean(given: Any) -> tuple[torch.Tensor, Any]:
            run = self.step.run(self._arguments(given, state.buffers, batch), {}, step=at.step)
            loss, buffers, aux = self._outputs(run, state.buffers)
            _check_weighted(loss, strategy, at.step)
            value = run.value()
            value = value[0] if isinstance(value, tuple) else value
            # torch.func takes tensors alone as aux.
            rest, structure = tree.flatten((buffers, aux))
            others[:] = [
                structure,
                isinstance(loss, Weighted),
                [None if isinstance(x, torch.Tensor) else x for x in rest],
            ]
            return value, [x for x in rest if isinstance(x, torch.Tensor)]

        pending = strategy.begin(state.params, sync.leaves, at, None)
        given = Synced(state.params, sync) if stateful else state.params
        grads, (loss, tensors) = torch.func.grad_and_value(mean, has_aux=True)(given)
        structure, weighted, rest = others
        aux_tensors = iter(tensors)
        buffers, aux = tree.unflatten(structure, [next(aux_tensors) if x is None else x for x in rest])
        if not weighted and (torch.compiler.is_compiling() or strategy.hook(at.step) is not None):
            loss = collectives.pmean(loss, self.step.axis)
        states = grads.sync_state.leaves if stateful else sync.leaves
        update = Update(self.optimizer, state.params, grads.params if stateful else grads, state.opt_state)
        updated = strategy.update(update, states, at, pending)
        if updated.pending is not None:
            raise UnsupportedError(
                f"{strategy!r} leaves work under way between two steps, which transforms can't carry. It has to land "
                "within a step there."
            )
        next_sync = SyncState(updated.states, sync.uses, sync.clock, at.step + 1)
        next_state = TrainState(updated.params, buffers, updated.opt_state, next_sync, state.step + 1, state.kinds)
        return next_state, Metrics(loss, aux, grad_norm(updated.opt_state))


def _check_weighted(loss: Any, strategy: Strategy, step: int) -> None:
    hook = strategy.hook(step)
    if isinstance(loss, Weighted) and hook is not None and not hook.gives_gradients:
        raise UnsupportedError(
            f"train_step: the loss is an ltx.Weighted, whose gradients are divided by the sum of the weights once they "
            f"are reduced, and {hook!r} of {type(strategy).__name__} doesn't give gradients. Return the mean of "
            "equally many samples on each rank, or use another strategy."
        )


def _refuse_in_graph(strategy: Strategy) -> None:
    """Run by Dynamo at trace time, where its axis isn't there."""
    if strategy.talks_besides:
        raise UnsupportedError(
            f"{strategy!r} talks about more than gradients in a training step, which a compiled graph can't hold. "
            "Compile the step inside: ltx.data_parallel(torch.compile(f), strategy)."
        )


_refuse_in_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Done:
    """What the backward pass has come to: the reduced gradients; or, by bucket, None and what the optimizer made."""

    grads: list[torch.Tensor] | None
    sync_flat: list[torch.Tensor]
    params: Tree = None
    opt_state: Tree = None


@dataclass(frozen=True)
class _Work:
    """The second half of an eager step: backward pass, landing, optimizer."""

    train: TrainStep
    state: TrainState
    leaves: list[torch.Tensor]  # differentiable leaves of this step's graph
    trained: list[int]  # their positions among the parameters' leaves
    sync_leaves: list[torch.Tensor]
    donate: bool

    def backward(self, total: torch.Tensor) -> list[torch.Tensor | None]:
        """Gradients of `total` with respect to parameters and communication state."""
        inputs = [*self.leaves, *self.sync_leaves]
        if not inputs or not total.requires_grad:
            return [None] * len(inputs)
        # Not autograd.grad: accumulating lays each gradient out as its parameter, which the optimizers' kernels want,
        # while it is still in the cache.
        torch.autograd.backward(total, inputs=inputs)
        return [x.grad for x in inputs]

    def at_once(self, total: torch.Tensor, divisor: torch.Tensor | None) -> _Done:
        """Without a wire: all gradients are there after the backward pass. `divisor`: that of a Weighted's."""
        found = self.backward(total)
        count = len(self.leaves)
        grads = [torch.zeros_like(x) if g is None else g for x, g in zip(self.leaves, found, strict=False)]
        if divisor is not None:
            grads = [g / divisor.to(g.dtype) for g in grads]
        states = [x if g is None else g for x, g in zip(self.sync_leaves, found[count:], strict=True)]
        return _Done(grads, [x.detach() for x in states])

    def land(self, schedule: WireSchedule, weighted: bool) -> tuple[_Done, wire.Header]:
        """Land every bucket and the header, then update; or bucket by bucket, with overlap="update"."""
        by_bucket = self.train.overlap == "update"
        scale = self._weighted_scale(schedule) if weighted else None
        grads: dict[int, torch.Tensor] = {}
        states: dict[int, list[torch.Tensor]] = {}
        params, opt_state, targets = self._in_place() if by_bucket else (None, None, None)
        for bucket, landed, next_states in schedule.land_each():
            if scale is not None:
                torch._foreach_mul_(landed, scale)
            given = iter(next_states)
            states.update((m, [next(given) for _ in schedule.plan.state_names[m]]) for m in bucket.members)
            if targets is None:
                grads.update(zip(bucket.members, landed, strict=True))
            else:
                self._apply_bucket(bucket.members, landed, targets)
        header = schedule.finish()
        assert header is not None
        flat = self._flat_states(schedule, states)
        if targets is None:
            return _Done([grads[m] for m in range(len(self.leaves))], flat), header
        return _Done(None, flat, params, self.train.optimizer.advance(opt_state)), header

    def _weighted_scale(self, schedule: WireSchedule) -> float:
        assert schedule.header is not None
        weight = float(schedule.header.wait().weight)
        if weight == 0:
            schedule.drain()  # every rank raises: leave the channels in step
            raise WeightError(
                "Weighted: the weights of all ranks add up to 0, so there is no mean. The state is as before the step. "
                "Give at least one rank a sample, or skip the step on all of them."
            )
        return schedule.plan.axis.size / weight

    def update(self, grads: list[torch.Tensor]) -> Update:
        """The optimizer's part, with the reduced gradients."""
        leaves, spec = tree.flatten(self.state.params)
        if len(grads) < len(leaves):
            by_place = dict(zip(self.trained, grads, strict=True))
            grads = [by_place[i] if i in by_place else torch.zeros_like(x) for i, x in enumerate(leaves)]
        return Update(
            self.train.optimizer, self.state.params, tree.unflatten(spec, grads), self.state.opt_state, self.donate
        )

    def _in_place(self) -> tuple[Tree, Tree, tuple[list[torch.Tensor], list[Any], int]]:
        """Parameters and optimizer state to be updated in place: the state's own, or copies."""
        params, opt_state = self.state.params, self.state.opt_state
        if not self.donate:
            params, opt_state = tree.map(torch.clone, params), tree.map(torch.clone, opt_state)
        leaves = tree.flatten(params)[0]
        return params, opt_state, (leaves, self.train.optimizer.leaf_states(opt_state, params), self.state.step)

    def _apply_bucket(
        self, members: Sequence[int], grads: list[torch.Tensor], targets: tuple[list[torch.Tensor], list[Any], int]
    ) -> None:
        params, states, count = targets
        at = [self.trained[m] for m in members]
        with torch.no_grad():
            self.train.optimizer.apply_leaves(grads, [states[i] for i in at], [params[i] for i in at], count)

    def _flat_states(self, schedule: WireSchedule, states: dict[int, list[torch.Tensor]]) -> list[torch.Tensor]:
        """The next communication state in the order of its leaves."""
        paths = tree.leaf_paths(self.state.params)
        entries = {path: dict(entry) for path, entry in self.state.sync_state.leaves.items()}
        for member, tensors in states.items():
            names = schedule.plan.state_names[member]
            if names:
                entries[paths[self.trained[member]]].update(zip(names, tensors, strict=True))
        return [x.detach() for x in tree.flatten(entries)[0]]


def _mean_at_once(
    total: torch.Tensor, weight: torch.Tensor | None, axis: Axis, local: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(mean loss, sum of the weights), without a header; None for the weights of an unweighted step.

    `local`: where ranks don't share gradients, they needn't wait for one another to share losses.
    """
    total, alone = total.detach(), local or axis.size == 1
    if weight is None:
        mean: torch.Tensor = total if alone else collectives.pmean(total, axis)
        return mean, None
    if not alone:
        total, weight = collectives.psum((total, weight), axis)
    if bool(weight == 0):
        if local and axis.size > 1:  # no data on this rank, whose peers go on: no gradient either
            return torch.full_like(total, float("nan")), torch.ones_like(weight)
        raise WeightError("Weighted: the weights add up to 0, so there is no mean. The state is as before the step.")
    return total / weight, weight


def _unshared(tensors: Tree, others: Tree) -> Tree:
    """`tensors`, those that share memory with one of `others` as copies."""
    owned = {x.untyped_storage().data_ptr() for x in tree.flatten(others)[0]}
    return tree.map(lambda x: x.clone() if x.untyped_storage().data_ptr() in owned else x, tensors)


def _detach(x: Any) -> Any:
    return x.detach() if isinstance(x, torch.Tensor) else x


def _what(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)} and {value.dtype}"
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else type(value).__name__


def train_step(
    step: DataParallel,
    optimizer: Optimizer,
    *,
    donate: bool = True,
    guard: Literal["off"] = "off",
    overlap: Literal["backward", "update"] = "backward",
    has_aux: bool = False,
) -> TrainStep:
    """A whole training step: gradients, their reduction, the optimizer, the strategy's work on parameters.

    Args:
        step: a data-parallel step that returns a 0-dim loss or :class:`ltx.Weighted`; accumulated or not.
        optimizer: from :mod:`ltx.optim`.
        donate: update the state's tensors in place, as JAX's buffer donation does; the old state can't be used again.
            Off under transforms.
        guard: only "off" so far.
        overlap: "backward": gradients are reduced while the backward pass goes on, and the optimizer runs when all have
            landed. The step commits whole: if anything fails before that, the state is as it was. "update": the
            optimizer runs bucket by bucket as they land, which is faster and not atomic: after a failure in the middle
            the state is torn. For optimizers that update leaf by leaf; refused for others (clipping).
        has_aux: the step returns ``(loss, aux)``; aux comes back in the metrics.

    Returns:
        A :class:`TrainStep`: ``.init(params, buffers=None) -> TrainState`` copies, and broadcasts from rank 0;
        ``(state, *batch) -> (state, Metrics)``. Every rank calls it with its own batch.

    Raises:
        DonatedStateError: the state was donated to an earlier step.
        RankMismatchError: ranks differ in their parameters, or have issued different collectives; before the update.
        WeightError: all weights of a Weighted step are 0; before the update.
        StepError, StrategyError, OptimError: the pieces don't fit, at once.

    Example:
        >>> import torch, ltx
        >>> step = ltx.data_parallel(lambda p, x: ((p["w"] * x) ** 2).mean())
        >>> train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=0.1))
        >>> state = train.init({"w": torch.tensor(1.0)})
        >>> state, metrics = train(state, torch.tensor([1.0, 2.0]))
        >>> metrics.loss, state.params["w"]
        (tensor(2.5000), tensor(0.5000))
    """
    return TrainStep(step, optimizer, donate, guard, overlap, has_aux)
