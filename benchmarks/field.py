"""What torch.func and plain autograd make of a distributed step, by library: each cell is a program that was run.

    python -m benchmarks.field [--write]

Two ranks on the CPU over gloo; simulated ones in one process. A program's result is compared, on each rank, with that
of one process that has the whole batch, in float64. ``--write`` renews ``benchmarks/RESULTS-field.md``, which
``docs/coming-from/field.md`` shows.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap

import ltx
from benchmarks.ranks import found_by_ranks

HERE = Path(__file__).parent
RANKS = 2
Params = dict[str, Tensor]
Call = Callable[[Tensor], Tensor]
Loss = Callable[[Call, Tensor, Tensor], Tensor]
Step = Callable[[Params, Tensor, Tensor], Tensor]
Program = Callable[[Tensor, Tensor], Any]

GRAD = "`torch.func.grad(step)`"
AFTER = "the mean over ranks of `torch.func.grad(loss)`"
TWICE = "double backward: `autograd.grad` of the squared norm of the mean gradient"
JVP = "`jvp` of the mean gradient: a Hessian-vector product"
VMAP = "`vmap` of the mean gradient: one for each sample"
INSIDE = "`backward()` of a loss with a `jvp` inside"
SIMULATED = "simulated ranks in one process"
STATE = "a hook's state in a checkpoint"
ROWS = (GRAD, AFTER, TWICE, JVP, VMAP, INSIDE, SIMULATED, STATE)

torch.manual_seed(0)
MODEL = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
PARAMS = {name: value.detach().clone() for name, value in MODEL.named_parameters()}
X, Y = torch.randn(RANKS, 5, 3).double(), torch.randn(RANKS, 5, 1).double()


def squares(call: Call, x: Tensor, y: Tensor) -> Tensor:
    """The loss of all rows but one."""
    return (call(x) - y).square().mean()


def with_jvp(call: Call, x: Tensor, y: Tensor) -> Tensor:
    """A loss of a model's values and of its derivative by the inputs."""
    value, tangent = jvp(call, (x,), (torch.ones_like(x),))
    return (value + tangent - y).square().mean()


def local(loss: Loss, model: torch.nn.Module = MODEL, prefix: str = "") -> Step:
    """A step of parameters, without a collective unless `model` has one."""
    return lambda p, x, y: loss(lambda x: functional_call(model, {prefix + k: v for k, v in p.items()}, (x,)), x, y)


def half_squares(grads: Any) -> Tensor:
    """Half of the squared norm: its gradient is the Hessian's product with the gradient."""
    return torch.stack([g.square().sum() for g in grads]).sum() / 2


def plainly(step: Step) -> Callable[..., Params]:
    """The gradient of a step by plain autograd; with ``twice`` that of its half squared norm."""

    def run(x: Tensor, y: Tensor, twice: bool = False) -> Params:
        params = {name: value.clone().requires_grad_() for name, value in PARAMS.items()}
        loss = step(params, x, y)
        if twice:
            loss = half_squares(torch.autograd.grad(loss, list(params.values()), create_graph=True))
        return dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))

    return run


def transformed(gradient: Callable[..., Params], params: Params) -> dict[str, Program]:
    """The rows that transform a gradient."""
    ones = {name: torch.ones_like(value) for name, value in params.items()}
    return {
        JVP: lambda x, y: jvp(lambda p: gradient(p, x, y), (params,), (ones,))[1],
        VMAP: lambda x, y: vmap(gradient, (None, 0, 0))(params, x[:, None], y[:, None]),
    }


def of_steps(made: Callable[[Loss], Step]) -> dict[str, Program]:
    """The rows by what makes a step on ranks of a loss."""
    step = made(squares)
    return {
        GRAD: lambda x, y: grad(step)(PARAMS, x, y),
        TWICE: lambda x, y: plainly(step)(x, y, twice=True),
        INSIDE: plainly(made(with_jvp)),
    }


def of_module(made: Callable[[], torch.nn.Module], prefix: str) -> dict[str, Program]:
    """The rows through a module that reduces gradients in the backward pass: a new one for each."""

    def stepped(program: Callable[[Step, Params], Program]) -> Program:
        def run(x: Tensor, y: Tensor) -> Any:
            model = made()
            params = {k.removeprefix(prefix): v.detach().clone() for k, v in model.named_parameters()}
            return program(local(squares, model, prefix), params)(x, y)

        return run

    def backward(loss: Loss, twice: bool = False) -> Program:
        def run(x: Tensor, y: Tensor) -> Params:
            model = made()
            found = loss(model, x, y)
            if twice:
                found = half_squares(torch.autograd.grad(found, list(model.parameters()), create_graph=True))
            found.backward()
            return {k.removeprefix(prefix): v.grad for k, v in model.named_parameters() if v.grad is not None}

        return run

    return {
        GRAD: stepped(lambda step, params: lambda x, y: grad(step)(params, x, y)),
        TWICE: backward(squares, twice=True),
        JVP: stepped(lambda step, params: transformed(grad(step), params)[JVP]),
        VMAP: stepped(lambda step, params: transformed(grad(step), params)[VMAP]),
        INSIDE: backward(with_jvp),
        SIMULATED: backward(squares),
    }


def of_sum(total: Call) -> dict[str, Program]:
    """The rows by a differentiable sum over ranks.

    The mean of equal parameters is these parameters, and its derivative the mean of gradients: so a step has its
    collective inside. Rows that transform a gradient have it behind.
    """

    def mean(tree: Params) -> Params:
        return {name: total(value) / RANKS for name, value in tree.items()}

    def gradient(params: Params, x: Tensor, y: Tensor) -> Params:
        return mean(grad(local(squares))(params, x, y))

    made = of_steps(lambda loss: lambda p, x, y: local(loss)(mean(p), x, y))
    after: Program = lambda x, y: gradient(PARAMS, x, y)  # noqa: E731
    return {**made, AFTER: after, **transformed(gradient, PARAMS), SIMULATED: after}


# --- columns ----------------------------------------------------------------------------------------------------------


def ddp() -> dict[str, Program]:
    """torch's DDP."""
    from torch.nn.parallel import DistributedDataParallel

    return {**of_module(lambda: DistributedDataParallel(copy.deepcopy(MODEL)), "module."), STATE: ddp_state}


def replicated(model: torch.nn.Module) -> Any:
    """`model` under torch's newer DDP, which is made of FSDP's parts."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return replicate(model, mesh=dist.device_mesh.init_device_mesh("cpu", (RANKS,)))


def newer_ddp() -> dict[str, Program]:
    """torch's newer DDP."""

    def made() -> torch.nn.Module:
        model = replicated(copy.deepcopy(MODEL))
        if dist.get_backend() != "fake":
            model(X[0])  # before its first forward pass it takes no other parameters, and raises
        return model

    return {**of_module(made, ""), STATE: newer_ddp_state}


def functional() -> dict[str, Program]:
    """torch's functional collectives."""
    from torch.distributed import _functional_collectives as collectives

    return of_sum(lambda v: collectives.wait_tensor(collectives.all_reduce(v, "sum", dist.group.WORLD)))


def functional_nn() -> dict[str, Program]:
    """torch's older collectives with derivatives."""
    from torch.distributed.nn import functional as collectives

    return of_sum(collectives.all_reduce)


def of_ltx() -> dict[str, Program]:
    """ltx."""
    made: Callable[[Loss], Step] = lambda loss: ltx.data_parallel(local(loss))  # noqa: E731
    gradient = grad(made(squares))
    return {
        **of_steps(made),
        AFTER: lambda x, y: ltx.pmean(grad(local(squares))(PARAMS, x, y)),
        **transformed(gradient, PARAMS),
        SIMULATED: lambda x, y: ltx.vmap(gradient, in_dims=(None, 0, 0))(PARAMS, X, Y),
        STATE: ltx_state,
    }


COLUMNS: dict[str, Callable[[], dict[str, Program]]] = {
    "DDP": ddp,
    "`replicate_with_fsdp`": newer_ddp,
    "`_functional_collectives`": functional,
    "`distributed.nn.functional`": functional_nn,
    "ltx": of_ltx,
}
MODE = "`LocalTensorMode`"


# --- a hook's state: four steps, and four with a checkpoint after the second ------------------------------------------


def wide() -> torch.nn.Module:
    """A model whose weight a hook compresses."""
    torch.manual_seed(1)
    return torch.nn.Linear(8, 8, bias=False).double()


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Two for this rank."""
    generator = torch.Generator().manual_seed(2 + dist.get_rank())
    for _ in range(2):
        x, y = torch.randn(2, 16, 8, generator=generator, dtype=torch.float64)
        yield x, y


def resumed(made: Callable[[Any], tuple[torch.nn.Module, Any]]) -> dict[str, tuple[Tensor, Tensor]]:
    """Weights after a restart and without, by what a checkpoint has besides the module's and optimizer's state_dict.

    `made`: gives a module and the state of its hook, of a hook's state.
    """

    def start(state: Any = None) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
        model, state = made(state)
        return model, torch.optim.SGD(model.parameters(), lr=0.5), state

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, *_: Any) -> Tensor:
        for x, y in batches():
            optimizer.zero_grad()
            squares(model, x, y).backward()
            optimizer.step()
        return next(model.parameters()).detach()

    model, optimizer, state = first = start()
    train(*first)
    saved = pickle.dumps((model.state_dict(), optimizer.state_dict(), state))
    whole, found = train(*first), {}
    for besides in ("", " with the hook's state pickled beside it"):
        of_model, of_optimizer, of_hook = pickle.loads(saved)
        model, optimizer, _ = again = start(of_hook if besides else None)
        model.load_state_dict(of_model)
        optimizer.load_state_dict(of_optimizer)
        found[besides] = train(*again), whole
    return found


def ddp_state(x: Tensor, y: Tensor) -> Any:
    """PowerSGD with error feedback."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
    from torch.nn.parallel import DistributedDataParallel

    def made(state: Any) -> tuple[torch.nn.Module, Any]:
        model = DistributedDataParallel(wide())
        options = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2, "min_compression_rate": 1}
        state = state or power.PowerSGDState(None, **options)
        model.register_comm_hook(state, power.powerSGD_hook)
        return model, state

    return resumed(made)


def newer_ddp_state(x: Tensor, y: Tensor) -> Any:
    """A hook of the all-reduce that keeps a moving mean."""

    def made(state: Any) -> tuple[torch.nn.Module, Any]:
        model, kept = replicated(wide()), state or []

        def smooth(reduced: Tensor) -> None:
            kept[:] = [(kept[0] + reduced) / 2 if kept else reduced.clone()]
            reduced.copy_(kept[0])

        model.set_all_reduce_hook(smooth)
        return model, kept

    return resumed(made)


def ltx_state(x: Tensor, y: Tensor) -> Any:
    """PowerSGD with error feedback."""
    strategy = ltx.DDPStrategy(comm_hook=ltx.hooks.PowerSGD(rank=1, start_step=0, min_compression_rate=1))
    optimizer = ltx.optim.from_torch(torch.optim.SGD, lr=0.5)

    def begin() -> tuple[Any, Any]:
        model = wide()
        train = ltx.train_step(ltx.data_parallel(local(squares, model), strategy), optimizer, donate=False)
        return train, train.init({name: value.detach() for name, value in model.named_parameters()})

    def go_on(train: Any, state: Any) -> Any:
        for batch in batches():
            state, _ = train(state, *batch)
        return state

    train, state = begin()
    with tempfile.TemporaryDirectory() as own:
        folder = ltx.broadcast_object(own)
        half = go_on(train, state)
        ltx.checkpoint.save(folder, half)
        whole = go_on(train, half)
        train, state = begin()
        again = go_on(train, ltx.checkpoint.load(folder, state).state)
        ltx.barrier()
    return {"": (again.params["weight"], whole.params["weight"])}


# --- what is measured -------------------------------------------------------------------------------------------------


def flat(tree: Any) -> Tensor:
    """One row of numbers, also of DTensors."""
    tree = tree if isinstance(tree, dict) else {"": tree}
    values = [value.to_local() if hasattr(value, "to_local") else value for value in tree.values()]
    return torch.cat([value.detach().reshape(-1) for value in values])


def of_batch(row: str, x: Tensor, y: Tensor) -> Tensor:
    """What one process makes of a batch."""
    if row in (GRAD, AFTER, SIMULATED):
        return flat(grad(local(squares))(PARAMS, x, y))
    if row in (JVP, VMAP):
        return flat(transformed(grad(local(squares)), PARAMS)[row](x, y))
    return flat(of_steps(local)[row](x, y))


def right(row: str) -> Tensor:
    """What one process makes of the whole batch; of samples, the mean of those that have a number in common."""
    if row == VMAP:
        return torch.stack([of_batch(row, X[rank], Y[rank]) for rank in range(RANKS)]).mean(0)
    return of_batch(row, X.flatten(0, 1), Y.flatten(0, 1))


def verdict(found: Tensor, right: Tensor, own: Tensor | None = None) -> str:
    """A cell of what came without an error."""
    if torch.allclose(found, right):
        return "right"
    kinds = {"0": torch.zeros_like(right), f"{RANKS} times too much": RANKS * right}
    kinds |= {} if own is None else {"each rank's own": own, f"each rank's own, by {RANKS}": own / RANKS}
    named = (name for name, value in kinds.items() if found.shape == value.shape and torch.allclose(found, value))
    return ": ".join(["wrong, no error", *([name] if (name := next(named, "")) else [])])


def joined(said: list[str]) -> str:
    """One cell of all ranks': what they have in common, where some are wrong in ways of their own."""
    kinds = sorted(set(said))
    wrong = all(kind.startswith("wrong, no error") for kind in kinds)
    return "wrong, no error" if wrong and len(kinds) > 1 else " / ".join(kinds)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without warnings: an error or a number is what is asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def cell(run: Callable[[], str]) -> str:
    """What `run` says, or what it raises."""
    with quiet():
        try:
            return run()
        except Exception as error:
            said = " ".join(str(error).split())[:300]
            print(f"{type(error).__name__}: {said}", file=sys.stderr)
            return f"raises {type(error).__name__}"


def on_ranks(column: str) -> dict[str, str]:
    """The cells of a column that need ranks, on one of them."""
    rank, programs, found = dist.get_rank(), COLUMNS[column](), {}

    def run(row: str) -> str:
        result = programs[row](X[rank], Y[rank])
        if row == STATE:
            return "; ".join(verdict(*map(flat, weights)) + besides for besides, weights in result.items())
        return verdict(flat(result), right(row), of_batch(row, X[rank], Y[rank]))

    for row in ROWS:
        if row != SIMULATED and row in programs:
            found[row] = cell(lambda row=row: run(row))
            dist.barrier()
    return found


def simulated(row: str, program: Program) -> str:
    """A cell by torch's simulation of ranks in one process."""
    from torch.distributed._local_tensor import LocalTensor, LocalTensorMode

    def run() -> str:
        with LocalTensorMode(RANKS):
            tree = program(*(LocalTensor(dict(enumerate(batch))) for batch in (X, Y)))
        tree = {k: v.to_local() if hasattr(v, "to_local") else v for k, v in tree.items()}
        return joined(
            [
                verdict(
                    flat({k: v._local_tensors[rank] if isinstance(v, LocalTensor) else v for k, v in tree.items()}),
                    right(row),
                    of_batch(row, X[rank], Y[rank]),
                )
                for rank in range(RANKS)
            ]
        )

    return cell(run)


def simulated_by_ltx() -> str:
    """The cell of :func:`ltx.vmap`, which gives each rank's result."""

    def run() -> str:
        found = of_ltx()[SIMULATED](X, Y)
        return joined(
            [verdict(flat({k: v[rank] for k, v in found.items()}), right(SIMULATED)) for rank in range(RANKS)]
        )

    return cell(run)


def alone() -> dict[str, dict[str, str]]:
    """The cells that need one process."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    found = {"ltx": {SIMULATED: simulated_by_ltx()}}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    for column in COLUMNS:
        if column != "ltx":
            found[column] = {SIMULATED: simulated(SIMULATED, COLUMNS[column]()[SIMULATED])}
    found[MODE] = {row: simulated(row, program) for row, program in functional().items()}
    return found


def worker(columns: list[str]) -> dict[str, dict[str, str]]:
    """The cells of columns by all ranks, which may differ."""
    found = {}
    for column in columns:
        each: list[Any] = [None] * RANKS
        dist.all_gather_object(each, on_ranks(column))
        found[column] = {row: joined([said[row] for said in each]) for row in each[0]}
    return found


def markdown(found: dict[str, dict[str, str]]) -> str:
    """The table."""
    names = [*(name for name in COLUMNS if name != "ltx"), MODE, "ltx"]
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    lines += [
        f"| {row} | " + " | ".join(found[name].get(row, "no such thing") for name in names) + " |" for row in ROWS
    ]
    return "\n".join(lines)


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="renew benchmarks/RESULTS-field.md")
    parser.add_argument("--columns", nargs="+", default=list(COLUMNS), help=argparse.SUPPRESS)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.alone:
        print(json.dumps(alone()))
        return
    if parsed.worker:
        with ltx.init(backend="gloo"):
            print(json.dumps(worker(parsed.columns)))
        return
    module = ["-m", "benchmarks.field"]
    found: dict[str, dict[str, str]] = found_by_ranks([*module, "--alone"], "loopback", 1)
    for column in parsed.columns:  # each with processes of its own: an error may leave something behind
        of_column = found_by_ranks([*module, "--columns", column], "loopback", RANKS)
        found[column] = of_column[column] | found[column]
    text = markdown(found)
    print(text)
    if parsed.write:
        about = f"{RANKS} ranks, CPU, gloo, torch {torch.__version__.partition('+')[0]}"
        (HERE / "RESULTS-field.md").write_text(f"Written by `python -m benchmarks.field --write`: {about}.\n\n{text}\n")


if __name__ == "__main__":
    main()
