"""Models of other libraries and other people's loops on two ranks, each against one process on all samples."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ltx
from tests.contract.models.zoo import MODELS, STEPS, VOCABULARY, both, causal, load
from tests.covering import some
from tests.kinds import Params, Ranks
from tests.needs import needs
from tests.train_on import go_on, trained

ROWS = {
    "gpt2": ("plain", "checkpoint", "bf16", "weights", "uneven"),
    "llama": ("plain", "checkpoint", "accumulate", "bf16"),
    "bert": ("plain", "checkpoint", "bf16", "uneven"),
    "t5": ("plain", "checkpoint", "weights"),
    "vit": ("plain", "accumulate", "bf16", "uneven", "compiled"),
    "resnet18": ("eval", "local", "sync"),
    "resnet50": ("eval", "local", "sync"),
    "lora": ("plain", "checkpoint", "accumulate", "uneven"),
}


@pytest.fixture(scope="module")
def loaded(ranks: Ranks) -> Ranks:
    ranks(2).run(load)
    return ranks


@needs("transformers", "peft")  # not imported here, which takes seconds: ranks do that
@pytest.mark.full
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", some(ROWS, "llama", "resnet18", "lora"))
def test_like_one_process(name: str, loaded: Ranks, seed: int) -> None:
    for rank, results in enumerate(loaded(2).run(both, name, ROWS[name], seed)):
        for variant, (mine, expected, before) in results.items():
            said = f"{name}, {variant}, rank {rank}: "
            rtol = max(MODELS[name].rtol, 1e-5 if "bf16" in variant else 0.0)
            tolerance = {"rtol": rtol, "atol": rtol, "msg": lambda text, said=said: said + text}
            assert len(mine.losses) == STEPS
            torch.testing.assert_close(mine.losses, expected.losses, **tolerance)
            torch.testing.assert_close(dict(mine.params), expected.params, **tolerance)
            torch.testing.assert_close(dict(mine.buffers), expected.buffers, **tolerance)
            frozen = [key for key in before if name == "lora" and "lora_" not in key]
            assert all(torch.equal(mine.params[key], before[key]) for key in frozen), said + "a frozen parameter moved"
            moved = [key for key in before if not torch.equal(mine.params[key], before[key])]
            assert len(moved) > 3, said + "nothing was trained"


Pair = tuple[Params, Params]

NET = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def loss(p: Params, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(ltx.functional_call(NET, p, (x,)), y)


def problem() -> tuple[Params, Tensor, Tensor]:
    """Rank 0's, on every rank."""
    params = {name: torch.randn_like(p) for name, p in NET.named_parameters()}
    return ltx.broadcast((params, torch.randn(32, 4), torch.randint(3, (32,))))


def data_loader() -> Pair:
    """With a sampler and workers, which are forks."""
    world, (params, x, y) = ltx.world(), problem()
    sampler: Any = DistributedSampler(TensorDataset(x, y), num_replicas=world.size, rank=world.rank, shuffle=False)
    loader: Any = DataLoader(TensorDataset(x, y), batch_size=4, sampler=sampler, num_workers=2)
    train = ltx.train_step(ltx.data_parallel(loss), ltx.optim.from_torch(torch.optim.SGD, lr=0.1))
    state, alone = go_on(train, train.init(params), [tuple(batch) for batch in loader]).state, params
    for step in range(32 // (4 * world.size)):
        places = [rank + world.size * (4 * step + k) for rank in range(world.size) for k in range(4)]
        gradients = grad(loss)(alone, x[places], y[places])
        alone = {k: p - 0.1 * gradients[k] for k, p in alone.items()}
    return state.params, alone


def clipped_mean(per_sample: Params) -> Params:
    norms = torch.stack([g.flatten(1).square().sum(1) for g in per_sample.values()]).sum(0).sqrt()
    return {k: torch.einsum("n,n...->...", (1 / norms).clamp(max=1), g) / len(g) for k, g in per_sample.items()}


def dp_sgd() -> Pair:
    params, x, y = problem()
    local = ltx.block_backward_sync(ltx.data_parallel(loss))
    mine, labels = ltx.shard((x, y))
    clipped = clipped_mean(vmap(grad(local), in_dims=(None, 0, 0))(params, mine[:, None], labels[:, None]))
    whole = clipped_mean(vmap(grad(loss), in_dims=(None, 0, 0))(params, x[:, None], y[:, None]))
    return ltx.sync_gradients(clipped, ltx.DDPStrategy())[0], whole


def physics() -> Pair:
    """A loss of derivatives with respect to the batch, which the step makes a leaf."""

    def residual(p: Params, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        u = ltx.functional_call(NET, p, (x,))
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        return (bend.sum(1) + u.sum(1)).square().mean()

    params, x, _ = problem()
    leaves = {k: p.clone().requires_grad_() for k, p in params.items()}
    found = torch.autograd.grad(residual(leaves, x), list(leaves.values()), materialize_grads=True)
    state, _ = trained(residual, ltx.optim.from_torch(torch.optim.SGD, lr=0.01), params, [ltx.shard(x)])
    return state.params, {k: p - 0.01 * g for (k, p), g in zip(params.items(), found, strict=True)}


def contrastive() -> Pair:
    def over(gather: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
        def clip(p: Params, images: Tensor, texts: Tensor) -> Tensor:
            one, two = gather(images @ p["0.weight"].t()), gather(texts @ p["0.weight"].t().sin())
            return cross_entropy(one @ two.t(), torch.arange(len(one)))

        return clip

    params, x, _ = problem()
    params, images, texts = {"0.weight": params["0.weight"]}, x[:16], x[16:]
    step = ltx.data_parallel(over(lambda rows: ltx.all_gather(rows, tiled=True)))
    return ltx.grad(step)(params, *ltx.shard((images, texts))), grad(over(lambda rows: rows))(params, images, texts)


LOOPS = {"DataLoader": data_loader, "DP-SGD": dp_sgd, "PINN": physics, "CLIP": contrastive}


@pytest.mark.parametrize("name", LOOPS)
def test_loops(name: str, ranks: Ranks, seed: int) -> None:
    for found, expected in (LOOPS[name](), *ranks(2).run(LOOPS[name])):
        torch.testing.assert_close(
            {k: v.detach() for k, v in found.items()}, {k: v.detach() for k, v in expected.items()}
        )


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
    return [[causal(3) for _ in range(2)] for _ in range(3)]


def served(name: str, seed: int, whole_module: bool, strategy: ltx.Strategy | None, overlap: Any) -> Any:
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


def looped(name: str, seed: int) -> nn.Module:
    model = made(name, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for of_ranks in batches(seed):
        optimizer.zero_grad()
        model(**{key: torch.cat([batch[key] for batch in of_ranks]) for key in of_ranks[0]}).loss.backward()
        optimizer.step()
    return model.eval()


CASES: dict[str, tuple[str, bool, ltx.Strategy | None, str]] = {
    "gpt2": ("gpt2", True, None, "backward"),
    "gpt2, by parameters": ("gpt2", False, None, "update"),
    "gpt2, zero": ("gpt2", True, ltx.ZeroStrategy(bucket_bytes=1024, first_bucket_bytes=1024), "update"),
    "llama": ("llama", True, None, "update"),
    "llama, zero": ("llama", True, ltx.ZeroStrategy(), "backward"),
}


@needs("transformers")
@pytest.mark.full
@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", CASES)
def test_generate_and_save_after_training_on_two_ranks(case: str, ranks: Ranks, seed: int) -> None:
    name, *others = CASES[case]
    expected: Any = looped(name, seed)
    for rank, (written, values, loaded) in enumerate(ranks(2).run(served, name, seed, *others)):
        assert torch.equal(written, expected.generate(PROMPT, max_new_tokens=4, do_sample=False))
        assert int(written.max()) < VOCABULARY
        torch.testing.assert_close(values, dict(expected.state_dict()), rtol=1e-6, atol=1e-7)
        if rank == 0:
            assert loaded.keys() == values.keys()
            assert all(torch.equal(x, values[key]) for key, x in loaded.items())
