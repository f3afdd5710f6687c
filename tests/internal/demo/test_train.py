"""The demo's training run: its schedule, its batches, and what it learns in a world of one."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch

import ltx
from ltx.demo.gpt import GPT, PARAGRAPH, Corpus
from ltx.demo.train import CONFIGURATIONS, CONTEXT, PEAK_LR, Lesson, Options, Report, main, schedule


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
