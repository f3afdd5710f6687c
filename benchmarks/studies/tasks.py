"""What the studies of convergence train: two tasks, and how far ranks drift apart. How they keep what came of it.

A small GPT on the characters of Python's own help texts, and scikit-learn's digits. All worlds share the
same global batches, so that they differ in communication alone.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import attention
from torch.nn.functional import cross_entropy

import ltx
from benchmarks.gpt import GPT, Corpus, read_topics

Params = dict[str, Tensor]
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Settings:
    """What is fixed for all hooks and strategies of a task."""

    steps: int
    batch_size: int  # of all ranks together
    peak_lr: float
    warm_up: int  # exact steps before hooks that want some
    block: int  # numbers that share a scale, where a hook has blocks
    eps: float | None = None  # Adam's


SETTINGS = {
    "digits": Settings(steps=300, batch_size=128, peak_lr=0.5, warm_up=30, block=32),
    "digits by label": Settings(steps=300, batch_size=128, peak_lr=0.5, warm_up=30, block=32),
    "gpt": Settings(steps=200, batch_size=64, peak_lr=4e-3, warm_up=60, block=32, eps=1e-3),
    "gpt, eps 1e-8": Settings(steps=200, batch_size=64, peak_lr=4e-3, warm_up=60, block=32, eps=1e-8),
}


class Task:
    """A model, its data and how it is trained."""

    skeleton: nn.Module  # whose parameters aren't used
    held_out: Batch

    def __init__(self, name: str) -> None:
        self.name = name  # in SETTINGS
        self.settings = SETTINGS[name]

    def model(self) -> nn.Module:
        """A new model, from torch's generator."""
        raise NotImplementedError

    def batch(self, step: int, seed: int) -> Batch:
        """The global batch of a step, a function of its arguments."""
        raise NotImplementedError

    def optimizer(self) -> ltx.optim.Optimizer:
        raise NotImplementedError

    def lr(self, step: int) -> float:
        """Up for a twentieth of the steps, then down to a hundredth along a cosine."""
        steps, peak = self.settings.steps, self.settings.peak_lr
        return ltx.optim.warmup_cosine(peak, max(1, steps // 20), steps, end=peak / 100)(step)

    def params(self, seed: int) -> Params:
        """The first parameters."""
        torch.manual_seed(seed)
        return {name: p.detach().clone() for name, p in self.model().named_parameters()}

    def loss(self, params: Params, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross-entropy in nats."""
        # The batched forms of torch's other attention kernels are loops, with a warning.
        with attention.sdpa_kernel(attention.SDPBackend.MATH):
            logits = ltx.functional_call(self.skeleton, params, (x,))
        return cross_entropy(logits.flatten(0, -2), y.flatten())

    @torch.no_grad()
    def validate(self, params: Params, every: int = 1) -> float:
        """The loss on what is held out, or on each `every`-th of it."""
        x, y = (part[::every] for part in self.held_out)
        return self.loss(params, x, y).item()


class CharacterGPT(Task):
    """A GPT with 2 layers of width 32, on the texts of Python's help()."""

    context = 32

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.corpus = Corpus.of(read_topics())
        self.held_out = self.corpus.validation_windows(self.context)
        self.skeleton = self.model()

    def model(self) -> nn.Module:
        return GPT(len(self.corpus.characters), self.context, width=32, layers=2, heads=2)

    def batch(self, step: int, seed: int) -> Batch:
        return self.corpus.batch(step, self.settings.batch_size, self.context, seed)

    def optimizer(self) -> ltx.optim.Optimizer:
        adamw = ltx.optim.from_torch(torch.optim.AdamW, lr=self.lr, eps=self.settings.eps, weight_decay=0.1)
        return ltx.optim.chain(ltx.optim.clip_by_global_norm(1.0), adamw)


class Digits(Task):
    """scikit-learn's 1,797 digits of 8 x 8 pixels, a fifth of them held out, and a network with one hidden layer."""

    def __init__(self, name: str) -> None:
        from sklearn.datasets import load_digits

        super().__init__(name)
        data = load_digits()
        x, y = torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        held, rest = order[: len(x) // 5], order[len(x) // 5 :]
        self.held_out, self.train = (x[held], y[held]), (x[rest], y[rest])
        self.skeleton = self.model()

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def batch(self, step: int, seed: int) -> Batch:
        x, y = self.train
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        chosen = torch.randint(len(x), (self.settings.batch_size,), generator=generator)
        return x[chosen], y[chosen]

    def optimizer(self) -> ltx.optim.Optimizer:
        return ltx.optim.from_torch(torch.optim.SGD, lr=self.lr, weight_decay=1e-3)


class SortedDigits(Digits):
    """The same batches sorted by label, so that each rank sees a few of the ten digits only."""

    def batch(self, step: int, seed: int) -> Batch:
        x, y = super().batch(step, seed)
        order = y.argsort(stable=True)
        return x[order], y[order]


TASKS = {"digits": Digits, "digits by label": SortedDigits, "gpt": CharacterGPT, "gpt, eps 1e-8": CharacterGPT}


def drift(leaves: list[Tensor]) -> float:
    """The root mean square over ranks (dimension 0) of their distance from the mean, by the mean's norm."""
    rows = torch.cat([leaf.flatten(1) for leaf in leaves], 1)
    mean = rows.mean(0)
    return float((rows - mean).norm(dim=1).square().mean().sqrt() / mean.norm())


@cache
def task_of(name: str) -> Task:
    """The task of that name, made once."""
    return TASKS[name](name)


def where(rows: list[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    """Those of a results file's rows that have these values."""
    wanted = json.loads(json.dumps(wanted))  # tuples are lists there
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def read(path: Path) -> dict[str, Any]:
    """A results file."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def parser_of(doc: str | None, results: Path) -> argparse.ArgumentParser:
    """The command line that the studies have in common; `results`: the checkout's own file."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(results.name)
    parser.add_argument("--out", type=Path, default=here, help="begins as the checkout's own (default: %(default)s)")
    parser.add_argument("--fresh", action="store_true", help="repeat what the file has")
    parser.add_argument("--table", action="store_true", help="print what the file has, and run nothing")
    return parser
