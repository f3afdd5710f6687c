"""The command line: ``ltx run`` starts a script on several ranks, ``ltx doctor`` checks what is here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from ltx import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point of ``ltx``: run a command, return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["run"]:  # all other arguments belong to torchrun and to the script
        # Each command imports its own module, so that the others needn't be imported.
        from ltx.runtime.run import launch

        return launch(arguments[1:])
    parsed = _parser().parse_args(arguments)  # the only other command is `doctor`
    from ltx.runtime.doctor import doctor

    return doctor(as_json=parsed.json, timeout_s=parsed.timeout)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ltx", description="Data-parallel training as function transformations.")
    parser.add_argument("--version", action="version", version=f"ltx {__version__}, torch {torch.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    commands.add_parser(
        "run", help="run a script on several ranks: ltx run -n 2 script.py ... (see ltx run --help)", add_help=False
    )
    doctor = commands.add_parser(
        "doctor",
        help="what world is chosen here and why, and whether a collective works",
        description="Print what world is chosen and why, what this machine has, and the time of a collective: of this "
        "world's ranks (srun ltx doctor; ltx run -n 2 -m ltx doctor), alone of two workers. Its exit status is 1 if "
        "something is wrong.",
    )
    doctor.add_argument("--json", action="store_true", help="print every rank's report, as JSON")
    doctor.add_argument(
        "--timeout",
        type=_positive,
        default=30,
        metavar="SECONDS",
        help="how long ranks may take to meet, and a collective to complete (default: %(default)s)",
    )
    return parser


def _positive(text: str) -> int:
    """An ``argparse`` type: an integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text}")
    return number
