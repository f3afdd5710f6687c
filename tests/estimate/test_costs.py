"""What hooks take by device. There is no accelerator here, so figures of one are put in the place of measured ones."""

from __future__ import annotations

import pytest
import torch

import ltx
from ltx import hooks
from ltx.estimate import autotune, costs
from ltx.profile import Network, plan

CPU, DEVICE = torch.device("cpu"), torch.device("cuda")
PARAMS = {"w": torch.empty(512, 512, device="meta")}
LINK = {"world": 4, "bandwidth": 1e9, "latency": 1e-4, "compute_s": 0.01}


@pytest.mark.parametrize("name", [*hooks.NAMED.values(), "TopK", "QSGD", "OneBit", "PowerSGD"])
def test_what_a_hook_takes_can_be_measured(name: str) -> None:
    taken = costs.measured(getattr(hooks, name)(), CPU, (64, 128))
    assert taken is not None
    assert taken > 0


def test_a_hook_that_reads_peers_gets_what_a_peer_with_the_same_would_send() -> None:
    buffer = torch.randn(2, 3)
    for operation, shape in (
        ("psum", (2, 3)),
        ("all_gather", (2, 2, 3)),
        ("psum_scatter", (3,)),
        ("all_to_all", (2, 3)),
    ):
        answer = costs._as_if_equal(ltx.hooks.CollectiveRequest(operation, buffer))
        assert answer.shape == shape
        assert answer.data_ptr() != buffer.data_ptr()
        torch.testing.assert_close(answer, (buffer[0] if operation == "psum_scatter" else buffer).expand(shape))


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> dict[type[hooks.CommHook], float | None]:
    """What hooks take on an accelerator, to be filled: seconds a number."""
    taken: dict[type[hooks.CommHook], float | None] = {}
    monkeypatch.setattr(costs, "measured", lambda hook, device: taken[type(hook)])
    monkeypatch.setattr(costs, "copies", lambda device: 0.0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: DEVICE)
    return taken


def test_plans_take_what_is_measured_of_an_accelerator(accelerator: dict[type[hooks.CommHook], float | None]) -> None:
    accelerator |= {hooks.AllReduce: 1e-12, hooks.ByteGrad: 3e-12}
    numel = PARAMS["w"].numel()
    exact, eight = ltx.DDPStrategy(), ltx.DDPStrategy(comm_hook=hooks.ByteGrad())
    assert plan(exact, PARAMS, device="cuda", **LINK).codec_s == pytest.approx(numel * 1e-12)
    assert plan(eight, PARAMS, device="cuda", **LINK).codec_s == pytest.approx(numel * 3e-12)
    on_cpu = plan(eight, PARAMS, **LINK).codec_s
    assert on_cpu == pytest.approx(numel * (costs.CODEC_S["ByteGrad"] + costs.BESIDE_S))


def test_a_hook_that_cannot_be_measured_counts_as_the_exact_sum_and_is_named(
    accelerator: dict[type[hooks.CommHook], float | None],
) -> None:
    accelerator |= {hooks.AllReduce: 1e-12, hooks.OneBit: None}
    cost = plan(ltx.DDPStrategy(comm_hook=hooks.OneBit()), PARAMS, device="cuda", **LINK)
    assert cost.codec_s == pytest.approx(PARAMS["w"].numel() * 1e-12)
    assert "OneBit" in cost.notes[0]


def test_auto_chooses_by_the_device(accelerator: dict[type[hooks.CommHook], float | None]) -> None:
    """On 40 Gbit/s a codec of a CPU takes longer than it saves; one that takes next to nothing doesn't."""
    accelerator |= dict.fromkeys((hooks.AllReduce, hooks.BF16, hooks.ByteGrad, hooks.PowerSGD), 1e-13)
    auto, network = ltx.DDPStrategy(comm_hook="auto"), Network(40e9, 1e-6)
    assert autotune.choice_for(auto, PARAMS, 2, network).name == "none"
    assert autotune.choice_for(auto, PARAMS, 2, network, device=DEVICE).name != "none"
    accelerator[hooks.BF16] = accelerator[hooks.ByteGrad] = accelerator[hooks.PowerSGD] = 1e-8
    assert autotune.choice_for(auto, PARAMS, 2, network, device=DEVICE).name == "none"


def test_a_device_that_is_not_here_is_refused() -> None:
    missing = "mps" if torch.accelerator.is_available() else "cuda"
    with pytest.raises(ltx.errors.InputError, match=r"this machine has no such device.*codec_s"):
        plan(ltx.DDPStrategy(), PARAMS, device=missing, **LINK)
    with pytest.raises(ltx.errors.InputError, match="no such device"):
        ltx.profile.recommend(PARAMS, device=missing, **LINK)
    assert plan(ltx.DDPStrategy(), PARAMS, device=missing, codec_s=0.0, **LINK).codec_s == 0.0
