"""The demo's training: each configuration trains the same GPT on the same text, and a table compares them.

The program prints its progress and the table, draws a figure of the losses, and writes every number as JSON lines.

Start it by ``ltx demo``, by ``ltx run -n 2 -m ltx.demo.train``, or by plain ``torchrun --nproc-per-node 2 -m
ltx.demo.train``; without a launcher it trains on one rank.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import accumulate
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import ltx
from ltx.core.base.readable import Table, format_bytes
from ltx.demo.gpt import GPT, Corpus, read_topics, unigram_entropy

Params = dict[str, Tensor]

CONTEXT = 64
PEAK_LR = 4e-3
VALIDATIONS = 8  # the number of validations during training, each on an eighth of the held-out text


@dataclass
class Report:
    """Writes rank 0's output: lines to `stream`, numbers to `metrics`, one JSON object a line. Other ranks write none.

    A terminal gets one line of progress that is overwritten, at most ten times a second; any other stream gets a line
    every `interval_s`. The last line of a run is always shown.
    """

    stream: TextIO | None = None
    metrics: TextIO | None = None
    interval_s: float = 5.0
    _next_s: float = field(default=0.0, init=False)
    _length: int = field(default=0, init=False)

    def say(self, text: str = "", end: str = "\n") -> None:
        if self.stream is not None:
            print(text, end=end, file=self.stream, flush=True)

    def show(self, line: str, last: bool) -> None:
        """Show a line on a run's progress, unless the last one was shown just before."""
        now = time.monotonic()
        if self.stream is None or (now < self._next_s and not last):
            return
        if not self.stream.isatty():
            self._next_s = now + self.interval_s
            return self.say(line)
        self._next_s = now + 0.1
        line = line[: max(40, shutil.get_terminal_size().columns - 1)]
        self.say("\r" + line.ljust(self._length), "\n" if last else "")
        self._length = 0 if last else len(line)

    def write(self, kind: str, **values: Any) -> None:
        if self.metrics is not None:
            self.metrics.write(json.dumps({"kind": kind, **values}) + "\n")


def told(tokens_per_s: float, nbytes: float, hidden: float | None) -> tuple[str, str, str]:
    """Texts for the speed of all ranks, the bytes that this rank sends, and the fraction hidden behind computing.

    >>> told(25_312.4, 3_303_424.0, 0.914)
    ('25,312', '3.30 MB', '91%')
    """
    return f"{tokens_per_s:,.0f}", format_bytes(round(nbytes)), "-" if hidden is None else f"{hidden:.0%}"


@dataclass(frozen=True)
class Curve:
    """The losses of one run, in nats per character, and the numbers of characters trained on until then."""

    tokens: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    validation_tokens: list[int] = field(default_factory=list)
    validation_loss: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Result:
    """The results of one run."""

    strategy: str  # the configuration's name
    steps: int  # the number of optimizer steps
    validation_loss: float  # the loss on the whole held-out text, in nats per character
    tokens_per_s: float  # characters per second, of all ranks together
    bytes_per_step: float  # bytes that a rank sends in an average step
    hidden: float | None  # the fraction of the communication during which the rank computed; None without communication
    seconds: float  # the time of training, without validation


def format_table(results: Sequence[Result]) -> str:
    """The results as a table in plain text."""
    header = ("strategy", "steps", "validation loss", "tokens/s", "bytes/step", "hidden")
    rows = [
        (x.strategy, str(x.steps), f"{x.validation_loss:.3f}", *told(x.tokens_per_s, x.bytes_per_step, x.hidden))
        for x in results
    ]
    return str(Table(header, rows, [False, *[True] * 5]))


def draw(curves: Mapping[str, Curve], unigram: float, path: Path) -> bool:
    """Draw the losses into a PNG file; returns False without a file if matplotlib isn't installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    plot(figure.subplots(), curves, unigram)
    figure.savefig(path, dpi=120)
    return True


def plot(axes: Any, curves: Mapping[str, Curve], unigram: float) -> None:
    """Draw the losses into matplotlib's `axes`."""
    for index, (name, curve) in enumerate(curves.items()):
        color = f"C{index}"
        smoothed = list(accumulate(curve.loss, lambda mean, loss: 0.9 * mean + 0.1 * loss))
        axes.plot(curve.tokens, smoothed, color=color, alpha=0.35, linewidth=1)
        style = ("o-", "o--")[index % 2]  # different styles, so that curves that cover each other both show
        axes.plot(curve.validation_tokens, curve.validation_loss, style, color=color, markersize=3, label=name)
    axes.axhline(unigram, color="grey", linestyle=":", linewidth=1)
    said = axes.text(0.99, unigram, "frequencies of characters alone", ha="right", va="bottom", color="grey")
    said.set_transform(axes.get_yaxis_transform())
    axes.set(xlabel="characters trained on", ylabel="loss (nats a character)", xlim=(0, None))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_title("Validation loss (dots) and training loss (faint)", fontsize="medium")
    axes.legend()


@dataclass(frozen=True)
class Configuration:
    """One way to train; all configurations train on the same number of characters."""

    name: str  # its name in the table
    comm_hook: str  # the `comm_hook` of ltx.DDPStrategy
    micro_batches: int = 1  # the number of batches in a step, which synchronises once


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
    strategy: str | None = None  # the name of the only configuration to train; None for all
    out: Path = Path("ltx-demo")
    seed: int = 0

    @staticmethod
    def of(arguments: argparse.Namespace) -> Options:
        return Options(**{option.name: getattr(arguments, option.name) for option in fields(Options)})

    def arguments(self) -> list[str]:
        """The command line that :func:`parse` reads back as these options.

        >>> parse(Options(steps=5, strategy="bf16").arguments()) == Options(steps=5, strategy="bf16")
        True
        """
        given = {name.replace("_", "-"): value for name, value in vars(self).items() if value is not None}
        return [f"--{name}={value}" for name, value in given.items()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    steps = "optimizer steps; accumulation takes a quarter as many, each on four batches (default: %(default)s)"
    out = "folder for the figure and the metrics (default: %(default)s)"
    parser.add_argument("--steps", type=positive, default=Options.steps, help=steps)
    parser.add_argument(
        "--batch-size", type=positive, default=Options.batch_size, help="sequences a rank (default: %(default)s)"
    )
    parser.add_argument("--strategy", choices=CONFIGURATIONS, help="train only this configuration (default: all)")
    parser.add_argument("--out", type=Path, default=Options.out, help=out)
    parser.add_argument("--seed", type=int, default=Options.seed, help="seed of parameters and batches (default: 0)")


def parse(argv: Sequence[str] | None = None) -> Options:
    """Read the command line of ``python -m ltx.demo.train``."""
    parser = argparse.ArgumentParser(prog="ltx.demo.train", description="Train a character-level GPT, data parallel.")
    add_arguments(parser)
    return Options.of(parser.parse_args(argv))


def positive(text: str) -> int:
    """An ``argparse`` type: an integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text}")
    return number


def schedule(steps: int) -> Callable[[int], float]:
    """A learning rate that rises for 1/20 of the steps, then falls along a cosine to 1/20 of its peak."""
    return ltx.optim.warmup_cosine(PEAK_LR, max(1, steps // 20), max(1, steps), end=PEAK_LR / 20)


@dataclass(frozen=True)
class Lesson:
    """What all configurations have in common: the initial model, the text, the options."""

    model: GPT
    corpus: Corpus
    options: Options

    def loss(self, params: Params, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per character. A pure function that knows nothing of ranks."""
        logits = ltx.functional_call(self.model, params, (inputs,))
        return cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def validate(self, params: Params, every: int = 1) -> float:
        """The loss on each ``every``-th window of the held-out text; each rank computes a part."""
        rank, size = int(ltx.axis_index()), ltx.axis_size()
        inputs, targets = (windows[::every][rank::size] for windows in self.corpus.validation_windows(CONTEXT))
        total = torch.zeros((), device="cpu")
        for x, y in zip(inputs.split(64), targets.split(64), strict=True):
            total += self.loss(params, x, y) * y.numel()
        total, count = ltx.psum((total, torch.tensor(float(targets.numel()), device="cpu")))
        return float(total / count)

    def train(self, configuration: Configuration, report: Report) -> tuple[Result, Curve, Params]:
        name, micro_batches = configuration.name, configuration.micro_batches
        steps = math.ceil(self.options.steps / micro_batches)  # each step takes `micro_batches` batches
        batch_size = self.options.batch_size * micro_batches * ltx.axis_size()
        loss_fn = ltx.accumulate(self.loss, steps=micro_batches) if micro_batches > 1 else self.loss
        step = ltx.data_parallel(loss_fn, ltx.DDPStrategy(comm_hook=configuration.comm_hook))
        adamw = ltx.optim.from_torch(torch.optim.AdamW, lr=schedule(steps), betas=(0.9, 0.98), weight_decay=0.1)
        train = ltx.train_step(step, ltx.optim.chain(ltx.optim.clip_by_global_norm(1.0), adamw))
        state = train.init(dict(self.model.named_parameters()))

        curve, seconds, sent, comm_s, waited_s = Curve(), 0.0, 0, 0.0, 0.0
        for done in range(1, steps + 1):
            batch = ltx.shard(self.corpus.batch(done - 1, batch_size, CONTEXT, self.options.seed))
            began = time.perf_counter()
            with ltx.profile.record() as trace:
                state, measured = train(state, *batch)
                loss = float(measured.loss)
            seconds += time.perf_counter() - began
            sent, comm_s, waited_s = sent + trace.bytes, comm_s + trace.comm_s, waited_s + trace.waited_s
            hidden = max(0.0, 1.0 - waited_s / comm_s) if sent and comm_s else None
            tokens = done * batch_size * CONTEXT
            curve.tokens.append(tokens)
            curve.loss.append(loss)
            assert measured.grad_norm is not None  # the optimizer clips gradients, so it measures their norm
            said = {"step": done, "tokens": tokens, "loss": loss, "grad_norm": float(measured.grad_norm)}
            said |= {"seconds": round(seconds, 4), "bytes": trace.bytes, "hidden": trace.hidden}
            report.write("step", strategy=name, **said)
            speed, nbytes, part = told(tokens / seconds, trace.bytes, hidden)
            bar, width = "#" * (24 * done // steps), len(str(steps))
            line = f"{name:14}  [{bar:-<24}]  {done:{width}}/{steps}  loss {loss:.3f}"
            report.show(f"{line}  {speed} tokens/s  {nbytes}/step  {part} hidden", last=done == steps)
            if done * VALIDATIONS // steps > (done - 1) * VALIDATIONS // steps:
                validation_loss = self.validate(state.params, every=8)
                curve.validation_tokens.append(tokens)
                curve.validation_loss.append(validation_loss)
                report.write("validation", strategy=name, tokens=tokens, loss=validation_loss)

        loss = self.validate(state.params)
        result = Result(name, steps, loss, curve.tokens[-1] / seconds, sent / steps, hidden, seconds)
        report.write("result", **asdict(result))
        return result, curve, state.params

    @torch.no_grad()
    def sample(self, params: Params, length: int = 320, temperature: float = 0.7) -> str:
        """Text that the trained model writes by itself."""
        generator = torch.Generator().manual_seed(self.options.seed)
        tokens = torch.tensor([self.corpus.characters.index(character) for character in "The "], device="cpu")
        for _ in range(length):
            logits = ltx.functional_call(self.model, params, (tokens[None, -CONTEXT:],))[0, -1]
            drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, drawn])
        return self.corpus.decode(tokens)


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    # The model is small and the number of processes any: all use the CPU, even if there are accelerators.
    with ltx.init(backend="gloo") as world:
        if not world.is_global_zero:
            return run(options, Report())
        options.out.mkdir(parents=True, exist_ok=True)
        with open(options.out / "metrics.jsonl", "w", encoding="utf-8", buffering=1) as metrics:
            run(options, Report(sys.stdout, metrics))


def run(options: Options, report: Report) -> None:
    corpus = Corpus.of(read_topics())
    torch.manual_seed(options.seed)
    lesson = Lesson(GPT(len(corpus.characters), CONTEXT), corpus, options)
    unigram = unigram_entropy(corpus.train)
    count = sum(parameter.numel() for parameter in lesson.model.parameters())
    report.say(
        f"{ltx.axis_size()} rank(s), {torch.get_num_threads()} thread(s) each: a GPT of {count:,} parameters on "
        f"{len(corpus.train):,} characters, {len(corpus.validation):,} held out\n"
    )
    chosen = [options.strategy] if options.strategy else CONFIGURATIONS
    results, curves, trained = zip(*(lesson.train(CONFIGURATIONS[name], report) for name in chosen), strict=True)
    report.say(f"\n{format_table(results)}\n")
    report.say(f"Frequencies of characters alone give a loss of {unigram:.3f}.")
    if report.stream is None:
        return
    report.say(f"The {results[0].strategy} model writes:\n")
    report.say(textwrap.indent(lesson.sample(trained[0]), "    ") + "\n")
    figure = options.out / "loss.png"
    drawn = draw({x.strategy: curve for x, curve in zip(results, curves, strict=True)}, unigram, figure)
    report.say(f"Figure: {figure}" if drawn else "No figure: matplotlib isn't installed (pip install 'ltx[demo]').")
    report.say(f"Metrics: {options.out / 'metrics.jsonl'}")


if __name__ == "__main__":
    main()
