"""The table of conformance: every operation under every transform. A new operation is one row of OPS.

Each row says an operation twice: as one rank calls it, and as plain torch on the stacked values of all ranks. Each
transform is said twice too. Between the two lies the convention of all of ltx: a derivative on rank r is that of the
sum over ranks of each rank's own loss. So what is expected comes from torch.func in one process, on one stacked tensor,
without anything of ltx.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import ltx
from ltx.extend import collectives

Fn = Callable[[Tensor], Tensor]

REAL = (torch.float32, torch.bfloat16)
ALL = (*REAL, torch.complex64)
WHOLE = (torch.int64, torch.bool)
#: Relative error of results by the dtype that operations round in; losses are always float64. Means of whole numbers
#: are float32.
ROUNDING = {torch.float64: 1e-9, torch.bfloat16: 4 * torch.finfo(torch.bfloat16).eps}
ROUNDING |= dict.fromkeys((torch.float32, torch.complex64, *WHOLE), 1e-5)


@dataclass(frozen=True)
class Op:
    """One operation.

    Attributes:
        name: its part of a test's name.
        apply: what one rank calls, on a float64 tensor of shape (n, 2 n).
        reference: the same for the stacked values of all ranks: (n, *shape) -> (n, *shape of the result).
        replicated: ranks have the same argument, like the parameters of a step.
        from_outside: a transform around all simulated ranks together gives the same as one on each rank.
        compiled: the transforms that are also compiled, which takes most of the time.
        paired: it is for 1, 2, 4, ... ranks alone.
        rounding: relative error of gradients, which some hooks round; second derivatives are exact.
        dtypes: that it also works in, besides float64.
        whole: dtypes without derivatives that it also works in.
    """

    name: str
    apply: Fn
    reference: Fn
    replicated: bool = False
    from_outside: bool = True
    compiled: tuple[str, ...] = ("hvp",)
    paired: bool = False
    rounding: float = 0.0
    dtypes: tuple[torch.dtype, ...] = REAL
    whole: tuple[torch.dtype, ...] = ()

    def output(self, x: Tensor, equal: bool = False) -> Tensor:
        """The operation's result on one rank, with the rank's weight: r + 1 for rank r, or 1 for all."""
        return self.apply(x) * (1 if equal else 1 + ltx.axis_index())

    def outputs(self, xs: Tensor, equal: bool = False) -> Tensor:
        """The same on all ranks."""
        return torch.stack([y * (1 if equal else 1 + rank) for rank, y in enumerate(self.reference(xs))])


@dataclass(frozen=True)
class Transform:
    """One transform of a function, at a point x in a direction t.

    Attributes:
        name: its part of a test's name.
        per_rank: ``(output, x, t)`` on one rank.
        reference: ``(outputs, xs, ts)`` on stacks; gives the stack of what the ranks get.
        gradient: a first derivative in reverse mode.
        plain: by autograd without torch.func, which can't be used under vmap or torch.compile.
        real: torch has it for real numbers alone.
        forward: in forward mode, in part at least.
    """

    name: str
    per_rank: Callable[[Fn, Tensor, Tensor], Tensor]
    reference: Callable[[Fn, Tensor, Tensor], Tensor]
    gradient: bool = False
    plain: bool = False
    real: bool = False
    forward: bool = False


# --- operations ------------------------------------------------------------------------------------------------------


class SumOfCopies(torch.autograd.Function):
    """Identity whose cotangent is n times as large: from the mean of n equal copies to the one value they share."""

    @staticmethod
    def forward(x: Tensor, n: int) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        ctx.n = inputs[1]

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        return cotangent * ctx.n, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return SumOfCopies.apply(tangent, ctx.n)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], x: Tensor, n: int) -> tuple[Tensor, int]:
        return SumOfCopies.apply(x, n), in_dims[0]


def everywhere(y: Tensor, n: int) -> Tensor:
    return y.expand(n, *y.shape)


def to_all(f: Fn) -> Fn:
    return lambda xs: everywhere(f(xs), len(xs))


sum_of, mean_of = to_all(lambda xs: xs.sum(0)), to_all(lambda xs: xs.mean(0))


def beside_each_other(xs: Tensor) -> Tensor:
    return torch.cat(xs.unbind(), 1)


def on_each(f: Callable[[Tensor, int], Tensor], xs: Tensor) -> Tensor:
    return torch.stack([f(x, rank) for rank, x in enumerate(xs)])


def groups(n: int) -> list[list[int]]:
    """Of 1, 2 and 3 ranks [[0]], [[1, 0]] and [[2, 0], [1]]."""
    alone = [1] if n > 2 else []
    return [[rank for rank in reversed(range(n)) if rank not in alone], *([alone] if alone else [])]


def within_groups(collective: Callable[..., Tensor]) -> Fn:
    return lambda x: collective(x, axis_index_groups=groups(ltx.axis_size()))


def in_groups(f: Fn, xs: Tensor) -> Tensor:
    by_group = groups(len(xs))
    order = torch.tensor([rank for group in by_group for rank in group]).argsort()
    return torch.cat([f(xs[group]) for group in by_group])[order]


def on_last(y: Tensor, n: int) -> Tensor:
    """What the last rank has; the others have zeros."""
    return torch.stack([*[torch.zeros_like(y)] * (n - 1), y])


def ring(n: int) -> list[tuple[int, int]]:
    return [(rank, (rank + 1) % n) for rank in range(n)]


def exchanged(xs: Tensor) -> Tensor:
    """Rank r's chunks of dimension 1, one below the other."""
    n = len(xs)
    return torch.stack([torch.cat([x.chunk(n, 1)[rank] for x in xs]) for rank in range(n)])


def wide(x: Tensor) -> Tensor:
    """In float64; complex numbers as pairs."""
    return (torch.view_as_real(x) if x.is_complex() else x).double()


def rank_loss(w: Tensor, rank: Tensor | int) -> Tensor:
    w = wide(w)
    return torch.cos(w * (rank + 2) / 2).sum() + torch.tanh(w.sum(1)).sum() * (1 + rank)


def rank_losses(ws: Tensor) -> Tensor:
    # Equal parameters on all ranks are their own mean, whose derivative is the mean of derivatives: data parallelism.
    return on_each(rank_loss, mean_of(ws))


def step(params: dict[str, Tensor]) -> Tensor:
    return rank_loss(torch.cat([params["w"], params["b"]], dim=1), ltx.axis_index())


def data_parallel(transformation: Callable[[Any], Any] = lambda s: s, outputs: Any = "local", **fields: Any) -> Fn:
    """`step` with two parameters, which travel in two buckets."""
    strategy = ltx.DDPStrategy(first_bucket_bytes=8, bucket_bytes=8, **fields)
    wrapped = transformation(ltx.data_parallel(step, strategy, outputs=outputs))
    return lambda w: wrapped({"w": w[:, :1], "b": w[:, 1:]})


summing_step = ltx.data_parallel(lambda w: rank_loss(ltx.psum(w * (1 + ltx.axis_index())) / 3, ltx.axis_index()))
weighted_step = ltx.data_parallel(lambda w: ltx.Weighted(rank_loss(w, ltx.axis_index()), 1 + ltx.axis_index()))


def batch_of(rank: Tensor | int) -> Tensor:
    return torch.tensor([0.5, 1.0, 1.5, 2.0], dtype=torch.float64) + rank


def adasum_of(xs: Tensor) -> Tensor:
    """(1 - <a,b> / 2|a|²) a + (1 - <a,b> / 2|b|²) b, for halves of the ranks."""
    if len(xs) == 1:
        return xs[0]
    a, b = map(adasum_of, xs.chunk(2))
    dot = (a * b).sum()
    return (1 - dot / (2 * a.square().sum())) * a + (1 - dot / (2 * b.square().sum())) * b


def batch_loss(w: Tensor, batch: Tensor) -> Tensor:
    return torch.stack([torch.sin(wide(w) * sample).sum() for sample in batch.unbind()]).mean()


def weight_of(x: Tensor) -> Tensor:
    return 1 + wide(x).square().mean()


def weighted_mean_of(xs: Tensor) -> Tensor:
    weights = torch.stack([weight_of(x) for x in xs])
    return everywhere(torch.einsum("rij,r->ij", xs, weights.to(xs.dtype)) / weights.sum(), len(xs))


def batch_norm(x: Tensor) -> Tensor:
    """One channel, so that a world of one has two values too."""
    slope, shift = torch.tensor([[1.5], [0.5]], dtype=x.dtype)
    return ltx.nn.sync_batch_norm(x.unsqueeze(1), None, None, slope, shift, eps=0.1)[0].squeeze(1)


def batch_norm_of(xs: Tensor) -> Tensor:
    return 1.5 * (xs - xs.mean()) / (xs.var(correction=0) + 0.1).sqrt() + 0.5


def softmax(x: Tensor) -> Tensor:
    exps = torch.exp(x - ltx.pmax(x.detach()))
    return exps / ltx.psum(exps)


def product_round_a_ring(x: Tensor) -> Tensor:
    """A rank's rows times the sum of all ranks' transposed ones, each multiplied as it comes round."""
    passing, y = x, x @ x.mT
    for _ in range(ltx.axis_size() - 1):
        passing = ltx.ppermute(passing, ring(ltx.axis_size()))
        y = y + x @ passing.mT
    return y


PREFIX_SUM = collectives.Rule(
    "a user's linear rule",
    "all_gather",
    after=lambda rows, x, rank, n, static: (rows[rank:] if static[0] else rows[: rank + 1]).sum(0, dtype=x.dtype),
    stacked=lambda xs, n, static: (xs.flip(0).cumsum(0).flip(0) if static[0] else xs.cumsum(0), True),
    transpose=lambda shape, static: (PREFIX_SUM, (1 - static[0],)),
)
LOG_SUM_EXP = collectives.Rule(
    "a user's nonlinear rule",
    "all_gather",
    after=lambda rows, x, rank, n, static: rows.logsumexp(0),
    stacked=lambda xs, n, static: (xs.logsumexp(0), False),
    weights=lambda x, y: (x - y).exp(),
)

accumulated = ltx.accumulate(ltx.data_parallel(batch_loss), steps=2)

EVERY: dict[str, Any] = {"dtypes": ALL, "whole": WHOLE}
EAGERLY, BY_GRAD = {**EVERY, "compiled": ()}, {**EVERY, "compiled": ("grad",)}
PSUM = Op("psum", ltx.psum, sum_of, compiled=("grad", "hvp", "vmap of grad"), **EVERY)
DATA_PARALLEL = Op("data_parallel", data_parallel(), rank_losses, replicated=True)
ROUNDED = replace(DATA_PARALLEL, compiled=("grad",))

OPS = (
    PSUM,
    Op("psum of a constant", lambda x: x * ltx.psum(torch.ones(())), lambda xs: xs * len(xs), **EAGERLY),
    Op("psum scaled", lambda x: ltx.psum(x, prescale=2, postscale=-3), lambda xs: -6 * sum_of(xs), **BY_GRAD),
    Op("psum in groups", within_groups(ltx.psum), lambda xs: in_groups(sum_of, xs), **BY_GRAD),
    Op("pmean in groups", within_groups(ltx.pmean), lambda xs: in_groups(mean_of, xs), **EAGERLY),
    Op("pmean", ltx.pmean, mean_of, **EVERY),
    Op("weighted_mean", lambda x: ltx.weighted_mean(x, weight_of(x)), weighted_mean_of, **EVERY),
    # From outside, copies are inputs of their own and pvary is no more than the identity.
    Op(
        "pvary",
        ltx.pvary,
        lambda ws: SumOfCopies.apply(mean_of(ws), len(ws)),
        replicated=True,
        from_outside=False,
        **EVERY,
    ),
    Op("all_gather", ltx.all_gather, to_all(lambda xs: xs), **EVERY),
    Op("all_gather at dim 1", lambda x: ltx.all_gather(x, dim=1), to_all(lambda xs: xs.movedim(0, 1)), **EAGERLY),
    Op("all_gather tiled", lambda x: ltx.all_gather(x, dim=1, tiled=True), to_all(beside_each_other), **EAGERLY),
    Op(
        "all_gather in another order",
        lambda x: ltx.all_gather(x, axis_index_groups=[list(range(ltx.axis_size()))[::-1]]),
        to_all(lambda xs: xs.flip(0)),
        **EAGERLY,
    ),
    Op("psum_scatter", ltx.psum_scatter, lambda xs: xs.sum(0), **EAGERLY),
    Op(
        "psum_scatter tiled",
        lambda x: ltx.psum_scatter(x, dim=1, tiled=True),
        lambda xs: torch.stack(xs.sum(0).chunk(len(xs), 1)),
        **EVERY,
    ),
    Op("broadcast", lambda x: ltx.broadcast(x, src=ltx.axis_size() - 1), to_all(lambda xs: xs[-1]), **EVERY),
    Op("psum_to", lambda x: ltx.psum_to(x, dst=ltx.axis_size() - 1), lambda xs: on_last(xs.sum(0), len(xs)), **EVERY),
    Op("gather", lambda x: ltx.gather(x, dst=ltx.axis_size() - 1), lambda xs: on_last(xs, len(xs)), **EVERY),
    Op(
        "gather tiled",
        lambda x: ltx.gather(x, dim=1, tiled=True, dst=ltx.axis_size() - 1),
        lambda xs: on_last(beside_each_other(xs), len(xs)),
        **EAGERLY,
    ),
    Op("scatter", lambda x: ltx.scatter(x, src=ltx.axis_size() - 1), lambda xs: xs[-1], **EVERY),
    Op(
        "scatter tiled",
        lambda x: ltx.scatter(x, dim=1, tiled=True),
        lambda xs: torch.stack(xs[0].chunk(len(xs), 1)),
        **EAGERLY,
    ),
    Op("pmax", ltx.pmax, to_all(lambda xs: xs.amax(0)), whole=WHOLE),
    Op("pmin", ltx.pmin, to_all(lambda xs: xs.amin(0)), compiled=(), whole=WHOLE),
    Op("pmax of ties", ltx.pmax, to_all(lambda xs: xs.amax(0)), replicated=True, compiled=()),
    Op(
        PREFIX_SUM.name,
        lambda x: collectives.collective(PREFIX_SUM, x, None, lambda x, n: (0,)),
        lambda xs: xs.cumsum(0),
        dtypes=ALL,
    ),
    Op(
        LOG_SUM_EXP.name,
        lambda x: collectives.collective(LOG_SUM_EXP, x),
        to_all(lambda xs: xs.logsumexp(0)),
        dtypes=(torch.float32,),
    ),
    Op("adasum", ltx.adasum, to_all(adasum_of), paired=True, dtypes=(torch.float32,)),
    Op("all_to_all", lambda x: ltx.all_to_all(x, 1, 0), exchanged, **EVERY),
    Op("ppermute in a ring", lambda x: ltx.ppermute(x, ring(ltx.axis_size())), lambda xs: xs.roll(1, 0), **EAGERLY),
    Op(
        "ppermute to one",
        lambda x: ltx.ppermute(x, [(0, ltx.axis_size() - 1)]),
        lambda xs: on_last(xs[0], len(xs)),
        **EVERY,
    ),
    Op(
        "reduce product",
        lambda x: ltx.reduce(x, "product"),
        to_all(lambda xs: xs.prod(0)),
        compiled=(),
        dtypes=(torch.float32,),
        whole=WHOLE,
    ),
    Op("sync_batch_norm", batch_norm, batch_norm_of, compiled=("grad",), dtypes=(torch.float32,)),
    Op("axis_index", lambda x: x * ltx.axis_index(), lambda xs: on_each(torch.mul, xs), **BY_GRAD),
    Op(
        "shard",
        lambda x: ltx.shard(x, dim=1),
        lambda xs: on_each(lambda x, rank: x.chunk(len(xs), 1)[rank], xs),
        **BY_GRAD,
    ),
    DATA_PARALLEL,
    replace(ROUNDED, name="data_parallel bf16", apply=data_parallel(comm_hook="bf16"), rounding=2e-2, dtypes=()),
    replace(ROUNDED, name="data_parallel fp16", apply=data_parallel(comm_hook="fp16"), rounding=2e-3, dtypes=()),
    Op(
        "data_parallel with mean outputs",
        data_parallel(outputs="mean"),
        lambda ws: mean_of(rank_losses(ws)),
        replicated=True,
        compiled=(),
    ),
    Op(
        "data_parallel with a psum",
        summing_step,
        lambda ws: on_each(rank_loss, sum_of(on_each(lambda w, rank: w * (1 + rank) / 3, mean_of(ws)))),
        replicated=True,
        compiled=("grad",),
    ),
    Op(
        "data_parallel Weighted",
        weighted_step,
        to_all(lambda ws: rank_losses(ws).sum() / sum(range(1, len(ws) + 1))),
        replicated=True,
        compiled=("grad", "hvp"),
    ),
    Op(
        "block_backward_sync",
        data_parallel(ltx.block_backward_sync),
        lambda ws: on_each(rank_loss, ws),
        replicated=True,
        compiled=("grad",),
    ),
    Op(
        "accumulate",
        lambda w: accumulated(w, batch_of(ltx.axis_index())),
        lambda ws: on_each(lambda w, rank: batch_loss(w, batch_of(rank)), mean_of(ws)),
        replicated=True,
        compiled=("grad", "hvp"),
    ),
    Op("sync_gradients", lambda x: ltx.sync_gradients(x)[0], mean_of),
    # What programs make of several collectives.
    Op("softmax over ranks", softmax, lambda xs: torch.softmax(xs, 0), compiled=(), dtypes=()),
    Op(
        "variance over ranks",
        lambda x: ltx.pmean((x - ltx.pmean(x)) ** 2),
        to_all(lambda xs: xs.var(0, correction=0)),
        compiled=(),
        dtypes=(),
    ),
    Op("product round a ring", product_round_a_ring, lambda xs: xs @ xs.sum(0).mT, compiled=(), dtypes=()),
)


# --- transforms ------------------------------------------------------------------------------------------------------


def bend(y: Tensor) -> Tensor:
    """A nonlinear loss in which every element counts differently."""
    y = wide(y)
    return torch.sin(y + 0.3 * torch.arange(float(y.numel())).reshape(y.shape)).sum()


def loss(f: Fn) -> Fn:
    return lambda x: bend(f(x))


def total(fs: Fn) -> Fn:
    """The sum over ranks of each one's own loss: what derivatives are of."""
    return lambda xs: vmap(bend)(fs(xs)).sum()


def component(gradient: Fn, t: Tensor) -> Fn:
    """A loss made of a gradient, of another weight on each rank."""
    return lambda x: wide(gradient(x) * t).sum() * (1 + ltx.axis_index())


def components(gradients: Fn, ts: Tensor) -> Fn:
    """The same of all ranks."""
    return lambda xs: on_each(lambda y, rank: wide(y).sum() * (1 + rank), gradients(xs) * ts).sum()


def samples(x: Tensor, t: Tensor) -> Tensor:
    """A batch of three, in a new dimension 0."""
    return torch.stack([x, x + t, x - 2 * t])


def autograd(f: Fn, x: Tensor, create_graph: bool = False) -> Tensor:
    x = x if x.requires_grad else x.detach().requires_grad_()
    return torch.autograd.grad(f(x), x, create_graph=create_graph)[0].requires_grad_(create_graph)


def jacobian_of_sum(fs: Fn, xs: Tensor) -> Tensor:
    """jacrev on each rank gives all the same cotangent, so that of the sum of all ranks' outputs."""
    jacobian = jacrev(lambda xs: fs(xs).sum(0))(xs)
    return jacobian.movedim(jacobian.ndim - xs.ndim, 0)


def common_shift(fs: Fn, xs: Tensor) -> Tensor:
    """jacfwd on each rank gives all the same tangent: they move together."""
    return jacfwd(lambda shift: fs(xs + shift))(torch.zeros_like(xs[0]))


TRANSFORMS = (
    Transform("value", lambda f, x, t: f(x), lambda fs, xs, ts: fs(xs)),
    Transform("grad", lambda f, x, t: grad(loss(f))(x), lambda fs, xs, ts: grad(total(fs))(xs), gradient=True),
    Transform(
        "grad of grad",
        lambda f, x, t: grad(component(grad(loss(f)), t))(x),
        lambda fs, xs, ts: grad(components(grad(total(fs)), ts))(xs),
    ),
    Transform("jvp", lambda f, x, t: jvp(f, (x,), (t,))[1], lambda fs, xs, ts: jvp(fs, (xs,), (ts,))[1], forward=True),
    Transform(
        "hvp",
        lambda f, x, t: jvp(grad(loss(f)), (x,), (t,))[1],
        lambda fs, xs, ts: jvp(grad(total(fs)), (xs,), (ts,))[1],
        forward=True,
    ),
    Transform("vmap", lambda f, x, t: vmap(f)(samples(x, t)), lambda fs, xs, ts: vmap(fs, out_dims=1)(samples(xs, ts))),
    Transform(
        "vmap of grad",
        lambda f, x, t: vmap(grad(loss(f)))(samples(x, t)),
        lambda fs, xs, ts: vmap(grad(total(fs)), out_dims=1)(samples(xs, ts)),
        gradient=True,
    ),
    Transform(
        "grad of vmap",
        lambda f, x, t: grad(lambda batch: vmap(loss(f))(batch).sum())(samples(x, t)),
        lambda fs, xs, ts: grad(lambda batch: vmap(total(fs))(batch).sum())(samples(xs, ts)).movedim(1, 0),
        gradient=True,
    ),
    Transform(
        "hessian",
        lambda f, x, t: hessian(loss(f))(x),
        lambda fs, xs, ts: common_shift(grad(total(fs)), xs),
        real=True,
        forward=True,
    ),
    Transform(
        "jacrev", lambda f, x, t: jacrev(f)(x), lambda fs, xs, ts: jacobian_of_sum(fs, xs), gradient=True, real=True
    ),
    Transform("jacfwd", lambda f, x, t: jacfwd(f)(x), lambda fs, xs, ts: common_shift(fs, xs), real=True, forward=True),
    Transform(
        "autograd",
        lambda f, x, t: autograd(loss(f), x),
        lambda fs, xs, ts: autograd(total(fs), xs),
        gradient=True,
        plain=True,
    ),
    Transform(
        "autograd twice",
        lambda f, x, t: autograd(component(lambda x: autograd(loss(f), x, create_graph=True), t), x),
        lambda fs, xs, ts: autograd(components(lambda xs: autograd(total(fs), xs, create_graph=True), ts), xs),
        plain=True,
    ),
)


# --- carrying a row out ----------------------------------------------------------------------------------------------

#: A result, or the exception there was instead.
Outcome = Tensor | Exception


def quarters(zs: Tensor) -> Tensor:
    """The nearest multiples of 1/4."""
    return torch.view_as_complex((4 * torch.view_as_real(zs)).round() / 4) if zs.is_complex() else (4 * zs).round() / 4


def draw(op: Op, n: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Points and directions of all ranks, stacked; multiples of 1/4 in narrow dtypes, so that sums are exact there."""
    drawn = torch.complex128 if dtype.is_complex else torch.float64
    zs = torch.randn(2, n, n, 2 * n, dtype=drawn, generator=torch.Generator().manual_seed(seed))
    if dtype != drawn:
        zs = zs > 0 if dtype == torch.bool else quarters(zs) * (1 if dtype in ALL else 4)
    xs, ts = zs.to(dtype)
    return tuple(everywhere(z[0], n).contiguous() for z in (xs, ts)) if op.replicated else (xs, ts)


def attempt(f: Callable[..., Tensor], x: Tensor, t: Tensor, backend: str | None) -> Outcome:
    """f(x, t), eagerly or compiled by `backend`."""
    # Clones: compiled forward mode (torch 2.13) fails on slices of inputs that are themselves slices.
    x, t = x.clone(), t.clone()
    try:
        if backend is None:
            return f(x, t).detach()
        torch._dynamo.reset()
        compiled = torch.compile(f, fullgraph=True, backend=backend)
        compiled(t, x)  # whatever the graph keeps of its first inputs shows in the second call
        return compiled(x, t).detach()
    except Exception as error:
        with suppress(RuntimeError):  # torch leaves it open when the trace of a jvp fails, and then fails every other
            torch._C._exit_dual_level(level=0)
        return error


#: An operation's and a transform's name, and their points and directions.
Cell = tuple[str, str, Tensor, Tensor]


def on_one_rank(cells: list[Cell], backend: str | None, equal: bool) -> list[Outcome]:
    """What cells of the table give on the real rank that this process is."""
    ops, transforms = ({entry.name: entry for entry in entries} for entries in (OPS, TRANSFORMS))
    rank = int(ltx.axis_index())
    return [
        attempt(
            lambda x, t, op=ops[op], transform=transforms[transform]: transform.per_rank(
                lambda x: op.output(x, equal=equal), x, t
            ),
            xs[rank],
            ts[rank],
            backend,
        )
        for op, transform, xs, ts in cells
    ]
