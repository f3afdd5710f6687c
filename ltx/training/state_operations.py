"""What a train step does with a state between steps: makes it, shares it, finishes what is pending, gathers shards."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ltx import collectives, comm, tree
from ltx.strategies.update import StepInfo
from ltx.training.outputs import unshared
from ltx.training.placed_state import init_on_parts, on_parts
from ltx.training.settings import TrainSettings, check_devices, check_kept
from ltx.training.step_parts import (
    scaling,
)
from ltx.training.train_state import TrainState
from ltx.training.trainable import split, taken_from
from ltx.transforms.sync_state import SyncState
from ltx.typing import Tree


@dataclass(frozen=True)
class StateOperations(TrainSettings):
    """The functions of a train state that need the step, the optimizer and the strategy."""

    def init(self, params: Tree | torch.nn.Module, buffers: Tree = None) -> TrainState:
        """The state before the first step, with rank 0's values on every rank.

        Args:
            params: tree of floating or complex tensors, which are copied. Parameters of a module whose requires_grad is
                False are frozen: neither differentiated nor sent, without optimizer state, and still given to the step;
                so are those that the train step's `trainable` leaves out. Or a module, whose parameters the state takes
                over, so that there is no second copy: they raise DonatedStateError from then on, and
                ``ltx.to_module(module, state)`` gives the module the state's values.
            buffers: tree of tensors, or None. With buffers the step is ``(params, buffers, *batch) -> (loss,
                buffers)``, or ``(loss, buffers, aux)`` with `has_aux`; :func:`ltx.functional_call` with
                ``return_buffers=True`` gives the next ones.

        Raises:
            TreeError: a leaf can't be trained; or two leaves are one tensor (tied weights).
            StepError: nothing is left to be trained.
        """
        if buffers is not None:
            check_kept(buffers, self.step.precision)
        strategy, axis = self.step.strategy, comm.resolve(self.step.axis)
        strategy.check_axis(axis)
        if (placed := init_on_parts(self, params, buffers)) is not None:
            return placed
        check_devices(
            axis, dict(params.named_parameters()) if isinstance(params, torch.nn.Module) else params, "params"
        )
        check_devices(axis, buffers, "buffers")
        if isinstance(params, torch.nn.Module):
            params, frozen = taken_from(params, axis, self.trainable)
        else:
            tree.check_dense(tree.flatten(params)[0], params, "params")
            trained, frozen = split(params, self.trainable)
            params = tree.map(torch.Tensor.detach, collectives.broadcast(params, axis=axis))
            if frozen is not None:
                params, frozen = tree.masked(params, trained), tree.masked(params, frozen)
        buffers = tree.map(torch.Tensor.detach, collectives.broadcast(buffers, axis=axis))
        sync_state = self.step.init(params)
        if not torch._C._are_functorch_transforms_active():
            sync_state = replace(sync_state, leaves=unshared(sync_state.leaves, params))
        opt_state = strategy.init_optimizer(self.optimizer, params, axis)
        dynamic = scaling(self)
        loss_scale: Any = () if dynamic is None else dynamic.start()
        if axis.comm is not None:
            loss_scale = tree.map(lambda x: x.to(axis.comm.device), loss_scale)
        layout = replace(strategy.layout, strategy=repr(self.step.hook_as_chosen(sync_state).strategy))
        state = TrainState(params, buffers, opt_state, sync_state, layout=layout, loss_scale=loss_scale, frozen=frozen)
        return state.unseen()

    @on_parts
    def broadcast(self, state: TrainState, src: int = 0) -> TrainState:
        """Rank `src`'s state on every rank, whatever theirs were: what was restored or made on one rank alone.

        Parameters, buffers, optimizer state, communication state and the count of steps, their structures included; so
        ranks may come with any state, such as that of :meth:`init`. Parts that are each rank's own (``state.kinds``)
        are the same on all of them afterwards: `src`'s. Every rank calls it.

        Source: Horovod's ``broadcast_parameters`` and ``broadcast_optimizer_state``.
        """
        state.check_owned()
        axis = comm.resolve(self.step.axis)
        sync: SyncState = state.sync_state
        parts = (state.trained, state.frozen, state.buffers, state.opt_state, sync.leaves, state.loss_scale)
        leaves, spec = tree.flatten(parts)
        metas = [torch.empty_like(x, device="meta") for x in leaves]  # dense strides stay as they are
        shapes = [(x.shape, x.stride(), x.dtype, leaf.device.type) for x, leaf in zip(metas, leaves, strict=True)]
        empty = tree.unflatten(spec, metas)
        told = (empty, shapes, state.step, sync.checked_step(), sync.choice, state.layout)
        empty, shapes, step, sync_step, choice, layout = collectives.broadcast_object(told, src, axis)
        if axis.rank != src or axis.size == 1:
            made = [torch.empty_strided(shape, strides, dtype=dtype, device=at) for shape, strides, dtype, at in shapes]
            parts = tree.unflatten(tree.flatten(empty)[1], made if axis.size > 1 else leaves)
        params, frozen, buffers, opt_state, entries, loss_scale = tree.map(
            torch.Tensor.detach, collectives.broadcast(parts, src, axis)
        )
        sync = replace(SyncState.new(entries, choice), step=sync_step)
        return TrainState(params, buffers, opt_state, sync, step, layout, loss_scale, frozen=frozen)

    @on_parts
    def finish(self, state: TrainState) -> TrainState:
        """`state` with all landed that its strategy has under way between two steps, as an asynchronous one has.

        Every rank calls it, after its last step or before it looks at the parameters; other strategies give the state
        back as it is. Training may go on afterwards.
        """
        state.check_owned()
        info = StepInfo(state.sync_state.checked_step(), comm.resolve(self.step.axis))
        if not self.step.strategy.communicates_besides:
            return state
        params, states = self.step.strategy.finish(state.trained, state.sync_state.leaves, info, state.pending)
        return replace(state, params=params, sync_state=replace(state.sync_state, leaves=states), pending=None)

    @on_parts
    def gather(self, state: TrainState) -> TrainState:
        """`state` with the whole optimizer state on every rank, where its strategy shards it; every rank calls this.

        So it can be saved and used on another number of ranks: load into ``train.gather(train.init(params))`` there. A
        step takes such a state and goes on with this rank's part. Other strategies give the state back as it is.
        """
        state.check_owned()
        if state.layout.opt_state != "sharded":
            return state
        info = StepInfo(state.sync_state.checked_step(), comm.resolve(self.step.axis))
        opt_state = self.step.strategy.gather_optimizer(self.optimizer, state.trained, state.opt_state, info)
        return replace(state, opt_state=opt_state, layout=replace(state.layout, opt_state="replicated"))
