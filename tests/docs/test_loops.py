"""The loops of two how-tos end where plain torch does, in one process on whole batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

import ltx
from tests.kinds import Params
from tests.test_readme import DOCS, blocks_of, run_in_order

Given = dict[str, Any]


def ran(page: str, names: list[str], folder: str) -> Given:
    """The page's variables of these names, those of train states without the states."""
    found = run_in_order(page, blocks_of(DOCS / "how-to" / page), folder)
    return {name: getattr(found[name], "params", found[name]) for name in names}


def trained(module: torch.nn.Module) -> Params:
    return {name: value.detach() for name, value in module.named_parameters()}


def adam(*modules: torch.nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam([p for module in modules for p in module.parameters()], lr=1e-2, betas=(0.5, 0.9))


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def gan(given: Given) -> dict[str, Params]:
    generator, critic = copy.deepcopy((given["generator"], given["critic"]))
    of_critic, of_generator = adam(critic), adam(generator)
    for real, z in zip(given["data"], given["noise"], strict=True):
        step(of_critic, (softplus(critic(generator(z).detach())) + softplus(-critic(real))).mean())
        step(of_generator, softplus(-critic(generator(z))).mean())
    return {"critic_state": trained(critic), "generator_state": trained(generator)}


def wgan_gp(given: Given) -> dict[str, Params]:
    generator, critic = copy.deepcopy((given["generator"], given["critic"]))
    optimizer = adam(critic)
    for real, z, mix in zip(given["data"], given["noise"], given["mixes"], strict=True):
        fake = generator(z).detach()
        between = (mix * real + (1 - mix) * fake).requires_grad_()
        [slopes] = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        step(optimizer, (critic(fake) - critic(real)).mean() + 10 * (slopes.norm(dim=1) - 1).square().mean())
    return {"wgan_state": trained(critic)}


def follow(target: torch.nn.Module, net: torch.nn.Module) -> None:
    with torch.no_grad():
        for old, new in zip(target.parameters(), net.parameters(), strict=True):
            old.lerp_(new, 0.05)


def targets(given: Given) -> dict[str, Params]:
    results: dict[str, Params] = {}
    for late, name in ((False, "q_state"), (True, "both")):
        q = copy.deepcopy(given["q"])
        target, optimizer = copy.deepcopy(q), adam(q)
        for state, reward, later in zip(given["states"], given["rewards"], given["later"], strict=True):
            wanted = reward + 0.9 * target(later).amax(dim=1).detach()
            if late:
                follow(target, q)
            step(optimizer, (q(state)[:, 0] - wanted).square().mean())
            if not late:
                follow(target, q)
        results |= {name: trained(q)} | ({} if late else {"target": trained(target)})
    return results


def sac(given: Given) -> dict[str, Params]:
    actor, value = copy.deepcopy((given["actor"], given["value"]))
    target, log_alpha = copy.deepcopy(value), torch.zeros((), requires_grad=True)
    of_value, of_actor = adam(value), adam(actor)
    of_alpha = torch.optim.Adam([log_alpha], lr=1e-2, betas=(0.5, 0.9))

    def act(state: Tensor, draw: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = actor(state).chunk(2, dim=1)
        log_std = log_std.clamp(-5, 2)
        raw = mean + log_std.exp() * draw
        log_p = -0.5 * draw**2 - log_std - 2 * (0.6931472 - raw - softplus(-2 * raw))
        return torch.tanh(raw), log_p[:, 0]

    columns = (given["states"], given["actions"], given["rewards"], given["later"], *given["draws"])
    for state, action, reward, later, draw, again in zip(*columns, strict=True):
        alpha = log_alpha.exp().detach()
        with torch.no_grad():
            ahead, log_p = act(later, draw)
            wanted = reward + 0.9 * (target(torch.cat([later, ahead], 1)).amin(dim=1) - alpha * log_p)
        step(of_value, (value(torch.cat([state, action], 1)) - wanted[:, None]).square().mean())
        moved, log_p = act(state, again)
        step(of_actor, (alpha * log_p - value(torch.cat([state, moved], 1)).amin(dim=1)).mean())
        step(of_alpha, -(log_alpha * (log_p.detach() - 1.0)).mean())
        follow(target, value)
    states = {"value_state": trained(value), "actor_state": trained(actor), "value_target": trained(target)}
    return states | {"alpha_state": {"log_alpha": log_alpha.detach()}}


def ensemble(given: Given) -> dict[str, Params]:
    members = copy.deepcopy(given["members"])
    for member in members:
        optimizer = adam(member)
        for batch in given["states"]:
            step(optimizer, (member(batch) - 1).square().mean())
    found = [trained(member) for member in members]
    return {"ensemble": {name: torch.stack([one[name] for one in found]) for name in found[0]}}


def learner(module: torch.nn.Module) -> tuple[Any, torch.optim.SGD]:
    own = copy.deepcopy(module)
    return own, torch.optim.SGD(own.parameters(), lr=0.1)


def ppo(given: Given) -> dict[str, Params]:
    (policy, optimizer), advantage = learner(given["policy"]), given["advantage"]
    normal = (advantage - advantage.mean()) / advantage.std(correction=0)
    for _ in range(4):
        new = torch.log_softmax(policy(given["observed"]), 1).gather(1, given["action"][:, None])[:, 0]
        ratio = (new - given["old"]).exp()
        step(optimizer, -torch.minimum(ratio * normal, ratio.clamp(0.8, 1.2) * normal).mean())
    return {"ppo": trained(policy)}


def plateau(given: Given) -> dict[str, Any]:
    policy, optimizer = learner(given["policy"])
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5, threshold=0.01)
    rates, best, since = [], float("inf"), 0
    for _ in range(80):
        loss = (policy(given["observed"]) - given["goal"]).square().mean()
        step(optimizer, loss)
        seen = round(loss.item(), 2)
        scheduler.step(loss.item())
        rates.append(optimizer.param_groups[0]["lr"])
        best, since = (seen, 0) if seen < best else (best, since + 1)
        if since == 6:
            break
    assert rates[-1] < 0.1
    return {"fit": trained(policy), "rates": rates}


def detection(given: Given) -> dict[str, Params]:
    """Two ranks take every other sample, two at a time: four together."""
    detector, optimizer = learner(given["detector"])
    for four in (given["dataset"][:4], given["dataset"][4:]):
        losses = [(detector(image.mean(dim=(1, 2))) - target["boxes"]).abs().mean() for image, target in four]
        step(optimizer, torch.stack(losses).mean())
    return {"detection": trained(detector)}


def sam(given: Given) -> dict[str, Params]:
    policy, optimizer = learner(given["policy"])
    for _ in range(4):
        before = copy.deepcopy(policy.state_dict())
        (policy(given["observed"]) - given["goal"]).square().mean().backward()
        length = torch.nn.utils.get_total_norm([p.grad for p in policy.parameters()])
        with torch.no_grad():
            for p in policy.parameters():
                p.add_(p.grad / length, alpha=0.05)
        optimizer.zero_grad()
        (policy(given["observed"]) - given["goal"]).square().mean().backward()
        policy.load_state_dict(before)
        optimizer.step()
        optimizer.zero_grad()
    return {"sam_state": trained(policy)}


def truncated(given: Given) -> dict[str, Params]:
    (cell, optimizer), hidden = learner(given["cell"]), torch.zeros(64, 8)
    for inputs in given["sequences"]:
        loss = torch.zeros(())
        hidden = hidden.detach()
        for x in inputs:
            hidden = cell(x, hidden)
            loss = loss + (hidden.mean(dim=1) - x.mean(dim=1)).square().mean()
        step(optimizer, loss)
    return {"cell_state": trained(cell)}


TWINS: dict[str, tuple[str, list[Callable[[Given], dict[str, Any]]]]] = {
    "several-networks.md": (
        "generator critic data noise mixes q states rewards later actor value actions draws members",
        [gan, wgan_gp, targets, sac, ensemble],
    ),
    "other-loops.md": (
        "policy observed action advantage old goal detector dataset cell sequences",
        [ppo, plateau, detection, sam, truncated],
    ),
}
RESULTS = {
    "several-networks.md": "critic_state generator_state wgan_state q_state target both value_state actor_state "
    "value_target alpha_state ensemble",
    "other-loops.md": "ppo fit rates detection sam_state cell_state",
}


@pytest.mark.parametrize("page", TWINS)
def test_it_ends_where_plain_torch_does(page: str, ranks: Callable[[int], ltx.Pool], tmp_path: Path) -> None:
    given, twins = TWINS[page]
    found = ranks(2).run(ran, page, [*given.split(), *RESULTS[page].split()], str(tmp_path))[0]
    expected: dict[str, Any] = {}
    for twin in twins:
        expected |= twin(found)
    assert set(expected) == set(RESULTS[page].split())
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=2e-4, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}")
