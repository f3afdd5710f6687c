"""A hook with state, for tests: bfloat16 with error feedback, and what it should compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

import ltx
from ltx import hooks
from tests.twins.cases import Params


@dataclass(frozen=True)
class ErrorFeedback(hooks.CommHook):
    """What rounding loses of a share is added to the next one."""

    exact: ClassVar[bool] = False
    state_names: ClassVar[tuple[str, ...]] = ("error",)

    def init(self, param: Tensor, path: str = "") -> dict[str, Tensor]:
        return {"error": torch.zeros_like(param)}

    def reduce(self, inputs: hooks.BucketInput) -> hooks.Reduction:
        wanted = inputs.flat + torch.cat([state["error"].reshape(-1) for state in inputs.states])
        sent = wanted.bfloat16().to(wanted.dtype)
        errors = (wanted - sent).split(inputs.bucket.sizes)
        total = yield hooks.CollectiveRequest("psum", sent)
        shapes = [leaf.shape for leaf in inputs.bucket.leaves]
        return total, [{"error": e.reshape(shape)} for e, shape in zip(errors, shapes, strict=True)]


STRATEGY = ltx.DDPStrategy(comm_hook=ErrorFeedback(), bucket_bytes=128, first_bucket_bytes=16)


def slow_twin(local: Sequence[Sequence[Params]]) -> tuple[list[Params], list[Params]]:
    """(reduced gradients by step, errors by rank in the end) from local gradients by step and rank."""
    n = len(local[0])
    errors = [{name: torch.zeros_like(g) for name, g in grads.items()} for grads in local[0]]
    reduced = []
    for by_rank in local:
        sent = []
        for rank, grads in enumerate(by_rank):
            wanted = {name: g / n + errors[rank][name] for name, g in grads.items()}
            sent.append({name: w.bfloat16().to(w.dtype) for name, w in wanted.items()})
            errors[rank] = {name: w - sent[rank][name] for name, w in wanted.items()}
        reduced.append(ltx.tree.map(lambda *xs: sum(xs), *sent))
    return reduced, errors


# --- ways to thread the state: (step, params, state, batch) -> (gradients, next state) -------------------------------

Way = Callable[..., tuple[Params, ltx.SyncState]]


def ltx_grad_and_value(step: Any, params: Params, state: ltx.SyncState, *batch: Tensor) -> Any:
    (grads, state), _ = ltx.grad_and_value(step)(params, *batch, sync_state=state)
    return grads, state


def ltx_grad(step: Any, params: Params, state: ltx.SyncState, *batch: Tensor) -> Any:
    return ltx.grad(step)(params, *batch, sync_state=state)


def func_grad(step: Any, params: Params, state: ltx.SyncState, *batch: Tensor) -> Any:
    return torch.func.grad(step)(ltx.Synced(params, state), *batch)


def required(params: Params, state: ltx.SyncState) -> ltx.Synced:
    return ltx.tree.map(lambda t: t.detach().clone().requires_grad_(), ltx.Synced(params, state))


def backward(step: Any, params: Params, state: ltx.SyncState, *batch: Tensor) -> Any:
    synced = required(params, state)
    step(synced, *batch).backward()
    return ltx.tree.map(lambda t: t.grad, synced)


def autograd_grad(step: Any, params: Params, state: ltx.SyncState, *batch: Tensor) -> Any:
    leaves, spec = ltx.tree.flatten(required(params, state))
    return ltx.tree.unflatten(spec, list(torch.autograd.grad(step(ltx.tree.unflatten(spec, leaves), *batch), leaves)))


def sync_gradients(step: Any, params: Params, state: ltx.SyncState, *batch: Tensor) -> Any:
    return ltx.sync_gradients(
        torch.func.grad(ltx.block_backward_sync(step))(ltx.Synced(params, state), *batch).params, step.strategy, state
    )


def returned(step: Any, params: Params, state: ltx.SyncState, *batch: Tensor) -> Any:
    """Differentiated twice over, as it happens inside another transform."""
    synced, _ = torch.func.vjp(lambda s: torch.func.grad(step)(s, *batch), ltx.Synced(params, state))
    return synced


FUNC_WAYS: dict[str, Way] = {
    "ltx.grad_and_value": ltx_grad_and_value,
    "ltx.grad": ltx_grad,
    "torch.func.grad": func_grad,
    "sync_gradients": sync_gradients,
    "torch.func.grad inside vjp": returned,
}
WAYS: dict[str, Way] = {**FUNC_WAYS, "backward": backward, "torch.autograd.grad": autograd_grad}


def errors_of(state: ltx.SyncState) -> Params:
    return {path: entry["error"] for path, entry in state.leaves.items()}
