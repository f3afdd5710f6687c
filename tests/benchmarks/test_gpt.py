"""The benchmarks' GPT: shapes and causality. Its text: cutting, encoding, batches."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpt import GPT, PARAGRAPH, Corpus, read_topics, split
from tests.train_on import refuses


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(vocabulary=11, context=12, width=16, layers=2, heads=4)


def test_a_position_sees_itself_and_what_is_before(model: GPT) -> None:
    tokens = torch.randint(11, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 11
    before, after = model(tokens)[0], model(changed)[0]
    torch.testing.assert_close(before[:7], after[:7])
    assert (before[7:] - after[7:]).abs().amax(dim=-1).gt(1e-6).all()


@pytest.fixture(scope="module")
def topics() -> str:
    return read_topics()


@pytest.fixture(scope="module")
def corpus(topics: str) -> Corpus:
    return Corpus.of(topics)


def decoded(corpus: Corpus, tokens: torch.Tensor) -> str:
    return "".join(corpus.characters[token] for token in tokens.tolist())


def test_the_held_out_text_is_the_end_and_none_of_it_was_trained_on(topics: str) -> None:
    train, validation = split(topics)
    assert topics.startswith(train)
    assert topics.endswith(validation[-200:])
    assert 0.05 < len(validation) / len(topics) <= 0.1
    assert not set(train.split(PARAGRAPH)) & set(validation.split(PARAGRAPH))


def test_a_text_without_paragraphs_is_refused() -> None:
    refuses(ValueError, r"text: no paragraph ends in its last 10%", split, "one line")


def test_tokens_are_characters(topics: str, corpus: Corpus) -> None:
    train, validation = split(topics)
    assert (decoded(corpus, corpus.train), decoded(corpus, corpus.validation)) == (train, validation)
    assert (len(corpus.characters), corpus.train.dtype) == (len(set(topics)), torch.int64)
    assert corpus.train.max() < len(corpus.characters)


def test_a_batch_is_a_function_of_step_and_seed(corpus: Corpus) -> None:
    x, y = corpus.batch(3, batch_size=4, context=16)
    again, _ = corpus.batch(3, batch_size=4, context=16)
    torch.testing.assert_close(x, again, rtol=0, atol=0)
    assert x.shape == y.shape == (4, 16)
    torch.testing.assert_close(x[:, 1:], y[:, :-1], rtol=0, atol=0)
    assert not torch.equal(x, corpus.batch(4, batch_size=4, context=16)[0])
    assert not torch.equal(x, corpus.batch(3, batch_size=4, context=16, seed=1)[0])


def test_validation_windows_cover_the_held_out_text_once(corpus: Corpus) -> None:
    x, y = corpus.validation_windows(64)
    assert x.shape == y.shape
    covered = x.flatten()
    torch.testing.assert_close(covered, corpus.validation[: len(covered)], rtol=0, atol=0)
    torch.testing.assert_close(y.flatten(), corpus.validation[1 : len(covered) + 1], rtol=0, atol=0)
    assert len(corpus.validation) - len(covered) <= 64
