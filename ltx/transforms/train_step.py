"""train_step: a whole training step as a function from state to state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from ltx import collectives, hooks, tree, wire
from ltx.axis import Axis, GroupBacking
from ltx.errors import OptimError, StepError, StrategyError, TreeError, UnsupportedError
from ltx.optim import Optimizer, grad_norm
from ltx.strategies.base import Moment, Strategy, Update, Updated
from ltx.sync.schedule import WireSchedule
from ltx.transforms.data_parallel import DataParallel
from ltx.transforms.landing import Work, any_not_finite, mean_at_once
from ltx.transforms.run import Run
from ltx.transforms.sync_state import Synced, SyncState
from ltx.transforms.train_state import Metrics, TrainState
from ltx.transforms.weighted import Weighted
from ltx.typing import Tree

if TYPE_CHECKING:
    from ltx.transforms.precision import DynamicLossScale


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
        if self.overlap == "update" and self._scaling is not None:
            raise StrategyError(
                f'overlap="update" applies the optimizer bucket by bucket, before it is known whether all gradients '
                f'are finite, which {self._scaling!r} asks. Use overlap="backward".'
            )

    @property
    def _scaling(self) -> DynamicLossScale | None:
        return None if self.step.precision is None else self.step.precision.dynamic

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
            self._check_kept(buffers)
        strategy, axis = self.step.strategy, wire.resolve(self.step.axis)
        strategy.check_axis(axis)
        params = tree.map(torch.Tensor.detach, collectives.broadcast(params, axis=axis))
        buffers = tree.map(torch.Tensor.detach, collectives.broadcast(buffers, axis=axis))
        sync_state = self.step.init(params)
        if not torch._C._are_functorch_transforms_active():
            sync_state = replace(sync_state, leaves=_unshared(sync_state.leaves, params))
        opt_state = strategy.init_optimizer(self.optimizer, params, axis)
        loss_scale = () if self._scaling is None else self._scaling.start()
        return TrainState(params, buffers, opt_state, sync_state, kinds=strategy.kinds, loss_scale=loss_scale)

    def _check_kept(self, buffers: Tree) -> None:
        precision = self.step.precision
        if precision is None or 1 in precision.keep:
            return
        for path, leaf in zip(tree.leaf_paths(buffers), tree.flatten(buffers)[0], strict=True):
            if leaf.is_floating_point() and leaf.dtype != precision.compute:
                raise StepError(
                    f"train_step: the buffer {path!r} is {tree.describe(leaf)}, and would be rounded to "
                    f"{precision.compute} at every step. Keep the buffers as they are: ltx.Precision(..., keep=(1,))."
                )

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
            if (late or begun or self._asks(moment)) and isinstance(axis.backing, GroupBacking):
                axis.backing.line.passes.leave(f"{type(error).__name__}: {error}")
            raise

    def _step(
        self, state: TrainState, batch: Sequence[Any], at: Moment, pending: Any, late: bool
    ) -> tuple[TrainState, Metrics]:
        """The step, once the strategy has begun its own. `late`: ranks talk after the optimizer has run."""
        sync, strategy = state.sync_state, self.step.strategy
        if self.donate and not late and sync.leaves:
            # The optimizer writes into the parameters; the last step may have returned one tensor as both.
            sync = replace(sync, leaves=_unshared(sync.leaves, state.params))
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
        if isinstance(loss, Weighted):
            strategy.check_weighted(at.step)
        total, weight = loss.checked() if isinstance(loss, Weighted) else (loss, None)
        schedule = run.schedule if isinstance(run.schedule, WireSchedule) else None
        if schedule is not None:
            schedule.send_header(total.detach(), torch.ones_like(total) if weight is None else weight)
        loss_scale = self._loss_scale(state)
        factor = 1.0 if loss_scale is None else float(loss_scale)
        mine = [leaves[i] for i in trained]
        by_bucket, donate = self.overlap == "update", self.donate and not late
        work = Work(self.optimizer, by_bucket, state, mine, trained, sync_leaves, donate, factor)
        if schedule is not None:
            try:
                work.backward(total)
                done, header = work.land(schedule, weighted=weight is not None)
            except BaseException as error:
                schedule.abandon(error)
                raise
            mean = (header.total / header.weight).to(total.dtype)
        else:
            mean, divisor = mean_at_once(total, weight, at.axis, local=strategy.hook(at.step) is None)
            done = work.at_once(total, divisor)
        states = tree.unflatten(sync_spec, done.sync_flat)
        finite = None
        if done.grads is None:
            params, states = strategy.after_update(done.params, states, at)
            updated = Updated(params, done.opt_state, states, pending)
        else:
            finite = self._finite(done.grads, at)
            updated = strategy.update(work.update(done.grads, finite), states, at, pending)
        next_sync = SyncState(updated.states, sync.uses, sync.clock, at.step + 1)
        if self.donate:
            state.donate()
        return self._finished(state, updated, buffers, next_sync, Metrics(mean, aux), finite)

    def _finished(
        self,
        state: TrainState,
        updated: Updated,
        buffers: Tree,
        sync: SyncState,
        metrics: Metrics,
        finite: bool | torch.Tensor | None,
    ) -> tuple[TrainState, Metrics]:
        """The next state, and metrics with what can be read off it."""
        metrics = replace(metrics, grad_norm=grad_norm(updated.opt_state))
        loss_scale: Any = state.loss_scale
        if self._scaling is not None and finite is not None:
            device = loss_scale.scale.device
            skipped = torch.logical_not(torch.as_tensor(finite, device=device))
            metrics = replace(metrics, loss_scale=loss_scale.scale, skipped=skipped)
            loss_scale = self._scaling.after(loss_scale, finite)
        following = TrainState(
            updated.params,
            buffers,
            updated.opt_state,
            sync,
            state.step + 1,
            self.step.strategy.kinds,
            loss_scale,
            updated.pending,
        )
        return following, metrics

    def _loss_scale(self, state: TrainState) -> torch.Tensor | float | None:
        """What the loss is multiplied by; None for 1."""
        if self._scaling is None:
            return None if self.step.precision is None else self.step.precision.fixed_scale
        if isinstance(state.loss_scale, tuple):
            raise StepError(
                "train_step: this state has no loss scale, so it was made by another train step. Make it with this "
                "one's init, or add it: dataclasses.replace(state, loss_scale=ltx.DynamicLossScale(...).start())."
            )
        scale: torch.Tensor = state.loss_scale.scale
        return scale

    def _asks(self, at: Moment) -> bool:
        """Whether ranks ask one another if gradients are finite, which they can't see themselves."""
        return self._scaling is not None and at.axis.size > 1 and not self.step.strategy.shares_gradients(at.step)

    def _finite(self, grads: Sequence[torch.Tensor], at: Moment) -> bool | torch.Tensor | None:
        """With dynamic loss scaling: whether all gradients of all ranks are finite, on all ranks alike."""
        if self._scaling is None:
            return None
        bad = any_not_finite(grads)
        if self._asks(at):
            shared = self.step.strategy.exchange(
                hooks.AllReduce(), [bad.float().reshape(1)], ["whether gradients are finite"], at
            )
            bad = shared.land()[0][0].reshape(()) > 0
        pure = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
        return bad.logical_not() if pure else not bad

    def broadcast(self, state: TrainState, src: int = 0) -> TrainState:
        """Rank `src`'s state on every rank, whatever theirs were: what was restored or made on one rank alone.

        Parameters, buffers, optimizer state, communication state and the count of steps, their structures included; so
        ranks may come with any state, such as that of :meth:`init`. Parts that are each rank's own (``state.kinds``)
        are the same on all of them afterwards: `src`'s. Every rank calls it. A collective of processes.

        Source: Horovod's ``broadcast_parameters`` and ``broadcast_optimizer_state``.
        """
        state.check_owned()
        axis = wire.resolve(self.step.axis)
        sync: SyncState = state.sync_state
        parts = (state.params, state.buffers, state.opt_state, sync.leaves, state.loss_scale)
        leaves, spec = tree.flatten(parts)
        shapes = [(x.shape, x.dtype, x.device.type) for x in leaves]
        empty = tree.unflatten(spec, [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in leaves])
        told = (empty, shapes, state.step, sync.checked_step(), state.kinds)
        empty, shapes, step, sync_step, kinds = collectives.broadcast_object(told, src, axis)
        if not (isinstance(axis.backing, GroupBacking) and axis.backing.rank == src):
            made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in shapes]
            parts = tree.unflatten(tree.flatten(empty)[1], made if axis.size > 1 else leaves)
        params, buffers, opt_state, entries, loss_scale = tree.map(
            torch.Tensor.detach, collectives.broadcast(parts, src, axis)
        )
        sync = replace(SyncState.new(entries), step=sync_step)
        return TrainState(params, buffers, opt_state, sync, step, kinds, loss_scale)

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
            _refuse_in_graph(strategy, self._scaling is not None)
            axis = Axis("data", 1)
        else:
            axis = wire.resolve(self.step.axis)
            strategy.check_axis(axis)
        at = Moment(sync.checked_step(), axis)
        stateful = bool(sync.leaves) or strategy.stateful
        loss_scale = self._loss_scale(state)
        others: list[Any] = []

        def mean(given: Any) -> tuple[torch.Tensor, Any]:
            run = self.step.run(self._arguments(given, state.buffers, batch), {}, step=at.step)
            loss, buffers, aux = self._outputs(run, state.buffers)
            if isinstance(loss, Weighted):
                strategy.check_weighted(at.step)
            value = run.value()
            value = value[0] if isinstance(value, tuple) else value
            # torch.func takes tensors alone as aux.
            rest, structure = tree.flatten((buffers, aux))
            others[:] = [
                structure,
                isinstance(loss, Weighted),
                [None if isinstance(x, torch.Tensor) else x for x in rest],
            ]
            tensors = [value, *(x for x in rest if isinstance(x, torch.Tensor))]
            return value if loss_scale is None else value * loss_scale, tensors

        pending = strategy.begin(state.params, sync.leaves, at, None)
        given = Synced(state.params, sync) if stateful else state.params
        grads, (_, (loss, *tensors)) = torch.func.grad_and_value(mean, has_aux=True)(given)
        structure, weighted, rest = others
        aux_tensors = iter(tensors)
        buffers, aux = tree.unflatten(structure, [next(aux_tensors) if x is None else x for x in rest])
        hook = None if torch.compiler.is_compiling() else strategy.hook(at.step)
        if not weighted and (torch.compiler.is_compiling() or hook is not None):
            loss = collectives.pmean(loss, self.step.axis if hook is None else hook.within(axis) or self.step.axis)
        states = grads.sync_state.leaves if stateful else sync.leaves
        grads = grads.params if stateful else grads
        if loss_scale is not None:
            inverse = 1 / loss_scale
            grads = tree.map(lambda g: (g * inverse).to(g.dtype), grads)
        finite = self._finite(tree.flatten(grads)[0], at)
        update = Update(self.optimizer, state.params, grads, state.opt_state, finite=finite)
        updated = strategy.update(update, states, at, pending)
        if updated.pending is not None:
            raise UnsupportedError(
                f"{strategy!r} leaves work under way between two steps, which transforms can't carry. It has to land "
                "within a step there."
            )
        next_sync = SyncState(updated.states, sync.uses, sync.clock, at.step + 1)
        return self._finished(state, updated, buffers, next_sync, Metrics(loss, aux), finite)

    def gather(self, state: TrainState) -> TrainState:
        """`state` with the whole optimizer state on every rank, where its strategy shards it; every rank calls this.

        So it can be saved and used on another number of ranks: load into ``train.gather(train.init(params))`` there. A
        step takes such a state and goes on with this rank's part. Other strategies give the state back as it is.
        """
        state.check_owned()
        if state.kinds.opt_state != "sharded":
            return state
        at = Moment(state.sync_state.checked_step(), wire.resolve(self.step.axis))
        opt_state = self.step.strategy.gather_optimizer(self.optimizer, state.params, state.opt_state, at)
        return replace(state, opt_state=opt_state, kinds=replace(state.kinds, opt_state="replicated"))


def _refuse_in_graph(strategy: Strategy, dynamic: bool) -> None:
    """Run by Dynamo at trace time, where its axis isn't there."""
    if dynamic and not strategy.shares_gradients(0):
        raise UnsupportedError(
            f"{strategy!r} leaves gradients local, so ranks would have to ask one another whether they are finite, "
            "which a compiled graph can't hold. Compile the step inside: ltx.data_parallel(torch.compile(f), strategy)."
        )
    if strategy.talks_besides or not strategy.updates_in_buckets:
        raise UnsupportedError(
            f"{strategy!r} does more in a training step than to reduce gradients, which a compiled graph can't hold. "
            "Compile the step inside: ltx.data_parallel(torch.compile(f), strategy)."
        )


_refuse_in_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]


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
