"""to_module: the values of a train state, back in a module."""

from __future__ import annotations

from typing import Any

import torch

from ltx import tree
from ltx.arguments import brief
from ltx.errors import TreeError
from ltx.training.train_state import TrainState
from ltx.typing import Tree

# Where a parameter or buffer is: a dict of a module, and the key in it.
_Slot = tuple[dict[str, Any], str]


def to_module(module: torch.nn.Module, state: TrainState | Tree) -> torch.nn.Module:
    """`module` with the parameters and buffers of a train state, as copies: for evaluation, ``generate``, saving.

    Args:
        module: the one whose ``named_parameters()`` the state was made of, or another one of the same names and shapes.
            It is changed, and returned.
        state: a :class:`ltx.TrainState`, or a dict of tensors by name. Names that the module has and `state` hasn't
            stay as they are. Tied parameters have one name in a state and stay tied; a dict may have all of their
            names, as ``module.state_dict()`` does.

    Raises:
        TreeError: a name or a shape of the state isn't the module's; or two names of one parameter have values that
            differ.
        DonatedStateError: the state was donated.

    Each rank sees its own state, so it calls this alone. Not differentiable: the copies are new leaves. What holds the
    old parameters, such as an optimizer of torch or DDP, has to be made after it.

    Example:
        >>> import torch, ltx
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> def loss(params, x):
        ...     return torch.func.functional_call(model, params, (x,)).sum()
        >>> train = ltx.train_step(ltx.data_parallel(loss), ltx.optim.from_torch(torch.optim.SGD, lr=1.0))
        >>> state = train.init({"weight": torch.zeros(1, 2)})
        >>> state, _ = train(state, torch.ones(1, 2))
        >>> ltx.to_module(model, state)(torch.ones(1, 2))
        tensor([[-2.]], grad_fn=<MmBackward0>)
    """
    if not isinstance(module, torch.nn.Module):
        raise TreeError(f"to_module: the first argument is a torch.nn.Module, got {brief(module)}.")
    if not isinstance(state, dict | TrainState):
        raise TreeError(
            f"to_module: the second argument is an ltx.TrainState or a dict of tensors, got {brief(state)}."
        )
    values: dict[str, torch.Tensor] = {}
    for part in (state,) if isinstance(state, dict) else (state.params, state.buffers):
        tree.check_tensors(part, "to_module: the state")
        values |= dict(zip(tree.leaf_paths(part), tree.flatten(part)[0], strict=True))
    slots = _slots(module)
    trainable = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for name, value in values.items():
        if name not in slots:
            raise TreeError(
                f"to_module: the state has {name!r}, and {type(module).__name__} has no parameter or buffer of that "
                "name. Give the module that the state was made of."
            )
        table, key = slots[name]
        if table[key].shape != value.shape:
            raise TreeError(
                f"to_module: {name!r} has shape {list(value.shape)} in the state, and {list(table[key].shape)} in the "
                f"{type(module).__name__}. Give the module that the state was made of."
            )
    together: dict[int, dict[str, _Slot]] = {}  # by tensor, which is tied where it has several names
    for name, (table, key) in slots.items():
        together.setdefault(id(table[key]), {})[name] = table, key
    with torch.inference_mode(False):  # what is copied in it could never be trained again
        for tied in together.values():
            given = [name for name in tied if name in values]
            if not given:
                continue
            _check_equal(given, values)
            table, key = tied[given[0]]
            old, new = table[key], values[given[0]].detach().clone()
            if given[0] in trainable:
                new = torch.nn.Parameter(new, requires_grad=old.requires_grad)
            for table, key in tied.values():
                table[key] = new
    return module


def _check_equal(names: list[str], values: dict[str, torch.Tensor]) -> None:
    """Raise unless the names of one parameter have one value."""
    first = values[names[0]]
    for name in names[1:]:
        other = values[name]
        if not bool(((other == first) | (other.isnan() & first.isnan())).all()):
            raise TreeError(
                f"to_module: {names[0]!r} and {name!r} are one parameter of the module (tied weights), and their "
                "values differ in the state. Give one of them alone, or a module in which they aren't tied."
            )


def _slots(module: torch.nn.Module) -> dict[str, _Slot]:
    """Where each parameter and buffer is, by all of its names."""
    found = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for table in (owner._parameters, owner._buffers):
            for key, value in table.items():
                if value is not None:
                    found[f"{prefix}.{key}" if prefix else key] = table, key
    return found
