"""The errors of single messages, against the bounds of the papers that each hook's file names."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import ltx
from ltx import hooks
from ltx.errors import StrategyError
from ltx.hooks import CompressedAllReduce, noise

INPUTS = {
    "normal": lambda: torch.randn(3, 512),
    "few large ones": lambda: torch.randn(3, 512) ** 5,
    "one sign": lambda: torch.rand(3, 512) + 1,
    "tiny": lambda: 1e-9 * torch.randn(3, 512),
    "far from zero": lambda: 1e4 + 1e-2 * torch.rand(3, 512),
    "equal": lambda: torch.full((3, 512), 0.3),
    "huge": lambda: 3e38 * (2 * torch.rand(3, 512) - 1),
}


def received(hook: CompressedAllReduce, rows: Tensor, key: Tensor | None = None) -> Tensor:
    messages = hook.encode(rows, key)
    assert messages.dtype == torch.uint8
    assert messages.shape[0] == rows.shape[0]
    return hook.decode(messages, rows.shape[1], rows.dtype)


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("hook", [hooks.ByteGrad(), hooks.Quantize(), hooks.Quantize("channel", 64)], ids=repr)
def test_eight_bits_are_off_by_half_a_step(hook: hooks.ByteGrad | hooks.Quantize, name: str, seed: int) -> None:
    """Of the true range, whatever it is: nothing wraps, and nothing is below a least step."""
    rows = INPUTS[name]()
    groups = rows.view(-1, 64) if hook == hooks.Quantize("channel", 64) else rows
    low, high = groups.double().amin(1, keepdim=True), groups.double().amax(1, keepdim=True)
    if isinstance(hook, hooks.Quantize):
        low, high = low.clamp(max=0), high.clamp(min=0)
    step = (high - low) / 255
    error = (received(hook, rows).view_as(groups).double() - groups.double()).abs()
    # What float32 itself can't tell apart, at the size of the numbers and of their range.
    unit = 4 * torch.finfo(torch.float32).eps * torch.maximum(low.abs(), high.abs())
    assert (error <= step / 2 * 1.001 + unit).all()
    if name in ("normal", "tiny", "one sign"):
        assert received(hook, rows)[0].unique().numel() > 60


@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e30])
def test_zero_is_exact_in_affine_quantization(scale: float, seed: int) -> None:
    rows = scale * torch.randn(4, 512)
    rows[:, ::3] = 0
    rows[1].abs_()
    rows[2] = -rows[2].abs()
    for hook in (hooks.ByteGrad(), hooks.Quantize(), hooks.Quantize("channel", 64)):
        assert (received(hook, rows)[:, ::3] == 0).all()
        assert (torch.func.vmap(lambda row, hook=hook: received(hook, row[None])[0])(rows)[:, ::3] == 0).all()


def bagua(x: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, decoded) of MinMaxUInt8."""
    s = 255 / (x.max() - x.min() + 1e-7)
    upper = torch.round(x.max() * s)
    codes = (torch.minimum(torch.round(x * s), upper) - upper + 255).clamp(0, 255)
    return codes, (codes + upper - 255) / s


def test_bytegrad_is_bagua_s_min_max_uint8(seed: int) -> None:
    golden = torch.tensor([[-1, -0.5, 0, 0.25, 1]])
    assert bagua(golden)[0].tolist() == [[0, 63, 127, 159, 255]]
    for x in (golden, torch.randn(1, 4096), 0.003 * torch.randn(1, 4096), torch.randn(1, 4096).double()):
        codes = hooks.ByteGrad().encode(x, None)[:, 2 * x.itemsize :].view(torch.int8).to(x.dtype) + 128
        expected, decoded = bagua(x)
        assert torch.equal(codes, expected)
        torch.testing.assert_close(received(hooks.ByteGrad(), x), decoded, rtol=3e-7, atol=3e-7 * float(x.abs().max()))


@pytest.mark.parametrize("name", INPUTS)
def test_one_bit_keeps_the_mean_size(name: str, seed: int) -> None:
    """|C(x) - x|^2 = (1 - |x|_1^2 / (d |x|^2)) |x|^2 for each block."""
    rows = INPUTS[name]().double()
    blocks, found = rows.view(-1, 64), received(hooks.OneBit(block=64), rows).view(-1, 64)
    expected = blocks.pow(2).sum(1) - blocks.abs().sum(1).pow(2) / 64
    assert (((found - blocks).pow(2).sum(1) - expected).abs() <= 1e-12 * blocks.pow(2).sum(1)).all()


@pytest.mark.parametrize("ratio", [0.004, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("name", INPUTS)
def test_top_k_leaves_the_smallest(name: str, ratio: float, seed: int) -> None:
    rows = INPUTS[name]().double()
    count = max(1, round(ratio * 512))
    found = received(hooks.TopK(ratio), rows)
    assert ((found != 0).sum(1) <= count).all()
    left = (found - rows).pow(2).sum(1)
    assert (left <= (1 - count / 512) * rows.pow(2).sum(1) * (1 + 1e-12)).all()
    torch.testing.assert_close(left, rows.abs().sort(dim=1).values[:, : 512 - count].pow(2).sum(1), rtol=1e-12, atol=0)


@pytest.mark.parametrize("levels", [6, 15])
def test_what_qsgd_feeds_back_stays_small(levels: int, seed: int) -> None:
    """In the longest blocks that are allowed; in longer ones it doubled at every step."""
    hook = hooks.QSGD(levels=levels, block=levels**2 - 1, error_feedback=True)
    strategy, x = ltx.DDPStrategy(comm_hook=hook), torch.randn(2, 4096)

    def residuals(x: Tensor) -> Tensor:
        state, found = ltx.data_parallel(lambda p: p, strategy).init(x), []
        for _ in range(12):
            _, state = ltx.sync_gradients(x, strategy, state)
            found.append(next(iter(state.leaves.values()))["residual"].norm())
        return torch.stack(found)

    assert (ltx.vmap(residuals)(x) <= 2 * x.norm(dim=1, keepdim=True)).all()


@pytest.mark.full(but=2)
@pytest.mark.parametrize("levels", [1, 4, 127])
def test_qsgd_is_unbiased_within_its_variance(levels: int, seed: int) -> None:
    """E|Q(x) - x|^2 <= min(d / s^2, sqrt(d) / s) |x|^2, lemma 3.1."""
    hook, x, draws = hooks.QSGD(levels=levels, block=512), torch.randn(1, 512).double(), 400
    keys = (noise.key_of(seed, i, device=x.device) for i in range(draws))
    found = torch.stack([received(hook, x, key) for key in keys])
    assert 0 < (found - x).pow(2).sum(-1).mean() <= min(512 / levels**2, 512**0.5 / levels) * x.pow(2).sum()
    for direction in (x, x.sign(), torch.randn_like(x)):  # single elements are too seldom drawn to tell
        along = ((found - x) * direction).sum(-1)
        assert abs(along.mean()) <= 6 * along.std() / draws**0.5


def test_random_k_leaves_what_its_ratio_says(seed: int) -> None:
    """E|C(x) - x|^2 = (1 - k/d) |x|^2."""
    x, draws = torch.randn(1, 500).double(), 400
    hook = hooks.RandomK(0.1, seed=seed, error_feedback=True)
    state = ltx.data_parallel(lambda p: p, ltx.DDPStrategy(comm_hook=hook)).init(x)
    left = []
    for step in range(draws):
        fresh = ltx.SyncState(state.leaves, state.uses, state.clock, step)
        found, _ = ltx.sync_gradients(x, ltx.DDPStrategy(comm_hook=hook), fresh)
        assert (found != 0).sum() == 50
        left.append((found - x).pow(2).sum() / x.pow(2).sum())
    errors = torch.stack(left)
    assert abs(errors.mean() - 0.9) <= 6 * errors.std() / draws**0.5


def test_random_numbers_are_uniform_normal_and_their_keys_differ(seed: int) -> None:
    cpu = torch.device("cpu")
    count = 100_000
    u = noise.uniform(noise.key_of(seed, 1, device=cpu), count, torch.float64)
    assert u.min() >= 0
    assert u.max() < 1
    frequencies = torch.histc(u, 50, 0, 1) / count
    assert (frequencies - 0.02).abs().max() <= 6 * (0.02 * 0.98 / count) ** 0.5
    z = noise.normal(noise.key_of(seed, 2, device=cpu), count, torch.float64)
    assert abs(z.mean()) <= 6 / count**0.5
    assert abs(z.std() - 1) <= 6 / (2 * count) ** 0.5
    for other in (noise.key_of(seed + 1, 1, device=cpu), noise.key_of(seed, 2, device=cpu)):
        assert abs(torch.stack([u, noise.uniform(other, count, torch.float64)]).corrcoef()[0, 1]) <= 6 / count**0.5
    assert abs(torch.stack([u[:-1], u[1:]]).corrcoef()[0, 1]) <= 6 / count**0.5


@pytest.mark.parametrize("warm_start", [True, False])
def test_many_power_iterations_give_the_best_approximation(warm_start: bool) -> None:
    """That of the singular value decomposition, of the mean over ranks, in one step."""
    hook = hooks.PowerSGD(3, 0, warm_start, min_compression_rate=1, error_feedback=False, iterations=40)
    left, right = (torch.linalg.qr(torch.randn(n, 12, dtype=torch.float64))[0] for n in (30, 20))
    values = 0.5 ** torch.arange(12, dtype=torch.float64)  # with gaps, by which it converges
    mean, noise = left * values @ right.mT, torch.randn(30, 20, dtype=torch.float64)
    strategy = ltx.DDPStrategy(comm_hook=hook)
    state = ltx.data_parallel(lambda p: p, strategy).init(mean)
    found = ltx.vmap(lambda g: ltx.sync_gradients(g, strategy, state)[0])(torch.stack([mean + noise, mean - noise]))
    torch.testing.assert_close(found, (left[:, :3] * values[:3] @ right[:, :3].mT).expand(2, -1, -1))


#: What can't work, also at some later step, is refused when it is made.
WRONG = [
    ("rank", lambda: hooks.PowerSGD(rank=0)),
    ("start_step", lambda: hooks.PowerSGD(start_step=-1)),
    ("iterations", lambda: hooks.PowerSGD(iterations=0)),
    ("min_compression_rate", lambda: hooks.PowerSGD(min_compression_rate=0)),
    ("per", lambda: hooks.Quantize("row")),
    ("channel", lambda: hooks.Quantize("channel", 0)),
    ("levels", lambda: hooks.QSGD(levels=128)),
    ("block", lambda: hooks.OneBit(block=12)),
    ("ratio", lambda: hooks.TopK(0)),
    ("ratio must", lambda: hooks.RandomK(1.5)),
    ("step must", lambda: hooks.after(-1, hooks.OneBit())),
    ("After.hook must be CommHook", lambda: hooks.after(1, "onebit")),
    ("needs a request for sums, which ByteGrad", lambda: hooks.chain(hooks.ByteGrad(), hooks.FP16())),
    ("needs a request for sums, which ByteGrad", lambda: hooks.chain(hooks.after(9, hooks.ByteGrad()), hooks.BF16())),
    ("needs a hook without per-parameter state", lambda: hooks.chain(hooks.AllReduce(), hooks.OneBit())),
    ("sums of its results, which Adasum", lambda: hooks.chain(hooks.AllReduce(), hooks.after(9, hooks.Adasum()))),
    ("sums of its results, which Noop", lambda: hooks.chain(hooks.AllReduce(), hooks.Noop())),
    ("sums of its results, which FromTorch", lambda: hooks.chain(hooks.AllReduce(), hooks.from_torch(print))),
    ("dtype must be", lambda: hooks.cast(hooks.AllReduce(), torch.int8)),
    ("expected hooks by pattern, got {}", lambda: hooks.partition({})),
    (r"got <class '.*FP16'> for '\*'", lambda: hooks.partition({"*": hooks.FP16})),
    ("hooks.partition needs a hook that calls", lambda: hooks.partition({"*": hooks.from_torch(print)})),
    (r"levels\^2 = 225 numbers or more", lambda: hooks.error_feedback(hooks.QSGD(levels=15, block=225))),
    (r"levels\^2 = 4 numbers", lambda: hooks.chain(hooks.RandomK(0.5), hooks.QSGD(levels=2))),
    ("needs an error to feed back", lambda: hooks.error_feedback(hooks.AllReduce())),
    ("needs an error to feed back", lambda: hooks.error_feedback(hooks.after(9, hooks.AllReduce()))),
]


@pytest.mark.parametrize(("text", "make"), WRONG)
def test_wrong_fields_are_refused_when_made(text: str, make: Callable[[], object]) -> None:
    with pytest.raises(StrategyError, match=text) as raised:
        make()
    assert isinstance(raised.value, ValueError)
