"""The network as ranks measure it: once, and the same on all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import ltx
from ltx import Axis
from ltx.core.comm import network as measuring
from ltx.errors import DeadlockDetectedError, InputError, LtxError, RankMismatchError
from tests.kinds import OnNewAxis, Ranks


def _on_new_axis(fn: Callable[[Axis], Any]) -> Any:
    """fn(axis) with an axis on which nothing was measured."""
    with ltx.axis_from_group(range(dist.get_world_size())) as axis:
        return fn(axis)


@pytest.mark.full(but=1)
@pytest.mark.parametrize("n", [2, 3])
def test_all_ranks_have_the_figures_of_one_measurement(ranks: Ranks, n: int) -> None:
    def measured_twice() -> Any:
        def twice(axis: Axis) -> Any:
            with ltx.profile.record() as first:
                network = ltx.profile.measure_network(axis)
            with ltx.profile.record() as second:
                again = ltx.profile.measure_network(axis)
            return network, again, len(first.events), len(second.events)

        return _on_new_axis(twice)

    found = ranks(n).run(measured_twice)
    networks = {(network, again) for network, again, *_ in found}
    assert len(networks) == 1
    ((network, again),) = networks
    assert network == again
    assert 1e6 < network.bandwidth < 1e13
    assert 0 < network.latency < 1
    assert all(issued > 20 and later == 0 for *_, issued, later in found)


def test_ranks_whose_clocks_differ_take_the_first_ones(ranks: Ranks) -> None:
    def measured_by_its_own_clock() -> Any:
        rank, clock = dist.get_rank(), time.perf_counter
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: 1e6**rank * clock()))
            return _on_new_axis(ltx.profile.measure_network)

    first, second = ranks(2).run(measured_by_its_own_clock)
    assert first == second
    assert first.latency < 0.1, "rank 1's clock goes a million times too fast"


def test_nothing_between_ranks_is_nothing_to_measure() -> None:
    assert ltx.profile.measure_network() is None
    found: list[Any] = []
    ltx.vmap(lambda x: (found.append(ltx.profile.measure_network()), x)[1])(torch.zeros(3))
    assert found == [None]


def test_a_rank_that_does_something_else(ranks: Ranks) -> None:
    def differ() -> str:
        def either(axis: Axis) -> str:
            try:
                if dist.get_rank():
                    ltx.profile.measure_network(axis)
                else:
                    ltx.psum(torch.ones(2), axis)
            except RankMismatchError as error:
                return str(error)
            return "nothing"

        return cast(str, _on_new_axis(either))

    for text in ranks(2).run(differ):
        assert "rank 0: psum" in text
        assert "rank 1: measure_network" in text


def test_a_rank_that_is_interrupted_tells_the_others(on_new_axis: OnNewAxis) -> None:
    def interrupted() -> Any:
        if dist.get_rank():
            calls, inner = [0], measuring._sum_s

            def at_the_third(*args: Any) -> float:
                calls[0] += 1
                if calls[0] == 3:
                    raise KeyboardInterrupt
                return inner(*args)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(measuring, "_sum_s", at_the_third)
                with pytest.raises(KeyboardInterrupt):
                    ltx.profile.measure_network()
        else:
            with pytest.raises(LtxError) as raised:
                ltx.profile.measure_network()
            assert isinstance(raised.value, DeadlockDetectedError)
            assert "KeyboardInterrupt" in str(raised.value)
        return ltx.profile.measure_network()

    first, second = on_new_axis(interrupted)
    assert first == second
    assert isinstance(first, ltx.profile.Network)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ((0, 1e-4), "Network.bandwidth must be a finite number of more than 0, got 0."),
        ((float("inf"), 1e-4), "Network.bandwidth must be a finite number of more than 0, got inf."),
        ((1e9, -1.0), "Network.latency must be a finite number of at least 0, got -1.0."),
        ((1e9, True), "Network.latency must be a finite number of at least 0, got True."),
        (("1 Gbit/s", 0.0), "Network.bandwidth must be a finite number of more than 0, got '1 Gbit/s'."),
    ],
)
def test_figures_that_cannot_be(fields: tuple[Any, Any], text: str) -> None:
    with pytest.raises(InputError) as raised:
        ltx.profile.Network(*fields)
    assert str(raised.value) == text


def test_times_are_those_of_plan(seed: int) -> None:
    for _ in range(20):
        bandwidth, latency = 10 ** (6 + 4 * torch.rand(())).item(), 10 ** (-5 + 3 * torch.rand(())).item()
        n, numel = int(torch.randint(2, 100, ())), int(torch.randint(1, 1000, ())) * 4950
        mine = ltx.profile.Network(bandwidth, latency).sum_s(4 * numel, n)
        link = {"world": n, "bandwidth": bandwidth, "latency": latency, "compute_s": 0.0}
        theirs = ltx.profile.plan(ltx.DDPStrategy(), {"w": torch.empty(numel, device="meta")}, **link)
        assert mine == pytest.approx(next(t.link_s for t in theirs.traffic if t.kind == "gradients"), rel=1e-4)


def test_what_is_measured_follows_from_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that is made up of the formula is found again."""

    class Channel:
        size = 4

    for network in (ltx.profile.Network(1e8, 3e-4), ltx.profile.Network(1e9, 1e-4), ltx.profile.Network(50e9, 2e-6)):
        assert isinstance(network, ltx.profile.Network)
        monkeypatch.setattr(measuring, "_sum_s", lambda channel, numel, device, it=network: it.sum_s(4 * numel, 4))
        found = measuring._measure(cast(Any, Channel()), torch.device("cpu"))
        assert found.bandwidth == pytest.approx(network.bandwidth, rel=0.01)
        assert found.latency == pytest.approx(network.latency, rel=0.05)


@pytest.mark.full
def test_an_axis_that_was_opened_anew_is_measured_anew(ranks: Ranks) -> None:
    def before_and_after() -> Any:
        def look(axis: Axis) -> Any:
            before = axis.comm.network
            return before, ltx.profile.measure_network(axis)

        return [_on_new_axis(look) for _ in range(2)]

    for rank in ranks(2).run(before_and_after):
        assert [before for before, _ in rank] == [None, None]
