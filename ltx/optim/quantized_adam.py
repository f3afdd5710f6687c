"""qadam: Adam at first, then Adam's step along a momentum that ranks have averaged, its second moment frozen.

    steps s = 1 .. w:   m = b1 m + (1 - b1) g,      v = b2 v + (1 - b2) g^2,      g with L2 decay
    steps s > w:        m = what the strategy has made of every rank's momentum,  v as it was after step w
    at each:            x = x - lr / (1 - b1^s) * m / (sqrt(v) / sqrt(1 - b2^s) + eps)

What happens between the ranks is :class:`ltx.strategies.qadam.QAdam`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from ltx.errors import OptimError
from ltx.extend import LeafState, OptimizerOffers, arguments, buffers, optimizers, tree
from ltx.typing import Tree

Tensors = list[Tensor]
States = list[LeafState]


@dataclass(frozen=True, repr=False)
class QAdamOptimizer(optimizers.TorchOptimizer):
    """Adam with a second phase; made by :func:`qadam`. In Adam's state ``exp_avg`` is the ranks' mean momentum."""

    warmup_steps: int
    bagua_exact: bool = False

    def __post_init__(self) -> None:
        # In Bagua's order the first update would divide by a second moment of 0.
        least, what = (2, "qadam with bagua_exact") if self.bagua_exact else (1, "qadam")
        warmup_steps = arguments.whole(f"{what}: warmup_steps", self.warmup_steps, least, OptimError)
        object.__setattr__(self, "warmup_steps", warmup_steps)
        super().__post_init__()

    @property
    def betas(self) -> tuple[float, float]:
        return cast(tuple[float, float], self._kwargs["betas"])

    @property
    def offers(self) -> OptimizerOffers:
        return replace(super().offers, strategy="QAdam")

    def _unless(self, skip: Tensor, params: Sequence[Tensor]) -> None:
        return None  # only torch's fused kernels can skip on the device, and the second phase has none

    def init(self, params: Tree) -> optimizers.TorchState:
        state = super().init(params)
        for path, leaf in zip(tree.leaf_paths(params), tree.flatten(params)[0], strict=True):
            if leaf.is_complex():
                raise OptimError(
                    f"qadam: leaf {path!r} is {tree.describe(leaf)}: momenta travel in 8 bits, for which parameters "
                    "must be real. Keep real and imaginary parts apart (torch.view_as_real)."
                )
        return state

    def _run(
        self, count: int, values: Any, grads: Tensors, states: States, params: Tensors, differentiable: bool = False
    ) -> None:
        if count < self.warmup_steps - self.bagua_exact:
            super()._run(count, values, grads, states, params, differentiable)
            return
        lr: float | Tensor = values.get("lr", self.kernel.group["lr"])
        step, (beta1, beta2) = count + 1, self.betas
        settled = (1 - beta2**step) ** 0.5
        rate = lr * settled / (1 - beta1**step)
        if params and not differentiable and not isinstance(rate, Tensor) and buffers.prefers_few_calls(params[0]):
            moments, squares, steps = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step"))
            apart = [(m, g) for m, g in zip(moments, grads, strict=True) if count >= self.warmup_steps and m is not g]
            with torch.no_grad():
                torch._foreach_add_(steps, 1)
                if apart:
                    torch._foreach_copy_([m for m, _ in apart], [g for _, g in apart])
                roots = torch._foreach_sqrt(squares)
                torch._foreach_add_(roots, self._kwargs["eps"] * settled)
                torch._foreach_addcdiv_(params, moments, roots, value=-rate)
            return
        with torch.set_grad_enabled(torch.is_grad_enabled() and differentiable):
            for momentum, state, param in zip(grads, states, params, strict=True):  # leaf by leaf, for the CPU's cache
                m, v = state["exp_avg"], state["exp_avg_sq"]
                state["step"].add_(1)
                if count >= self.warmup_steps and m is not momentum:  # at step w Bagua ignores it (bagua_exact)
                    m.copy_(momentum)
                # m / (sqrt(v) / settled + eps), with numerator and denominator multiplied by `settled`
                root, least = v.sqrt(), self._kwargs["eps"] * settled
                scale = root + least if torch.is_grad_enabled() else root.add_(least)
                if isinstance(rate, Tensor):  # a derivative may be taken of it
                    param.sub_((m / scale).mul_(rate))
                else:
                    param.addcdiv_(m, scale, value=-rate)

    def __repr__(self) -> str:
        named = {"lr": self.lr, "warmup_steps": self.warmup_steps, **self.kwargs}
        named |= {"bagua_exact": True} if self.bagua_exact else {}
        written = (f"{name}={getattr(value, '__qualname__', repr(value))}" for name, value in named.items())
        return f"qadam({', '.join(written)})"


@arguments.checked("betas", "eps", "weight_decay", "bagua_exact")
def qadam(
    lr: float | Callable[[int], float] = 1e-3,
    *,
    warmup_steps: int,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    bagua_exact: bool = False,
) -> QAdamOptimizer:
    """The optimizer of Bagua's QAdam: Adam for `warmup_steps` steps, then steps along the ranks' mean momentum.

    During the warm-up it equals ``from_torch(torch.optim.Adam)`` to the bit. After the warm-up its `grads` are the
    ranks' mean momentum, which :class:`ltx.strategies.qadam.QAdam` computes in 8 bits; the second moment stays frozen,
    and there is no weight decay. So every other strategy refuses this optimizer.

    The second moment must have settled by the end of the warm-up; the authors warm up for a fifth of training.

    Args:
        lr: a number, or a function from the number of updates done so far (0 first).
        warmup_steps: the number of steps before the second moment is frozen, at least 1.
        betas, eps, weight_decay: as in Adam, with weight decay added to the gradients (L2).
        bagua_exact: do as Bagua does at the last step of the warm-up: ignore its gradients, and step along the previous
            momentum. `warmup_steps` must then be at least 2.

    Returns:
        An :class:`ltx.optim.Optimizer` with Adam's state (:class:`ltx.optim.TorchState`).

    Raises:
        ltx.errors.OptimError: `warmup_steps` is too small, or torch's Adam refuses another argument. The optimizer's
            methods raise it for complex or sparse parameters.

    Source: Tang et al., "1-bit Adam", ICML 2021, algorithm 1, in the form of Bagua's QAdamOptimizer, whose bias
    corrections keep moving while the second moment is frozen.

    Example:
        >>> import torch, ltx
        >>> optimizer = ltx.optim.qadam(0.1, warmup_steps=1)
        >>> params = {"w": torch.ones(2)}
        >>> state = optimizer.init(params)
        >>> params, state = optimizer.apply({"w": torch.tensor([1.0, -2.0])}, state, params)
        >>> params
        {'w': tensor([0.9000, 1.1000])}
        >>> params, state = optimizer.apply({"w": torch.zeros(2)}, state, params)  # a momentum of 0: no step
        >>> params
        {'w': tensor([0.9000, 1.1000])}
    """
    kwargs = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
    return QAdamOptimizer(torch.optim.Adam, lr, kwargs, warmup_steps, bagua_exact)
