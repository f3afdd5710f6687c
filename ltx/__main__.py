"""The command line: ``ltx run``, or ``python -m ltx run``, starts a script on several ranks."""

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
        from ltx.runtime.run import launch  # torchrun's modules take a while to import

        return launch(arguments[1:])
    parser = argparse.ArgumentParser(prog="ltx", description="Data-parallel training as function transformations.")
    parser.add_argument("--version", action="version", version=f"ltx {__version__}, torch {torch.__version__}")
    ran = "run: run a script on several ranks: ltx run -n 2 script.py ... (see ltx run --help)"
    parser.add_argument("command", choices=["run"], metavar="COMMAND", help=ran)
    parser.parse_args(arguments)  # which ends by itself, since the only command isn't there
    return 0


if __name__ == "__main__":
    sys.exit(main())
