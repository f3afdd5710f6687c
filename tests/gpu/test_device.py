"""Where things are, when they happen, and what they take: barriers, streams, memory, parameters elsewhere."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.core.training.guard import any_not_finite
from ltx.errors import StepError
from tests.gpu.device import ADAMW, DEVICE, HALVES, batch, check, model, needs_cuda, on_cpu, params_of, synchronize
from tests.streams.test_steps import loss_of
from tests.train_on import go_on, said


def train_step(**options: Any) -> Any:
    return ltx.train_step(ltx.data_parallel(loss_of(model()), HALVES), ADAMW, **options)


@needs_cuda
def test_a_barrier_waits_for_the_device(workers: Any) -> None:
    def run() -> tuple[bool, bool]:
        ltx.barrier()
        torch.cuda._sleep(1_000_000_000)  # half a second
        done = torch.cuda.current_stream().record_event()
        before = done.query()
        ltx.barrier()
        return before, done.query()

    assert list(workers.run(run)) == [(False, True)]


def test_everything_is_on_the_device(workers: Any) -> None:
    def run() -> Any:
        scale = ltx.DynamicLossScale(init=2.0)
        step = ltx.data_parallel(loss_of(model()), HALVES)
        step = ltx.mixed_precision(step, ltx.Precision(compute=torch.bfloat16, loss_scale=scale))
        train = ltx.train_step(step, ltx.optim.chain(ltx.optim.clip_by_global_norm(1.0), ADAMW))
        state, metrics = train(train.init(params_of(model())), *batch(0))
        told = {"the rank": ltx.axis_index(), "a sum of a number": ltx.psum(1.0), "the loss": metrics.loss}
        told |= {"the norm": metrics.grad_norm, "the loss scale": metrics.loss_scale, "skipped": metrics.skipped}
        told |= zip(ltx.tree.leaf_paths(state), ltx.tree.flatten(state)[0], strict=True)
        return ltx.world().device.type, {name for name, x in told.items() if x.device.type != DEVICE}

    ((where, elsewhere),) = workers.run(run)
    assert where == DEVICE
    # These are the host's, which reads them in each step.
    assert elsewhere <= {"sync_state.uses", "sync_state.clock"}


@needs_cuda
def test_parameters_on_the_cpu_are_refused(workers: Any) -> None:
    (text,) = workers.run(lambda: said(StepError, train_step().init, on_cpu(params_of(model()))))
    assert "rank 0 computes on cuda:0, and params leaf '0.bias' is on cpu" in text


def on_streams(streams: Callable[[int], Any], **options: Any) -> dict[str, Tensor]:
    """Parameters after steps, step k on ``streams(k)``, each behind the one before; None is the current one."""
    train = train_step(**options)
    state, given = train.init(params_of(model())), [batch(step) for step in range(6)]
    for step, arguments in enumerate(given):
        stream = streams(step)
        if stream is None:
            state, _ = train(state, *arguments)
            continue
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            state, _ = train(state, *arguments)
        torch.cuda.current_stream().wait_stream(stream)
    return on_cpu(train.finish(state).params)


@needs_cuda
@pytest.mark.parametrize("overlap", ["backward", "update"])
def test_steps_on_other_streams(overlap: Any, workers: Any) -> None:
    def run() -> Any:
        one, two = torch.cuda.Stream(), torch.cuda.Stream()
        expected = on_streams(lambda step: None, overlap=overlap)
        ways = [lambda step: one, lambda step: (None, one, two)[step % 3]]
        return [on_streams(way, overlap=overlap) for way in ways], [expected] * 2

    check(workers, run, rtol=0, atol=0)


@needs_cuda
def test_memory_that_another_stream_takes_meanwhile(workers: Any) -> None:
    """A step that completes on one stream while the one that it began on goes on with other work."""

    def run() -> Any:
        expected = on_streams(lambda step: None)
        train, side = train_step(), torch.cuda.Stream()
        state, given = train.init(params_of(model())), [batch(step) for step in range(6)]
        for step in range(0, 6, 2):
            state, _ = train(state, *given[step])
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                state, _ = train(state, *given[step + 1])
                params = train.finish(state).params
            for size in (1 << 12, 1 << 14, 1 << 16):  # where freed buckets may have lain
                torch.full((size,), float("nan"), device="cuda")
            torch.cuda.current_stream().wait_stream(side)
        return on_cpu(params), expected

    check(workers, run, rtol=0, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_element_is_found(bad: float, workers: Any) -> None:
    """Wherever it is, among tensors of other dtypes and in a large one."""
    shapes = ((), (3,), (1 << 17,), (300, 200), (0,))
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

    def run() -> list[str]:
        wrong = []
        for dtype in dtypes:
            grads = [torch.ones(shape, dtype=own, device=DEVICE) for own in (torch.float32, dtype) for shape in shapes]
            if bool(any_not_finite(grads)):
                wrong.append(f"{dtype}: finite")
            for grad in (g for g in grads if g.numel()):
                for at in {0, grad.numel() // 2, grad.numel() - 1}:
                    grad.view(-1)[at] = bad
                    if not bool(any_not_finite(grads)):
                        wrong.append(f"{dtype}: {grad.dtype} of shape {list(grad.shape)} at {at}")
                    grad.view(-1)[at] = 1
        return wrong

    assert list(workers.run(run)) == [[]]


def out_of_memory() -> None:
    if DEVICE != "cuda":
        raise torch.OutOfMemoryError("as the device would say")
    torch.empty(1 << 45, dtype=torch.uint8, device=DEVICE)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory(where: str, workers: Any) -> None:
    """It is raised as what it is, the state is as before, and training goes on as if nothing had been."""

    def run() -> Any:
        loss, fails = loss_of(model()), [False]

        def hungry(params: Any, x: Tensor, y: Tensor) -> Tensor:
            value = loss(params, x, y)
            if fails[0] and where == "forward":
                out_of_memory()
            if fails[0]:
                value.register_hook(lambda _: out_of_memory())
            return value

        results = []
        for at in (None, 2):
            train = ltx.train_step(ltx.data_parallel(hungry, HALVES), ADAMW)
            state = train.init(params_of(model()))
            for step in range(5):
                if step == at:
                    fails[0] = True
                    said(torch.OutOfMemoryError, train, state, *batch(step))
                    fails[0] = False
                state, _ = train(state, *batch(step))
            results.append(on_cpu(state.params))
        return results

    check(workers, run, rtol=0, atol=0)


@needs_cuda
@pytest.mark.parametrize("overlap", ["backward", "update"])
def test_donated_steps_take_no_more_memory(overlap: Any, workers: Any) -> None:
    def run() -> list[int]:
        train = train_step(overlap=overlap)
        state, given, taken = train.init(params_of(model())), batch(0), []
        for _ in range(4):
            state = go_on(train, state, [given] * 10).state
            gc.collect()
            synchronize()
            taken.append(torch.cuda.memory_allocated())
        return taken

    (taken,) = workers.run(run)
    assert len(set(taken[1:])) == 1, taken


@needs_cuda
def test_a_step_takes_one_copy_of_the_gradients(workers: Any) -> None:
    """At its peak there are parameters, Adam's two moments, and gradients as they were sent and as they came out."""

    def run() -> float:
        gc.collect()
        width, layers, before = 1024, 48, torch.cuda.memory_allocated()
        module = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers))).to(DEVICE)

        def loss(params: Any, x: Tensor) -> Tensor:
            return ltx.functional_call(module, params, (x,)).square().mean()

        train = ltx.train_step(ltx.data_parallel(loss, ltx.DDPStrategy(comm_hook="fp16")), ADAMW)
        x = torch.ones(2, width, device=DEVICE)
        state = go_on(train, train.init(module), [x] * 3).state
        synchronize()
        torch.cuda.reset_peak_memory_stats()
        go_on(train, state, [x] * 2)
        synchronize()
        return (torch.cuda.max_memory_allocated() - before) / (4 * width * width * layers)

    (copies,) = workers.run(run)
    # Three copies, half of one in half precision, and one; the rest is for activations and torch's workspaces.
    assert copies < 3 + 0.5 + 1 + 0.5, copies


@needs_cuda
def test_a_step_leaves_the_current_stream_as_it_was(workers: Any) -> None:
    def run() -> bool:
        before, train = torch.cuda.current_stream(), train_step()
        train(train.init(params_of(model())), *batch(0))
        return before == torch.cuda.current_stream()

    assert list(workers.run(run)) == [True]
