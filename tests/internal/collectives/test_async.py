"""async_: collectives that are begun and waited for later give what they give themselves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ltx
from ltx.core import comm
from ltx.core.collectives.futures import _mover
from ltx.errors import AxisError, LtxError, RankMismatchError, UnsupportedError
from tests.forks import Ranks as Forks
from tests.kinds import Ranks
from tests.train_on import mine, said

CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "psum": (ltx.psum, (), {"prescale": 2, "postscale": 3}),
    "pmean": (ltx.pmean, (), {}),
    "pmax": (ltx.pmax, (), {}),
    "pmin": (ltx.pmin, ("data",), {}),
    "psum_to": (ltx.psum_to, (1,), {}),
    "all_gather": (ltx.all_gather, (), {"dim": 1, "axis": None}),
    "all_gather detached": (ltx.all_gather, ("data",), {"tiled": True, "sync_grads": False}),
    "psum_scatter": (ltx.psum_scatter, (), {"tiled": True}),
    "all_to_all": (ltx.all_to_all, (0, 1), {}),
    "all_to_all untiled": (ltx.all_to_all, (0, 1), {"tiled": False}),
    "ppermute": (ltx.ppermute, ([(0, 1)],), {}),
    "broadcast": (ltx.broadcast, (1,), {}),
    "gather": (ltx.gather, (), {"dst": 1}),
    "scatter": (ltx.scatter, (), {"axis": "data"}),
    "in groups": (ltx.psum, (), {"axis_index_groups": [[1, 0]]}),
}


ON_ONE_AXIS = [name for name in CALLS if name != "in groups"]


def of_each(x: Tensor, call: Callable[..., Any], names: Iterable[str] = CALLS) -> dict[str, Any]:
    """What ``call(collective, tree, arguments)`` makes of every collective."""
    value = {"x": x, "n": x.isnan().long()}
    return {name: call(fn, value, *args, **named) for name, (fn, args, named) in CALLS.items() if name in names}


def directly(fn: Callable[..., Any], *args: Any, **named: Any) -> Any:
    return fn(*args, **named)


def begun(fn: Callable[..., Any], value: Any, *args: Any, **named: Any) -> ltx.Future:
    """Begun; then what was given changes."""
    value = ltx.tree.map(torch.clone, value)
    future = ltx.async_(fn)(value, *args, **named)
    ltx.tree.map(lambda x: x.zero_(), value)
    return future


def waited(futures: dict[str, ltx.Future], backwards: bool) -> dict[str, Any]:
    names = list(futures)
    found = {name: futures[name].wait() for name in (reversed(names) if backwards else names)}
    assert all(future.done and future.wait() is found[name] for name, future in futures.items())
    return {name: found[name] for name in names}


@pytest.mark.parametrize("sockets", [False, True])
def test_processes(on_new_axis: Callable[..., Any], sockets: bool, seed: int) -> None:
    """All at once under way, waited for in another order on each rank, between other collectives."""
    xs = torch.randn(2, 2, 4, dtype=torch.float64)
    xs[1, 0, 1] = torch.nan

    def run() -> tuple[Any, Any, float, float]:
        rank = int(ltx.axis_index())
        futures = of_each(xs[rank].clone(), begun, ON_ONE_AXIS)
        between = ltx.psum(torch.tensor(float(rank)))
        found = waited(futures, backwards=rank == 1)
        return found, of_each(xs[rank], directly, ON_ONE_AXIS), between.item(), len(comm.resolve("data").comm.futures)

    for found, want, between, left in on_new_axis(run, sockets=sockets):
        torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)
        assert (between, left) == (1.0, 0)


def test_in_groups(ranks: Ranks, seed: int) -> None:
    xs = torch.randn(2, 2, 4, dtype=torch.float64)

    found = ranks(2).run(lambda: waited(of_each(mine(xs), begun, ["in groups"]), backwards=False))
    torch.testing.assert_close(found.replicated()["in groups"]["x"], xs.sum(0))


def test_simulated_ranks(seed: int) -> None:
    xs = torch.randn(2, 2, 4, dtype=torch.float64)
    found = ltx.vmap(lambda x: waited(of_each(x, begun), backwards=False))(xs)
    torch.testing.assert_close(found, ltx.vmap(lambda x: of_each(x, directly))(xs))
    batched = torch.vmap(ltx.vmap(lambda x: ltx.async_(ltx.psum)(x).wait()))(xs[None])
    torch.testing.assert_close(batched[0], xs.sum(0).expand(2, 2, 4))


def test_alone() -> None:
    future = ltx.async_(ltx.psum)({"x": torch.ones(2), "n": 3})
    assert future.done
    assert repr(future) == "<ltx.Future of psum, done>"
    assert future.wait()["x"].tolist() == [1.0, 1.0]
    assert future.wait() is future.wait()


def test_layouts_dtypes_and_empty_ones(ranks: Ranks) -> None:
    def run() -> tuple[Any, ...]:
        last = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
        futures = (
            ltx.async_(ltx.broadcast)(last),
            ltx.async_(ltx.gather)(torch.ones(2, dtype=torch.uint16)),
            ltx.async_(ltx.psum)([torch.zeros(0), torch.tensor(True)]),
            ltx.async_(ltx.pmax)(torch.zeros(0, 3)),
            ltx.async_(ltx.psum)({}),
        )
        copied, moved, (empty, flag), none, nothing = (future.wait() for future in futures)
        layout = copied.is_contiguous(memory_format=torch.channels_last)
        return layout, moved.dtype, empty.shape, flag.item(), none.shape, nothing

    assert ranks(2).run(run).replicated() == (True, torch.uint16, (0,), 2, (0, 3), {})


def test_a_rank_may_call_the_collective_itself(ranks: Ranks) -> None:
    def run() -> tuple[float, list[tuple[str, str]]]:
        x = torch.ones(2)
        with ltx.profile.record() as trace:
            total = ltx.async_(ltx.psum)(x).wait() if ltx.axis_index() else ltx.psum(x)
        return total[0].item(), [(event.operation, event.label) for event in trace.events]

    assert list(ranks(2).run(run)) == [(2.0, [("psum", "psum")]), (2.0, [("psum", "async psum")])]


def test_between_steps(ranks: Ranks) -> None:
    """Begun before a training step and waited for after it, whose buckets go over channels of their own."""

    def run() -> list[float]:
        train = ltx.train_step(
            ltx.data_parallel(lambda w, x: (w * x).sum()), ltx.optim.from_torch(torch.optim.SGD, lr=0.1)
        )
        state, found = train.init(torch.ones(3)), []
        for step in range(3):
            future = ltx.async_(ltx.psum)(torch.tensor(float(step)))
            state, metrics = train(state, torch.full((3,), float(ltx.axis_index())))
            found.append(future.wait().item() + 0 * metrics.loss.item())
        return found

    assert ranks(2).run(run).replicated() == [0.0, 2.0, 4.0]


def test_what_has_no_derivative() -> None:
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(UnsupportedError, match=r"async_: ltx\.psum of leaf 'w', which requires a gradient.*x\.detach"):
        ltx.async_(ltx.psum)({"a": torch.ones(1), "w": x})
    with pytest.raises(UnsupportedError, match=r"ltx\.pmax of the value itself, which requires"):
        ltx.async_(ltx.pmax)(x)
    with torch.no_grad():
        assert ltx.async_(ltx.psum)(x).wait().tolist() == [1.0, 1.0]
    text = r"async_: ltx\.pmean under a transform of torch\.func or forward mode"

    def loss(x: Tensor) -> Tensor:
        return ltx.async_(ltx.pmean)(x).wait().sum()

    y = torch.ones(2)
    for call in (torch.func.grad(loss), lambda y: torch.func.jvp(loss, (y,), (y,)), torch.vmap(loss)):
        with pytest.raises(UnsupportedError, match=text):
            call(y)
    with pytest.raises(UnsupportedError, match=text):
        ltx.vmap(torch.func.grad(loss))(torch.ones(2, 2))
    with pytest.raises(UnsupportedError, match=text):
        torch.func.grad(lambda xs: ltx.vmap(loss)(xs).sum())(torch.ones(2, 2))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(UnsupportedError, match=text):
        loss(y)


def test_what_is_no_collective_of_one_message() -> None:
    for fn in (ltx.weighted_mean, ltx.barrier, partial(ltx.psum, axis="data"), 3):
        with pytest.raises(UnsupportedError, match=r"async_ takes a collective that is one message, got .*ltx\.psum, "):
            ltx.async_(fn)  # type: ignore[arg-type]
    for call in (
        lambda x: ltx.async_(ltx.all_gather)(x, tiled=True, splits=[2]),
        lambda x: ltx.async_(ltx.psum_scatter)(x, tiled=True, splits=[2]),
        lambda x: ltx.async_(ltx.all_to_all)(x, 0, 0, splits=[2]),
        lambda x: ltx.async_(ltx.psum)(x.to_sparse()),
    ):
        with pytest.raises(UnsupportedError, match=r"async_: .* is more than one message"):
            call(torch.ones(2))
    with pytest.raises(TypeError, match="missing a required argument: 'value'"):
        ltx.async_(ltx.psum)()


def test_compiled() -> None:
    with pytest.raises(RuntimeError, match=r"UnsupportedError: async_: ltx\.psum can't be begun in a compiled graph"):
        torch.compile(lambda x: ltx.async_(ltx.psum)(x).wait(), fullgraph=True, backend="eager")(torch.ones(2))


def test_ranks_that_disagree(ranks: Ranks) -> None:
    """At the call, as the collective itself."""

    def run() -> str:
        return said(RankMismatchError, ltx.async_(ltx.psum), {"w": torch.ones(31 + int(ltx.axis_index()))})

    found = ranks(2).run(run)
    assert "ranks disagree on psum, leaf 'w': rank 0: float32[31]; rank 1: float32[32]" in found.replicated()


@pytest.mark.parametrize("sockets", [False, True])
def test_nobody_waits(started: Callable[..., Forks], sockets: bool) -> None:
    """Neither a hang nor an abort at the end, also where the peer hasn't come to it yet; its value is there then."""

    def body(tell: Callable[[Any], None]) -> None:
        ltx.psum(torch.ones(2_000_000))  # known from now on, so that the first to begin it doesn't wait
        if dist.get_rank() == 0:
            time.sleep(0.3)  # the peer is in its shutdown by then
        kept = ltx.async_(ltx.psum)(torch.ones(2_000_000))
        for _ in range(5):
            ltx.async_(ltx.psum)(torch.ones(2_000_000))
        ltx.shutdown()
        tell((kept.wait()[-1].item(), kept.done))

    world = started(2, body, sockets=sockets)
    assert [line.recv() for line in world.lines] == [(2.0, True)] * 2
    for process in world.processes:
        process.join(60)
        assert process.exitcode == 0


@pytest.mark.parametrize("sockets", [False, True])
def test_a_peer_waits_while_this_rank_is_elsewhere(started: Callable[..., Forks], sockets: bool) -> None:
    """In another library's barrier, say. A thread does this rank's part, where there is something to do."""

    def watched() -> bool:
        deadline = time.monotonic() + 30.0
        while _mover._watched and time.monotonic() < deadline:
            time.sleep(0.01)
        return bool(_mover._watched)

    def body(tell: Callable[[Any], None]) -> None:
        size = 2_000_000
        ltx.psum(torch.ones(size))  # known from now on, so that the first to begin it doesn't wait
        needless = _mover._thread is not None
        dist.barrier()
        if dist.get_rank() == 0:
            time.sleep(0.3)
        futures = [ltx.async_(ltx.psum)(torch.full((size,), i)) for i in (1.0, 2.0)]
        if dist.get_rank() == 0:
            values = [future.wait() for future in futures]
            dist.barrier()
        else:
            dist.barrier()
            values = [future.wait() for future in futures]
        tell(([value.unique().tolist() for value in values], needless, watched()))

    world = started(2, body, sockets=sockets)
    assert [world.told(rank) for rank in (0, 1)] == [([[2.0], [4.0]], False, False)] * 2


@pytest.mark.parametrize("sockets", [False, True])
def test_one_that_the_peer_never_begins(started: Callable[..., Forks], sockets: bool) -> None:
    """The end of the world gives it up, and a wait after that says so."""

    def body(tell: Callable[[Any], None]) -> None:
        future = None
        ltx.psum(torch.ones(3))  # known from now on
        if dist.get_rank() == 0:
            future = ltx.async_(ltx.psum)(torch.ones(3))
        began = time.monotonic()
        ltx.shutdown()
        took_s, text = time.monotonic() - began, ""
        if future is not None:
            text = said(AxisError, future.wait)
            assert said(AxisError, future.wait) == text
        tell((text, took_s))

    world = started(2, body, sockets=sockets)
    (text, took_s), (_, other_s) = (line.recv() for line in world.lines)
    assert text.startswith("async psum was under way when its axis was closed, and couldn't be completed: ")
    assert max(took_s, other_s) < 15
    for process in world.processes:
        process.join(60)
        assert process.exitcode == 0


def test_a_failed_one_fails_again(on_new_axis: Callable[..., Any]) -> None:
    """The peer calls something else, which is known too: the error names what was begun."""

    def run() -> list[str]:
        x = torch.ones(3)
        ltx.psum(x)
        ltx.pmax(x)
        future = ltx.async_(mine((ltx.psum, ltx.pmax)))(x)
        return [said(LtxError, future.wait) for _ in range(2)]

    for rank, (first, second) in enumerate(on_new_axis(run)):
        assert first == second
        assert f"async {'pmax' if rank else 'psum'} on axis 'data'" in first
