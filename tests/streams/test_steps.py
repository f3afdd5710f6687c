"""Training on a backend that orders streams: one order of issues, no host that stands still, nothing read too early."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import ltx
from ltx import hooks
from ltx.core.comm.backends import CommStream
from ltx.errors import RankMismatchError
from tests import inside, train_on
from tests.contract.optim.test_opaque import Anchored
from tests.kinds import Ranks
from tests.streams.backend import NAME, log
from tests.streams.pool import StreamedPool

#: What the host reads of a step: hidden guards of the communication state, which are on the host.
ON_HOST = "SyncState.checked_step"
#: The step before has come this far on the device, so that the host is one step ahead at most.
OF_LAST_STEP = "read_last_summary"


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)
    )


def loss_of(module: torch.nn.Module) -> Callable[..., Tensor]:
    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(ltx.functional_call(module, params, (x,)), y)

    return loss


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(16, 8, generator=drawn), torch.randint(4, (16,), generator=drawn)


def summed(module: torch.nn.Module) -> Callable[..., ltx.Weighted]:
    """The mean over all ranks' samples, of which each may have another number."""

    def loss(params: Any, x: Tensor, y: Tensor) -> ltx.Weighted:
        out = ltx.functional_call(module, params, (x,))
        return ltx.Weighted(torch.nn.functional.cross_entropy(out, y, reduction="sum"), torch.tensor(len(x)))

    return loss


def spoilt(rank: int, steps: int, bad: range, samples: int = 16) -> list[tuple[Tensor, Tensor]]:
    """A rank's batches, which aren't finite on rank 1 in the steps `bad`."""
    drawn = enumerate(batch(rank, step) for step in range(steps))
    return [(x[:samples] * (torch.nan if rank == 1 and step in bad else 1.0), y[:samples]) for step, (x, y) in drawn]


def copies(params: dict[str, Tensor]) -> dict[str, Tensor]:
    """As they are once the device has come so far."""
    return {name: x + 0 for name, x in params.items()}


def of_this_step(lines: list[str]) -> list[str]:
    """What was read off the device, besides what the step before has left."""
    return [line for line in lines if ON_HOST not in line and OF_LAST_STEP not in line]


SMALL = {"bucket_bytes": 512, "first_bucket_bytes": 128}
adamw = ltx.optim.from_torch(torch.optim.AdamW, lr=1e-2)


def prepared(
    strategy: ltx.Strategy | None = None,
    optimizer: Any = adamw,
    loss: Callable[..., Any] = loss_of,
    wrap: Callable[[Any], Any] = lambda step: step,
    **options: Any,
) -> tuple[Any, Any, int]:
    """A train step of the model in small buckets, its state at the start, and this rank."""
    module = model()
    step = wrap(ltx.data_parallel(loss(module), strategy or ltx.DDPStrategy(**SMALL)))
    train = ltx.train_step(step, optimizer, **options)
    state = train.init({name: x.detach().clone() for name, x in module.named_parameters()})
    return train, state, int(ltx.axis_index())


def trained(strategy: ltx.Strategy, steps: int = 4, **options: Any) -> tuple[Any, list[list[str]], list[list[str]]]:
    """Parameters after some steps, and what each step issued and read."""
    train, state, rank = prepared(strategy, **options)
    issued, read = [], []
    for step in range(steps):
        log().clear()
        state, _ = train(state, *batch(rank, step))
        issued.append(list(log().issues))
        read.append(list(log().reads))
    return copies(train.finish(state).params), issued, read


STRATEGIES: dict[str, tuple[ltx.Strategy, dict[str, Any]]] = {
    "mean": (ltx.DDPStrategy(**SMALL), {}),
    "update": (ltx.DDPStrategy(**SMALL), {"overlap": "update"}),
    "fp16": (ltx.DDPStrategy(comm_hook=hooks.FP16(), **SMALL), {}),
    "powersgd": (ltx.DDPStrategy(comm_hook=hooks.PowerSGD(rank=1, start_step=0), **SMALL), {}),
    "bytegrad": (ltx.DDPStrategy(comm_hook=hooks.ByteGrad(), **SMALL), {}),
    "zero": (ltx.ZeroStrategy(**SMALL), {"overlap": "update"}),
    "zero, whole steps": (ltx.ZeroStrategy(**SMALL), {}),
    "adasum": (ltx.HorovodStrategy(op="adasum", **SMALL), {}),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_ranks_issue_alike_and_get_what_gloo_gives(name: str, ranks: Ranks) -> None:
    strategy, options = STRATEGIES[name]
    (expected, _, _), _ = ranks(2).run(trained, strategy, **options)
    (params, issued, _), (others, issued_there, _) = StreamedPool(ranks(2)).run(trained, strategy, **options)
    assert issued == issued_there
    torch.testing.assert_close(params, others, rtol=0, atol=0)
    torch.testing.assert_close(params, expected)


@pytest.mark.parametrize("name", ["mean", "update", "fp16"])
def test_a_default_step_reads_nothing(name: str, ranks: Ranks) -> None:
    strategy, options = STRATEGIES[name]
    for _, _, read in StreamedPool(ranks(2)).run(trained, strategy, steps=5, **options):
        for of_step in read[2:]:  # the first one compares ranks
            assert (of_this_step(of_step), len([line for line in of_step if OF_LAST_STEP in line])) == ([], 1)


def test_one_communicator_an_axis(ranks: Ranks) -> None:
    def run() -> tuple[int, int]:
        before = log().groups
        trained(STRATEGIES["powersgd"][0])
        return before, log().groups

    for before, after in StreamedPool(ranks(2)).run(run):
        assert after == before, "nothing connects once training has begun"


def test_buckets_wait_for_collectives_in_the_graph(ranks: Ranks) -> None:
    """A sum inside the loss whose backward pass comes at its end on rank 0, and at its beginning on rank 1."""

    def run() -> tuple[Any, list[str]]:
        module, rank = model(), int(ltx.axis_index())

        def loss(params: Any, x: Tensor) -> Tensor:
            first = torch.nn.functional.linear(x, params["0.weight"], params["0.bias"])
            if rank == 0:
                first = first * ltx.psum(first.mean())
            hidden = torch.tanh(torch.nn.functional.linear(first.tanh(), params["2.weight"], params["2.bias"]))
            out = torch.nn.functional.linear(hidden, params["4.weight"], params["4.bias"])
            return out.square().mean() * (ltx.psum(out.mean()) if rank == 1 else 1.0)

        step = ltx.data_parallel(loss, ltx.DDPStrategy(**SMALL))
        log().clear()
        grads = torch.func.grad(step)(dict(module.named_parameters()), torch.ones(4, 8) + rank)
        return copies(grads), list(log().issues)

    (grads, issued), (others, issued_there) = StreamedPool(ranks(2)).run(run)
    assert issued == issued_there
    assert issued[0] == issued[2] == "allreduce [()]", "both sums go before any bucket; between them is the summary"
    torch.testing.assert_close(grads, others, rtol=0, atol=0)
    (expected, _), _ = ranks(2).run(run)
    torch.testing.assert_close(grads, expected)


def test_a_barrier_waits(ranks: Ranks) -> None:
    def run() -> tuple[float, float]:
        ltx.barrier("here")  # a name that is new is compared, for which ranks wait in the store
        if int(ltx.axis_index()) == 1:
            time.sleep(0.3)
        came = time.time()
        ltx.barrier("here")
        return came, time.time()

    (_, left), (came, _) = StreamedPool(ranks(2)).run(run)
    assert left >= came


sgd = ltx.optim.from_torch(torch.optim.SGD, lr=1e-2, momentum=0.9)
GROUPS = {"*bias": "biases", "*": "others"}
OPTIMIZERS = {
    "adamw": adamw,
    "clipped": ltx.optim.chain(ltx.optim.clip_by_global_norm(0.1), adamw),
    "groups": ltx.optim.chain(
        ltx.optim.masked(ltx.optim.clip_by_value(0.1), "*bias"),
        ltx.optim.partition({"biases": sgd, "others": adamw}, GROUPS),
    ),
}


def scaled(step: Any) -> Any:
    """In half precision, with a loss scale, which is a guard too."""
    scale = ltx.DynamicLossScale(init=2.0**14)
    return ltx.mixed_precision(step, ltx.Precision(compute=torch.bfloat16, loss_scale=scale))


GUARDED: dict[str, dict[str, Any]] = {
    **{name: {"optimizer": each, "loss": summed, "guard": "skip"} for name, each in OPTIMIZERS.items()},
    "loss scale": {"wrap": scaled, "guard": "off"},
}


@pytest.mark.parametrize("name", GUARDED)
def test_weights_and_a_guard(name: str, ranks: Ranks) -> None:
    """What is left out on all ranks alike, and unequal weights, are as over gloo. Nothing is read for it, or copied."""

    def run() -> Any:
        train, state, rank = prepared(**GUARDED[name])
        skipped, read = [], []
        places = [{x.data_ptr() for x in state.params.values()}]
        for step, given in enumerate(spoilt(rank, 4, range(2, 3), 8 + 8 * rank)):
            log().clear()
            state, metrics = train(state, *given)
            if step > 1:
                read += of_this_step(log().reads)
            places.append({x.data_ptr() for x in state.params.values()})
            skipped.append(metrics.skipped)
        return copies(state.params), [bool(x) for x in skipped], read, places

    (expected, left_out, _, _), _ = ranks(2).run(run)
    for found, skipped, read, places in StreamedPool(ranks(2)).run(run):
        assert (skipped, read) == (left_out, []) == ([False, False, True, False], [])
        assert places == places[:1] * 5
        torch.testing.assert_close(found, expected)


def test_a_guarded_update_in_two_phases(ranks: Ranks) -> None:
    def run() -> Any:
        step = ltx.data_parallel(lambda w, x: (w * x).sum(), ltx.BaguaStrategy("qadam", warmup_steps=1))
        train = ltx.train_step(step, ltx.optim.qadam(warmup_steps=1, lr=1e-2), guard="skip")
        state, seen = train.init(torch.ones(3)), []
        for number in range(5):
            state, metrics = train(state, torch.ones(3) * (float("nan") if number == 3 else 1.0))
            seen.append((bool(metrics.skipped), state.params + 0))
        return seen

    for seen in StreamedPool(ranks(2)).run(run):
        assert [skipped for skipped, _ in seen] == [False, False, False, True, False]
        assert torch.equal(seen[3][1], seen[2][1])
        assert seen[4][1].isfinite().all()


def test_objects(ranks: Ranks) -> None:
    def run() -> Any:
        rank = int(ltx.axis_index())
        one, all_of_them = ltx.broadcast_object({"from": rank}, 1), ltx.all_gather_object(rank)
        return one, all_of_them, ltx.reduce_boolean_decision(rank > 0)

    assert list(StreamedPool(ranks(2)).run(run)) == [({"from": 1}, [0, 1], False)] * 2


def test_ranks_that_differ_are_found_a_step_later(ranks: Ranks) -> None:
    """Known collectives in another order, which nobody compares: the digest tells, when the host reads it."""

    def run() -> str:
        train, state, rank = prepared()
        inside.resolve(None).comm.user.habit = None
        x, batches = torch.ones(3), [batch(rank, step) for step in range(3)]
        ltx.pmin(x), ltx.pmax(x)
        state, _ = train_on.go_on(train, state, batches)
        for collective in (ltx.pmin, ltx.pmax)[:: 1 - 2 * rank]:
            collective(x)
        return train_on.said(RankMismatchError, train_on.go_on, train, state, batches)

    for told in StreamedPool(ranks(2)).run(run):
        assert told.startswith("axis 'data': ranks have issued different collectives")
        assert "load a checkpoint" in told


@pytest.mark.parametrize(("name", "overlap"), [("adamw", "backward"), ("groups", "backward"), ("groups", "update")])
def test_weights_that_add_up_to_nothing(name: str, overlap: Any, ranks: Ranks) -> None:
    """The step changes nothing, and the next one says why."""

    def run() -> tuple[bool, str]:
        train, state, rank = prepared(None, OPTIMIZERS[name], summed, overlap=overlap)
        state, _ = train(state, *batch(rank, 0))
        before = [x + 0 for x in ltx.tree.flatten((state.params, state.opt_state))[0]]
        state, _ = train(state, torch.ones(0, 8), torch.ones(0, dtype=torch.int64))
        same = all(map(torch.equal, ltx.tree.flatten((state.params, state.opt_state))[0], before))
        return same, train_on.raised_by(train, state, *batch(rank, 1))

    found = list(StreamedPool(ranks(2)).run(run))
    for same, told in found:
        assert same
        assert "in the step before this one the weights of all ranks added up to 0" in told
    # A rank whose device is late may hear of it from its peer, which has left the step.
    kinds = {told.partition(":")[0] for _, told in found}
    assert "WeightError" in kinds
    assert kinds <= {"WeightError", "DeadlockDetectedError"}


def test_a_limit_on_skipped_steps_reads_now_and_then(ranks: Ranks) -> None:
    def run() -> tuple[list[bool], int, str]:
        train, state, rank = prepared(guard="skip", max_skipped=3)
        reads = []
        try:
            for given in spoilt(rank, 12, range(2, 12)):
                log().clear()
                state, _ = train(state, *given)
                reads.append(bool(of_this_step(log().reads)))
        except FloatingPointError as error:
            return reads[2:], state.step, str(error)
        raise AssertionError

    for reads, step, said in StreamedPool(ranks(2)).run(run):
        assert reads == [False, True, False, False]  # steps 2 to 5
        assert step == 6
        assert "gradients of step 6 aren't finite. rank 1: " in said


def test_a_class_that_runs_as_it_is_begins_after_a_skipped_step(ranks: Ranks) -> None:
    """Whether its state has begun is for the host to know, which waits for it; the rest of the partition with it."""

    def run() -> Any:
        module, rank = model(), int(ltx.axis_index())
        optimizer = ltx.optim.partition({"biases": ltx.optim.from_torch(Anchored, lr=1e-2), "others": adamw}, GROUPS)
        start, batches = dict(module.named_parameters()), spoilt(rank, 3, range(1))
        found = train_on.trained(loss_of(module), optimizer, start, batches, ltx.DDPStrategy(**SMALL), guard="skip")
        return copies(found.params), found.skipped

    (expected, left_out), _ = ranks(2).run(run)
    for params, skipped in StreamedPool(ranks(2)).run(run):
        assert skipped == left_out == [True, False, False]
        torch.testing.assert_close(params, expected)


def test_under_ddp_nothing_waits_before_the_last_bucket(ranks: Ranks) -> None:
    """Each future is completed on the stream that communicates, and DDP waits for it at the end."""

    def run() -> Any:
        module, rank, seen = model(), int(ltx.axis_index()), list[str]()
        behind, fence, future = CommStream.behind_current, CommStream.fence, torch.futures.Future
        complete = future.set_result

        @contextmanager
        def noted(stream: CommStream) -> Iterator[None]:
            with behind(stream):
                seen.append("on")
                yield
                seen.append("off")

        def fenced(stream: CommStream) -> Callable[..., None]:
            wait = fence(stream)
            return lambda *given: (seen.append("waits"), wait(*given))[1]

        ddp = DistributedDataParallel(module, bucket_cap_mb=1e-4, init_sync=False)
        group = dist.new_group(backend=NAME)
        ddp.register_comm_hook(group, hooks.to_torch(hooks.FP16()))
        ddp(batch(rank, 0)[0]).square().mean().backward()  # in one bucket
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CommStream, "behind_current", noted)
            patch.setattr(CommStream, "fence", fenced)
            patch.setattr(future, "set_result", lambda *given: (seen.append("completed"), complete(*given)))
            ddp(batch(rank, 1)[0]).square().mean().backward()
        dist.destroy_process_group(group)
        return seen

    for seen in StreamedPool(ranks(2)).run(run):
        buckets = seen.count("completed")
        assert buckets > 2
        assert seen == ["on", "completed", "off"] * buckets + ["waits"] * buckets
