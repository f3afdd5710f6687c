"""The stateless hooks, on real, simulated and single ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ltx
from ltx import hooks
from ltx.errors import StrategyError, UnsupportedError
from ltx.strategies.horovod import Scaled
from ltx.strategies.nodes import ByNode
from ltx.strategies.qadam import MeanMomentum
from tests.kinds import Ranks
from tests.train_on import mine, refuses

OUTER = [Scaled(hooks.FP16()), ByNode(2, hooks.FP16()), ByNode(2, hooks.FP16(), (2,)), MeanMomentum(0.9)]


def synced(name: str, grad: Tensor) -> Tensor:
    return ltx.sync_gradients([grad], ltx.DDPStrategy(comm_hook=name))[0][0]


def test_fp16_divides_before_it_rounds_and_overflows_alike(ranks: Ranks) -> None:
    xs = torch.tensor([[60000.0, 200000.0], [60000.0, 0.0]])
    assert ranks(2).run(lambda: synced("fp16", mine(xs))).replicated().tolist() == [60000.0, float("inf")]


def test_gradients_of_gradients_are_exact(ranks: Ranks, seed: int) -> None:
    """The outer backward pass goes through the inner one, on the wire too."""
    w, v = torch.randn(2, 50, dtype=torch.float64)

    def run() -> Tensor:
        scale = 1 + ltx.axis_index()
        step = ltx.data_parallel(lambda w: scale * (w**3).sum(), ltx.DDPStrategy(comm_hook=ltx.hooks.ByteGrad()))
        return torch.func.grad(lambda w: torch.func.grad(step)(w) @ v)(w)

    torch.testing.assert_close(ranks(2).run(run).replicated(), 1.5 * 6 * w * v)


def test_hooks_without_sums_have_none_to_hand_on() -> None:
    for hook in (hooks.Noop(), hooks.from_torch(lambda state, bucket: None)):
        assert not hook.sums
        refuses(StrategyError, "needs a request for sums", hooks.chain, hook, hooks.ByteGrad())
    assert hooks.cast(hooks.Noop(), torch.bfloat16) == hooks.Noop()


def test_what_is_no_mean_has_no_derivative_and_no_sparse_form(seed: int) -> None:
    """Either would communicate, where Noop is there to measure a step that doesn't."""
    strategy, w, x = ltx.DDPStrategy(comm_hook=hooks.Noop()), torch.randn(5), torch.randn(2)
    step = ltx.data_parallel(lambda w, x: (w**3).sum() * x, strategy)
    gradients = ltx.vmap(torch.func.grad(step), in_dims=(None, 0))(w, x)
    torch.testing.assert_close(gradients, 3 * w**2 * x[:, None])
    text = r"a mean of gradients, which Noop\(\) doesn't offer: .*block_backward_sync"
    refuses(UnsupportedError, text, ltx.vmap(torch.func.hessian(step), in_dims=(None, 0)), w, x)
    text = r"needs a mean of gradients, which Noop\(\) doesn't"
    refuses(UnsupportedError, text, ltx.sync_gradients, {"table": torch.eye(3).to_sparse()}, strategy)


@pytest.mark.parametrize("outer", OUTER, ids=repr)
def test_a_hook_around_another_forgets_no_member(outer: hooks.CommHook) -> None:
    """A member of CommHook is the outer hook's own, or the inner hook's; it isn't CommHook's."""
    own = {"at", "reduce"}
    mro = type(outer).__mro__
    defined = {name for cls in mro[: mro.index(hooks.CommHook)] for name in vars(cls)}
    assert {name for name in vars(hooks.CommHook) if not name.startswith("_")} - own - defined == set()
