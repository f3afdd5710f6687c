"""The demo's training run: its schedule, its batches, and what it learns in a world of one."""

from __future__ import annotations

import io
import json
import math
import sys
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.func import functional_call
from torch.nn.functional import cross_entropy

import ltx
from ltx.demo.gpt import GPT, PARAGRAPH, Corpus, read_topics, split, unigram_entropy
from ltx.demo.train import (
    CONFIGURATIONS,
    CONTEXT,
    PEAK_LR,
    Curve,
    Lesson,
    Options,
    Report,
    Result,
    draw,
    format_table,
    main,
    schedule,
    told,
)


@pytest.fixture
def lesson() -> Lesson:
    """A tiny model on a text that is easy to learn."""
    torch.manual_seed(0)
    corpus = Corpus.of(PARAGRAPH.join(f"{'ab' * 40} number {number}" for number in range(60)))
    return Lesson(GPT(len(corpus.characters), CONTEXT, width=16, layers=1, heads=2), corpus, Options(steps=24))


@pytest.mark.parametrize("steps", [1, 3, 100])
def test_the_schedule_rises_to_its_peak_and_falls(steps: int) -> None:
    rates = [schedule(steps)(step) for step in range(steps)]
    peak = rates.index(max(rates))
    assert max(rates) == pytest.approx(PEAK_LR)
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert min(rates) > 0


def test_ranks_see_different_parts_of_the_same_batch(lesson: Lesson) -> None:
    x, y = lesson.corpus.batch(step=5, batch_size=6, context=8)

    def part(_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mine: tuple[torch.Tensor, torch.Tensor] = ltx.shard((x, y))
        return mine

    parts_x, parts_y = ltx.vmap(part, axis_name="data")(torch.zeros(3))
    torch.testing.assert_close(parts_x.flatten(0, 1), x, rtol=0, atol=0)
    torch.testing.assert_close(parts_y.flatten(0, 1), y, rtol=0, atol=0)
    assert not torch.equal(parts_x[0], parts_x[1])


def test_ranks_of_a_pool_see_different_samples(ranks) -> None:
    """The same on two processes: equal again when asked again, different between ranks."""

    def drawn() -> list[list[int]]:
        corpus = Corpus.of(PARAGRAPH.join(f"a line of text, number {number}" for number in range(60)))
        return ltx.shard(corpus.batch(step=5, batch_size=4, context=16))[0].tolist()

    first, again = (list(ranks(2).run(drawn)) for _ in range(2))
    assert first == again
    assert first[0] != first[1]


def test_accumulation_is_the_larger_batch(lesson: Lesson) -> None:
    x, y = lesson.corpus.batch(step=0, batch_size=8, context=CONTEXT)
    params = {name: parameter.detach() for name, parameter in lesson.model.named_parameters()}
    whole = torch.func.grad(lesson.loss)(params, x, y)
    accumulated = torch.func.grad(ltx.data_parallel(ltx.accumulate(lesson.loss, steps=4)))(params, x, y)
    for name, gradient in whole.items():
        torch.testing.assert_close(accumulated[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.full(but=1)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_training_learns_and_is_written_down(name: str, lesson: Lesson) -> None:
    stream, metrics = io.StringIO(), io.StringIO()
    with ltx.init():
        result, curve, params = lesson.train(CONFIGURATIONS[name], Report(stream, metrics))
        assert lesson.validate(params) == pytest.approx(result.validation_loss)
    assert result.steps == len(curve.loss) == 24 // CONFIGURATIONS[name].micro_batches
    assert curve.loss[-1] < curve.loss[0]
    assert curve.tokens[-1] == curve.validation_tokens[-1] == 24 * Options().batch_size * CONTEXT
    assert (result.bytes_per_step, result.hidden) == (0, None)
    last = stream.getvalue().splitlines()[-1]
    for part in (result.strategy, f"[{'#' * 24}]  {result.steps}/{result.steps}", "tokens/s  0 B/step  - hidden"):
        assert part in last
    lines = [json.loads(line) for line in metrics.getvalue().splitlines()]
    assert [line["loss"] for line in lines if line["kind"] == "step"] == curve.loss
    assert lines[-1]["kind"] == "result"


def test_it_trains_on_the_cpu_of_a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("ltx.core.world.world.default_backend", lambda device: "cpu:gloo,cuda:nccl")
    seen = []
    monkeypatch.setattr("ltx.demo.train.run", lambda *_: seen.append(ltx.world().backend))
    main(["--out", str(tmp_path)])
    assert seen == ["gloo"]


def test_the_validation_loss_is_the_mean_over_all_windows(lesson: Lesson) -> None:
    params = dict(lesson.model.named_parameters())
    x, y = lesson.corpus.validation_windows(CONTEXT)
    with torch.no_grad():
        assert lesson.validate(params) == pytest.approx(lesson.loss(params, x, y).item(), rel=1e-5)


def test_a_sample_is_text_and_the_same_again() -> None:
    corpus = Corpus.of("The beginning of the text is long" + PARAGRAPH + "end")
    model = GPT(len(corpus.characters), CONTEXT, width=16, layers=1, heads=2)
    lesson = Lesson(model, corpus, Options())
    text = lesson.sample(dict(model.named_parameters()), length=5)
    assert len(text) == len("The ") + 5
    assert text == lesson.sample(dict(model.named_parameters()), length=5)


# --- The demo's model: shapes and causality. Its text: cutting, encoding, batches ------------------------------------


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(vocabulary=11, context=12, width=16, layers=2, heads=4)


@pytest.mark.parametrize("time", [1, 7, 12])
def test_logits_for_each_position(model: GPT, time: int) -> None:
    assert model(torch.zeros(3, time, dtype=torch.int64)).shape == (3, time, 11)


def test_a_position_sees_itself_and_what_is_before(model: GPT) -> None:
    tokens = torch.randint(11, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 11
    before, after = model(tokens)[0], model(changed)[0]
    torch.testing.assert_close(before[:7], after[:7])
    assert (before[7:] - after[7:]).abs().amax(dim=-1).gt(1e-6).all()


def test_it_starts_as_ignorant_as_can_be(model: GPT) -> None:
    tokens = torch.randint(11, (4, 12))
    loss = cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    assert loss.item() == pytest.approx(math.log(11), rel=0.05)


def test_a_functional_call_reads_the_parameters_given(model: GPT) -> None:
    tokens = torch.randint(11, (2, 5))
    zeros = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    assert functional_call(model, zeros, (tokens,)).eq(0).all()


def test_the_demo_has_under_a_million_parameters() -> None:
    assert 500_000 < sum(parameter.numel() for parameter in GPT(vocabulary=103).parameters()) < 1_000_000


@pytest.fixture(scope="module")
def topics() -> str:
    return read_topics()


@pytest.fixture(scope="module")
def corpus(topics: str) -> Corpus:
    return Corpus.of(topics)


def test_the_text_is_what_cpython_ships(topics: str) -> None:
    assert len(topics) > 300_000
    assert 'The "assert" statement' in topics


def test_the_held_out_text_is_the_end_and_none_of_it_was_trained_on(topics: str) -> None:
    train, validation = split(topics)
    assert topics.startswith(train)
    assert topics.endswith(validation[-200:])
    assert 0.05 < len(validation) / len(topics) <= 0.1
    assert not set(train.split(PARAGRAPH)) & set(validation.split(PARAGRAPH))


def test_a_text_without_paragraphs_is_refused() -> None:
    with pytest.raises(ValueError, match=r"text: no paragraph ends in its last 10%"):
        split("one line")


def test_tokens_are_characters(topics: str, corpus: Corpus) -> None:
    train, validation = split(topics)
    assert (corpus.decode(corpus.train), corpus.decode(corpus.validation)) == (train, validation)
    assert len(corpus.characters) == len(set(topics))
    assert corpus.train.dtype == torch.int64
    assert corpus.train.max() < len(corpus.characters)


def test_a_batch_is_a_function_of_step_and_seed(corpus: Corpus) -> None:
    x, y = corpus.batch(3, batch_size=4, context=16)
    again, _ = corpus.batch(3, batch_size=4, context=16)
    torch.testing.assert_close(x, again, rtol=0, atol=0)
    assert x.shape == y.shape == (4, 16)
    torch.testing.assert_close(x[:, 1:], y[:, :-1], rtol=0, atol=0)
    assert not torch.equal(x, corpus.batch(4, batch_size=4, context=16)[0])
    assert not torch.equal(x, corpus.batch(3, batch_size=4, context=16, seed=1)[0])


def test_batches_come_from_the_training_text(corpus: Corpus) -> None:
    x, _ = corpus.batch(0, batch_size=2, context=32)
    train = corpus.decode(corpus.train)
    assert all(corpus.decode(row) in train for row in x)


def test_validation_windows_cover_the_held_out_text_once(corpus: Corpus) -> None:
    x, y = corpus.validation_windows(64)
    assert x.shape == y.shape
    covered = x.flatten()
    torch.testing.assert_close(covered, corpus.validation[: len(covered)], rtol=0, atol=0)
    torch.testing.assert_close(y.flatten(), corpus.validation[1 : len(covered) + 1], rtol=0, atol=0)
    assert len(corpus.validation) - len(covered) <= 64


def test_unigram_entropy_of_equal_frequencies() -> None:
    assert unigram_entropy(torch.arange(8)) == pytest.approx(math.log(8))


# --- What the demo tells: progress, table, figure, JSON lines --------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Time that moves when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("ltx.demo.train.time.monotonic", clock)
    return clock


def test_without_communication_nothing_is_hidden() -> None:
    assert told(1e6, 0.0, None) == ("1,000,000", "0 B", "-")


@pytest.mark.parametrize("width", [41, 79, 300])
def test_a_terminal_gets_one_line_that_is_rewritten(width: int, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    report = Report(stream := Terminal())
    for step in range(1, 11):
        report.show(f"{step} " + "x" * (100 - 8 * step), last=step == 10)
        clock.now += 1 / 16  # every second one comes too early
    first, *lines = stream.getvalue().split("\r")
    assert (first, [line.split()[0] for line in lines]) == ("", ["1", "3", "5", "7", "9", "10"])
    assert all(len(line.rstrip("\n")) < width for line in lines)
    assert [len(a.rstrip()) <= len(b) for a, b in pairwise(lines)] == [True] * 5  # covers what was there
    assert [line.count("\n") for line in lines] == [0, 0, 0, 0, 0, 1]
    assert stream.getvalue().endswith("\n")


def test_elsewhere_a_line_now_and_then_and_the_last(clock: Clock) -> None:
    report = Report(stream := io.StringIO(), interval_s=5)
    for step in range(1, 11):
        report.show(f"step {step}", last=step == 10)
        clock.now += 1
    assert stream.getvalue() == "step 1\nstep 6\nstep 10\n"


def test_a_rank_without_a_stream_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report()
    report.show("10/10", last=True)
    report.say("hello")
    report.write("step", loss=1.0)
    assert capsys.readouterr() == ("", "")


RESULTS = [
    Result("fp32", 700, 1.7046, 24_012.0, 3_303_424.0, 0.92, 30.1),
    Result("accumulate x 4", 175, 1.94, 25_100.0, 0.0, None, 29.0),
]


def test_a_row_for_each_result() -> None:
    header, rule, *rows = format_table(RESULTS).splitlines()
    assert header.split("  ")[0] == "strategy"
    for column in ["validation loss", "tokens/s", "bytes/step"]:
        assert column in header
    assert set(rule) <= {"-", " "}
    assert rows[0].split() == ["fp32", "700", "1.705", "24,012", "3.30", "MB", "92%"]
    assert rows[1].split() == ["accumulate", "x", "4", "175", "1.940", "25,100", "0", "B", "-"]
    assert len({len(line) for line in (header, rule, *rows)}) == 1


def test_a_figure_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "loss.png"
    assert draw({"fp32": Curve([1, 2], [3.0, 2.0], [2], [2.5])}, 3.2, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not draw({}, 3.2, tmp_path / "loss.png")
    assert not list(tmp_path.iterdir())


def test_metrics_are_json_lines() -> None:
    Report(metrics=(file := io.StringIO())).write("result", **asdict(RESULTS[1]))
    result = json.loads(file.getvalue())
    assert (result["kind"], result["strategy"], result["hidden"]) == ("result", "accumulate x 4", None)
