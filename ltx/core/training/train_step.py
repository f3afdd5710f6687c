"""train_step: a whole training step as a function from state to state."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ltx.core import collectives, comm
from ltx.core.base import private, traced, tree
from ltx.core.base.arguments import checked
from ltx.core.base.errors import CollectiveTimeoutError, LtxError, PeerLostError, StepError, StepLeftOutError, TreeError
from ltx.core.base.handed_in import HandedIn
from ltx.core.gradients.pending import Exchange
from ltx.core.gradients.planning import in_step, requires_grad
from ltx.core.optim import Optimizer
from ltx.core.ranks.axis import Axis
from ltx.core.training.follower import compiled, follow
from ltx.core.training.made_for import adopted, check_made_for, layout_for
from ltx.core.training.outputs import Batch, as_loss, check_call
from ltx.core.training.parameters import Trainable, split, taken_from
from ltx.core.training.pure_step import PureStep
from ltx.core.training.replicas import check_replicas, warn_of_equal_batches
from ltx.core.training.resolved import resolve
from ltx.core.training.settings import TrainSettings, check_devices, check_kept
from ltx.core.training.step import EagerStep, incomplete
from ltx.core.training.straight import StraightStep
from ltx.core.training.train_state import LossScale, Metrics, TrainState
from ltx.core.transforms.closure_check import captured
from ltx.core.transforms.data_parallel import DataParallel
from ltx.core.transforms.strategy import StepInfo, check_next
from ltx.core.transforms.sync_state import SyncState
from ltx.typing import Tree


@dataclass(frozen=True)
class TrainStep(TrainSettings):
    """What :func:`train_step` returns: ``init(params) -> state`` and ``(state, *batch) -> (state, metrics)``."""

    def init(self, params: Tree | torch.nn.Module, buffers: Tree = None) -> TrainState:
        """Make the state before the first step, with rank 0's values on every rank.

        Args:
            params: a tree of floating or complex tensors, which are copied. Parameters of a module whose requires_grad
                is False are frozen: they are given to the step, but not differentiated or sent, and have no optimizer
                state. So are parameters that the train step's `trainable` leaves out. Or a module, which follows: the
                state is in its parameters' memory, and the module has the present values between steps. What `train`
                gave last is what it shows, here also :meth:`finish`, :meth:`adopt`, :meth:`broadcast`; a state that a
                program has made (loaded, copied, replaced) only after a step or :func:`ltx.to_module`. Another
                ``init`` of the module begins with its weights, and ends the older state.
            buffers: a tree of tensors, or None; those with names of the module's buffers are followed, too. With
                buffers the step is ``(params, buffers, *batch) -> (loss, buffers)``, or ``(loss, buffers, aux)`` with
                `has_aux`; :func:`ltx.functional_call` with ``return_buffers=True`` returns the next ones.

        Raises:
            TreeError: a leaf can't be trained; or two leaves are one tensor (tied weights).
            RankMismatchError: ranks share parameters, and differ in their guards or in their optimizers, as these are
                printed; on all ranks.
            StepError: all parameters are frozen.
        """
        module = params if isinstance(params, torch.nn.Module) else None
        if module is not None and private.in_transform():  # ranks' values differ there, and a module has one
            params, module = dict(module.named_parameters()), None
        elif module is None and any(isinstance(x, torch.nn.Parameter) for x in tree.flatten(params)[0]):
            warnings.warn(_APART, UserWarning, stacklevel=2)
        if buffers is not None:
            check_kept(buffers, self.step)
        strategy, axis = self.step.strategy, comm.resolve(self.step.axis)
        strategy.check(self.optimizer, axis)
        check_devices(axis, params if module is None else dict(module.named_parameters()), "params")
        check_devices(axis, buffers, "buffers")
        if module is not None:
            params, frozen = taken_from(module, axis, self.trainable)
        else:
            if hasattr(params, "_metadata"):  # torch puts it on what state_dict returns
                raise TreeError(
                    "train.init: params is a state_dict(), in which buffers would be trained too. Write "
                    "train.init(module), or train.init(dict(module.named_parameters()), dict(module.named_buffers()))."
                )
            tree.check_dense(tree.flatten(params)[0], params, "params")
            trained, frozen = split(params, self.trainable)
            params = collectives.broadcast(tree.map(self._begun, params), axis=axis)
            if frozen is not None:
                params, frozen = tree.masked(params, trained), tree.masked(params, frozen)
        buffers = collectives.broadcast(tree.map(self._begun, buffers), axis=axis)
        sync_state = self.step.init(params)
        if not private.in_transform():
            sync_state = replace(sync_state, leaves=tree.unshared(sync_state.leaves, params))
        if strategy.layout.params == "replicated":  # other rates would part them, with nothing to show it
            axis.ranks.by_rank(comm.Signature("train.init", (), _settings(self.optimizer, self.guard)))
        opt_state = strategy.init_optimizer(self.optimizer, params, axis)
        if strategy.communicates_besides:
            axis.ranks.start_anew()
        unscaled: Any = () if self.max_skipped is None else LossScale()
        loss_scale = unscaled if self.dynamic is None else self.dynamic.start()
        if leaves := tree.flatten(params)[0]:
            loss_scale = tree.map(lambda x: x.to(leaves[0].device), loss_scale)
        layout = layout_for(self, params if frozen is None else tree.filled(params, frozen))
        state = TrainState(params, buffers, opt_state, sync_state, layout=layout, loss_scale=loss_scale, frozen=frozen)
        state.__dict__.update(of_step=True, seen=())
        return (state if module is None else follow(self, module, state)).by(self)

    def adopt(self, state: TrainState, params: Literal["mean", "rank0"] = "mean") -> TrainState:
        """A state for this train step, of one that was made for another: another strategy, optimizer, `trainable`.

        Training goes on with the same parameters, buffers and count of steps. Every rank calls it. `state` stays valid;
        ``layout.adopted`` of the new one says what was kept.

        ======================  =======================================================================================
        parameters              of ranks that have their own (local SGD, gossip) the mean, or rank 0's; else unchanged
        buffers                 each rank's own, unchanged
        optimizer's state       kept if the optimizer is of the same classes, for parameters that were trained before;
                                new for others, and in an optimizer of other classes, whose schedules begin at 0
        communication state     kept if the strategy is the same one; else new, and its schedules (periods, warm-ups,
                                error feedback) begin at 0
        loss scale              kept if both steps have one
        ======================  =======================================================================================

        Args:
            state: a state whose exchanges are complete (:meth:`finish`), whole (:meth:`gather`).
            params: "mean" or "rank0": which values parameters get, and with them the optimizer's state, where ranks'
                differ.

        Raises:
            StepError: `params` is something else, or the optimizer's state is sharded. InputError: an exchange of the
                state's strategy is under way.

        Example:
            >>> import torch, ltx
            >>> step = ltx.data_parallel(lambda p, x: ((p["body"] * x + p["head"]) ** 2).mean())
            >>> sgd = ltx.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
            >>> head, all_of_it = ltx.train_step(step, sgd, trainable="head"), ltx.train_step(step, sgd)
            >>> state = head.init({"body": torch.tensor(1.0), "head": torch.tensor(1.0)})
            >>> state, _ = head(state, torch.tensor(1.0))
            >>> state, _ = all_of_it(all_of_it.adopt(state), torch.tensor(1.0))
            >>> state.step, state.params["body"] < 1.0
            (2, tensor(True))
        """
        return adopted(self, state, params).by(self)

    def broadcast(self, state: TrainState, src: int = 0) -> TrainState:
        """Give every rank the state of rank `src`, such as one that was restored or made on that rank alone.

        It sends parameters, buffers, optimizer state, communication state and the count of steps, with their
        structures; so ranks may pass any state, such as that of :meth:`init`. Parts that differ between ranks
        (``state.layout``) become `src`'s on every rank; copies of peers' parameters are replaced too. Every rank calls
        it.

        Source: Horovod's ``broadcast_parameters`` and ``broadcast_optimizer_state``.
        """
        state.check_owned()
        axis = comm.resolve(self.step.axis)
        sync: SyncState = state.sync_state
        parts = (state.trained, state.frozen, state.buffers, state.opt_state, sync.leaves, state.loss_scale)
        leaves, spec = tree.flatten(parts)
        empty = tree.unflatten(spec, [torch.empty_like(x, device="meta") for x in leaves])  # it keeps dense strides
        told = (empty, [x.device.type for x in leaves], state.step, sync.checked_step(), state.layout)
        empty, devices, step, sync_step, layout = collectives.broadcast_object(told, src, axis)
        if axis.rank != src or axis.size == 1:
            metas, spec = tree.flatten(empty)
            made = [torch.empty_like(x, device=at) for x, at in zip(metas, devices, strict=True)]
            parts = tree.unflatten(spec, made if axis.size > 1 else leaves)
        parts = collectives.broadcast(parts, src, axis)
        params, frozen, buffers, opt_state, entries, loss_scale = tree.map(torch.Tensor.detach, parts)
        if name := layout.copies_of:  # the state has copies of peers' parameters, which now equal this rank's
            entries = {path: {copy: held[name].clone() for copy in held} for path, held in entries.items()}
        sync = replace(SyncState.new(entries), step=sync_step)
        given = TrainState(params, buffers, opt_state, sync, step, layout, loss_scale, None, frozen, state.module)
        check_made_for(self, given)  # on all ranks alike, as they have the same one now
        return given.by(self)

    def finish(self, state: TrainState) -> TrainState:
        """Complete what the strategy has begun in earlier steps, such as the rounds of an asynchronous strategy.

        Every rank calls it, after its last step or before it looks at the parameters. For other strategies it returns
        the same state. Training may continue afterwards.
        """
        state.check_whole()
        check_made_for(self, state)
        info = StepInfo(state.sync_state.checked_step(), comm.resolve(self.step.axis))
        strategy = self.step.strategy
        if not strategy.communicates_besides:
            return state
        params, states = state.trained, state.sync_state.leaves
        got = strategy.finish(params, states, info, state.pending)
        params, states = check_next(strategy, "finish", got, params, states)
        return replace(state, params=params, sync_state=replace(state.sync_state, leaves=states), pending=None).by(self)

    def gather(self, state: TrainState) -> TrainState:
        """`state` with the whole optimizer state on every rank, if the strategy shards it. Every rank calls this.

        Such a state can be saved and used on another number of ranks: load it there into
        ``train.gather(train.init(params))``. A step takes such a state and keeps this rank's part. Other strategies
        return the same state.
        """
        state.check_owned()
        check_made_for(self, state)
        if state.layout.opt_state != "sharded":
            return state
        info = StepInfo(state.sync_state.checked_step(), comm.resolve(self.step.axis))
        opt_state = self.step.strategy.gather_optimizer(self.optimizer, state.trained, state.opt_state, info)
        return replace(state, opt_state=opt_state, layout=replace(state.layout, opt_state="replicated")).by(self)

    @traced.whole
    def __call__(self, state: TrainState, *args: Any, **named: Any) -> tuple[TrainState, Metrics]:
        batch = Batch(args, named)
        if not isinstance(state, TrainState):
            raise StepError(
                f"the first argument is the TrainState that init or the last step gave, got {type(state).__name__}. "
                "Write state = train.init(params) once, and then state, metrics = train(state, *batch)."
            )
        if traced.recording():
            check_made_for(self, state)
            compiled(self, state.module)
            return PureStep.of(self, state, batch).run()
        if torch.is_inference_mode_enabled():
            raise StepError(
                "a train step was called in torch.inference_mode(), where nothing is differentiated: its gradients "
                "would be zeros. Call it outside of that mode; torch.no_grad() around it does no harm."
            )
        state.check_whole(training=True)
        params, resolved = state.held_params, state.resolved
        if resolved is None or resolved.train is not self:
            resolved = None
            check_made_for(self, state)
            if state.left:
                warnings.warn(_LEFT.format(state.left[1]), UserWarning, stacklevel=3)
        leaves, spec = tree.flatten(params) if resolved is None else (resolved.leaves, resolved.spec)
        buffers, transforming = state.held_buffers, private.is_transforming()
        if not transforming and torch.is_grad_enabled():
            # Somebody may differentiate the next state. If the step reuses memory, the batch doesn't count.
            given: Any = () if self.donate and not in_step.get() else [batch]
            if given and resolved is None:
                given.append(captured(self.step.fn))
            read = [] if resolved is not None else leaves  # nobody has had them, to set requires_grad
            others = () if buffers is None and not given else tree.flatten((buffers, given))[0]
            transforming = bool(read or others) and requires_grad([*read, *others])
        if transforming:
            return PureStep.of(self, state, batch).run()
        # read `seen` now, since the comparison looks at the state too
        axis, seen = comm.resolve(self.step.axis), state.seen
        if resolved is not None and not resolved.holds(axis, state.held_sync_state.step):
            resolved = None
        if HandedIn.messages is not None and not in_step.get():
            HandedIn.messages.step_begins(state, *batch)
        if resolved is None or self.check_every is not None:
            self._compare(state, axis, batch)
        sync = state.held_sync_state
        strategy, info = self.step.strategy, StepInfo(sync.checked_step() if resolved is None else sync.step, axis)
        resolved = resolved or resolve(self, params, leaves, spec, info)
        pending, begun = state.pending, False
        try:
            with resolved.ranks.in_step(state.step) as commit, comm.span("step"):
                if not resolved.lasts and strategy.communicates_besides:
                    pending = strategy.begin(params, sync.leaves, info, pending)
                    begun = pending is not None and pending is not state.pending
                of = self, state, batch, info, pending, params, leaves, spec
                kind = StraightStep if resolved.straight else EagerStep
                return kind(*of, resolved, seen, commit).run()
        except BaseException as error:
            what = f"step {state.step} of the training"
            if begun and isinstance(error, StepLeftOutError) and isinstance(pending, Exchange):
                try:
                    pending.wait()  # as all ranks do, which have begun it too
                except LtxError as in_exchange:
                    comm.end_world(axis, in_exchange, what)
                    raise
            elif begun:  # the exchange that this rank has begun won't be completed
                comm.end_world(axis, error, what)
            if comm.has_lost_pass(axis):
                incomplete(state, error)
            if isinstance(error, PeerLostError | CollectiveTimeoutError):
                error.args = (f"{error} It was in {what}.",)
            if isinstance(error, TypeError):
                check_call(self.step.fn, buffers, batch)
            raise

    def _begun(self, x: torch.Tensor) -> torch.Tensor:
        """`x`; detached if it is a module's parameter, or a leaf whose memory steps will reuse."""
        reused = self.donate and not private.is_transforming() and not in_step.get()  # derivatives need the old values
        return x.detach() if x.is_leaf and (reused or isinstance(x, torch.nn.Parameter)) else x

    def _compare(self, state: TrainState, axis: Axis, batch: Batch) -> None:
        """Compare what ranks should have alike: every `check_every` steps, and at a world's first, then batches too."""
        compared, layout = axis.ranks.compared, self.step.strategy.layout
        anew = compared is not None and not compared.has(TrainStep, None)
        first = anew and "replicated" in (layout.params, layout.sync_state)
        if first or (self.check_every is not None and state.step % self.check_every == 0):
            check_replicas(state, axis)
            if first:
                warn_of_equal_batches(batch, axis)
            if compared is not None:
                compared.add(TrainStep, None)


_APART = (
    "train.init was given a module's Parameters, and the state has copies of them: the module keeps the values that it "
    "has. With train.init(model) the module follows each step. To train apart from it on purpose, give p.detach()."
)

_LEFT = (
    "this state comes from another process by pickle (torch.load), where a {} followed it, as no module does here. To "
    "have one follow: dataclasses.replace(state, module=train.init(model).module); or take ltx.checkpoint.load."
)


@checked("donate", "has_aux")
def train_step(
    step: DataParallel,
    optimizer: Optimizer,
    *,
    donate: bool = True,
    guard: Literal["off", "skip", "raise"] = "off",
    overlap: Literal["backward", "update"] = "backward",
    has_aux: bool = False,
    check_every: int | None = None,
    trainable: Trainable = None,
    max_skipped: int | None = None,
) -> TrainStep:
    """A whole training step: gradients, their reduction, the optimizer, and the strategy's work on parameters. So the
    body of a training loop is ``state, metrics = train(state, batch)``.

    Args:
        step: a data-parallel step that returns a 0-dim loss, an :class:`ltx.Weighted`, or a mapping or dataclass that
            has the loss as `loss`; accumulated, one of the first two. Or a step with ``returns="grads"``, which returns
            ``(grads, loss)`` as :func:`ltx.grad_and_value` does, and then its other outputs: DP-SGD, evolution
            strategies. If the loss is Weighted, the gradients are those of its total.
        optimizer: from :mod:`ltx.optim`.
        donate: update the state's tensors in place, as JAX's buffer donation does; the old state can't be used again.
            Steps don't donate when they are differentiated: under transforms, inside another step, or if the state
            requires grad. With ``donate=False`` derivatives pass through steps, also to a batch that requires grad.
        guard: what happens if gradients are NaN or infinite on any rank. "off": no check. "skip": parameters, buffers,
            optimizer state and hooks' states don't change, on all ranks. The step is counted, ``metrics.skipped`` is
            true, and the strategy averages parameters as at any other step. "raise": every rank raises the same
            NotFiniteError, which names ranks and leaves; the state stays valid. Ranks that don't share gradients ask
            each other at every step. With :class:`ltx.DynamicLossScale`, which skips such steps anyway, "raise" raises
            only when the scale is down to 1, or to its least value.
        overlap: "backward": gradients are reduced during the backward pass, and the optimizer runs when all are there.
            The step commits as a whole: after an error before that, the state is unchanged. "update": the optimizer
            runs on each bucket as soon as that is reduced, which is faster but not atomic: after an error in between, a
            donated state is invalid, and using it raises InvalidStateError. It needs an optimizer that updates leaf by
            leaf, and refuses others (clipping). If ranks communicate after the optimizer (ZeRO, Adasum), both happen
            bucket by bucket during the backward pass, and an error invalidates the state too.
        has_aux: the step returns ``(loss, aux)``; ``metrics.aux`` is this rank's aux. Take means in the step, ``return
            loss, {"accuracy": ltx.pmean(accuracy)}``, or with ``data_parallel(outputs="mean")``. A mapping or dataclass
            with an entry `loss`, as transformers return it, stands for its loss; with `has_aux` it is aux as well.
        check_every: compare the values that should be the same on all ranks (:func:`ltx.check_replicas`) before every
            `check_every` steps, the first included. None: never. Compiled graphs never compare.
        trainable: which parameters are trained, except those that :meth:`TrainStep.init` freezes anyway: a pattern of
            paths such as ``"head.*"``, a list of such patterns, or a function of a path. None: all.
        max_skipped: how many steps in a row may be skipped (by ``guard="skip"``, or :class:`ltx.DynamicLossScale`); one
            more raises as ``guard="raise"`` does. None: any number. On an accelerator the host only looks every
            `max_skipped` steps, so the error comes there.

    Returns:
        A :class:`TrainStep`: ``.init(params, buffers=None) -> TrainState`` copies, and broadcasts from rank 0. Then
        every rank calls ``(state, *batch) -> (state, Metrics)`` with its own batch, by position or by keyword, as the
        step takes it.

    Raises:
        DonatedStateError: the state was donated to an earlier step.
        RankMismatchError: ranks differ in their parameters, have issued different collectives, or some alone have
            changed their state since the last step; before the update.
        WeightError: all weights of a Weighted step are 0; before the update.
        ReplicaDivergedError: ranks have different parameters, with `check_every`; before the step.
        NotFiniteError: (a FloatingPointError) gradients aren't finite, with ``guard="raise"``, or for more steps in a
            row than `max_skipped`; before the update.
        InvalidStateError: something failed while a step with overlap="update" was being applied.
        StepError, StrategyError, OptimError: the arguments don't fit together; raised by this call.

    Example:
        >>> import torch, ltx
        >>> step = ltx.data_parallel(lambda p, x: ((p["w"] * x) ** 2).mean())
        >>> train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=0.1))
        >>> state = train.init({"w": torch.tensor(1.0)})
        >>> state, metrics = train(state, torch.tensor([1.0, 2.0]))
        >>> metrics.loss, state.params["w"]
        (tensor(2.5000), tensor(0.5000))
    """
    if isinstance(step, DataParallel):
        step = as_loss(step)
    return TrainStep(step, optimizer, donate, guard, overlap, has_aux, check_every, trainable, max_skipped)


def _settings(optimizer: Optimizer, guard: Any) -> str:
    """What ranks must have alike, without addresses, devices and orders; of a user's class the name alone."""
    what = repr(optimizer) if type(optimizer).__module__.startswith("ltx.") else type(optimizer).__name__
    text = re.sub(r"0x[0-9a-f]+|device='[^']*'|index=\d+", "", f"{what}, guard={guard!r}")
    return re.sub(r"{([^{}]*)}", lambda found: f"{{{', '.join(sorted(found[1].split(', ')))}}}", text)
