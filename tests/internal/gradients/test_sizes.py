"""Sizes of buckets from the cost model, against the model itself."""

from __future__ import annotations

import math

import pytest
import torch

from ltx import hooks
from ltx.core.gradients.planning import DEFAULT_BYTES, MIB, bucket_sizes, chosen_sizes
from ltx.profile import Network

START = 0.02


def _drawn() -> tuple[Network, int, int]:
    bandwidth, latency = (10 ** (a + b * torch.rand(()).item()) for a, b in ((6.0, 5.5), (-6.0, 4.0)))
    return Network(bandwidth, latency), int(torch.randint(2, 65, ())), int(10 ** (4 + 6 * torch.rand(()).item()))


def _starts_s(network: Network, ranks: int, nbytes: int, size: int) -> float:
    """What is lost where the link is what a step waits for."""
    return network.start_s(ranks) * nbytes / size


def _tail_s(network: Network, ranks: int, nbytes: int, size: int) -> float:
    """What is lost where it isn't: the last bucket."""
    return network.sum_s(size, ranks) - network.start_s(ranks)


def test_every_size(seed: int) -> None:
    for _ in range(300):
        network, ranks, nbytes = _drawn()
        size, first = bucket_sizes(network, ranks, nbytes, MIB)
        assert size & (size - 1) == 0, "a power of two"
        assert 256 << 10 <= size <= 256 << 20
        assert 0 < first <= min(size // 4, MIB)
        assert bucket_sizes(network, ranks, nbytes, 1000)[1] == 1000


def test_starts_take_little_of_the_links_time(seed: int) -> None:
    """Where the link is the bottleneck: at most what the default's starts take, or a fiftieth of the whole, rounded."""
    for _ in range(300):
        network, ranks, nbytes = _drawn()
        size, _ = bucket_sizes(network, ranks, nbytes, MIB)
        lost = _starts_s(network, ranks, nbytes, size)
        default = _starts_s(network, ranks, nbytes, DEFAULT_BYTES)
        assert lost <= max(1.5 * default, 1.45 * START * network.sum_s(nbytes, ranks))


def test_it_is_near_the_best_of_the_sum(seed: int) -> None:
    """Where neither the bounds nor the default hold it, no other power of two loses a tenth less."""
    for _ in range(300):
        network, ranks, nbytes = _drawn()
        size, _ = bucket_sizes(network, ranks, nbytes, MIB)
        if size <= DEFAULT_BYTES or size == 256 * MIB:
            continue
        lost = {
            other: _starts_s(network, ranks, nbytes, other) + _tail_s(network, ranks, nbytes, other)
            for other in (1 << k for k in range(18, 29))
        }
        assert lost[size] <= 1.1 * min(lost.values())


def test_latency_makes_buckets_larger(seed: int) -> None:
    for _ in range(50):
        network, ranks, nbytes = _drawn()
        sizes = [bucket_sizes(Network(network.bandwidth, k * network.latency), ranks, nbytes, MIB)[0] for k in (1, 10)]
        assert sizes == sorted(sizes)


@pytest.mark.parametrize(
    ("network", "size"),
    [
        (Network(25e9, 50e-6), 4 * MIB),  # shared memory
        (Network(1e9, 125e-6), 2 * MIB),
        (Network(1e8, 300e-6), 512 << 10),
        (Network(1e9, 20e-3), 8 * MIB),  # far apart
    ],
)
def test_known_links(network: Network, size: int) -> None:
    assert bucket_sizes(network, 2, 21_000_000, MIB) == (size, min(size // 4, MIB))


@pytest.mark.full(but=1)
@pytest.mark.parametrize(
    ("hook", "sizes"),
    [
        (hooks.AllReduce(), (2 * MIB, MIB // 2)),
        (hooks.FP16(), (2 * MIB, MIB // 2)),
        (hooks.ByteGrad(), (4 * MIB, MIB)),
        (hooks.PowerSGD(rank=2), (4 * MIB, MIB)),
    ],
    ids=repr,
)
def test_hooks_of_several_phases_keep_the_default_at_least(hook: hooks.CommHook, sizes: tuple[int, int]) -> None:
    network = Network(1e9, 125e-6)
    assert chosen_sizes((4 * MIB, MIB), network, hook, 2, 21_000_000) == sizes
    assert chosen_sizes((4 * MIB, MIB), Network(1e9, 20e-3), hook, 2, 21_000_000)[0] == 8 * MIB
    assert chosen_sizes((4 * MIB, MIB), None, hook, 2, 21_000_000) == (4 * MIB, MIB)


@pytest.mark.full
def test_nothing_to_send() -> None:
    assert bucket_sizes(Network(1e9, 1e-4), 2, 0, MIB)[0] >= 1
    assert math.log2(bucket_sizes(Network(1e9, 0.0), 2, 10, MIB)[0]).is_integer()
