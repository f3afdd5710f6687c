"""The parameters of a train step: choose the trained ones, take over a module's parameters, give them back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any

import torch

from ltx.core import collectives
from ltx.core.base import private, tree
from ltx.core.base.arguments import brief
from ltx.core.base.errors import StepError, TreeError
from ltx.core.ranks.axis import Axis
from ltx.core.training.follower import begins, put_apart
from ltx.core.training.train_state import TrainState
from ltx.core.transforms.closure_check import UNFIT, Members, first_hooked, has_bytes, hooked_text, same_values, unfit
from ltx.core.transforms.compare import tensors_by_path
from ltx.typing import Tree

#: Selects the trained leaves: patterns of paths (as in :mod:`fnmatch`), or a function of a path.
Trainable = str | Sequence[str] | Callable[[str], bool] | None


def split(params: Tree, trainable: Trainable) -> tuple[Tree, Tree]:
    """(trained, frozen) parameters: two trees, each with None in the other's places; `frozen` may be None. A leaf is
    frozen if `trainable` leaves it out, or if it doesn't require gradients, unless no leaf does and none is a module's.
    """
    (leaves, spec), paths = tree.flatten(params), tree.leaf_paths(params)
    says = any(x.requires_grad or isinstance(x, torch.nn.Parameter) for x in leaves)
    out = left_out(trainable, paths)
    frozen = [path in out or (says and not x.requires_grad) for x, path in zip(leaves, paths, strict=True)]
    _check(leaves, paths, frozen)
    if not any(frozen):
        return params, None
    if all(frozen):
        raise StepError(
            "train_step: every parameter is frozen, so there is nothing to train. Frozen are those whose requires_grad "
            "is False while others' isn't, and those that trainable= leaves out."
        )
    trained = tree.unflatten(spec, [None if f else x for x, f in zip(leaves, frozen, strict=True)])
    return trained, tree.masked(params, trained, there=False)


def left_out(trainable: Trainable, paths: Sequence[str]) -> set[str]:
    if trainable is None:
        return set()
    if callable(trainable):
        return {path for path in paths if not trainable(path)}
    return set(paths) - tree.wanted(trainable, paths, StepError, "train_step: trainable=")


def _check(leaves: Sequence[torch.Tensor], paths: Sequence[str], frozen: Sequence[bool]) -> None:
    """Refuse leaves that can't be trained, and two names of one tensor, which training would make different."""
    known: dict[Any, str] = {}
    spans: list[Any] = []  # (the first byte, that behind it, path, leaf)
    if (hooked := first_hooked(leaves)) is not None:
        raise TreeError(hooked_text(f"params: leaf {paths[hooked]!r}"))
    for x, path, is_frozen in zip(leaves, paths, frozen, strict=True):
        if not is_frozen and not (x.is_floating_point() or x.is_complex()):
            raise TreeError(
                f"params: leaf {path!r} is {tree.describe(x)}, and only floating or complex tensors can be "
                "trained. Pass it in the buffers, or close over it."
            )
        if private.is_wrapped(x) or x.is_meta or not x.numel():
            continue
        reach = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
        spans.append((x.data_ptr(), x.data_ptr() + (reach + 1) * x.element_size(), path, x))
        place = (x.data_ptr(), x.shape, x.stride(), x.dtype)
        if place in known:
            raise TreeError(
                f"params: leaves {known[place]!r} and {path!r} are one tensor (tied weights), and would be trained "
                "apart. Pass it once, as dict(model.named_parameters()) does; ltx.functional_call puts it in both. Two "
                "Parameters with one memory (b.weight.data = a.weight.data) have to be one: b.weight = a.weight."
            )
        known[place] = path
    groups, last = list[list[Any]](), 0
    for span in sorted(spans, key=itemgetter(0)):
        if span[0] >= last:  # it lies behind all that came before
            groups.append([])
        groups[-1].append(span)
        last = max(last, span[1])
    for group in groups:
        if len(group) > 1:
            _check_apart(group)


def _check_apart(group: Sequence[Any]) -> None:
    """Refuse leaves that are views of the same elements. They may lie between each other, as columns do."""
    base, size = group[0][0], math.gcd(*(x.element_size() for *_, x in group))
    nbytes = max(end for _, end, _, _ in group) - base
    owners = torch.zeros(nbytes // size, dtype=torch.int32, device="cpu")  # of each part of the memory
    for number, (start, _, path, x) in enumerate(group, 1):
        parts = x.element_size() // size
        strides = (*(step * parts for step in x.stride()), 1)
        cells = owners.as_strided((*x.shape, parts), strides, (start - base) // size)
        if other := int(cells.max()):
            raise TreeError(
                f"params: leaves {group[other - 1][2]!r} and {path!r} share memory (views of one tensor that overlap), "
                "and would be trained apart. Pass the whole once, and take views of it inside the step."
            )
        cells.fill_(number)


def taken_from(module: torch.nn.Module, axis: Axis, trainable: Trainable) -> tuple[Tree, Tree]:
    """(trained, frozen) parameters of `module`, in the module's memory, which has rank 0's values on every rank."""
    if isinstance(module, UNFIT):
        raise unfit(module, "train.init")
    parameters = dict(module.named_parameters())
    tree.check_tensors(parameters, "train.init(module)")
    if axis.ranks.overlaps:
        tree.check_values(list(parameters.values()), parameters, "train.init(module)")
    trained, frozen = split(parameters, trainable)
    begins(tree.flatten(trained)[0])
    with torch.no_grad():
        sent = [*parameters.values(), *filter(has_bytes, module.buffers())]  # the step may read buffers, too
        totals = zip(sent, accumulate(x.nbytes for x in sent), strict=True)
        # in pieces of about 64 MiB, since a piece needs a second copy
        for _, piece in groupby(totals, lambda pair: pair[1] >> 26) if axis.size > 1 else ():
            mine = [parameter for parameter, _ in piece]
            given = collectives.broadcast([x.detach() for x in mine], axis=axis)
            for parameter, value in zip(mine, given, strict=True):
                if 0 in parameter.stride():  # an expanded one can't be written to
                    parameter.data = value
                else:  # others may look at this memory: another process, a flat buffer
                    parameter.detach().copy_(value)
    held: tuple[Tree, Tree] = tree.map(torch.Tensor.detach, (trained, frozen))
    return held


def to_module(module: torch.nn.Module, state: TrainState | Tree) -> torch.nn.Module:
    """`module` with the parameters and buffers of a train state, as copies, for evaluation or saving.

    Args:
        module: the module whose ``named_parameters()`` the state was made of, or one like it. It is changed and
            returned.
        state: a :class:`ltx.TrainState`, or a dict of tensors by name. Tensors of the module whose names `state` lacks
            don't change. Tied parameters have one name in a state and stay tied; a dict may have all of their names,
            as ``module.state_dict()`` does.

    Raises:
        TreeError: the module has no tensor of this name or shape; or two names of one parameter have different values.
        DonatedStateError: the state was donated.
        UnsupportedError: the module's tensors can't be replaced: it is scripted, or under fully_shard.

    A rank calls this alone, since each rank has its own state. Not differentiable: the copies are new leaves. A
    module that ``train.init(module)`` got keeps its Parameters, has what it has of the state already, and at the next
    step gets that step's, which refuses to drop what is written to copies until then. For others make objects that hold
    the parameters, such as DDP, after this call.

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
    if not isinstance(state, dict | TrainState):
        raise TreeError(f"to_module: the second argument is a TrainState or a dict of tensors, got {brief(state)}.")
    values: dict[str, torch.Tensor] = {}
    for part in (state,) if isinstance(state, dict) else (state.params, state.buffers):
        tree.check_tensors(part, "to_module: the state")
        values |= tensors_by_path(part)
    members = Members(module, "to_module", values)
    slots = members.slots
    trainable = {*map(id, module.parameters())}
    for name, value in values.items():
        if name not in slots:
            what = f"the state has {name!r}, and {type(module).__name__} has no parameter or buffer of that name"
            raise TreeError(f"to_module: {what}. Give the module that the state was made of.")
        table, key = slots[name]
        if (there := table[key].shape) != value.shape:
            what = f"has shape {[*value.shape]} in the state, and {[*there]} in the {type(module).__name__}"
            raise TreeError(f"to_module: {name!r} {what}. Give the module that the state was made of.")
    with torch.inference_mode(False):  # tensors copied in inference mode could never be trained again
        for tied in members.names.values():
            given = [name for name in values if name in tied]
            if not given:
                continue
            table, key = slots[given[0]]
            old, new = table[key], values[given[0]].detach()
            for name in given[1:]:
                if not same_values([values[name]], [values[given[0]]]):
                    raise TreeError(
                        f"to_module: {given[0]!r} and {name!r} are one parameter of the module (tied weights), and "
                        "differ in the state. Give one of them alone, or a module in which they aren't tied."
                    )
            plain = {type(old), type(new)} <= {torch.Tensor, torch.nn.Parameter} and not private.is_wrapped(new)
            if plain and new.numel() and (old.data_ptr(), old.stride()) == (new.data_ptr(), new.stride()):
                continue  # it lies in the memory of the module's tensor
            new = new.clone()
            if put_apart(old, new):
                continue
            if id(old) in trainable:
                new = torch.nn.Parameter(new, requires_grad=old.requires_grad)
            for table, key in map(slots.__getitem__, tied):
                table[key] = new
    return module
