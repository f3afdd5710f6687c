"""vmap: simulated ranks, each an entry of a batch dimension of ``torch.vmap``."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from typing import Any, Literal

import torch

from ltx.core.base import private, traced, tree
from ltx.core.base.arguments import brief, checked, is_whole, shown
from ltx.core.base.containers import of_array
from ltx.core.base.errors import AxisError, LtxError, UnsupportedError
from ltx.core.base.private import unwrapped
from ltx.core.ranks.axis import DEFAULT_NAME, close_simulated, open_simulated
from ltx.core.ranks.batched import below_wrappers
from ltx.typing import Tree


@checked("f", "axis_name", "axis_size", "randomness")
def vmap(
    f: Callable[..., Any],
    in_dims: Any = 0,
    out_dims: Any = 0,
    *,
    axis_name: str = DEFAULT_NAME,
    axis_size: int | None = None,
    randomness: Literal["error", "different", "same"] = "different",
    chunk_size: None = None,
) -> Callable[..., Any]:
    """Run `f` on simulated ranks: every rank is one entry of a batch dimension of ``torch.vmap``.

    Use it to try or test a distributed function in one process, on a laptop or in a notebook: four ranks are a batch of
    four. The same function runs between processes unchanged.

    Inside `f` ltx's collectives, and all that is built on them, work over the axis `axis_name`, as they do between
    processes. The call composes with ``torch.func`` and nests. Code that ``torch.vmap`` can't run (``.item()``, boolean
    masks, writes in place) runs on processes: ``ltx.Pool(n).run(f)``. A result of ``psum`` and its like is one tensor
    that all ranks share: ``psum(x) + y`` works; ``psum(x).add_(y)``, which would write all ranks' values to it, raises.

    Args:
        f: the function that one rank runs. It takes and returns trees; leaves that aren't tensors are passed on.
        in_dims: an int or None for all positional arguments, or a tuple with one entry for each (an int, None, or a
            tree of them that is a prefix of the argument). None: every rank sees the same value. Tensors in keyword
            arguments are mapped over dimension 0, as in JAX.
        out_dims: where the outputs' rank dimension goes: an int or None for all of them, or a tree of these that is a
            prefix of the output. None: the output is one value without a rank dimension, which has to be the same on
            all ranks, such as a result of ``psum``, gradients of a data-parallel step, or parameters.
        axis_name: the axis' name in collectives.
        axis_size: the number of ranks; needed only if no input is mapped.
        randomness: as in ``torch.vmap``: "different" numbers on each rank, whatever the seed; the "same"; "error".
        chunk_size: None. With a number ``torch.vmap`` would run ranks in turns, and they couldn't communicate.

    Returns:
        A function with `f`'s arguments, each mapped tensor or array with an additional dimension of size `axis_size`.

    Raises:
        AxisError: the mapped inputs disagree on the axis' size, or there are none and `axis_size` isn't given; or an
            output of ``out_dims=None`` differs between ranks.
        TreeError: an object among the mapped arguments or the outputs holds tensors where ltx can't look inside.
        UnsupportedError: a `chunk_size`; or ``torch.vmap`` can't run an operation. The error says what to write.

    Example:
        >>> import torch, ltx
        >>> ltx.vmap(lambda x: ltx.psum(x) + ltx.axis_index())(torch.tensor([1.0, 2.0]))
        tensor([3., 4.])
        >>> ltx.vmap(lambda x: (x, ltx.psum(x)), out_dims=(0, None))(torch.tensor([1.0, 2.0]))
        (tensor([1., 2.]), tensor(3.))
    """
    if chunk_size is not None:
        raise UnsupportedError(
            "ltx.vmap: chunk_size runs ranks in turns, and ranks of one axis wait for each other. Leave it out."
        )

    def mapped(*args: Any, **named: Any) -> Any:
        # Dynamo can't flatten a dict without keys.
        leaves, spec, dims = _mapped_arguments(axis_name, in_dims, args, (*args, named) if named else args)
        size = _mapped_size(axis_name, axis_size, leaves, dims)
        given = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        mapped_first = sorted(given, key=lambda i: dims[i] is None)
        device = leaves[mapped_first[0]].device if given else None
        known: list[Any] = []

        def one_rank(_rank: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            level = open_simulated(axis_name, size, device)
            try:
                own = tree.unflatten(spec, tree.at_places(leaves, given, tensors))
                output = f(*own[:-1], **own[-1]) if named else f(*own)
            finally:
                close_simulated()
            outputs, structure = tree.flatten(output)
            tree.check_open(outputs, output, f"axis {axis_name!r}: the output", "stacked by rank", tensors_only=True)
            places = [i for i, out in enumerate(outputs) if isinstance(out, torch.Tensor)]
            known.append((structure, outputs, places, _placed(out_dims, output, outputs, level)))
            return tuple(outputs[i] for i in places)

        try:  # the rank's number is mapped too: torch.vmap has a batch even if no input of the user's is mapped
            ranks = torch.vmap(one_rank, in_dims=(0, *(dims[i] for i in given)), randomness=randomness)
            stacked = ranks(torch.arange(size, device="cpu"), *(leaves[i] for i in given))
        except RuntimeError as error:
            advice = next((text for pattern, text in _ADVICE.items() if re.search(pattern, str(error))), None)
            if any("_higher_order_ops" in frame.filename for frame in traceback.extract_tb(error.__traceback__)):
                advice = _RECORDS
            if advice is None or isinstance(error, LtxError):
                raise
            raise UnsupportedError(f"ltx.vmap, axis {axis_name!r}: {advice} torch says: {error}") from error
        structure, outputs, places, placed = known[0]
        for i, result in zip(places, stacked, strict=True):
            dim, path = placed[i]
            if path is not None:
                _check_equal(result, path)
            outputs[i] = _place(result, dim)
        return tree.unflatten(structure, outputs)

    return traced.whole(mapped)


_OR_POOL = ", or run the function on processes, ltx.Pool(n).run(fn)."
_RECORDS = (
    "torch.cond, scan, map and while_loop record their functions as graphs, which torch.vmap runs if all of their "
    "branches and carried values have a rank dimension, at best. Write torch.where(condition, a, b), a Python `if` or "
    "a Python loop; between processes they work."
)
#: Patterns of torch's texts for operations that its vmap can't run, and what to do instead.
_ADVICE = {
    r"calling .item\(\) on a Tensor|data-dependent control flow|dynamic shape|Cannot access data pointer|aten::equal": (
        "the function reads values, which simulated ranks don't have one by one (.item(), an `if`, a boolean mask). "
        "Run it on processes, ltx.Pool(n).run(fn), or choose by torch.where(condition, a, b)."
    ),
    "randomness on an unbatched tensor": (
        "the function draws random numbers in place, as a module does that is made in it. Make the module before and "
        f"pass its parameters (in_dims=None){_OR_POOL}"
    ),
    "doesn't match the broadcast shape|but `self` not being vmapped over": (
        "a write in place needs a tensor that holds the result. What all ranks share, such as what psum gives, has no "
        f"rank dimension: write psum(x) + y for psum(x).add_(y){_OR_POOL}"
    ),
    "to use channels_last|vmap for memory_format|only supported with memory_format": (
        f"torch counts the rank dimension in memory formats. Call .to(memory_format=...) before ltx.vmap{_OR_POOL}"
    ),
    "running_mean or running_var": f"batch norm writes its statistics in place. Use ltx.nn.sync_batch_norm{_OR_POOL}",
    r"Tensor.requires_grad_\(\)": f"differentiate by ltx.grad or torch.func.grad{_OR_POOL}",
}


def _check_equal(result: torch.Tensor, path: str) -> None:
    """Raise unless all entries of the leaf at `path` of an output, stacked by rank, are equal to the last bit."""
    if result.is_meta:
        return
    advice = "Give it a dimension, or return what is the same on all of them, such as its ltx.pmean."
    said = f"out_dims=None: the output {path!r} differs between ranks. {advice}"
    first = result[:1]
    same = (result == first) | ((result != result) & (first != first))  # NaN is NaN
    if not torch.compiler.is_compiling():
        if not bool(unwrapped(same).all()):  # if an outer transform batches the result, all its entries must be equal
            raise AxisError(said)
    elif _level():
        traced.refuse(f"out_dims=None: the output {path!r} may differ between ranks. {advice}", AxisError)
    else:
        private.assert_later(same.all(), f"AxisError: {said}")


@traced.at_trace_time
def _level() -> int:
    return private.maybe_current_level() or 0


def _placed(out_dims: Any, output: Tree, leaves: list[Any], level: int) -> list[tuple[int | None, str | None]]:
    """Each leaf's entry of `out_dims`; and, if that is None though the leaf has a value for each rank, its path."""
    dims = _entries("out_dims", out_dims, output)
    if torch.compiler.is_compiling():
        _let_ask()
    differ = [
        dim is None and isinstance(leaf, torch.Tensor) and _has_rank_dim(leaf, level).shape[0] > 0
        for leaf, dim in zip(leaves, dims, strict=True)
    ]
    paths = tree.leaf_paths(output) if any(differ) else [""] * len(leaves)
    return [(dim, path if own else None) for dim, path, own in zip(dims, paths, differ, strict=True)]


@traced.node
def _has_rank_dim(leaf: torch.Tensor, level: int) -> torch.Tensor:
    """A tensor of length 1 if `leaf` has a value for each rank, else of length 0: Dynamo knows only tensors' shapes."""
    return torch.empty(int(below_wrappers(leaf, level)[1] is not None), device="cpu")


@traced.at_trace_time
def _let_ask() -> None:
    traced.keep("nothing", None)


def _place(result: torch.Tensor, out_dim: int | None) -> torch.Tensor:
    # Not torch.vmap's out_dims, which in torch 2.13 is wrong for an output that is the same on all ranks.
    if out_dim is None:
        return result[0]
    if not -result.ndim <= out_dim < result.ndim:
        raise AxisError(f"out_dims={out_dim} is out of range for an output of {result.ndim} dimensions, ranks too.")
    return result if out_dim == 0 else result.movedim(0, out_dim)


def _mapped_arguments(
    axis_name: str, in_dims: Any, args: tuple[Any, ...], given: tuple[Any, ...]
) -> tuple[list[Any], Any, list[int | None]]:
    """Leaves, structure, and the ranks' dimension of each leaf of `given`: `args`, and a dict of keyword arguments."""
    leaves, spec = tree.flatten(given)
    entries = in_dims if isinstance(in_dims, tuple | list) else (in_dims,) * len(args)
    if len(entries) != len(args):
        raise AxisError(f"in_dims has {len(entries)} entries for {len(args)} arguments.")
    dims = [dim for entry, arg in zip(entries, args, strict=True) for dim in _entries("in_dims", entry, arg)]
    dims += [0] * (len(leaves) - len(dims))  # keyword arguments'
    if not torch.compiler.is_compiling():
        leaves = [x if dim is None else of_array(x) for x, dim in zip(leaves, dims, strict=True)]
    mapped, what = [None if dim is None else x for x, dim in zip(leaves, dims, strict=True)], f"axis {axis_name!r}"
    tree.check_open(mapped, given, f"{what}: mapped arguments", "mapped (in_dims=None gives every rank the whole)")
    return leaves, spec, dims


def _entries(what: str, prefix: Any, whole: Tree) -> list[int | None]:
    """The leaves of `prefix`, a prefix of the tree `whole`, each repeated for all leaves of `whole` under it."""
    if prefix is None or is_whole(prefix):
        return [prefix] * len(tree.flatten(whole)[0])
    dims: list[int | None] = []
    for dim in tree.flatten(prefix)[0]:
        if dim is not None and not is_whole(dim):
            hint = f" A name is axis_name={dim!r}." if isinstance(dim, str) else ""
            raise AxisError(f"{what} must be an int, None or a tree of them, got {shown(dim)}.{hint}")
    try:
        tree.map(lambda dim, sub: dims.extend([dim] * len(tree.flatten(sub)[0])), prefix, whole, none_is_leaf=True)
    except ValueError:
        of = "argument" if what == "in_dims" else "output"
        said = tree.map(lambda x: _Shape(tree.describe(x) if isinstance(x, torch.Tensor) else type(x).__name__), whole)
        raise AxisError(f"{what}: {brief(prefix)} isn't a prefix of its {of}, which is {brief(said)}.") from None
    return dims


class _Shape(str):
    """A leaf's shape in an error text, printed without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _mapped_size(name: str, given: int | None, leaves: list[Any], dims: list[int | None]) -> int:
    """The size of an axis, which mapped `leaves` have, and which may be `given`."""
    mapped = [(x, dim) for x, dim in zip(leaves, dims, strict=True) if dim is not None and isinstance(x, torch.Tensor)]
    if not traced.recording():
        traced.refuse_script()  # torch.jit.trace gives sizes as tensors
        tree.check_dense([leaf for leaf, _ in mapped], [leaf for leaf, _ in mapped], f"axis {name!r}: mapped arguments")
    for leaf, dim in mapped:
        if leaf.ndim == 0:
            raise AxisError(
                f"axis {name!r}: a 0-dim tensor has no dimension to map over; use in_dims=None for it, or stack one "
                "value for each rank."
            )
        if not -leaf.ndim <= dim < leaf.ndim:
            raise AxisError(f"axis {name!r}: in_dims={dim} is out of range for a tensor of shape {list(leaf.shape)}.")
    sizes = {leaf.shape[dim] for leaf, dim in mapped}
    if given is not None:
        if given < 1:
            raise AxisError(f"axis {name!r}: axis_size is the number of ranks, at least 1, got {given}.")
        sizes.add(given)
    if len(sizes) != 1:
        got = f"sizes {sorted(sizes)}" if sizes else "no mapped tensor"
        raise AxisError(f"axis {name!r} needs one size, got {got}. Stack one entry for each rank, or give axis_size.")
    return sizes.pop()
