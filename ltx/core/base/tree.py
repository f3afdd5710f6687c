"""Trees of tensors: flattening, the paths that errors name, and one registration for both tree libraries.

ltx flattens with optree alone. It sorts the keys of dicts, which pairs leaves across ranks whose dicts were built in
different orders; torch's own pytree keeps insertion order. ``torch.func`` however looks inside its arguments with
torch's pytree, so ltx's own nodes are registered with both (:func:`register_node`).

Containers are dicts, lists, tuples, named tuples, deques, None; all mappings (``collections.abc.Mapping``) and
dataclasses, which unflatten to their own class; classes registered with ``optree.register_pytree_node`` for every
namespace or for "ltx", and those registered with ``torch.utils._pytree``, such as TensorDict. Everything else is a
leaf. Functions that change all tensors of a batch raise TreeError for one with tensors inside (:func:`check_open`).
"""

from __future__ import annotations

import builtins
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar, cast

import optree
import torch

from ltx.core.base import traced
from ltx.core.base.containers import NAMESPACE as NAMESPACE
from ltx.core.base.containers import PLAIN, closed, open_in_graph, opened, sorted_keys
from ltx.core.base.errors import WHOLE, Kind, TreeError, UnsupportedError
from ltx.core.base.private import FakeTensor, in_transform, torch_pytree, unwrapped
from ltx.typing import Tree

T = TypeVar("T")
_EVERYWHERE = getattr(optree.registry, "__GLOBAL_NAMESPACE")

# optree's own functions, without wrappers, because Dynamo recognises them by identity. Only the types are looser.
unflatten: Callable[[Any, Iterable[Any]], Tree] = optree.tree_unflatten
_flatten: Callable[..., tuple[list[Any], Any]] = optree.tree_flatten


def at_places(values: Sequence[Any], places: Sequence[int], others: Iterable[Any]) -> list[Any]:
    """A copy of `values` as a list, with `others` at `places`."""
    filled = list(values)
    for place, other in zip(places, others, strict=True):
        filled[place] = other
    return filled


def flatten(
    tree: Tree, is_leaf: Callable[[Any], bool] | None = None, none_is_leaf: bool = False
) -> tuple[list[Any], Any]:
    """The leaves, in the order of sorted dict keys, and the structure for :func:`unflatten`.

    `is_leaf`: which other nodes count as leaves. `none_is_leaf`: so does each None.

    Raises TreeError for a tree that contains itself or is nested too deeply.

    >>> flatten({"b": 2, "a": [1, None]})[0]
    [1, 2]
    """
    if torch.compiler.is_compiling():  # Dynamo traces optree, but not the try block below
        traced.trace_dicts()
        plain = type(tree) is dict and tree and is_leaf is None and not none_is_leaf
        if plain and all(isinstance(x, torch.Tensor) for x in tree.values()):
            # Dynamo takes ten times as long for optree's own walk, which makes a structure for each leaf.
            leaf = optree.treespec_leaf(namespace=NAMESPACE)
            spec = optree.treespec_dict(dict.fromkeys(tree, leaf), namespace=NAMESPACE)
            return [tree[key] for key in spec.entries()], spec
        leaves, spec = _flatten(tree, is_leaf, none_is_leaf=none_is_leaf, namespace=NAMESPACE)
        for leaf in leaves:
            if not (isinstance(leaf, torch.Tensor) or (is_leaf is not None and is_leaf(leaf))):
                open_in_graph(type(leaf))
        return leaves, spec
    try:
        leaves, spec = _flatten(tree, is_leaf, none_is_leaf=none_is_leaf, namespace=NAMESPACE)
        if PLAIN.issuperset(builtins.map(type, leaves)):
            return leaves, spec
        # `opened` registers a new container class, so flatten again; this happens once for each class.
        kinds = {type(x) for x in leaves if is_leaf is None or not is_leaf(x)}
        return flatten(tree, is_leaf, none_is_leaf) if any(builtins.map(opened, kinds)) else (leaves, spec)
    except RecursionError:
        raise TreeError(
            f"a tree of type {type(tree).__name__} holds itself, or is nested too deeply. Pass dicts, lists and tuples."
        ) from None


def map(function: Callable[..., Any], tree: Tree, *rest: Tree, **options: Any) -> Tree:
    """A tree of ``function(leaf, *others)``, with the leaf's counterparts in `rest`. `options` are :func:`flatten`'s.

    >>> map(lambda x, y: x + y, {"a": 1}, {"a": 2})
    {'a': 3}
    """
    leaves, spec = flatten(tree, **options)
    return unflatten(spec, builtins.map(function, leaves, *[spec.flatten_up_to(other) for other in rest]))


def unshared(values: Tree, others: Tree) -> Tree:
    """`values`, with copies of the tensors that share memory with one of `others`."""
    if not any(isinstance(x, torch.Tensor) for x in flatten(values)[0]):
        return values
    owned = {x.untyped_storage().data_ptr() for x in flatten(others)[0]}

    def apart(x: Any) -> Any:
        shares = isinstance(x, torch.Tensor) and x.layout is torch.strided and x.untyped_storage().data_ptr() in owned
        return x.clone() if shares else x

    return map(apart, values)


def detached(tree: Tree) -> Tree:
    """`tree` with detached tensors, which share memory with the old ones."""
    return map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, tree)


def filled(tree: Tree, others: Tree) -> Tree:
    """`tree` with each None replaced by the leaf of `others` in its place.

    >>> filled({"a": 1, "b": None}, {"a": None, "b": 2})
    {'a': 1, 'b': 2}
    """
    return map(lambda x, other: other if x is None else x, tree, others, none_is_leaf=True)


def masked(tree: Tree, others: Tree, there: bool = True) -> Tree:
    """`tree` with None where `others` has None, or with ``there=False`` where `others` has a leaf.

    >>> masked({"a": 1, "b": 2}, {"a": None, "b": 3}), masked({"a": 1, "b": 2}, {"a": None, "b": 3}, there=False)
    ({'a': None, 'b': 2}, {'a': 1, 'b': None})
    """
    return map(lambda x, other: x if (other is not None) is there else None, tree, others, none_is_leaf=True)


def leaf_paths(tree: Tree, with_none: bool = False, is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
    """The path of each leaf (`with_none`: of each None too), in the order of :func:`flatten`.

    `is_leaf`: which other nodes count as leaves.

    >>> leaf_paths({"layers": [1, 2], "bias": 3})
    ['bias', 'layers.0', 'layers.1']
    """
    return list(paths_of(flatten(tree, is_leaf, with_none)[1]))


def paths_of(spec: Any) -> tuple[str, ...]:
    """The :func:`leaf_paths` of trees with the structure `spec`."""
    return _written(tuple(spec.paths()))


#: :func:`paths_of`, kept for the last structures that it was called with.
spec_paths: Callable[[Any], tuple[str, ...]] = functools.lru_cache(maxsize=1024)(paths_of)


@traced.at_trace_time
def _written(paths: tuple[tuple[Any, ...], ...]) -> tuple[str, ...]:
    return tuple(".".join(str(part) for part in path) or WHOLE for path in paths)


def wanted(
    patterns: str | Sequence[str], paths: Sequence[str], error: Kind, what: str, others: Sequence[str] | None = ()
) -> set[str]:
    """The paths that match one of `patterns` (as in :mod:`fnmatch`). The error begins with `what`.

    A pattern that is itself a path, such as ``a[0]``, matches no other: not ``a0``.

    Raises unless each pattern matches a path, or one of the `others`, which aren't returned; None: they aren't known.

    >>> sorted(wanted("*.bias", ["head.bias", "head.weight"], TreeError, "labels: "))
    ['head.bias']
    """
    found: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        exact = pattern in paths or pattern in (others or ())
        fitting = [path for path in paths if path == pattern or (not exact and fnmatchcase(path, pattern))]
        if not (fitting or exact or others is None or any(fnmatchcase(path, pattern) for path in others)):
            raise error(
                f"{what}{pattern!r} fits no parameter. Their paths: {', '.join(paths[:6])}"
                f"{', ...' if len(paths) > 6 else ''}."
            )
        found.update(fitting)
    return found


@functools.lru_cache(maxsize=64)
def first_fitting(
    patterns: tuple[str, ...], paths: tuple[str, ...], error: Kind, what: str, rest: str, others: Sequence[str] | None
) -> dict[str, str]:
    """By path, the first of `patterns` that fits it, as in :func:`wanted`. If there is none, the error asks to give the
    `rest` something.
    """
    found: dict[str, str] = {}
    for pattern in patterns:
        for path in wanted(pattern, paths, error, what, others):
            found.setdefault(path, pattern)
    if missing := [path for path in paths if path not in found]:
        which = f"{', '.join(missing[:6])}{', ...' * (len(missing) > 6)}"
        raise error(f"{what}no pattern fits {which}. Give the rest {rest}.")
    return found


def insertion_order(tree: Tree) -> list[int]:
    """The indices of the leaves (in :func:`flatten`'s order), sorted by insertion into the dicts: about that of the
    forward pass for ``named_parameters()``, in whose reverse gradients arrive.

    >>> insertion_order({"wte": 0, "block": {"b": 0, "a": 0}})
    [2, 1, 0]
    """
    numbers = itertools.count()

    def walk(node: Tree) -> list[int]:
        """The next numbers, as many as `node` has leaves: given in their order, listed by insertion."""
        if isinstance(node, Mapping) and all(isinstance(key, str) for key in node.keys()):  # noqa: SIM118
            parts = {key: walk(node[key]) for key in sorted_keys(node)}
            # to iterate over a TensorDict gives its rows
            return [number for key in node.keys() for number in parts[key]]  # noqa: SIM118
        if isinstance(node, list | tuple):
            return [number for child in node for number in walk(child)]
        return [next(numbers) for _ in flatten(node)[0]]

    return walk(tree)


def check_tensors(tree: Tree, what: str) -> None:
    """Raise :class:`ltx.errors.TreeError` unless every leaf of `tree` is a tensor."""
    check_leaves(flatten(tree)[0], tree, what)


def _first(leaves: Sequence[Any], tree: Tree, places: Iterable[int]) -> tuple[str, Any] | None:
    """The path of the first leaf at one of `places`, and the leaf; None if there is none."""
    place = next(iter(places), None)
    return None if place is None else (leaf_paths(tree)[place], leaves[place])


def check_leaves(leaves: Sequence[Any], tree: Tree, what: str) -> None:
    """:func:`check_tensors` for a tree that is already flattened."""
    if all(builtins.map(isinstance, leaves, itertools.repeat(torch.Tensor))):
        refuse_dtensors(leaves, tree, what)
        return
    place = next(i for i, x in enumerate(leaves) if not isinstance(x, torch.Tensor))
    path, leaf, hint = leaf_paths(tree)[place], leaves[place], ""
    if isinstance(leaf, torch.nn.Module):
        hint = " Pass dict(module.named_parameters()) and call it with ltx.functional_call."
    elif isinstance(leaf, torch.fx.Proxy):
        hint = " torch.fx.symbolic_trace can't record ltx. Use make_fx, torch.export or torch.compile."
    elif callable(getattr(leaf, "__next__", None)):
        hint = " A generator is used up by its first reader: pass a dict, list or tuple of tensors."
        hint += " Of a module: dict(module.named_parameters())."
    elif type(leaf).__module__ == "numpy" and hasattr(leaf, "dtype"):
        hint = f" Its dtype is {leaf.dtype}, and torch has no such tensors."
        if leaf.dtype.kind in "biufc":
            hint = " Pass torch.as_tensor(array)."
    raise TreeError(f"{what} must be a tree of tensors, but leaf {path!r} is of type {type(leaf).__name__}.{hint}")


def refuse_dtensors(leaves: Sequence[torch.Tensor], tree: Tree, what: str) -> None:
    """Raise for DTensors: what is computed with this rank's part of one isn't meant for the whole."""
    cls = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)  # None: nobody can have made one
    if cls is None or torch.compiler.is_compiling():
        return
    kinds = [*builtins.map(type, builtins.map(unwrapped, leaves) if in_transform() else leaves)]
    if any(issubclass(kind, cls) for kind in {*kinds}):
        path = leaf_paths(tree)[next(place for place, kind in enumerate(kinds) if issubclass(kind, cls))]
        raise UnsupportedError(f"{what}: leaf {path!r} is a DTensor, {_NO_DTENSORS}")


_NO_DTENSORS = (
    "and a plain tensor was expected. Where parameters are DTensors, wrap the step or train step: "
    "ltx.tensor_parallel.with_dtensors(train). Elsewhere pass what this rank holds, x.to_local(), or the value, "
    "x.full_tensor()."
)


def refuse_in_graph(leaves: Sequence[Any]) -> None:
    """Raise if a tensor in a graph, which Dynamo traces, is a DTensor."""
    if "DTensor" in [type(x).__name__ for x in leaves]:
        traced.refuse(f"a parameter in a compiled graph is a DTensor, {_NO_DTENSORS}")


def check_open(leaves: Sequence[Any], tree: Tree, what: str, done: str, tensors_only: bool = False) -> None:
    """Raise TreeError unless all tensors of `tree` are leaves. A leaf may hide some: an object, a set, a NumPy array,
    an iterator of batches. They "would not be" `done`, such as "split". `tensors_only`: allow arrays and iterators.
    """
    if PLAIN.issuperset(builtins.map(type, leaves)):
        return
    for place, leaf in enumerate(leaves):
        if why := closed(leaf, tensors_only):
            raise TreeError(
                f"{what}: leaf {leaf_paths(tree)[place]!r} is of type {type(leaf).__name__}, {why[0]}, and ltx can't "
                f"look inside: they would not be {done}. {why[1]}"
            )


def check_dense(leaves: Sequence[Any], tree: Tree, what: str, hint: str = "Use x.to_dense().") -> None:
    """Raise for sparse, quantized or nested tensors."""
    check_leaves(leaves, tree, what)
    odd = (i for i, x in enumerate(leaves) if x.layout is not torch.strided or x.is_quantized or x.is_nested)
    if (found := _first(leaves, tree, odd)) is None:
        return
    path, x = found
    if x.layout in (torch.strided, torch.jagged):
        kind = "quantized" if x.is_quantized else "nested"
        raise UnsupportedError(f"{what}: leaf {path!r} is {kind}, and a dense tensor was expected. Convert it.")
    raise UnsupportedError(f"{what}: leaf {path!r} has layout {x.layout}, and a dense tensor was expected. {hint}")


def check_paths(tree: Tree, what: str) -> None:
    """Raise :class:`ltx.errors.TreeError` if two leaves have one path: states and checkpoints use paths as keys."""
    paths = leaf_paths(tree)
    if len(set(paths)) < len(paths):
        path = next(path for place, path in enumerate(paths) if path in paths[:place])
        raise TreeError(f"{what}: two leaves have the path {path!r}, by which their states are known. Rename one.")


def check_values(leaves: Sequence[torch.Tensor], tree: Tree, what: str) -> None:
    """Raise for tensors without values: on the meta device, or fake outside of their mode."""
    if found := _first(leaves, tree, (i for i, x in enumerate(leaves) if x.is_meta or isinstance(x, FakeTensor))):
        meta = ' Give them memory, module.to_empty(device="cpu"), and set them.' if found[1].is_meta else ""
        where = "on the meta device" if meta else "a FakeTensor, outside of its FakeTensorMode"
        raise TreeError(f"{what}: leaf {found[0]!r} is {where}, and its values are needed.{meta}")


def describe(tensor: torch.Tensor) -> str:
    """A tensor's dtype and shape in the short form that errors use.

    >>> describe(torch.zeros(2, 3))
    'float32[2, 3]'
    """
    sparse = f" (sparse in {tensor.sparse_dim()} dim)" if tensor.layout is torch.sparse_coo else ""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{sparse}"


def register_node(
    cls: type[T],
    to_parts: Callable[[T], tuple[Sequence[Any], Any]],
    from_parts: Callable[[Sequence[Any], Any], T],
    names: Sequence[str] | Callable[[T], Sequence[str]],
) -> None:
    """Register `cls` as a node with optree and with torch's pytree. `to_parts` returns ``(children, static)``, `static`
    hashable and part of the structure; `from_parts` is the inverse. `names`: the children's, or a function of a node.
    """
    optree.register_pytree_node(
        cast(Any, cls),
        lambda node: (*to_parts(cast(Any, node)), tuple(names(cast(Any, node)) if callable(names) else names)),
        lambda static, children: cast(Any, from_parts(tuple(children), static)),
        namespace=_EVERYWHERE,
    )
    torch_pytree.register_pytree_node(
        cls,
        lambda node: (lambda parts: (list(parts[0]), parts[1]))(to_parts(node)),
        lambda children, static: from_parts(tuple(children), static),
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
    )
