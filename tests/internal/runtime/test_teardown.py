"""Two real processes with torchrun's environment: they meet, and they end without being aborted."""

from __future__ import annotations

import pytest

from tests.covering import some
from tests.programs import begun, finished, of_torchrun

PREAMBLE = """
import glob, sys, time, torch, ltx
import torch.distributed as dist
from datetime import timedelta
from ltx.core.world.init import init
from ltx.core.world.world import shutdown, world
def total():
    return float(ltx.psum(torch.tensor(1.0 + world().rank)))
def name_of(thread):
    try:
        return open(thread).read()
    except OSError:  # it has just ended
        return ""
def gloo_threads():
    return sum("gloo" in name_of(thread) for thread in glob.glob("/proc/self/task/*/comm"))
timeout = timedelta(seconds=60)
"""

ONE_MORE = """
here = init(timeout=timeout)
total()
if here.rank == 1: sys.exit(0)
try:
    {}
except ltx.errors.PeerLostError as error:
    print('rank 1 has ended its part of the world in good order' in str(error), 'ltx.uneven' in str(error))
"""
# For each: the script, and the exit status and last line of each rank.
SCRIPTS = {
    "with": (
        "with init(timeout=timeout) as here:\n    out = here.rank, here.size, total(), gloo_threads() > 0\n"
        "print(*out, dist.is_initialized(), gloo_threads())",
        [(0, "0 2 3.0 True False 0"), (0, "1 2 3.0 True False 0")],
    ),
    "one world after the other": (
        "for turn in range(3):\n    init(timeout=timeout)\n    out = total()\n    shutdown()\nprint(out)",
        [(0, "3.0"), (0, "3.0")],
    ),
    "no shutdown, and rank 0, which hosts the store, ends first": (
        "init(timeout=timeout)\nprint(total())\nif world().rank == 0: sys.exit(0)\ntime.sleep(0.3)\nprint('later')",
        [(0, "3.0"), (0, "later")],
    ),
    "init again, after the other has ended in good order": (
        "out = init(timeout=timeout).rank, total()\n"
        "if world().rank == 1: time.sleep(0.5)\n"
        "print(*out, init(timeout=timeout).size)",
        [(0, "0 3.0 2"), (0, "1 3.0 2")],
    ),
    "an exception on one rank while the other waits for it": (
        "try:\n"
        "    with init(timeout=timeout):\n"
        "        total()\n"
        "        if world().rank == 1: raise KeyError('mine')\n"
        "        total()\n"
        "except BaseException as error:\n"
        "    print(type(error).__name__, dist.is_initialized())\n"
        "    sys.exit(5)",
        [(5, "DeadlockDetectedError False"), (5, "KeyError False")],
    ),
    "an exception on one rank with a collective under way that the other never joins": (
        "from ltx.core.comm import resolve\n"
        "init(timeout=timeout)\n"
        "total()\n"
        "if world().rank == 0:\n"
        "    work = resolve(None).comm.background.issue('psum', torch.ones(3), 'pending')\n"
        "    raise KeyError('mine')\n"
        "try:\n"
        "    total()\n"
        "except Exception:\n"
        "    print('told')",
        [(1, ""), (0, "told")],
    ),
    "one more step on a rank than on the other": (ONE_MORE.format("total()"), [(0, "True True"), (0, "")]),
    "one more step on a rank than on the other, of another shape": (
        ONE_MORE.format("ltx.psum(torch.ones(3))"),
        [(0, "True True"), (0, "")],
    ),
    "an exception that nobody catches": ("init(timeout=timeout)\ntotal()\n1 / 0", [(1, ""), (1, "")]),
}


def _run_both(script: str) -> tuple[list[tuple[int, str]], list[str]]:
    """(exit status and last line of each rank, what each has said on stderr)"""
    done = finished(begun(["-c", PREAMBLE + script], of_torchrun(2)))
    return [(status, out.strip().rpartition("\n")[2]) for status, out, _ in done], [err for *_, err in done]


@pytest.mark.full(but=1)
@pytest.mark.parametrize("case", some(SCRIPTS, "with", "one more step on a rank than on the other"))
def test_two_ranks(case: str) -> None:
    script, expected = SCRIPTS[case]
    ends, errors = _run_both(script)
    assert ends == expected, "\n".join(errors)


@pytest.mark.full
@pytest.mark.parametrize("ahead", [pytest.param(0, marks=pytest.mark.full), 1])
def test_what_is_under_way_in_the_background_is_joined_at_the_end(ahead: int) -> None:
    """One rank has begun a round more than the other, and neither finishes."""
    ends, errors = _run_both(
        "from ltx.strategies.async_averaging import AsyncAveraging\n"
        "with init(timeout=timeout) as here:\n"
        "    step = ltx.data_parallel(lambda p, x: (p * x).sum(), AsyncAveraging(sync_interval_ms=0))\n"
        "    train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=0.1))\n"
        "    state = train.init(torch.zeros(3))\n"
        "    def begun():\n"
        "        return sum(event.label == 'background 0' for event in trace.events)\n"
        "    with ltx.profile.record() as trace:\n"
        f"        while begun() < 3 + (here.rank == {ahead}):\n"
        "            state, _ = train(state, torch.ones(3))\n"
        "try:\n"
        "    state.pending.mean.wait()\n"
        "except ltx.errors.AxisError as error:\n"
        "    print('given up' in str(error))"
    )
    assert [status for status, _ in ends] == [0, 0]
    assert ends[ahead] == (0, "True")  # the other's last round may be complete
    assert errors == ["", ""]
