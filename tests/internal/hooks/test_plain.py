"""What eager tensors on the CPU take instead of the readable path: the same up to rounding; hooks without state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx import hooks
from ltx.core.gradients import buffers
from ltx.core.gradients.buffers import CHUNK
from ltx.errors import StrategyError, UnsupportedError
from ltx.hooks import CompressedAllReduce
from ltx.hooks.powersgd import multiply_all, orthonormal_all, row_norms
from ltx.strategies.horovod import Scaled
from ltx.strategies.nodes import ByNode
from ltx.strategies.qadam import MeanMomentum
from tests.contract.hooks.table import FED_BACK, HOOKS
from tests.kinds import Ranks
from tests.train_on import reduced, refuses

CODECS: dict[str, CompressedAllReduce] = {
    "one grid": hooks.ByteGrad(),
    "one grid with zero": hooks.Quantize(),
    "a grid a block": hooks.Quantize("channel", 512),
    "blocks longer than a chunk": hooks.Quantize("channel", CHUNK + 512),
    "a bit": hooks.OneBit(),
    "a bit, blocks longer than a chunk": hooks.OneBit(CHUNK + 512),
}
LENGTH = 2 * (CHUNK + 512)  # two chunks and a rest


def with_specials(rows: Tensor) -> Tensor:
    rows[0, 512:1024] = 0.25  # a step of zero
    rows[0, 1024:1536] = 0
    rows[0, 1100:1200] = -0.0
    rows[1, 7], rows[1, CHUNK + 9] = torch.nan, -torch.inf
    return rows


@pytest.fixture
def readable(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on codecs take the readable path."""

    def turn() -> None:
        monkeypatch.setattr(buffers, "IN_PIECES", frozenset())

    return turn


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Several threads share the sum of a long row, which then rounds otherwise than where each sums rows of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.full(but=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CODECS)
def test_codecs_in_chunks(name: str, dtype: torch.dtype, readable: Callable[[], None], seed: int) -> None:
    codec, rows = CODECS[name], torch.randn(3, LENGTH, dtype=dtype)
    rows[2] *= 1e-3
    messages, left = codec.encode(rows, None), rows.clone()
    decoded = codec.decode(messages, LENGTH, dtype)
    assert torch.equal(codec.encode_and_keep(left, None), messages)
    assert torch.equal(left, rows - decoded)
    readable()
    assert torch.equal(codec.encode(rows, None), messages)
    assert torch.equal(codec.decode(messages, LENGTH, dtype), decoded)


@pytest.mark.full(but=2)
@pytest.mark.parametrize("name", CODECS)
def test_codecs_in_chunks_of_what_isnt_finite(name: str, readable: Callable[[], None], seed: int) -> None:
    codec, rows = CODECS[name], with_specials(torch.randn(2, LENGTH))
    messages, left = codec.encode(rows, None), rows.clone()
    decoded = codec.decode(messages, LENGTH, rows.dtype)
    assert not decoded[1, 7].isfinite()
    assert decoded[0].isfinite().all()
    codec.encode_and_keep(left, None)
    torch.testing.assert_close(left, rows - decoded, rtol=0, atol=0, equal_nan=True)
    readable()
    again = codec.decode(codec.encode(rows, None), LENGTH, rows.dtype)
    finite = again.isfinite()
    assert torch.equal(decoded.isfinite(), finite)
    assert torch.equal(decoded[finite], again[finite])


#: What is made of numbers from a normal distribution.
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda row: row,
    "few large": lambda row: row**9,
    # The sample says that all numbers are large.
    "sampled large": lambda row: row + 100 * (torch.arange(len(row)) % 101 == 0),
    "mostly zeros": lambda row: row * (torch.rand(len(row)) < 0.005),
    "ties": lambda row: (3 * row).round(),
    "not finite": lambda row: row.index_copy(0, torch.tensor([50, 60]), torch.tensor([torch.nan, -torch.inf])),
}


@pytest.mark.full(but=2)
@pytest.mark.covering(1)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("ratio", [1e-5, 0.01, 0.5, 1.0])
def test_greatest_are_those_of_topk(change: str, ratio: float, seed: int) -> None:
    rows = torch.stack([CHANGES[change](torch.randn(LENGTH)) for _ in range(2)])
    codec, count = hooks.TopK(ratio), max(1, round(ratio * LENGTH))
    messages, left = codec.encode(rows, None), rows.clone()
    assert messages.shape == (2, 8 * count)
    places = messages[:, 4 * count :].clone().view(torch.int32).long()
    for row, mine in zip(rows, places, strict=True):
        assert len(mine.unique()) == count
        found, expected = row[mine].abs().sort(descending=True).values, torch.topk(row.abs(), count).values
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(codec.encode_and_keep(left, None), messages)
    assert (left.gather(1, places) == 0).all()
    assert torch.equal(left.scatter(1, places, rows.gather(1, places)).nan_to_num(), rows.nan_to_num())


SHAPES = {"tall": (40, 6), "wide": (5, 64), "bias": (9,), "square": (12, 12), "like it": (12, 12)}
SHAPES |= {"row": (1, 8), "kernel": (6, 3, 5)}


@pytest.mark.full(but=5)
@pytest.mark.covering(1)
@pytest.mark.parametrize("spoilt", [None, "square", "bias"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize("name", FED_BACK)
def test_hooks_with_residuals(
    name: str, accelerator: bool, spoilt: str | None, value: float, readable: Callable[[], None], seed: int
) -> None:
    """A world of one takes the short ways, or those of an accelerator; a simulated rank the readable ones."""
    if accelerator:
        readable()
    grads = [{path: torch.randn(shape, dtype=torch.float64) for path, shape in SHAPES.items()} for _ in range(5)]
    grads[1]["tall"] = torch.zeros(40, 6, dtype=torch.float64)
    if spoilt is not None:
        grads[2][spoilt].view(-1)[4] = value
    strategy = ltx.DDPStrategy(comm_hook=HOOKS[name], bucket_bytes=3000)

    def run(*given: Any) -> Any:
        results, state = reduced(strategy, given)
        return results, state.leaves

    results, leaves = run(*grads)
    expected = ltx.vmap(run)(*ltx.tree.map(lambda x: x[None], grads))
    found, wanted = (ltx.tree.flatten(tree)[0] for tree in ((results, leaves), expected))
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other[0], rtol=1e-9, atol=1e-9, equal_nan=True)
    assert all(x.isfinite().all() for x in ltx.tree.flatten(leaves)[0])
    if spoilt is not None:
        assert not results[2][spoilt].isfinite().all()


#: (rows, columns, rank): two of one shape apart from each other, and one that is too large to be copied for it.
MATRICES = [(6, 5, 2), (3, 9, 1), (6, 5, 2), (2000, 600, 2), (3, 9, 1), (6, 5, 2)]


def test_many_matrices_at_once(readable: Callable[[], None], seed: int) -> None:
    """Products, norms and orthonormal rows, as accelerators take them, are those one by one."""
    lefts = [torch.randn(rows, columns, dtype=torch.float64) for rows, columns, _ in MATRICES]
    rights = [torch.randn(r, columns, dtype=torch.float64).mT for _, columns, r in MATRICES]

    def run() -> list[list[Tensor]]:
        products = multiply_all(lefts, rights)
        return [products, row_norms(products), orthonormal_all(products)]

    one_by_one = run()
    readable()
    for mine, expected in zip(run(), one_by_one, strict=True):
        torch.testing.assert_close(mine, expected)
    assert (multiply_all([], []), row_norms([]), orthonormal_all([])) == ([], [], [])


OUTER = [Scaled(hooks.FP16()), ByNode(2, hooks.FP16()), ByNode(2, hooks.FP16(), (2,)), MeanMomentum(0.9)]


def test_fp16_divides_before_it_rounds_and_overflows_alike(ranks: Ranks) -> None:
    xs = torch.tensor([[60000.0, 200000.0], [60000.0, 0.0]])
    strategy = ltx.DDPStrategy(comm_hook="fp16")
    found = ranks(2).run(lambda: ltx.sync_gradients(xs[int(ltx.axis_index())], strategy)[0]).replicated()
    assert found.tolist() == [60000.0, float("inf")]


def test_hooks_without_sums_have_none_to_hand_on() -> None:
    for hook in (hooks.Noop(), hooks.from_torch(lambda state, bucket: None)):
        assert not hook.sums
        refuses(StrategyError, "needs a request for sums", hooks.chain, hook, hooks.ByteGrad())
    assert hooks.cast(hooks.Noop(), torch.bfloat16) == hooks.Noop()


def test_what_is_no_mean_has_no_derivative_and_no_sparse_form(seed: int) -> None:
    """Either would communicate, where Noop is there to measure a step that doesn't."""
    strategy, w, x = ltx.DDPStrategy(comm_hook=hooks.Noop()), torch.randn(5), torch.randn(2)
    step = ltx.data_parallel(lambda w, x: (w**3).sum() * x, strategy)
    torch.testing.assert_close(ltx.vmap(torch.func.grad(step), in_dims=(None, 0))(w, x), 3 * w**2 * x[:, None])
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
