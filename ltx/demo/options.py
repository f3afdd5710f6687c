"""What can be chosen: the configurations that the demo compares, and its command line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Configuration:
    """One way to train; all of them see the same number of characters.

    Attributes:
        name: what the table calls it.
        comm_hook: how gradients travel, a ``comm_hook`` of :class:`ltx.DDPStrategy`.
        micro_batches: how many batches go into one step, and so into one synchronisation.
    """

    name: str
    comm_hook: str
    micro_batches: int = 1

    def steps(self, steps: int) -> int:
        """The optimizer steps that see as many characters as ``steps`` steps of one batch each.

        >>> Configuration("accumulate x 4", "allreduce", 4).steps(10)
        3
        """
        return math.ceil(steps / self.micro_batches)


CONFIGURATIONS = {
    "fp32": Configuration("fp32", "allreduce"),
    "bf16": Configuration("bf16", "bf16"),
    "accumulate": Configuration("accumulate x 4", "allreduce", micro_batches=4),
}


@dataclass(frozen=True)
class Options:
    """The demo's options, as on the command line."""

    steps: int = 500
    batch_size: int = 8
    strategy: str | None = None
    out: Path = Path("ltx-demo")
    seed: int = 0

    @property
    def configurations(self) -> tuple[Configuration, ...]:
        """The chosen configuration, or all of them."""
        return (CONFIGURATIONS[self.strategy],) if self.strategy else tuple(CONFIGURATIONS.values())

    def arguments(self) -> list[str]:
        """The command line that :func:`parse` reads back as these options.

        >>> parse(Options(steps=5, strategy="bf16").arguments()) == Options(steps=5, strategy="bf16")
        True
        """
        chosen = ["--strategy", self.strategy] if self.strategy else []
        numbers = ["--steps", self.steps, "--batch-size", self.batch_size, "--seed", self.seed]
        return [*map(str, numbers), "--out", str(self.out), *chosen]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to ``parser``."""
    default = Options()
    parser.add_argument(
        "--steps",
        type=positive,
        default=default.steps,
        help="optimizer steps; accumulation takes a quarter as many, each on four batches (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-size", type=positive, default=default.batch_size, help="sequences a rank (default: %(default)s)"
    )
    parser.add_argument("--strategy", choices=CONFIGURATIONS, help="this configuration alone (default: all of them)")
    parser.add_argument(
        "--out", type=Path, default=default.out, help="folder for the figure and the metrics (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=default.seed, help="of parameters and batches (default: 0)")


def options_of(arguments: argparse.Namespace) -> Options:
    """The options among parsed ``arguments``."""
    return Options(arguments.steps, arguments.batch_size, arguments.strategy, arguments.out, arguments.seed)


def parse(argv: Sequence[str] | None = None) -> Options:
    """Read the command line of ``python -m ltx.demo.train``."""
    parser = argparse.ArgumentParser(prog="ltx.demo.train", description="Train a character-level GPT, data parallel.")
    add_arguments(parser)
    return options_of(parser.parse_args(argv))


def positive(text: str) -> int:
    """An ``argparse`` type: an integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text}")
    return number
