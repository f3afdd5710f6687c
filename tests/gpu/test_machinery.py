"""Recordings, compiled steps, overlap without torch's priorities, forks: what goes by other ways on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx import Pool
from ltx.core.gradients import marker
from ltx.core.ranks.axis import axes_in_scope
from ltx.errors import UnsupportedError
from tests.gpu.device import DEVICE, HALVES, batch, check, loss_of, model, needs_cuda, on_cpu, params_of
from tests.programs import printed
from tests.train_on import go_on

SGD = ltx.optim.from_torch(torch.optim.SGD, lr=0.1)
#: The compiler's own kernels where there is a GPU; on the CPU the graph is what counts.
BACKEND = "inductor" if DEVICE == "cuda" else "aot_eager"
STEPS = 4


@needs_cuda
@pytest.mark.parametrize("overlap", ["backward", "update"])
def test_a_recording(overlap: Any, workers: Any) -> None:
    def run() -> Any:
        train = ltx.train_step(ltx.data_parallel(loss_of(model()), HALVES), SGD, overlap=overlap)
        state, _ = train(train.init(params_of(model())), *batch(0))
        with ltx.profile.record() as trace:
            train.finish(go_on(train, state, map(batch, range(3))).state)
        return trace

    (trace,) = workers.run(run)
    assert len(trace.buckets) >= 2 * 3
    assert sum(event.label == "summary" for event in trace.events) == 3
    for event in trace.events:
        assert event.issued_s <= event.completed_s
    completed = [event.completed_s for event in trace.buckets]
    assert completed == sorted(completed), "one stream does them in the order of their issues"
    assert 0.0 <= trace.hidden <= 1.0
    assert trace.waited_s >= 0.0


def steps(train: Any, made: Any = None) -> Any:
    """Losses and parameters by `train`, from a state that `made` makes if `train` is a graph of it."""
    state, losses = (made or train).init(params_of(model())), []
    for step in range(STEPS):
        state, metrics = train(state, *batch(step))
        losses.append(float(metrics.loss))  # at once: a graph's next replay may write there
    return losses, on_cpu(state.params)


def trained(loss: Any, **options: Any) -> Any:
    return steps(ltx.train_step(ltx.data_parallel(loss, HALVES), SGD, **options))


#: A compiler's kernels round elsewhere, and gradients may fall on the other side in half precision.
CLOSE = {"rtol": 1e-3, "atol": 1e-4}


@pytest.mark.slow_compile
@pytest.mark.timeout(150)
@pytest.mark.parametrize("overlap", ["backward", "update"])
@pytest.mark.parametrize("how", [{"backend": BACKEND}, pytest.param({"mode": "reduce-overhead"}, marks=needs_cuda)])
def test_a_compiled_loss(how: dict[str, Any], overlap: Any, pool: Pool) -> None:
    """That of a CUDA graph has its gradients in memory that the graph's next replay writes to."""

    def run() -> Any:
        torch._dynamo.reset()
        loss = loss_of(model())
        return trained(torch.compile(loss, **how), overlap=overlap), trained(loss)

    check(pool, run, **CLOSE)


@pytest.mark.slow_compile
@pytest.mark.timeout(150)
@pytest.mark.parametrize("whole", [False, True])
def test_collectives_in_a_graph(whole: bool, pool: Pool) -> None:
    """Gradients, or a whole step, as one compiled graph with its collectives."""

    def run() -> Any:
        torch._dynamo.reset()
        step, params = ltx.data_parallel(loss_of(model()), HALVES), params_of(model())
        if whole:
            train = ltx.train_step(step, SGD)
            return steps(torch.compile(train, fullgraph=True, backend=BACKEND), train), steps(train)
        both = torch.func.grad_and_value(step)
        compiled = torch.compile(both, fullgraph=True, backend=BACKEND)
        return on_cpu(compiled(params, *batch(0))), on_cpu(both(params, *batch(0)))

    check(pool, run, **CLOSE)


@needs_cuda
@pytest.mark.slow_compile
@pytest.mark.timeout(150)
def test_collectives_in_a_cuda_graph(pool: Pool) -> None:
    """Gradients with their collectives, which the graph replays; an eager optimizer uses them before the next one."""

    def run() -> Any:
        torch._dynamo.reset()
        step, both = ltx.data_parallel(loss_of(model()), HALVES), []
        function = torch.func.grad_and_value(step)
        for called in (torch.compile(function, fullgraph=True, mode="reduce-overhead"), function):
            params = params_of(model())
            state, losses = SGD.init(params), []
            for number in range(STEPS):
                grads, value = called(params, *batch(number))
                losses.append(float(value))
                params, state = SGD.apply(grads, state, params, donate=True)
            both.append((losses, on_cpu(params)))
        return both

    check(pool, run, **CLOSE)


@needs_cuda
@pytest.mark.slow_compile
@pytest.mark.timeout(150)
def test_a_whole_step_as_a_cuda_graph(pool: Pool) -> None:
    """Its state goes from one replay to the next. That works, or torch refuses it and says why."""

    def run() -> Any:
        torch._dynamo.reset()
        train = ltx.train_step(ltx.data_parallel(loss_of(model()), HALVES), SGD)
        expected = steps(train)
        try:
            return expected, steps(torch.compile(train, fullgraph=True, mode="reduce-overhead"), train)
        except RuntimeError as error:
            return expected, str(error)

    ((expected, found),) = pool.run(run)
    if isinstance(found, str):
        assert "accessing tensor output of CUDAGraphs that has been overwritten" in found
    else:
        torch.testing.assert_close(found, expected, **CLOSE)


@needs_cuda
def test_a_step_in_a_capture(pool: Pool) -> None:
    """Refused by name. The state is as before."""

    def run() -> Any:
        train, results = ltx.train_step(ltx.data_parallel(loss_of(model()), HALVES), SGD), []
        for interrupted in (False, True):
            state, given = train.init(params_of(model())), batch(1)
            state, _ = train(state, *batch(0))
            if interrupted:
                with pytest.raises(UnsupportedError) as caught, torch.cuda.graph(torch.cuda.CUDAGraph()):
                    train(state, *given)
            state, _ = train(state, *given)
            results.append(on_cpu(state.params))
        return *results, str(caught.value)

    ((expected, found, text),) = pool.run(run)
    assert "rank 0: data_parallel" in text
    assert "in the capture of a CUDA graph" in text
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("hidden", [False, True])
def test_buckets_go_out_during_the_backward_pass(hidden: bool, workers: Any) -> None:
    """By torch's priorities, and where it has none (before 2.13) by hooks of leaves."""

    def run() -> Any:
        seen: list[int] = []
        axis_comm: Any = axes_in_scope()[0].comm

        def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
            hidden = torch.tanh(torch.nn.functional.linear(x, params["0.weight"], params["0.bias"]))
            seen.append(axis_comm.bucket_channel(0).begun)
            hidden.register_hook(lambda _: seen.append(axis_comm.bucket_channel(0).begun))
            again = torch.tanh(torch.nn.functional.linear(hidden, params["2.weight"], params["2.bias"]))
            out = torch.nn.functional.linear(again, params["4.weight"], params["4.bias"])
            return torch.nn.functional.cross_entropy(out, y)

        with pytest.MonkeyPatch.context() as patch:
            if hidden:
                patch.setattr(marker, "can_raise_priority", lambda: False)
            strategy = ltx.DDPStrategy(comm_hook="fp16", bucket_bytes=1 << 11, first_bucket_bytes=1 << 11)
            losses, params = steps(ltx.train_step(ltx.data_parallel(loss, strategy), SGD))
        return [during - before for before, during in zip(seen[::2], seen[1::2], strict=True)], losses, params

    ((issued, losses, params),) = workers.run(run)
    # The step summary, and at least a bucket of each of the two layers behind.
    assert min(issued) >= 3, issued
    ((expected_losses, expected),) = workers.run(lambda: trained(loss_of(model())))
    torch.testing.assert_close(losses, expected_losses)
    torch.testing.assert_close(params, expected)


FORK = """
import torch, ltx

def where():
    x = torch.ones(3, device=ltx.world().device)
    return x.device.type, float(ltx.psum(x).sum()), ltx.world().backend

print(ltx.launch(where, 1, start_method="fork"))
"""


def test_a_fork_uses_the_gpu() -> None:
    """Neither ltx's import nor its start of workers begins anything of CUDA's in their parent."""
    backend = "cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo"
    told = printed("-c", FORK, timeout_s=55, **({} if DEVICE == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}))
    assert told.strip() == str([(DEVICE, 3.0, backend)])
