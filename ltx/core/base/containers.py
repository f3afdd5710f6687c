"""Users' containers as nodes of trees: mappings, dataclasses, nodes of torch's pytree; what to say of everything else.

A class is registered with optree, in ltx's own namespace, when its first instance is found as a leaf; from then on
optree flattens it in C++ without a look from here.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import optree
import torch

from ltx.core.base import private
from ltx.core.base.errors import TreeError
from ltx.core.base.traced import TORCH, at_trace_time

NAMESPACE = "ltx"

# What can't hold a tensor, or is one.
PLAIN: frozenset[type] = frozenset(
    (torch.Tensor, torch.nn.Parameter, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
)
# So many objects are looked at in search of a tensor.
_FAR = 1000

_GRAPHS = (
    "Pass a list with one object a graph, which is cut between them, and join this part of it inside the step "
    "(Batch.from_data_list, dgl.batch)."
)
#: Classes whose tensors belong together, by "package.class" or the package of one of their bases.
_WHOLE = {
    "torch.PackedSequence": "Pass the padded tensor and its lengths, and pack them inside the step "
    "(pack_padded_sequence with enforce_sorted=False).",
    "torch_geometric": _GRAPHS,
    "dgl": _GRAPHS,
    "torch_sparse": "Pass a dense tensor, or a list of its parts, one a sample.",
    "torchrec": "Pass a list of its parts, one a sample, and join them inside the step.",
}


def opened(cls: type) -> bool:
    """Whether instances of `cls` are nodes, from this call on: mappings, dataclasses, nodes of torch's own pytree."""
    return _opened(cls, cls in private.torch_pytree.SUPPORTED_NODES)


@cast(Callable[[Callable[[type, bool], bool]], Callable[[type, bool], bool]], functools.cache)
def _opened(cls: type, of_torch: bool) -> bool:
    # a module's parameters go by another way
    if cls.__module__.split(".")[0] == "ltx" or issubclass(cls, torch.nn.Module | torch.Tensor):
        return False
    of_torch = of_torch and not (_is_refilled(cls) or dataclasses.is_dataclass(cls))
    if not (of_torch or issubclass(cls, Mapping) or dataclasses.is_dataclass(cls)):
        return False
    if optree.register_pytree_node.get(cls, namespace=NAMESPACE) is None:
        own = (_mapping_parts, _mapping_whole) if issubclass(cls, Mapping) else (_dataclass_parts, _dataclass_whole)
        functions: Any = (_torch_parts, _torch_whole) if of_torch else own
        optree.register_pytree_node(cls, *functions, namespace=NAMESPACE)  # type: ignore[arg-type]
    return True


@at_trace_time
def open_in_graph(cls: type) -> None:
    """Open `cls`, found as a leaf by Dynamo, which reads optree's registry once a trace, and so begins again."""
    if opened(cls):
        from torch._dynamo.exc import UnspecializeRestartAnalysis  # it takes 1.5 s, and is here if Dynamo traces

        raise UnspecializeRestartAnalysis(restart_reason=f"{cls.__qualname__} is a node of trees from now on")


@dataclasses.dataclass(eq=False)
class _Rest:
    """What an instance holds besides its children. Structures that differ in nothing but these are equal."""

    #: Of a mapping's keys, as they were put in; of a node of torch's pytree, its children's places.
    order: tuple[Any, ...]
    attributes: dict[str, Any]
    mirrored: tuple[Any, ...] = ()  # keys that are attributes too
    itself: bool = False  # the mapping is its own __dict__, as in many classes with attribute access
    context: Any = None  # torch's pytree's, which alone makes a difference, and needn't be hashable

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Rest) and bool(self.context == other.context)

    def __hash__(self) -> int:
        return 0


def sorted_keys(mapping: Mapping[Any, Any]) -> list[Any]:
    """Keys in the order of the children: sorted, so that ranks pair the same ones; an OrderedDict's as they are."""
    keys = list(mapping.keys())  # to iterate over a TensorDict gives its rows
    if isinstance(mapping, OrderedDict):
        return keys
    try:
        return sorted(keys)
    except TypeError:  # they can't be compared
        return sorted(keys, key=lambda key: (type(key).__qualname__, str(key)))


def _dataclass_parts(node: Any) -> tuple[list[Any], Any, tuple[str, ...]]:
    """All attributes, fields first, are children, but no cached property, which ranks may not all have read."""
    names = [field.name for field in dataclasses.fields(node) if hasattr(node, field.name)]
    others = [name for name in _attributes(node) if name not in names]
    if others:
        caches = _caches(type(node))
        names += [name for name in others if name not in caches]
    return [getattr(node, name) for name in names], (type(node), tuple(names)), tuple(names)


def _attributes(node: Any) -> tuple[str, ...]:
    """The names of the attributes that it keeps itself."""
    return tuple(getattr(node, "__dict__", ()))


if TORCH < "2.12":  # whose Dynamo can't iterate over them
    _attributes = at_trace_time(_attributes)


@at_trace_time
def _caches(cls: type) -> tuple[str, ...]:
    """The attributes in which its cached properties keep what they computed of the others."""
    return _caches_of(cls)


@functools.cache
def _caches_of(cls: type) -> tuple[str, ...]:
    found = {name: value for base in reversed(cls.__mro__) for name, value in vars(base).items()}
    return tuple(name for name, value in found.items() if isinstance(value, functools.cached_property))


def _dataclass_whole(static: Any, children: Sequence[Any]) -> Any:
    cls, names = static
    node = object.__new__(cls)
    for name, child in zip(names, children, strict=True):
        object.__setattr__(node, name, child)
    return node


def _torch_parts(node: Any) -> tuple[list[Any], Any, tuple[str, ...]]:
    """A node of a class that is registered with torch's pytree: its children, sorted by name if they have names."""
    rule = private.torch_pytree.SUPPORTED_NODES[type(node)]
    children, context = rule.flatten_fn(node)
    names = [str(place) for place in range(len(children))]
    order = list(range(len(children)))
    if rule.flatten_with_keys_fn is not None:
        keys = [key for key, _ in rule.flatten_with_keys_fn(node)[0]]
        names = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in keys]
        if all(isinstance(key, private.torch_pytree.MappingKey) for key in keys):
            order.sort(key=names.__getitem__)
    static = type(node), _Rest(tuple(order), {}, context=context)
    return [children[i] for i in order], static, tuple(names[i] for i in order)


def _torch_whole(static: Any, children: Sequence[Any]) -> Any:
    cls, rest = static
    given = dict(zip(rest.order, children, strict=True))
    rule = private.torch_pytree.SUPPORTED_NODES[cls]
    return rule.unflatten_fn([given[place] for place in range(len(given))], rest.context)


def _mapping_parts(node: Any) -> tuple[list[Any], Any, tuple[Any, ...]]:
    """Values are children, and attributes that hold tensors; other attributes are taken over as they are."""
    cls, keys = type(node), sorted_keys(node)
    children = [node[key] for key in keys]
    attributes = getattr(node, "__dict__", {})
    if not _is_refilled(cls) or attributes is node:
        return children, (cls, tuple(keys), (), _Rest(tuple(node), {}, itself=attributes is node)), tuple(keys)
    mirrored = tuple(key for key in keys if key in attributes and attributes[key] is node[key])
    caches = _caches(cls)
    kept = {name: x for name, x in attributes.items() if name not in mirrored and name not in caches}
    if issubclass(cls, UserDict):
        kept.pop("data", None)  # the items themselves
    holding = {name: kept.pop(name) for name in list(kept) if holds_tensors(kept[name])}
    if isinstance(node, defaultdict):
        kept["default_factory"] = node.default_factory
    static = cls, tuple(keys), tuple(holding), _Rest(tuple(node), kept, mirrored)
    return [*children, *holding.values()], static, (*keys, *holding)


def _mapping_whole(static: Any, children: Sequence[Any]) -> Any:
    cls, keys, holding, rest = static
    values = dict(zip(keys, children, strict=False))
    items = {key: values[key] for key in rest.order}
    if not _is_refilled(cls):
        return _made(cls, items)
    node = cls.__new__(cls)
    if issubclass(cls, UserDict):
        object.__setattr__(node, "data", items)
    else:  # by the class of Python's, since one's own may do something else besides
        base = OrderedDict if issubclass(cls, OrderedDict) else dict
        for key, value in items.items():
            base.__setitem__(node, key, value)
    if rest.itself:
        object.__setattr__(node, "__dict__", node)
    own = {**rest.attributes, **{key: items[key] for key in rest.mirrored}}
    for name, value in (*own.items(), *zip(holding, children[len(keys) :], strict=True)):
        object.__setattr__(node, name, value)
    return node


def _is_refilled(cls: type) -> bool:
    """Whether an instance can be made empty and filled. Others are made by their class of a dict, or of keywords."""
    return issubclass(cls, dict | UserDict) and not dataclasses.is_dataclass(cls)


def _made(cls: Any, items: dict[Any, Any]) -> Any:
    by_keyword = dataclasses.is_dataclass(cls)
    try:
        return cls(**items) if by_keyword else cls(items)
    except Exception as error:
        arguments = "its items as keywords" if by_keyword else "a dict of its items"
        raise TreeError(
            f"a {cls.__qualname__} can't be made of {arguments}: {type(error).__name__}: {error}. {_register(cls)}"
        ) from error


def holds_tensors(value: Any) -> bool:
    """Whether a tensor is found in `value`, its elements and attributes, or theirs."""
    queue, seen = [[value]], set()
    for node in queue:  # which grows meanwhile
        for part in _inside(node):
            if isinstance(part, torch.Tensor):
                return True
            if type(part) not in PLAIN and id(part) not in seen and len(queue) < _FAR:
                seen.add(id(part))
                queue.append(part)
    return False


def _inside(node: Any) -> Iterator[Any]:
    if isinstance(node, type | types.ModuleType | types.FunctionType) or _is_array(node):
        return
    if isinstance(node, dict | UserDict | types.MappingProxyType):
        yield from list(node.values())
    elif isinstance(node, list | tuple | set | frozenset):
        yield from list(node)[:_FAR]
    yield from list(getattr(node, "__dict__", {}).values())
    for name in _slots(type(node)):
        if hasattr(node, name):
            yield getattr(node, name)


@at_trace_time
def _slots(cls: type) -> tuple[str, ...]:
    found = [base.__dict__.get("__slots__", ()) for base in cls.__mro__]
    each = [name for slots in found for name in ((slots,) if isinstance(slots, str) else slots)]
    return tuple(name for name in each if name not in ("__dict__", "__weakref__"))


def closed(leaf: Any, tensors_only: bool) -> tuple[str, str] | None:
    """What is wrong with a leaf that isn't open, and what to do; None of one that is."""
    if type(leaf) in PLAIN or isinstance(leaf, torch.Tensor):
        return None
    if _is_array(leaf):
        advice = "Pass torch.as_tensor(array)." if leaf.dtype.kind in "biufc" else "Pass array.tolist(), a list."
        return ("a NumPy array", advice) if leaf.ndim and not tensors_only else None
    source = isinstance(leaf, torch.utils.data.DataLoader | torch.utils.data.Dataset)
    if not tensors_only and (source or hasattr(type(leaf), "__next__")):
        return "which gives batches and is none", "Take a batch from it, and pass that."
    if not holds_tensors(leaf):
        return None
    if isinstance(leaf, torch.nn.Module):
        return "which holds tensors", "Let the step close over it, and pass tensors as dicts, lists or tuples."
    if isinstance(leaf, set | frozenset):
        return "which holds tensors", "A set has no order that ranks could share: pass a list."
    for base in (list, tuple, dict):
        if isinstance(leaf, base):
            return "which holds tensors", f"Pass a {base.__name__} of them. Or: {_register(type(leaf))}"
    return "which holds tensors", _register(type(leaf))


def _register(cls: type) -> str:
    return (
        f"Pass a dict, or say once what is inside: optree.register_pytree_node({cls.__qualname__}, to_children, "
        'from_children, namespace="ltx").'
    )


def _is_array(x: object) -> bool:
    """Whether `x` is numpy's array, which there are none of where nobody has imported numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(x, numpy.ndarray)


def advice_for(node: Any) -> str:
    """What to do instead of cutting `node`, if that would be inside of samples; else ""."""
    if isinstance(node, torch.Tensor):
        if node.is_nested:
            return "Pass a list of records, [(x,) for x in nested.unbind()], and nest its part inside the step."
        return "" if node.layout is torch.strided else "Pass x.to_dense(), or index it first: x.index_select(0, rows)."
    return "" if type(node) in PLAIN else _advice_for_class(type(node))


@at_trace_time
def _advice_for_class(cls: type) -> str:
    if issubclass(cls, torch.nn.Module):
        return ""
    names = [(base.__module__.split(".")[0], base.__name__) for base in cls.__mro__]
    return next((_WHOLE[key] for package, name in names for key in (package, f"{package}.{name}") if key in _WHOLE), "")


def of_array(x: Any) -> Any:
    """A NumPy array as a tensor; anything else, and an array of what tensors don't hold, as it is."""
    if not _is_array(x) or x.dtype.kind not in "biufc":
        return x
    # torch takes neither strides below 0 nor the other byte order, and warns of what is read-only.
    x = x.astype(x.dtype.newbyteorder("="), order="C")
    try:
        return torch.as_tensor(x, device="cpu")
    except (RuntimeError, TypeError):  # more than 64 bits
        return x
