"""Noise that is the same wherever it is drawn."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import ltx
from ltx.errors import OptimError, StrategyError, UnsupportedError
from ltx.optim import add_noise, chain, from_torch, partition
from tests.contract.optim.cases import same_bits
from tests.kinds import Ranks
from tests.train_on import go_on, refuses

noisy = add_noise(0.5, seed=3)
PARAMS = {
    "a": torch.zeros(20_000),
    "b": torch.zeros(20_000, dtype=torch.float64),
    "half": torch.zeros(100, 200, dtype=torch.bfloat16),
    "complex": torch.zeros(20_000, dtype=torch.complex64),
    "none": torch.zeros(0, 3),
    "scalar": torch.zeros(()),
}


def drawn(updates: int = 1) -> Any:
    state = noisy.init(PARAMS)
    for _ in range(updates):
        found, state = noisy.update(PARAMS, state, PARAMS)
    assert state.count == updates
    return found


def test_is_gaussian_and_of_the_gradients_dtype() -> None:
    found = drawn()
    for name, noise in found.items():
        assert noise.dtype == PARAMS[name].dtype
        assert noise.shape == PARAMS[name].shape
        if noise.numel() < 100:
            continue
        assert abs(noise.mean()) < 0.02  # 5 standard deviations: the seed is fixed
        assert abs(noise.std() - 0.5) < 0.02
    assert abs(torch.corrcoef(torch.stack([found["a"].double(), found["b"]]))[0, 1]) < 0.05


def test_is_a_function_of_seed_step_and_leaf() -> None:
    torch.manual_seed(0)
    one = drawn(2)
    torch.manual_seed(1)
    assert same_bits(one, drawn(2))
    assert not torch.equal(one["a"], drawn(1)["a"])
    assert not torch.equal(one["a"], add_noise(0.5, seed=4).update(PARAMS, noisy.init(PARAMS), PARAMS)[0]["a"])
    assert pickle.loads(pickle.dumps(noisy)) == noisy


def test_real_and_simulated_ranks_stay_alike(ranks: Ranks) -> None:
    made = chain(noisy, from_torch(torch.optim.SGD, lr=1.0))
    train = ltx.train_step(ltx.data_parallel(lambda p, x: (p["w"] * x).sum()), made)

    def trained() -> Any:
        x = torch.tensor([1.0, 2.0]) + ltx.world().rank
        return dict(go_on(train, train.init({"w": torch.zeros(2)}), [x] * 3).params)

    params = ranks(2).run(trained).replicated()
    state = train.init({"w": torch.zeros(2)})
    x = torch.tensor([[1.0, 2.0], [2.0, 3.0]])
    simulated, _ = ltx.vmap(train, in_dims=(None, 0))(state, x)
    real, _ = train(train.init({"w": torch.zeros(2)}), torch.tensor([1.5, 2.5]))
    for rank in range(2):
        torch.testing.assert_close(simulated.params["w"][rank], real.params["w"])
    assert not torch.equal(params["w"], -3 * torch.tensor([1.5, 2.5]))


def test_refused() -> None:
    refuses(OptimError, "std must be a finite number of at least 0, got -1", add_noise, -1.0, 0)
    refuses(OptimError, "seed", add_noise, 1.0, None)
    with pytest.raises(StrategyError, match="ZeroStrategy needs an elementwise update"):
        ltx.train_step(ltx.data_parallel(sum, ltx.ZeroStrategy()), chain(noisy, from_torch(torch.optim.SGD)))


@pytest.mark.slow_compile
@pytest.mark.full
def test_not_in_a_compiled_step() -> None:
    train = ltx.train_step(ltx.data_parallel(lambda p: p["w"].sum()), chain(noisy, from_torch(torch.optim.SGD)))
    refused = (UnsupportedError, torch._dynamo.exc.TorchDynamoException)
    with pytest.raises(refused, match="add_noise can't be traced"):
        torch.compile(train, fullgraph=True, backend="eager")(train.init({"w": torch.zeros(2)}))


def test_groups_of_one_seed_draw_different_noise_and_a_missing_gradient_moves_nobodys_place() -> None:
    zeros = {"a": torch.zeros(100), "b": torch.zeros(100)}
    alike = chain(noisy, from_torch(torch.optim.SGD, lr=1.0))
    groups = partition({"a": alike, "b": alike}, {"a": "a", "b": "b"})
    found, _ = groups.apply(zeros, groups.init(zeros), zeros)
    assert not torch.equal(found["a"], found["b"])
    whole, _ = alike.apply(zeros, alike.init(zeros), zeros)
    assert same_bits(found, whole)
    lacking = {"a": None, "b": zeros["b"]}
    assert torch.equal(alike.apply(lacking, alike.init(zeros), zeros)[0]["b"], whole["b"])
