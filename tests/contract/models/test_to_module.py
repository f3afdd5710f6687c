"""A model of transformers with tied embeddings, trained on two ranks, writes and is saved as that of a plain loop."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ltx
from tests.contract.models.zoo import MODELS, VOCABULARY, causal
from tests.kinds import Ranks
from tests.needs import needs

pytestmark = needs("transformers")

STEPS = 3
PROMPT = torch.tensor([[3, 4, 5]])


def made(name: str, seed: int) -> Any:
    """The model, whose input and output embeddings are one tensor."""
    torch.manual_seed(seed)
    model: Any = MODELS[name].made()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    assert is_tied(model)
    return model


def is_tied(model: Any) -> bool:
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def batches(seed: int) -> list[list[dict[str, Tensor]]]:
    torch.manual_seed(seed + 1)
    return [[causal(3) for _ in range(2)] for _ in range(STEPS)]


def trained(name: str, seed: int, whole_module: bool, strategy: ltx.Strategy | None, overlap: Any) -> Any:
    """On a rank: what the module writes, its state dict, and that of the module that is loaded from its files."""
    model = made(name, seed)

    @ltx.data_parallel(strategy=strategy)
    def step(params: dict[str, Tensor], **batch: Tensor) -> Any:
        return ltx.functional_call(model, params, (), batch)

    train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9), overlap=overlap)
    state = train.init(model if whole_module else dict(model.named_parameters()))
    for of_ranks in batches(seed):
        state, _ = train(state, **of_ranks[int(ltx.axis_index())])
    back = ltx.to_module(model, state).eval()
    assert is_tied(back)
    written, loaded = back.generate(PROMPT, max_new_tokens=4, do_sample=False), None
    if int(ltx.axis_index()) == 0:  # transformers writes on rank 0 alone
        with tempfile.TemporaryDirectory() as folder:
            back.save_pretrained(folder)
            again = type(back).from_pretrained(folder, dtype=torch.float64)
            assert is_tied(again)
            loaded = dict(again.state_dict())
    values = {key: x.detach().clone() for key, x in back.state_dict().items()}
    train(state, **of_ranks[0])  # the state may still be trained
    same = [torch.equal(x, values[key]) for key, x in back.state_dict().items()]
    assert all(same) != whole_module, "the module follows, or has copies"
    return written, values, loaded


def plain(name: str, seed: int) -> nn.Module:
    model = made(name, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for of_ranks in batches(seed):
        optimizer.zero_grad()
        whole = {key: torch.cat([batch[key] for batch in of_ranks]) for key in of_ranks[0]}
        model(**whole).loss.backward()
        optimizer.step()
    return model.eval()


def check(results: Any, name: str, seed: int) -> None:
    expected: Any = plain(name, seed)
    for rank, (written, values, loaded) in enumerate(results):
        assert torch.equal(written, expected.generate(PROMPT, max_new_tokens=4, do_sample=False))
        assert int(written.max()) < VOCABULARY
        torch.testing.assert_close(values, dict(expected.state_dict()), rtol=1e-6, atol=1e-7)
        if rank == 0:
            assert loaded.keys() == values.keys()
            assert all(torch.equal(x, values[key]) for key, x in loaded.items())


CASES: dict[str, tuple[str, bool, ltx.Strategy | None, str]] = {
    "gpt2": ("gpt2", True, None, "backward"),
    "gpt2, by parameters": ("gpt2", False, None, "update"),
    "gpt2, zero": ("gpt2", True, ltx.ZeroStrategy(bucket_bytes=1024, first_bucket_bytes=1024), "update"),
    "llama": ("llama", True, None, "update"),
    "llama, zero": ("llama", True, ltx.ZeroStrategy(), "backward"),
}


@pytest.mark.full
@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", CASES)
def test_generate_and_save_after_training_on_two_ranks(case: str, ranks: Ranks, seed: int) -> None:
    name, *others = CASES[case]
    check(ranks(2).run(trained, name, seed, *others), name, seed)
