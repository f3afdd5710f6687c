"""ltx.simulate: what goes wrong on a rank is an error by name on all that wait, and what can't run is refused."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import ltx
from ltx.errors import AxisError, PeerLostError, RankMismatchError, UnsupportedError
from ltx.extend import inner, outer
from tests.inside import find
from tests.kinds import Ranks

XS = torch.tensor([[1.0, -2.0], [3.0, 4.0]])


def here() -> int:
    return int(ltx.axis_index())


def nothing_is_left() -> None:
    """After a failure: the axis is closed, threads have ended, and the next run works."""
    assert not [t for t in threading.enumerate() if t.name.startswith("ltx rank")]
    assert ltx.axis_size() == 1
    assert ltx.simulate(ltx.psum)(XS).replicated().tolist() == [4.0, 2.0]


def test_one_rank_raises() -> None:
    caught: list[Exception] = []

    def f(x: Tensor) -> Tensor:
        if here() == 1:
            raise KeyError("mine")
        try:
            return ltx.psum(x)
        except PeerLostError as error:
            caught.append(error)
            raise

    with pytest.raises(KeyError, match="mine") as raised:
        ltx.simulate(f)(torch.ones(3, 1))
    assert raised.value.__notes__ == ["ltx.simulate: on rank 1 of 3, axis 'data'"]
    # Rank 2 has not begun by then.
    assert [str(e) for e in caught] == [
        "rank 1 raised KeyError: 'mine'. This rank had called psum(<the tree itself>: float32[1]), and ends too."
    ]
    nothing_is_left()


def test_one_rank_catches_what_its_collective_raises() -> None:
    """Its next one would else be taken for the one that has failed."""

    def f(x: Tensor) -> Tensor:
        if here() == 1:
            with pytest.raises(UnsupportedError):
                ltx.psum(x.to(torch.uint16))
        else:
            ltx.psum(x)
        return ltx.psum(10 * x)

    with pytest.raises(RankMismatchError, match="rank 1: a call that raised an error"):
        ltx.simulate(f)(XS)
    nothing_is_left()


def test_one_rank_raises_in_its_backward_pass() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, cotangent: Tensor) -> Tensor:
            raise ValueError("in backward")

    def f(x: Tensor) -> Tensor:
        y = ltx.psum(x.requires_grad_() * 2)
        return torch.autograd.grad((Fails.apply(y) if here() else y).sum(), x)[0]

    with pytest.raises(ValueError, match="in backward") as raised:
        ltx.simulate(f)(XS)
    assert "on rank 1 of 2" in raised.value.__notes__[0]
    nothing_is_left()


def only_rank_0(x: Tensor) -> Tensor | None:
    return ltx.psum(x) if here() == 0 else None


def other_shapes(x: Tensor) -> Tensor:
    return ltx.psum(x[: 1 + here()])


def other_dtypes(x: Tensor) -> Tensor:
    return ltx.psum(x.double() if here() else x)


def other_names(x: Tensor) -> Any:
    return ltx.psum({"a": x, "b": x} if here() else {"a": x, "c": x})


def other_operations(x: Tensor) -> Tensor:
    return ltx.pmax(x) if here() else ltx.psum(x)


def other_arguments(x: Tensor) -> Tensor:
    return ltx.broadcast(x, src=here())


def one_more(x: Tensor) -> Tensor:
    return ltx.psum(ltx.psum(x)) if here() else ltx.psum(x)


def other_barriers(x: Tensor) -> None:
    ltx.barrier(f"of {here()}")


def other_plans(x: Tensor) -> Any:
    """Steps of the same shapes that ranks know already, in another order."""
    steps = [ltx.data_parallel(lambda p, x, name=name: (p[name] * x).sum()) for name in "ab"]
    for name, step in zip("ab", steps, strict=True):
        ltx.grad(step)({name: torch.ones(2)}, x)
    name, step = ("ab"[here()], steps[here()])
    return ltx.grad(step)({name: torch.ones(2)}, x)


MISMATCHES = {
    only_rank_0: r"what they call next: rank 0: psum\(<the tree itself>: float32\[2\]\); rank 1: has returned\. Fix",
    other_shapes: r"psum, leaf '<the tree itself>': rank 0: float32\[1\]; rank 1: float32\[2\]",
    other_dtypes: r"rank 0: float32\[2\]; rank 1: float64\[2\]",
    other_names: r"psum, leaf 'c': rank 0: float32\[2\]; rank 1: no such leaf",
    other_operations: "the operation: rank 0: psum; rank 1: pmax",
    other_arguments: r"broadcast, its arguments: rank 0: arguments \[\(0,\)\]; rank 1: arguments \[\(1,\)\]",
    one_more: "what they call next: rank 0: has returned; rank 1: psum",
    other_barriers: "the operation: rank 0: barrier 'of 0'; rank 1: barrier 'of 1'",
    other_plans: r"data_parallel, leaf 'a': rank 0: float32\[2\]; rank 1: no such leaf",
}


@pytest.mark.parametrize("f", MISMATCHES, ids=lambda f: f.__name__)
def test_ranks_that_disagree(f: Callable[[Tensor], Any]) -> None:
    caught: list[RankMismatchError] = []

    def on_a_rank(x: Tensor) -> Any:
        try:
            return f(x)
        except RankMismatchError as error:
            caught.append(error)
            raise

    with pytest.raises(RankMismatchError, match="axis 'data': ranks disagree on ") as raised:
        ltx.simulate(on_a_rank)(XS)
    assert re.search(MISMATCHES[f], str(raised.value)), str(raised.value)
    if f not in (only_rank_0, one_more):
        assert [str(e) for e in caught] == [str(raised.value)] * 2  # on every rank
    nothing_is_left()


def test_ranks_may_go_on_after_a_disagreement() -> None:
    def f(x: Tensor) -> Tensor:
        with pytest.raises(RankMismatchError):
            other_shapes(x)
        return ltx.psum(x)

    assert ltx.simulate(f)(XS).replicated().tolist() == [4.0, 2.0]


def test_parts_of_an_axis_wait_for_their_own_ranks() -> None:
    def f(x: Tensor) -> Any:
        data = find("data")
        if here() < 2:
            x = ltx.psum(x, inner(data, 2))  # the other node calls nothing
        return x, ltx.psum(x, outer(data, 2)), ltx.psum(x, ("data",))

    found = ltx.simulate(f)(torch.tensor([1.0, 2.0, 3.0, 4.0])).stack()
    assert [x.tolist() for x in found] == [[3.0, 3.0, 3.0, 4.0], [6.0, 7.0, 6.0, 7.0], [13.0] * 4]

    def unequal(x: Tensor) -> Any:
        return ltx.psum(x, inner(find("data"), 2) if here() % 2 else "data")

    with pytest.raises(
        RankMismatchError, match=r"rank.* 0, 2: psum.* on axis 'data'; rank.* 1, 3: psum.* within nodes"
    ):
        ltx.simulate(unequal)(torch.ones(4))


def test_an_interrupt_ends_all_ranks() -> None:
    turns = []

    def f() -> None:
        while True:
            turns.append(here())
            if len(turns) == 5:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            ltx.barrier()

    with pytest.raises(KeyboardInterrupt):
        ltx.simulate(f, ranks=2)()
    nothing_is_left()


def test_an_axis_is_closed_afterwards() -> None:
    axes = ltx.simulate(lambda: find("data"), ranks=2)()
    with pytest.raises(AxisError, match=r"axis 'data' is closed: the ltx\.simulate that opened it has ended"):
        ltx.psum(torch.ones(1), axes.rank(0))


def test_another_thread_is_no_rank() -> None:
    found: list[BaseException | None] = []

    def f() -> None:
        axis = find("data")

        def elsewhere() -> None:
            for given in (axis, None):
                with pytest.raises(UnsupportedError) as caught:
                    ltx.psum(torch.ones(1), given)
                found.append(caught.value)
            assert ltx.vmap(ltx.psum, axis_name="x")(torch.ones(2)).tolist() == [2.0, 2.0]
            found.append(None)

        thread = threading.Thread(target=elsewhere)
        if here() == 0:
            thread.start()
            thread.join()
        ltx.psum(torch.ones(1))  # what was refused isn't taken for a call of rank 0's

    ltx.simulate(f, ranks=2)()
    assert found.pop() is None
    text = "psum(<the tree itself>: float32[1]) on axis 'data' was called in a thread that is no rank's"
    assert [text in str(error) for error in found] == [True, True]
    nothing_is_left()


def test_a_thread_beside_ranks_while_they_hand_over() -> None:
    """At no moment is it in a world of one, where a collective gives back what it was given."""
    over, said = threading.Event(), set[str]()

    def beside() -> None:
        while not over.is_set():
            try:
                ltx.psum(torch.ones(1))
                said.add("a sum")
            except UnsupportedError as error:
                said.add(str(error)[-100:])

    def f(x: Tensor) -> None:
        if here() == 0:
            thread.start()
        for _ in range(300):
            ltx.psum(x)
        if here() == 1:
            over.set()
            thread.join(30)

    thread = threading.Thread(target=beside)
    ltx.simulate(f)(XS)
    assert len(said) == 1
    assert "a sum" not in said


def test_in_a_thread_beside_another() -> None:
    inside, looked = threading.Event(), threading.Event()

    def rank(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert looked.wait(30)
        return ltx.psum(x)

    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(ltx.simulate(rank)(XS)))
    thread.start()
    assert inside.wait(30)
    with pytest.raises(UnsupportedError, match="or in a thread beside it"):
        ltx.simulate(ltx.psum)(XS)
    looked.set()
    thread.join(30)
    assert torch.equal(got[0].rank(1), XS.sum(0))
    assert torch.equal(ltx.simulate(ltx.psum)(XS).rank(0), XS.sum(0))


def test_what_is_refused() -> None:
    simulated = ltx.simulate(ltx.psum)
    with pytest.raises(UnsupportedError, match="into which no transform"):
        torch.func.grad(lambda x: simulated(x).rank(0).sum())(XS)
    with pytest.raises(UnsupportedError, match="into which no transform"):
        ltx.vmap(lambda x: simulated(x).stack())(XS)
    with pytest.raises(UnsupportedError, match="under forward mode"):
        ltx.simulate(lambda x: torch.func.jvp(ltx.psum, (x,), (x,)))(XS)
    with pytest.raises(UnsupportedError, match=r"ltx\.simulate inside of ltx\.simulate"):
        ltx.simulate(lambda x: simulated(torch.stack([x, x])))(XS)
    with FlopCounterMode(display=False), pytest.raises(UnsupportedError, match="into which no mode leads"):
        simulated(XS)
    jacobian = ltx.simulate(lambda x: torch.func.jacfwd(torch.sin)(x) * ltx.psum(x))(XS)  # no collective inside
    assert torch.equal(jacobian.rank(0), torch.diag(XS[0].cos()) * XS.sum(0))


@pytest.mark.slow_compile
def test_compiled_graphs_hold_no_collectives_of_turns() -> None:
    with pytest.raises(Exception, match=r"can't hold a collective of ltx\.simulate"):
        ltx.simulate(torch.compile(lambda x: ltx.psum(x) * 2, backend="eager", fullgraph=True))(XS)
    double = torch.compile(lambda x: x * 2, backend="eager")
    assert ltx.simulate(lambda x: ltx.psum(double(x)))(XS).replicated().tolist() == [8.0, 4.0]


def test_a_world_of_several_processes_has_no_simulated_ranks(ranks: Ranks) -> None:
    def run() -> str:
        with pytest.raises(UnsupportedError) as caught:
            ltx.simulate(ltx.psum)(XS)
        return str(caught.value)

    assert "this world has 2 ranks on axis 'data'" in ranks(2).run(run).replicated()


def test_inside_a_world_of_one() -> None:
    with ltx.init():
        assert ltx.simulate(ltx.psum)(XS).replicated().tolist() == [4.0, 2.0]


# --- what ranks share ------------------------------------------------------------------------------------------------


def test_what_ranks_write_into_a_shared_module_raises() -> None:
    norm, layer, w = nn.BatchNorm1d(2), nn.Linear(2, 1), torch.ones(2, requires_grad=True)

    def statistics(x: Tensor) -> None:
        norm(x.expand(2, 2))

    def accumulates(x: Tensor) -> None:
        layer(x).sum().backward()

    def into_a_tensor(x: Tensor) -> None:
        (w * x).sum().backward()

    for f, name in ((statistics, "'num_batches_tracked' of BatchNorm1d"), (accumulates, "'weight' of Linear")):
        with pytest.raises(UnsupportedError, match=rf"f wrote to {name}, or to its \.grad"):
            ltx.simulate(f)(XS)
    with pytest.raises(UnsupportedError, match=r"f wrote to a tensor of shape \[2\]"):
        ltx.simulate(into_a_tensor)(XS)
    total = torch.zeros(2)
    with pytest.raises(UnsupportedError, match=r"f wrote to a tensor of shape \[2\].* What ranks find, f returns"):
        ltx.simulate(lambda x: total.add_(x))(XS)  # a sum that each process would have of its own
    frozen = nn.Linear(2, 1).requires_grad_(False)
    assert len(ltx.simulate(lambda x: frozen(x))(XS)) == 2  # reading is fine


def test_a_step_that_writes_to_shared_buffers_is_refused() -> None:
    norm = nn.BatchNorm1d(2)
    step = ltx.data_parallel(lambda p, x: (norm(x) * p).square().mean())
    with pytest.raises(ltx.errors.StepError, match="running_mean"):
        ltx.simulate(lambda x: ltx.grad(step)(torch.ones(2), x))(torch.randn(2, 3, 2))
