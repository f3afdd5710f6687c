"""The command line: ``ltx run`` starts a script on several ranks, ``ltx demo`` the demo, ``ltx doctor`` looks around.

The first two go through torch's own elastic launcher, the one behind ``torchrun``. Each command imports what it needs.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ltx import __version__
from ltx.demo import options as demo_options


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point of ``ltx``: run a command, return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["run"]:  # everything behind it belongs to torchrun and to the script
        return launch(arguments[1:])
    parsed = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = parsed.function
    return command(parsed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ltx", description="Data-parallel training as function transformations.")
    parser.add_argument("--version", action="version", version=f"ltx {__version__}, torch {torch.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    commands.add_parser(
        "run",
        help="run a script on several ranks: ltx run -n 2 script.py ... (see ltx run --help)",
        add_help=False,
    )
    demo = commands.add_parser(
        "demo",
        help="train a small GPT, data parallel, in three configurations",
        description="Train a character-level GPT, data parallel, on text that every CPython ships: gradients in fp32, "
        "in bf16, and accumulated over four batches. Prints a table; writes loss.png and metrics.jsonl.",
    )
    demo.add_argument("--ranks", type=demo_options.positive, default=2, help="worker processes (default: %(default)s)")
    demo_options.add_arguments(demo)
    demo.set_defaults(function=_demo)
    doctor = commands.add_parser(
        "doctor",
        help="what world is chosen here and why, and whether a collective works",
        description="Print what world is chosen and why, what this machine has, and the time of a collective: of this "
        "world's ranks (srun ltx doctor; ltx run -n 2 -m ltx doctor), alone of two workers. Its exit status is 1 if "
        "something is wrong.",
    )
    doctor.add_argument("--json", action="store_true", help="the same as JSON, of every rank")
    doctor.add_argument(
        "--timeout",
        type=demo_options.positive,
        default=30,
        metavar="SECONDS",
        help="how long ranks may take to meet, and a collective to complete (default: %(default)s)",
    )
    doctor.set_defaults(function=_doctor)
    return parser


def _demo(parsed: argparse.Namespace) -> int:
    from ltx.core.world.world import cores  # torch, which --help can do without

    threads = max(1, cores() // parsed.ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # unset, torchrun warns
    options = demo_options.options_of(parsed)
    return launch(["-n", str(parsed.ranks), "-m", "ltx.demo.train", *options.arguments()])


def _doctor(parsed: argparse.Namespace) -> int:
    from ltx.runtime.doctor import doctor  # torch

    return doctor(as_json=parsed.json, timeout_s=parsed.timeout)


def launch(arguments: Sequence[str]) -> int:
    """Start a script on every rank of this machine and wait for it: ``torchrun``, with these differences.

    ``-n`` is short for ``--nproc-per-node``. Ranks of a run on this machine alone meet on loopback, where nobody else
    can connect, at a free port unless one is given (``--master-port``), so that several can run at once. With
    ``LTX_KEY`` set, it prints where others may join. A failure is told in a line about the rank that failed first.

    Args:
        arguments: torchrun's options, then the script (or ``-m`` and a module), then the script's arguments.

    Returns:
        The exit status: 0, or 1 if a rank failed.
    """
    # Torch takes seconds to import.
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    from ltx.core.world.placement import DEFAULT_PORT
    from ltx.runtime import agent, failures

    parser = torchrun.get_args_parser()
    parser.prog = "ltx run"
    parser.description = "Start a script on several ranks. Takes all options of torchrun, which it is built on."
    parser.add_argument("-n", dest="nproc_per_node", metavar="N", help="ranks on this machine: --nproc-per-node")
    if "PET_MASTER_PORT" not in os.environ:
        parser.set_defaults(master_port=None)  # a number before torch 2.12
    parsed = parser.parse_args(list(arguments))
    if parsed.standalone and parsed.nnodes not in _ONE:
        parser.error(f"--standalone is of one machine, and --nnodes={parsed.nnodes} of several: leave one of them out")
    elsewhere = parsed.rdzv_backend != "static" or parsed.rdzv_endpoint or parsed.master_addr != "127.0.0.1"
    if parsed.standalone or not (elsewhere or parsed.nnodes not in _ONE or parsed.node_rank):
        agent.register(_tell_join if os.environ.get("LTX_KEY") else None)
        parsed.standalone, parsed.rdzv_backend = False, agent.LOOPBACK_RENDEZVOUS
        parsed.rdzv_endpoint = f"127.0.0.1:{parsed.master_port or 0}"
        if parsed.rdzv_id == parser.get_default("rdzv_id"):
            parsed.rdzv_id = uuid.uuid4().hex
    elif parsed.master_port is None:
        parsed.master_port = DEFAULT_PORT  # of several machines, which have to know it
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # what torchrun does too, with a warning
    if parsed.nnodes in _ONE:
        os.environ.setdefault("LTX_KEY", os.urandom(16).hex())  # of this job alone, for what its ranks unpickle
    logs = None
    if parsed.log_dir is None:
        if (parsed.redirects, parsed.tee) == ("0", "0"):  # it is for the word that failing ranks leave alone
            logs = tempfile.TemporaryDirectory(prefix="ltx_run_")
            parsed.log_dir = logs.name
        else:  # the job's output goes there, so it outlives the job
            parsed.log_dir = tempfile.mkdtemp(prefix="ltx_run_")
            print(f"ltx run: the ranks' output is kept in {parsed.log_dir}", file=sys.stderr, flush=True)
    earlier = set(Path(parsed.log_dir).glob("*"))
    try:
        torchrun.run(parsed)
    except ChildFailedError as error:
        runs = set(Path(parsed.log_dir).glob("*")) - earlier
        mine = [run for run in runs if run.name.startswith(f"{parsed.rdzv_id}_")]
        print(failures.told_failures(mine, error.failures), file=sys.stderr)
        return 1
    except RendezvousError as error:  # the launchers of several machines: this one's ranks have been ended
        print(f"ltx run: this machine couldn't meet the others, or lost them: {error}", file=sys.stderr)
        return 1
    except SignalException as error:
        print(f"ltx run: stopped by {error.sigval.name}", file=sys.stderr)
        return 128 + error.sigval.value
    finally:
        if logs is not None:
            logs.cleanup()
    return 0


#: What --nnodes says of one machine.
_ONE = ("1", "1:1")


def _tell_join(port: int) -> None:
    print(f"ltx run: processes with the same LTX_KEY may join: LTX_JOIN=127.0.0.1:{port}", file=sys.stderr, flush=True)
