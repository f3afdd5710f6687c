"""``ltx run``: ``torchrun``'s launcher, with ranks that meet on loopback."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from torch.distributed import run as torchrun
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from ltx.core.world.world import LOOPBACK
from ltx.peers.addresses import loopback_store
from ltx.runtime.failures import CONSEQUENCES, exit_text
from ltx.runtime.placement import DEFAULT_PORT

LOOPBACK_RENDEZVOUS = "ltx-loopback"  #: the name under which torch's launcher finds :class:`LoopbackRendezvous`


class LoopbackRendezvous(StaticTCPRendezvous):
    """That of one machine alone: torch's own listens on all interfaces, and unpickles what anyone sends there."""

    def __init__(self, asked: rendezvous.RendezvousParameters):
        self._own_store, self._rounds = loopback_store(int(asked.endpoint.rpartition(":")[2])), 0
        super().__init__(LOOPBACK, self._own_store.port, rank=0, world_size=1, run_id=asked.run_id, timeout=0)

    def get_backend(self) -> str:
        return LOOPBACK_RENDEZVOUS

    def next_rendezvous(self) -> rendezvous.RendezvousInfo:
        self._rounds += 1
        store = PrefixStore(f"{self.run_id}/{self._rounds}", self._own_store)
        met = rendezvous.RendezvousStoreInfo(self.master_addr, self.master_port)
        return rendezvous.RendezvousInfo(store, 0, 1, met)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"ltx run: error: {message} (see ltx run --help)\n")


def _parser() -> argparse.ArgumentParser:
    helps = {  # of torchrun's options, those that are listed
        "module": "the script is a module, as with python -m",
        "max_restarts": "restart all ranks after a failure, at most this many times (default: 0)",
        "log_dir": "keep the ranks' output in this folder: -r 3 doesn't show it, -t 3 shows it too",
        "nnodes": "number of machines; run this on each, with --node-rank, --master-addr and --master-port",
    }
    ranks, all_others = argparse.ArgumentParser(add_help=False), torchrun.get_args_parser()
    what = "ranks on this machine: a number, or auto, cpu, gpu (default: 1)"
    ranks.add_argument("-n", dest="nproc_per_node", metavar="N", default=argparse.SUPPRESS, help=what)
    for action in all_others._actions:
        action.help = helps.get(action.dest, argparse.SUPPRESS)
    parser = _Parser(
        prog="ltx run",
        usage="ltx run [-n N] [options] script.py [arguments of the script]",
        description="Start a script on several ranks of this machine, or of several.",
        epilog="All other options of torchrun, which this is built on, work too: torchrun --help",
        parents=[ranks, all_others],
        conflict_handler="resolve",
        allow_abbrev=False,  # a script's --log would be an ambiguous --log-dir or --logs-specs
    )
    if "PET_MASTER_PORT" not in os.environ:
        parser.set_defaults(master_port=None)  # before torch 2.12 the default is a fixed number
    return parser


def _problem(parsed: argparse.Namespace) -> str:
    """The mistake in the arguments that would make every rank fail, found before they start; "" if none."""
    try:
        ranks = torchrun.determine_local_world_size(parsed.nproc_per_node)
    except ValueError:
        ranks = 0
    if ranks < 1:
        return f"-n: expected a number of ranks of at least 1, or auto, cpu or gpu, got {parsed.nproc_per_node!r}"
    script = parsed.training_script
    if parsed.module:
        name = script.partition(".")[0]  # looking up a submodule would import its packages
        return "" if PathFinder.find_spec(name, [""]) or find_spec(name) else f"there is no module {script!r} here"
    if parsed.no_python:
        return "" if shutil.which(script) else f"there is no program {script!r}"
    if not os.path.exists(script):
        return f"there is no file {script!r} in {os.getcwd()}"
    try:
        if script.endswith(".py"):
            compile(Path(script).read_bytes(), script, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        return f"{script} isn't Python: {error}"
    return ""


def launch(arguments: Sequence[str]) -> int:
    """``torchrun`` with these `arguments`, but ranks of one machine meet on loopback, at a free port, and after a
    failure one line tells of the rank that failed first. Returns the exit status.
    """
    parser = _parser()
    parsed = parser.parse_args(list(arguments))
    if problem := _problem(parsed):
        parser.error(problem)
    one_machine = parsed.nnodes in ("1", "1:1")
    if parsed.standalone and not one_machine:
        parser.error(f"--standalone is of one machine, and --nnodes={parsed.nnodes} of several: leave one of them out")
    elsewhere = parsed.rdzv_backend != "static" or parsed.rdzv_endpoint or parsed.master_addr != "127.0.0.1"
    if parsed.standalone or (one_machine and not (elsewhere or parsed.node_rank)):
        rendezvous.rendezvous_handler_registry.register(LOOPBACK_RENDEZVOUS, LoopbackRendezvous)
        parsed.standalone, parsed.rdzv_backend = False, LOOPBACK_RENDEZVOUS
        parsed.rdzv_endpoint = f"127.0.0.1:{parsed.master_port or 0}"
        if parsed.rdzv_id == parser.get_default("rdzv_id"):
            parsed.rdzv_id = uuid.uuid4().hex
    elif parsed.master_port is None:
        parsed.master_port = DEFAULT_PORT  # several machines have to know the port in advance
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun does the same, with a warning
    # If NumPy isn't installed, torch would warn on every rank, although it works.
    calm = ["ignore:Failed to initialize NumPy:UserWarning", *filter(None, [os.environ.get("PYTHONWARNINGS")])]
    os.environ["PYTHONWARNINGS"] = ",".join(calm)
    if one_machine:
        os.environ.setdefault("LTX_KEY", os.urandom(16).hex())  # by which ranks authenticate pickles
    with ExitStack() as ended:
        if parsed.log_dir is None:
            if (parsed.redirects, parsed.tee) == ("0", "0"):  # there are only the error files of failing ranks
                parsed.log_dir = ended.enter_context(tempfile.TemporaryDirectory(prefix="ltx_run_"))
            else:  # the job's output goes there, so the directory stays
                parsed.log_dir = tempfile.mkdtemp(prefix="ltx_run_")
                print(f"ltx run: the ranks' output is kept in {parsed.log_dir}", file=sys.stderr, flush=True)
        earlier = set(Path(parsed.log_dir).glob("*"))
        try:
            torchrun.run(parsed)
        except ChildFailedError as error:
            runs = set(Path(parsed.log_dir).glob("*")) - earlier
            mine = [run for run in runs if run.name.startswith(f"{parsed.rdzv_id}_")]
            print(told_failures(mine, error.failures), file=sys.stderr)
            return 1
        except rendezvous.RendezvousError as error:
            # launchers on several machines lost each other; this one's ranks have ended
            print(f"ltx run: this machine couldn't meet the others, or lost them: {error}", file=sys.stderr)
            return 1
        except SignalException as error:
            print(f"ltx run: stopped by {error.sigval.name}", file=sys.stderr)
            return 128 + error.sigval.value
    return 0


class Ended(NamedTuple):
    """How a rank has ended, in words; `kind` is the exception's class and `at_s` its time, if the rank told them."""

    text: str
    kind: str = ""
    at_s: float = 0.0


def first_failure(ended: Mapping[int, Ended]) -> int:
    """The rank whose failure caused the failures of the others.

    Example:
        >>> first_failure({0: Ended("", "PeerLostError", 1.0), 1: Ended("was killed"), 2: Ended("", "ValueError", 2.0)})
        2
    """
    told = {rank: end for rank, end in ended.items() if end.kind}
    genuine = [rank for rank, end in told.items() if end.kind not in CONSEQUENCES]
    silent = [rank for rank, end in ended.items() if not end.kind]
    unasked = [rank for rank in silent if "SIGTERM" not in ended[rank].text]  # by which the launcher ends the others
    return min(genuine or unasked or told or silent, key=lambda rank: (ended[rank].at_s, rank))


def told_failures(runs: Sequence[Path], failures: Mapping[int, Any]) -> str:
    """The text about a run that failed, by its directories with the ranks' error files, and torch's `failures`."""
    ended = {rank: Ended(exit_text(failure.exitcode)) for rank, failure in failures.items()}
    attempts = [path for run in runs for path in run.glob("attempt_*")]
    attempts.sort(key=lambda path: int(path.name.rpartition("_")[2]))
    for file in attempts[-1].glob("*/error.json") if attempts else ():
        with suppress(OSError, ValueError, LookupError, TypeError):
            message = json.loads(file.read_text())["message"]
            extra = message["extraInfo"]
            line = message["message"].partition("\n")[0]
            where = f" ({extra['where']})" if extra.get("where") else ""
            ended[int(extra["rank"])] = Ended(f"raised {extra['kind']}: {line}{where}", extra["kind"], extra["at_s"])
    first = first_failure(ended)
    others = [f"rank {rank} {end.text}" for rank, end in sorted(ended.items()) if rank != first]
    return f"ltx run: rank {first} {ended[first].text}" + (f"\nOther ranks: {'; '.join(others)}" if others else "")
