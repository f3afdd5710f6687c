"""The training run: each configuration trains the same GPT on the same text, then they are compared.

Started by ``ltx demo``, by ``ltx run -n 2 -m ltx.demo.train``, or by plain ``torchrun --nproc-per-node 2 -m
ltx.demo.train``; without any launcher it is a world of one.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import ltx
from ltx.demo.gpt import GPT, Corpus, read_topics, unigram_entropy
from ltx.demo.report import Curve, JsonLines, Progress, Reading, Result, draw, format_table
from ltx.profile import Trace

Params = dict[str, Tensor]

CONTEXT = 64
PEAK_LR = 4e-3
VALIDATIONS = 8  # while training; each on an eighth of the held-out text


@dataclass(frozen=True)
class Configuration:
    """One way to train; all of them see the same number of characters."""

    name: str  # what the table calls it
    comm_hook: str  # how gradients travel, a `comm_hook` of ltx.DDPStrategy
    micro_batches: int = 1  # how many batches go into one step, and so into one synchronisation

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
    default = Options()
    steps = "optimizer steps; accumulation takes a quarter as many, each on four batches (default: %(default)s)"
    out = "folder for the figure and the metrics (default: %(default)s)"
    sequences = "sequences a rank (default: %(default)s)"
    parser.add_argument("--steps", type=positive, default=default.steps, help=steps)
    parser.add_argument("--batch-size", type=positive, default=default.batch_size, help=sequences)
    parser.add_argument("--strategy", choices=CONFIGURATIONS, help="this configuration alone (default: all of them)")
    parser.add_argument("--out", type=Path, default=default.out, help=out)
    parser.add_argument("--seed", type=int, default=default.seed, help="of parameters and batches (default: 0)")


def options_of(arguments: argparse.Namespace) -> Options:
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


def schedule(steps: int) -> Callable[[int], float]:
    """A learning rate that warms up for a twentieth of the steps, then falls to a twentieth along a cosine.

    >>> lr = schedule(100)
    >>> [round(lr(step), 5) for step in (0, 4, 5, 100)]
    [0.0008, 0.004, 0.004, 0.0002]
    """
    return ltx.optim.warmup_cosine(PEAK_LR, max(1, steps // 20), max(1, steps), end=PEAK_LR / 20)


@dataclass
class Meter:
    """Sums over a run's steps: characters, seconds, and what ``ltx.profile.record()`` saw."""

    tokens: int = 0
    seconds: float = 0.0
    bytes_sent: int = 0
    comm_s: float = 0.0
    waited_s: float = 0.0

    def add(self, tokens: int, seconds: float, trace: Trace) -> None:
        self.tokens += tokens
        self.seconds += seconds
        self.bytes_sent += trace.bytes
        self.comm_s += trace.comm_s
        self.waited_s += trace.waited_s

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def hidden(self) -> float | None:
        """The part of the communication that went on while this rank computed; None if nothing was sent."""
        return max(0.0, 1.0 - self.waited_s / self.comm_s) if self.bytes_sent and self.comm_s else None


@dataclass(frozen=True)
class Lesson:
    """What all configurations have in common: the model's shape, the text, the options."""

    model: GPT
    corpus: Corpus
    options: Options

    def loss(self, params: Params, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats a character: pure, and without a word about ranks."""
        logits = ltx.functional_call(self.model, params, (inputs,))
        return cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def validate(self, params: Params, every: int = 1) -> float:
        """The loss on each ``every``-th window of the held-out text, dealt out to the ranks."""
        rank, size = int(ltx.axis_index()), ltx.axis_size()
        inputs, targets = (windows[::every][rank::size] for windows in self.corpus.validation_windows(CONTEXT))
        total = torch.zeros(())
        for x, y in zip(inputs.split(64), targets.split(64), strict=True):
            total += self.loss(params, x, y) * y.numel()
        total, count = ltx.psum((total, torch.tensor(float(targets.numel()))))
        return float(total / count)

    def train(
        self, configuration: Configuration, progress: Progress, metrics: JsonLines
    ) -> tuple[Result, Curve, Params]:
        name, steps = configuration.name, configuration.steps(self.options.steps)
        batch_size = self.options.batch_size * configuration.micro_batches * ltx.axis_size()

        loss_fn: Callable[..., Any] = self.loss
        if configuration.micro_batches > 1:
            loss_fn = ltx.accumulate(loss_fn, steps=configuration.micro_batches)
        step = ltx.data_parallel(loss_fn, ltx.DDPStrategy(comm_hook=configuration.comm_hook))
        adamw = ltx.optim.from_torch(torch.optim.AdamW, lr=schedule(steps), betas=(0.9, 0.98), weight_decay=0.1)
        train = ltx.train_step(step, ltx.optim.chain(ltx.optim.clip_by_global_norm(1.0), adamw))
        state = train.init(dict(self.model.named_parameters()))

        meter, curve = Meter(), Curve()
        for index in range(steps):
            batch = ltx.shard(self.corpus.batch(index, batch_size, CONTEXT, self.options.seed))
            began = time.perf_counter()
            with ltx.profile.record() as trace:
                state, measured = train(state, *batch)
                loss = float(measured.loss)
            assert measured.grad_norm is not None  # there is one because the gradients are clipped
            meter.add(batch_size * CONTEXT, time.perf_counter() - began, trace)

            curve.tokens.append(meter.tokens)
            curve.loss.append(loss)
            said = {"step": index + 1, "tokens": meter.tokens, "loss": loss, "grad_norm": float(measured.grad_norm)}
            said |= {"seconds": round(meter.seconds, 4), "bytes": trace.bytes, "hidden": trace.hidden}
            metrics.write("step", strategy=name, **said)
            progress.show(name, Reading(index + 1, steps, loss, meter.tokens_per_s, trace.bytes, meter.hidden))
            if (index + 1) * VALIDATIONS // steps > index * VALIDATIONS // steps:
                validation_loss = self.validate(state.params, every=8)
                curve.validation_tokens.append(meter.tokens)
                curve.validation_loss.append(validation_loss)
                metrics.write("validation", strategy=name, tokens=meter.tokens, loss=validation_loss)

        validation_loss = self.validate(state.params)
        result = Result(
            name, steps, validation_loss, meter.tokens_per_s, meter.bytes_sent / steps, meter.hidden, meter.seconds
        )
        metrics.write("result", **asdict(result))
        return result, curve, state.params

    @torch.no_grad()
    def sample(self, params: Params, length: int = 320, temperature: float = 0.7) -> str:
        """Text that the trained model writes by itself."""
        generator = torch.Generator().manual_seed(self.options.seed)
        tokens = self.corpus.vocabulary.encode("The ")
        for _ in range(length):
            logits = ltx.functional_call(self.model, params, (tokens[None, -CONTEXT:],))[0, -1]
            drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, drawn])
        return self.corpus.vocabulary.decode(tokens)


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    # A small model on as many processes as were asked for: on the CPU, whatever accelerators there are.
    with ltx.init(backend="gloo") as world:
        # Only rank 0 speaks and writes; elsewhere both are silent, so that the code below is the same on all ranks.
        progress = Progress(sys.stdout if world.is_global_zero else None)
        with JsonLines(options.out / "metrics.jsonl" if world.is_global_zero else None) as metrics:
            run(options, progress, metrics)


def run(options: Options, progress: Progress, metrics: JsonLines) -> None:
    corpus = Corpus.of(read_topics())
    torch.manual_seed(options.seed)
    lesson = Lesson(GPT(len(corpus.vocabulary), CONTEXT), corpus, options)
    unigram = unigram_entropy(corpus.train)
    count = sum(parameter.numel() for parameter in lesson.model.parameters())
    progress.say(
        f"{ltx.axis_size()} rank(s), {torch.get_num_threads()} thread(s) each: a GPT of {count:,} parameters on "
        f"{len(corpus.train):,} characters, {len(corpus.validation):,} held out\n"
    )

    results, curves, trained = [], {}, None
    for configuration in options.configurations:
        result, curves[configuration.name], params = lesson.train(configuration, progress, metrics)
        results.append(result)
        trained = params if trained is None else trained

    progress.say(f"\n{format_table(results)}\n")
    progress.say(f"Frequencies of characters alone give a loss of {unigram:.3f}.")
    if progress.stream is None or trained is None:
        return
    progress.say(f"The {results[0].strategy} model writes:\n")
    progress.say("\n".join(f"    {line}" for line in lesson.sample(trained).splitlines()) + "\n")
    figure = options.out / "loss.png"
    drawn = draw(curves, unigram, figure)
    progress.say(f"Figure: {figure}" if drawn else "No figure: matplotlib isn't installed (pip install 'ltx[demo]').")
    progress.say(f"Metrics: {options.out / 'metrics.jsonl'}")


if __name__ == "__main__":
    main()
