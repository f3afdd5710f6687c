"""One good call of every public function and class, whose arguments the tests of bad input replace one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from inspect import signature
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor

import ltx
from ltx import checkpoint, hooks, nn, optim
from tests.twins.training import sgd


class Call:
    """A call that works. What it gives back is used as far as `then` says: entered, iterated, called.

    Arguments that aren't given are what the signature says, and are replaced too. Those that are `free` are the
    caller's own, of any type at all.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *args: Any,
        then: Callable[[Any], Any] = lambda result: result,
        free: tuple[int | str, ...] = (),
        **kwargs: Any,
    ) -> None:
        self.fn, self.args, self.then, self.free = fn, args, then, free
        given = signature(fn).bind_partial(*args).arguments
        rest = [one for name, one in signature(fn).parameters.items() if name not in given]
        self.kwargs = {one.name: one.default for one in rest if one.default is not one.empty} | kwargs

    def __repr__(self) -> str:
        return f"Call({self.fn}, {self.args}, {self.kwargs})"

    def places(self) -> list[int | str]:
        return [place for place in (*range(len(self.args)), *self.kwargs) if place not in self.free]

    def run(self, replaced: Mapping[int | str, Any] = MappingProxyType({})) -> Any:
        args = [replaced.get(place, arg) for place, arg in enumerate(self.args)]
        return self.then(self.fn(*args, **{name: replaced.get(name, arg) for name, arg in self.kwargs.items()}))


def loss(params: Any, x: Tensor) -> Tensor:
    return (x @ params["w"] + params["b"]).square().mean()


def params() -> dict[str, Tensor]:
    return {"w": torch.ones(3, 2), "b": torch.zeros(2)}


def batch() -> Tensor:
    return torch.ones(4, 3)


def grads_fn(params: Any, x: Tensor) -> Any:
    """A step's gradients, for returns="grads"."""
    return torch.func.grad(loss)(params, x)


def trained() -> tuple[Any, ltx.TrainState]:
    step = ltx.train_step(ltx.data_parallel(loss), optim.from_torch(torch.optim.AdamW, lr=0.1), donate=False)
    return step, step.init(params())


def _entered(context: AbstractContextManager[Any]) -> Any:
    with context as entered:
        return entered


def _recorded(recording: AbstractContextManager[None]) -> None:
    """A step of a training that is recorded."""
    train, state = trained()
    with recording:
        train(state, batch())


def _first(iterator: Iterator[Any]) -> Any:
    return next(iter(iterator), None)


def _stepped(step: Any) -> Any:
    return step(params(), batch())


def _in_block(module: Any, given: Any) -> Any:
    with ltx.using(module, given):
        return module(batch())


def _differentiated(step: Any) -> Any:
    return ltx.grad(step)(params(), batch())


def _reduced(hook: Any) -> Any:
    """The gradients of a step that the hook reduces, and on two simulated ranks."""
    strategy = ltx.DDPStrategy(comm_hook=hook)
    step = ltx.data_parallel(loss, strategy)
    state = step.init(params())
    return ltx.vmap(lambda x: ltx.sync_gradients({"w": x}, strategy, step.init({"w": x}))[0])(torch.ones(2, 5)), state


def _optimized(optimizer: Any) -> Any:
    return optimizer.apply(params(), optimizer.init(params()), params())


def _as_float(x: Tensor, numel: int) -> Tensor:
    return x.float()


def _scheduled(schedule: Any) -> Any:
    return _optimized(sgd(schedule))


def _uses(result: Any) -> Any:
    return repr(result)


T = torch.ones(4, 4)


def calls(folder: Path) -> dict[str, list[Call]]:
    """All of them, by public name; `folder` is for checkpoints."""
    step, state = trained()
    ddp = ltx.DDPStrategy()
    dp = ltx.data_parallel(loss)
    checkpoint.save(folder, state, data={"seen": 1})
    record = folder / "record"
    _recorded(ltx.record_messages(record, steps=range(1)))
    exact = hooks.AllReduce()
    lossy = hooks.TopK(0.5)
    adam = optim.from_torch(torch.optim.AdamW, lr=0.1)
    common: dict[str, Any] = {
        "bucket_bytes": 1 << 20,
        "first_bucket_bytes": 1 << 20,
        "process_group_backend": None,
        "timeout": timedelta(seconds=60),
    }
    with ltx.profile.record() as trace:
        ltx.psum(T)
    found: dict[str, list[Call]] = {
        # --- axes
        "ltx.Axis": [Call(ltx.Axis, "data", 1, None, then=lambda axis: ltx.psum(T, axis))],
        "ltx.vmap": [
            Call(ltx.vmap, lambda x: ltx.psum(x), axis_size=4, then=lambda mapped: mapped(T)),
            Call(ltx.vmap(lambda x: ltx.psum(x)), T),
        ],
        "ltx.axis_index": [Call(ltx.axis_index, "data")],
        "ltx.axis_size": [Call(ltx.axis_size, "data")],
        "ltx.axis_from_group": [],  # what isn't a group is refused in test_processes.py, where there are groups
        # --- collectives
        **{
            f"ltx.{name}": [Call(getattr(ltx, name), T, axis="data")]
            for name in ("pvary", "adasum", "gather_all_tensors")
        },
        **{
            f"ltx.{name}": [Call(getattr(ltx, name), T, axis="data", axis_index_groups=[[0]])]
            for name in ("pmean", "pmax", "pmin")
        },
        "ltx.psum": [
            Call(ltx.psum, T, "data", axis_index_groups=[[0]]),
            Call(ltx.psum, T, "data", prescale=2.0, postscale=0.5),
        ],
        "ltx.AllGatherGrad": [Call(ltx.AllGatherGrad.apply, T)],
        "ltx.all_gather": [Call(ltx.all_gather, T, "data", tiled=True), Call(ltx.all_gather, T)],
        "ltx.psum_scatter": [Call(ltx.psum_scatter, T, "data", tiled=True)],
        "ltx.all_to_all": [Call(ltx.all_to_all, T, 0, 1, "data")],
        "ltx.ppermute": [Call(ltx.ppermute, T, [(0, 0)], "data")],
        "ltx.gather": [Call(ltx.gather, T, 0, "data")],
        "ltx.scatter": [Call(ltx.scatter, T, 0, "data", tiled=True)],
        "ltx.psum_to": [Call(ltx.psum_to, T, 0, "data")],
        "ltx.broadcast": [Call(ltx.broadcast, T, 0, "data")],
        "ltx.weighted_mean": [Call(ltx.weighted_mean, T, 2.0, "data")],
        "ltx.reduce": [Call(ltx.reduce, T, "mean", "data", False), Call(ltx.reduce, T.long(), "bor")],
        "ltx.reduce_boolean_decision": [Call(ltx.reduce_boolean_decision, True, True, "data")],
        "ltx.broadcast_object": [Call(ltx.broadcast_object, {}, 0, "data", free=(0,))],
        "ltx.all_gather_object": [Call(ltx.all_gather_object, {}, "data", free=(0,))],
        "ltx.barrier": [Call(ltx.barrier, "here", "data")],
        "ltx.rank_seed": [Call(ltx.rank_seed, 3, "data")],
        "ltx.shard": [Call(ltx.shard, T, "data", 0)],
        # --- world and running
        "ltx.init": [
            Call(
                ltx.init,
                ddp,
                timeout=timedelta(seconds=60),
                heartbeat_timeout=timedelta(seconds=10),
                then=lambda world: ltx.shutdown(),
            )
        ],
        "ltx.shutdown": [Call(ltx.shutdown)],
        "ltx.world": [Call(ltx.world)],
        "ltx.World": [Call(ltx.World, 0, 1, 0, 0, 1, torch.device("cpu"), "none", "none")],
        "ltx.to_device": [Call(ltx.to_device, {"x": T})],
        "ltx.DataPosition": [
            Call(ltx.DataPosition, 8, 4, done=4, then=lambda position: position.after_step().indices(0, 2))
        ],
        "ltx.launch": [],  # starts processes; refused in test_processes.py
        "ltx.Pool": [],
        "ltx.PerRank": [Call(ltx.PerRank, [T, T], then=lambda values: values.stack())],
        # --- strategies
        "ltx.Strategy": [Call(ltx.Strategy, **common)],
        "ltx.DDPStrategy": [
            Call(ltx.DDPStrategy, **common, comm_hook="fp16"),
            Call(ltx.DDPStrategy, model_averaging_period=2, start_local_sgd_step=3),
        ],
        "ltx.HorovodStrategy": [Call(ltx.HorovodStrategy, **common, compression="none")],
        "ltx.BaguaStrategy": [
            Call(
                ltx.BaguaStrategy,
                "decentralized",
                **common,
                hierarchical=False,
                peer_selection_mode="all",
                communication_interval=1,
            ),
            Call(ltx.BaguaStrategy, "async", warmup_steps=1, sync_interval_ms=100),
            Call(ltx.BaguaStrategy, "gradient_allreduce", hierarchical=False, flatten=True),
        ],
        "ltx.LocalSGDStrategy": [Call(ltx.LocalSGDStrategy, 4, 0, None, "allreduce", **common)],
        "ltx.DiLoCoStrategy": [Call(ltx.DiLoCoStrategy, 4, 0.7, 0.9, "allreduce", 1, adam, 0.5, 1, **common)],
        "ltx.ZeroStrategy": [Call(ltx.ZeroStrategy, **common)],
        # --- transformations
        # The precision is what mixed_precision sets.
        "ltx.DataParallel": [Call(ltx.DataParallel, loss, ddp, 0, then=_stepped, free=("precision",))],
        "ltx.data_parallel": [
            Call(ltx.data_parallel, loss, ddp, axis="data", then=_differentiated),
            Call(ltx.data_parallel, grads_fn, returns="grads", then=_stepped),
            Call(dp, params(), batch(), free=(1,)),
            Call(dp.init, params()),
        ],
        "ltx.Metrics": [Call(ltx.Metrics, torch.tensor(1.0), None, None, None, None, free=(0, 1))],
        "ltx.Synced": [Call(ltx.Synced, params(), dp.init(params()), then=lambda s: dp(s, batch()))],
        "ltx.SyncState": [Call(lambda value: dp(ltx.Synced(params(), value), batch()), dp.init(params()))],
        "ltx.TrainState": [Call(step, state, batch(), free=(1,)), Call(ltx.check_replicas, state)],
        "ltx.Weighted": [
            Call(lambda t, w: ltx.data_parallel(lambda p, x: ltx.Weighted(t, w))(params(), batch()), T.sum(), 4.0)
        ],
        "ltx.accumulate": [Call(ltx.accumulate, dp, 2, then=_stepped)],
        "ltx.block_backward_sync": [Call(ltx.block_backward_sync, dp, then=_differentiated)],
        "ltx.sync_params": [Call(ltx.sync_params, params(), 0, "data")],
        "ltx.check_replicas": [Call(ltx.check_replicas, params(), "data")],
        "ltx.functional_call": [
            Call(
                ltx.functional_call,
                torch.nn.Linear(3, 2),
                {"weight": torch.ones(2, 3), "bias": torch.zeros(2)},
                (batch(),),
                free=(2, "kwargs"),
            )
        ],
        "ltx.using": [Call(_in_block, torch.nn.Linear(3, 2), {"weight": torch.ones(2, 3)})],
        "ltx.to_module": [Call(ltx.to_module, torch.nn.Linear(3, 2), {"weight": torch.ones(2, 3)})],
        "ltx.grad": [Call(ltx.grad, dp, then=_stepped)],
        "ltx.grad_and_value": [
            Call(ltx.grad_and_value, dp, then=_stepped),
            Call(lambda p, s: ltx.grad_and_value(dp)(p, batch(), sync_state=s), params(), dp.init(params())),
        ],
        "ltx.sync_gradients": [Call(ltx.sync_gradients, params(), ddp, None, axis="data")],
        "ltx.train_step": [
            Call(
                ltx.train_step,
                dp,
                adam,
                donate=False,
                guard="skip",
                max_skipped=2,
                then=lambda made: made(made.init(params()), batch()),
            ),
            Call(step.init, params(), None),
        ],
        "ltx.rank_zero_first": [Call(ltx.rank_zero_first, None, then=lambda made: made.__enter__())],
        "ltx.uneven": [Call(ltx.uneven, [T], "data", then=_first)],
        "ltx.mixed_precision": [Call(ltx.mixed_precision, dp, ltx.Precision(), then=_stepped)],
        "ltx.Precision": [Call(ltx.Precision, then=lambda precision: _stepped(ltx.mixed_precision(dp, precision)))],
        "ltx.DynamicLossScale": [Call(ltx.DynamicLossScale, init=8.0, growth_interval=10)],
        # --- comparing
        "ltx.profile.Comparison": [],  # a result, which nobody makes by hand
        "ltx.profile.compare": [
            Call(
                lambda state, *batch, steps: ltx.profile.compare({"adam": trained()[0]}, state, *batch, steps=steps),
                trained()[1],
                batch(),
                steps=1,
                then=_uses,
                free=(1,),
            )
        ],
        # --- the wire
        "ltx.debug_checks": [Call(ltx.debug_checks, then=_entered)],
        "ltx.record_messages": [Call(ltx.record_messages, folder, steps=range(1), max_bytes=1 << 20, then=_recorded)],
        "ltx.replay": [Call(ltx.replay, record, 0, then=_entered)],
        "ltx.Replayed": [],
        "ltx.profile.record": [Call(ltx.profile.record, then=_entered)],
        "ltx.profile.timeline": [Call(ltx.profile.timeline, [trace], then=_uses)],
        "ltx.profile.Timeline": [],
        "ltx.profile.Trace": [],
        # --- hooks
        "ltx.hooks.Adasum": [Call(hooks.Adasum, torch.float32, then=_reduced)],
        "ltx.hooks.after": [Call(hooks.after, 2, lossy, first=exact, then=_reduced)],
        "ltx.hooks.partition": [Call(hooks.partition, {"*": lossy}, then=_reduced)],
        "ltx.hooks.chain": [Call(hooks.chain, hooks.FP16(), exact, then=_reduced)],
        "ltx.hooks.cast": [Call(hooks.cast, exact, torch.float16, then=_reduced)],
        "ltx.hooks.error_feedback": [Call(hooks.error_feedback, hooks.FP16(), then=_reduced)],
        **{f"ltx.hooks.{name}": [Call(getattr(hooks, name), then=_reduced)] for name in ("BF16", "FP16", "ByteGrad")},
        **{
            f"ltx.hooks.{name}": [Call(lambda hook: _reduced(hook), getattr(hooks, name)())]
            for name in ("AllReduce", "Noop")
        },
        **{
            f"ltx.hooks.{name}": []  # to be derived from, or made by ltx
            for name in ("CommHook", "LossyHook", "CompressedAllReduce", "BucketInput", "CollectiveRequest")
        },
        "ltx.hooks.OneBit": [Call(hooks.OneBit, 512, then=_reduced)],
        "ltx.hooks.QSGD": [Call(hooks.QSGD, 127, 512, 0, then=_reduced)],
        "ltx.hooks.Quantize": [Call(hooks.Quantize, "channel", 512, then=_reduced)],
        "ltx.hooks.RandomK": [Call(hooks.RandomK, 0.5, 0, then=_reduced)],
        "ltx.hooks.TopK": [Call(hooks.TopK, 0.5, then=_reduced)],
        "ltx.hooks.PowerSGD": [Call(hooks.PowerSGD, 1, 0, True, 0, 2.0, 2, then=_reduced)],
        "ltx.hooks.BatchedPowerSGD": [Call(hooks.BatchedPowerSGD, 1, 0, 0, then=_reduced)],
        "ltx.hooks.from_functions": [
            Call(hooks.from_functions, torch.Tensor.half, _as_float, error_feedback=True, then=_reduced)
        ],
        "ltx.hooks.from_torch": [Call(hooks.from_torch, lambda state, bucket: None, None, free=(1,))],
        "ltx.hooks.to_torch": [Call(hooks.to_torch, exact, None)],
        # --- optimizers
        "ltx.optim.Optimizer": [],
        "ltx.optim.ClipState": [],
        "ltx.optim.TorchState": [],
        "ltx.optim.adjustable": [Call(optim.adjustable, 0.1, then=_scheduled)],
        "ltx.optim.adjust": [Call(optim.adjust, sgd(optim.adjustable(0.1)).init(params()), lr=0.2)],
        "ltx.optim.apply_updates": [Call(optim.apply_updates, params(), params())],
        "ltx.optim.chain": [Call(optim.chain, optim.clip_by_global_norm(1.0), adam, then=_optimized)],
        "ltx.optim.measure_global_norm": [Call(optim.measure_global_norm, then=_optimized)],
        "ltx.optim.clip_by_global_norm": [Call(optim.clip_by_global_norm, 1.0, then=_optimized)],
        "ltx.optim.clip_by_value": [Call(optim.clip_by_value, 1.0, then=_optimized)],
        "ltx.optim.partition": [Call(optim.partition, {"0": adam}, {"*": "0"}, then=_optimized)],
        "ltx.optim.masked": [Call(optim.masked, optim.clip_by_value(1.0), "*", then=_optimized)],
        "ltx.optim.warmup_cosine": [Call(optim.warmup_cosine, 0.1, 1, 3, 0.0, then=_scheduled)],
        "ltx.optim.from_scheduler": [
            Call(optim.from_scheduler, partial(torch.optim.lr_scheduler.StepLR, step_size=1), 0.1, then=_scheduled)
        ],
        "ltx.optim.from_functions": [
            Call(
                optim.from_functions,
                lambda params: (),
                lambda grads, state, params: (grads, state),
                elementwise=True,
                then=_optimized,
            )
        ],
        "ltx.optim.from_torch": [
            Call(optim.from_torch, torch.optim.AdamW, lr=0.1, weight_decay=0.0, then=_optimized),
            Call(adam.init, params()),
            Call(adam.update, params(), adam.init(params()), params()),
            Call(adam.apply, params(), adam.init(params()), params()),
        ],
        "ltx.optim.grad_norm": [Call(optim.grad_norm, optim.clip_by_global_norm(1.0).init(params()))],
        "ltx.optim.identity": [Call(optim.identity, then=_optimized)],
        "ltx.optim.qadam": [Call(optim.qadam, 0.1, warmup_steps=2, betas=(0.9, 0.99), then=_optimized)],
        # --- layers
        "ltx.nn.SyncBatchNorm": [
            Call(nn.SyncBatchNorm, 4, 1e-5, 0.1, True, True, then=lambda layer: layer(T), free=("device", "dtype")),
            Call(nn.SyncBatchNorm(4), T),
        ],
        "ltx.nn.convert_sync_batch_norm": [Call(nn.convert_sync_batch_norm, torch.nn.BatchNorm1d(4), "data")],
        "ltx.nn.sync_batch_norm": [
            Call(nn.sync_batch_norm, T, torch.zeros(4), torch.ones(4), torch.ones(4), torch.zeros(4), axis="data")
        ],
        # --- checkpoints
        "ltx.checkpoint.latest": [Call(checkpoint.latest, folder)],
        "ltx.checkpoint.load": [Call(checkpoint.load, folder, state, rng=False, axis="data")],
        "ltx.checkpoint.save": [Call(checkpoint.save, folder, state, axis="data", free=("data",))],
        "ltx.checkpoint.save_async": [
            Call(checkpoint.save_async, folder, state, axis="data", then=lambda saving: saving.result(), free=("data",))
        ],
        "ltx.checkpoint.preemption": [Call(checkpoint.preemption, axis="data", then=_entered)],
        "ltx.checkpoint.Preemption": [],
        "ltx.checkpoint.Restored": [],
        "ltx.checkpoint.Saving": [],
    }
    return found


def public_names() -> set[str]:
    modules: tuple[ModuleType, ...] = (ltx, hooks, optim, nn, checkpoint, ltx.profile)
    return {
        f"{module.__name__}.{name}"
        for module in modules
        for name in dir(module)
        if not name.startswith("_")
        and callable(found := getattr(module, name))
        and getattr(found, "__module__", "").startswith("ltx")
    }
