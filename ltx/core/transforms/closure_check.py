"""Checks for tensors that a step uses without getting them as arguments: a parameter's gradient would silently stay
local, a buffer would change on one rank only, and a value that is differentiated around it would have no derivative.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from operator import attrgetter
from traceback import walk_stack
from types import CellType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.utils import stateless
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from ltx.core.base import private, tree
from ltx.core.base.errors import InputError, LtxError, StepError, TreeError, UnsupportedError
from ltx.core.base.traced import TracedValueError
from ltx.core.comm.signature import Seen
from ltx.core.gradients.planning import in_step
from ltx.core.transforms.compare import digest, tensors_by_path, values
from ltx.typing import Tree

#: What is known of each function, since looking takes long: "called", "watched", and of graphs with so many nodes
#: ("whole", nodes), which lead to no captured parameters, and ("alone", nodes), which lead to no leaves of their own.
_known = Seen(forgets=True)
#: The calls of ltx.functional_call that run in this thread (each its ``Swap``), the outermost first.
placed: ContextVar[tuple[Any, ...]] = ContextVar("placed", default=())
_CALL = stateless._functional_call.__code__
#: The tensors to which a function refers and that required no grad when it was looked at: it is again if one does.
_frozen: WeakKeyDictionary[Any, WeakTensorKeyDictionary] = WeakKeyDictionary()
_FLAG = attrgetter("requires_grad")
_HOOKS = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
#: What torch says of a write, to a tensor that simulated ranks share, of values that differ between them.
_IN_PLACE = ("which will be updated in place, were not batched", "that would mutate a captured Tensor")
#: Modules into which no tensors can be put.
UNFIT = torch.jit.ScriptModule, nn.DataParallel
# A step may refer to everything in a program, so the search is limited.
_DEPTH, _MANY = 6, 10_000


def edges(nodes: Iterable[Any], ends: Callable[[Any], bool] = lambda _: False) -> Iterator[tuple[Any, Any, int]]:
    """(a node, one that it uses, which of its outputs) for all edges below `nodes`, but not below what `ends` says."""
    queue: list[tuple[Any, Any, int]] = [(None, node, 0) for node in nodes if node is not None]
    seen = set[Any]()
    while queue:
        user, node, output = queue.pop()
        if user is not None:
            yield user, node, output
        if node not in seen and not ends(node):
            seen.add(node)
            queue.extend((node, *used) for used in node.next_functions if used[0] is not None)


def _kept_as(leaf: torch.Tensor, fn: Any) -> str | None:
    """What a leaf is, if it is a parameter, or `fn` refers to it, so that it existed before the call; else None."""
    modules = modules_of(fn)
    for module in modules:
        for what, held in (("a parameter", module.named_parameters()), ("a buffer", module.named_buffers())):
            for path in (path for path, x in held if x is leaf):
                return f"{path!r} of {type(module).__name__}, {what}"
    attributes = [x for module in modules for part in module.modules() for x in vars(part).values()]
    kept = isinstance(leaf, nn.Parameter) or any(x is leaf for x in (*reached_from(fn), *attributes))
    return "a parameter" if kept else None


def refuse_captured(fn: Any, outputs: Tree, given: Tree, made: int = 0, to_given: bool = False) -> None:
    """Raise if `outputs` of `fn` depend on parameters that aren't `given` to it, or on buffers, unless derivatives are
    taken only `to_given`; in another step on Parameters. Done once, and again for another number of nodes, `made`.
    """
    if _known.has(fn, ("whole", made)) and not any(map(_FLAG, _frozen.get(fn, ()))):
        return
    buffers = [buffer for module in modules_of(fn) for buffer in module.buffers()] if to_given else []
    known = [*_tensors(given), *buffers]
    ids, above = {*map(id, known)}, {x.grad_fn for x in known}  # what these were made of is the caller's business
    kinds = nn.Parameter if in_step.get() else torch.Tensor
    for _, node, _ in edges([x.grad_fn for x in _tensors(outputs)], above.__contains__):
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, kinds) and id(leaf) not in ids and (what := _kept_as(leaf, fn)) is not None:
            raise StepError(
                f"the step uses {what} of shape {list(leaf.shape)} that isn't one of its arguments, "
                "so its gradient would stay local to this rank without a word. Pass it in: params = "
                "dict(module.named_parameters()) and ltx.functional_call(module, params, inputs) inside the step. "
                "If it is meant to be frozen, call requires_grad_(False) on it."
            )
    _known.add(fn, ("whole", made))
    still = [x for x, _ in _tensors_of(fn) if not x.requires_grad and x.is_floating_point()]
    with suppress(TypeError):
        _frozen[fn] = WeakTensorKeyDictionary(dict.fromkeys(still))


def _tensors(values: Tree) -> list[torch.Tensor]:
    return [x for x in tree.flatten(values)[0] if isinstance(x, torch.Tensor)]


def own_leaves(fn: Any, outputs: Tree, asked: Tree, given: Tree, made: int = 0) -> list[torch.Tensor]:
    """The tensors to which a Function leads that leads to none that a backward pass is `asked` for: a reversible layer,
    which brings gradients by itself, is only called if its dummy argument, made by `fn` or `given`, is asked for too.
    """
    if _known.has(fn, ("alone", made)):
        return []
    wanted, nodes = _tensors(asked), [x.grad_fn for x in _tensors(outputs)]
    ids, leads = {*map(id, wanted)}, {x.grad_fn for x in wanted}
    above = {x.grad_fn: x for x in _tensors(given) if x.grad_fn is not None and x.grad_fn not in leads}
    users: dict[Any, list[Any]] = {node: [] for node in nodes}
    for user, node, _ in edges(nodes, {*leads, *above}.__contains__):
        users.setdefault(node, []).append(user)
    leads |= {node for node in users if id(getattr(node, "variable", None)) in ids}
    leading = [*leads]
    for node in leading:  # the loop appends to what it goes through
        leading += (new := {*users.get(node, ())} - leads)
        leads |= new
    calls = [node for node in users if hasattr(node, "_forward_cls") and node not in leads and node not in above]
    below = {node: above.get(node, getattr(node, "variable", None)) for _, node, _ in edges(calls, above.__contains__)}
    own = [x for x in below.values() if x is not None]
    if not own:
        _known.add(fn, ("alone", made))
    return own


class _Watch(TorchFunctionMode):
    """Raises TracedValueError at the first use of a value that an outer level or plain autograd differentiates."""

    def __init__(self, fn: Any) -> None:
        super().__init__()
        self._fn, self._begin = fn, private.nodes_made()
        self._captured = {id(x): x for x in captured(fn)}  # held, or another tensor might have the id later

    def __exit__(self, kind: Any, *rest: Any) -> None:
        super().__exit__(kind, *rest)  # type: ignore[no-untyped-call]
        if kind is None:
            _known.add(self._fn, "watched")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != "__get__":  # reading a shape is harmless
            here = private.maybe_current_level() or 0
            for x in tree.flatten((args, tuple(kwargs.values())))[0]:
                if isinstance(x, torch.Tensor):
                    wrapped = private.is_wrapped(x)
                    node = None if wrapped else x.grad_fn
                    before = id(x) in self._captured or (node is not None and private.number_of(node) < self._begin)
                    if private.level_of(x) > here if wrapped else before:
                        raise TracedValueError
        return func(*args, **kwargs)


def watch_for_traced_values(fn: Any) -> AbstractContextManager[Any]:
    """Raise TracedValueError if `fn` uses a traced value. Later runs are watched only if it has one within reach."""
    first = _referred(fn)
    near = [x for y in (first, *map(_referred, first)) for x in y if isinstance(x, torch.Tensor)]
    return nullcontext() if _known.has(fn, "watched") and not any(map(_is_traced, near)) else _Watch(fn)


def captured(fn: Any) -> list[torch.Tensor]:
    """The tensors that a step `fn` refers to and plain autograd around it differentiates; leaves only in a step."""
    found = [x for x, module in _tensors_of(fn) if module is None or type(x) is not nn.Parameter]
    return [x for x in found if _is_traced(x) and x.requires_grad]


def _is_traced(x: torch.Tensor) -> bool:
    return private.is_wrapped(x) or (x.requires_grad and (in_step.get() or x.grad_fn is not None))


def look_at_modules(fn: Any, given: Sequence[Any], params: Tree) -> AbstractContextManager[bool | None]:
    """In the first call of `fn` raise StepError if it writes to a module's buffer or to one of its `params`, or uses an
    embedding that renormalises in place, or trained parameters with hooks that aren't `given`. Gives True.
    """
    return nullcontext() if _known.has(fn, "called") else _looking(fn, given, params)


@contextmanager
def _looking(fn: Any, given: Sequence[Any], params: Tree) -> Iterator[bool]:
    modules, tensors = modules_of(fn), [x for x in given if isinstance(x, torch.Tensor)]
    ids, derived = {*map(id, tensors)}, any(x.grad_fn is not None for x in tensors)
    for module in modules:
        refuse_max_norm(module)
        own = [(name, x) for name, x in module.named_parameters() if type(x) is nn.Parameter and id(x) not in ids]
        left = [(name, x) for name, x in own if x.requires_grad]
        if not derived and (place := first_hooked([x for _, x in left])) is not None:
            raise StepError(hooked_text(f"the step uses a module whose {left[place][0]!r} ({type(module).__name__})"))
    watched = [(module, buffer, _told(buffer.tensor)) for module in modules for buffer in Members(module).buffers]
    before = {} if private.in_transform() else {path: (x, _told(x)) for path, x in tensors_by_path(params)}
    try:
        yield True
    except RuntimeError as error:
        if " of Marker is a view" in str(error):
            raise StepError(_WRITES.format("a parameter that it was given and that is trained")) from error
        norms = [
            f"{f'{path}.running_mean' if path else 'running_mean'!r} of {type(module).__name__}"
            for module in modules
            for path, part in module.named_modules()
            if isinstance(part, nn.modules.batchnorm._NormBase) and part.training and part.running_mean is not None
        ]
        if norms and any(text in str(error) for text in _IN_PLACE):
            raise StepError(own_buffer_text(norms[0])) from error
        raise
    for module, buffer, told in watched:
        own_written([buffer if _told(buffer.tensor) == told else buffer._replace(version=-1)], type(module).__name__)
    written = {path: x for path, (x, told) in before.items() if _told(x) != told}
    for path in (path for path, x in written.items() if x.requires_grad):
        raise StepError(_WRITES.format(f"{path!r}, a parameter that it was given and that is trained"))
    if written:
        warnings.warn(_WRITES_FROZEN.format(", ".join(map(repr, written))), UserWarning, stacklevel=1)
    _known.add(fn, "called")


def has_bytes(x: torch.Tensor) -> bool:
    """Whether the values of `x` lie in memory as its shape and dtype say, so that they can be compared and sent."""
    return x.layout is torch.strided and not (x.is_meta or x.is_quantized or x.is_nested)


def _told(x: torch.Tensor) -> tuple[Any, ...]:
    """What differs after a write to `x`. Writes through ``x.data`` aren't counted in its version."""
    if type(x) not in (torch.Tensor, nn.Parameter) or not has_bytes(x):
        return ()
    with private.below_transforms(), torch.no_grad():
        return version_of(x), digest(values(x))


_WRITES = (
    "the step writes to {}: each rank would go on from values of its own, and gradients are those of the values "
    "before. Write to it between two steps: the module follows, as in `with torch.no_grad(): model.w.clamp_(0, 1)`. "
    "What a first batch initialises, initialise by model(x) before train.init(model), which sends rank 0's to all."
)
_WRITES_FROZEN = (
    "the step writes to {}, frozen parameters that it was given. All ranks must write the same values, which isn't "
    'compared; a step that guard="skip" leaves out has written too, and with donate=False the old state changes. '
    "Values that follow the batch are buffers: register_buffer, and return_buffers=True of ltx.functional_call."
)


def first_hooked(tensors: Sequence[torch.Tensor]) -> int | None:
    """The place of the first tensor that has hooks for its gradient; None if none has."""
    with private.plain_tensors():
        return next((place for place, hooks in enumerate(map(_HOOKS, tensors)) if any(hooks)), None)


def hooked_text(which: str) -> str:
    return (
        f"{which} has hooks (register_hook) for the gradient of this very tensor, and another one is differentiated. "
        "Remove them, and do to the gradients that you get what they do: "
        'grads["name"] * mask after ltx.grad(step)(...); in a train step in the optimizer: '
        "ltx.optim.chain(ltx.optim.from_functions(...), optimizer)."
    )


def refuse_max_norm(module: nn.Module) -> None:
    for path, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            where = f"{path}.weight" if path else "weight"
            raise StepError(
                f"{where!r} of {type(module).__name__}: {type(part).__name__}(max_norm={part.max_norm}) renormalises, "
                "in place, the rows that this rank's batch looks up, so each rank would change other rows. Set it to "
                "None, and in the step w = params[...]; w = w * (max_norm / w.norm(dim=1, keepdim=True)).clamp(max=1)."
            )


def own_written(buffers: Iterable[Buffer], where: str) -> None:
    """Raise if one of `buffers`, of a module called `where`, has changed; outer calls check those that they gave it."""
    for buffer in (buffer for buffer in buffers if buffer.written() and id(buffer.tensor) not in tensors_in_place()):
        raise StepError(own_buffer_text(f"{buffer.path!r} of {where}"))


def tensors_in_place() -> set[int]:
    """The ids of tensors that running functional calls, of ltx and torch, have put into modules."""
    calls = [*(swap.tensors for swap in placed.get()), *(tensors for _, tensors in calls_of_torch())]
    return {id(x) for tensors in calls for x in tensors.values()}


def calls_of_torch() -> list[tuple[nn.Module, Mapping[str, torch.Tensor]]]:
    """The (module, tensors) of the calls of torch.func.functional_call that run in this thread. They are found on the
    stack: a call in a graph that breaks in it runs modules eagerly, and only its frame knows.
    """
    frames = (frame for frame, _ in walk_stack(sys._getframe()))
    # Dynamo makes a code object of the same name and file, but not the same object.
    found = [f for f in frames if (f.f_code.co_name, f.f_code.co_filename) == (_CALL.co_name, _CALL.co_filename)]
    return [(frame.f_locals["module"], frame.f_locals["parameters_and_buffers"]) for frame in found]


def own_buffer_text(which: str) -> str:
    return (
        f"{which}: the module wrote to this buffer of its own. It isn't part of any state, and each rank would have "
        "its own values. Pass buffers in and return them: train.init(params, dict(module.named_buffers())), and in the "
        "step (params, buffers, x) -> (loss, buffers) output, buffers = ltx.functional_call(module, (params, buffers), "
        "x, return_buffers=True). Statistics over all ranks: ltx.nn.convert_sync_batch_norm(module). Or leave them as "
        "they are: module.eval()."
    )


class Buffer(NamedTuple):
    """A buffer of a module at one time: its path, where it is kept, and the count of writes to it."""

    path: str
    kept_in: dict[str, Any]
    name: str
    tensor: torch.Tensor
    version: int
    persistent: bool

    def written(self) -> bool:
        """Whether the buffer was written to, or replaced. A buffer that isn't saved may be replaced: it is a cache."""
        now = self.kept_in.get(self.name)
        return version_of(now) != self.version if now is self.tensor else self.persistent


def version_of(tensor: torch.Tensor) -> int:
    """The count of writes to the tensor; 0 for an inference tensor, whose writes torch doesn't count."""
    return 0 if tensor.is_inference() else tensor._version


def same_values(xs: Sequence[torch.Tensor], ys: Sequence[torch.Tensor]) -> bool:
    """Whether the pairs of tensors are equal, to the last bit and below all transforms."""

    def bits(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        return torch.cat([x.reshape(-1).view(torch.uint8) for x in tensors if x.device == device])

    with private.below_transforms(), torch.no_grad():
        return all(torch.equal(bits(xs, device), bits(ys, device)) for device in {x.device for x in xs})


def unfit(module: Any, what: str) -> LtxError:
    """The error for what is no module, or one of these."""
    if not isinstance(module, nn.Module):
        return TreeError(f"{what} takes a torch.nn.Module, got {type(module).__name__}.")
    which = "module.module" if isinstance(module, nn.DataParallel) else "the module that was scripted"
    return UnsupportedError(f"{what} can't put tensors into a {type(module).__name__}. Give it {which}.")


class Members:
    """The places of a module's tensors by name, in parts that torch.compile has wrapped by those that are `given`."""

    def __init__(self, module: nn.Module, what: str = "functional_call", given: Iterable[str] = ()):
        if isinstance(module, UNFIT) or not isinstance(module, nn.Module):
            raise unfit(module, what)
        self.module, self.what = module, what
        self.slots: dict[str, tuple[dict[str, Any], str]] = {}  # path -> the dict that holds the tensor, and its key
        self.names: dict[int, list[str]] = {}  # the names of each tensor, by id
        self.buffers: list[Buffer] = []
        self.hooked: list[str] = []  # the names of parameters with hooks for their gradients
        slots, names = self.slots, self.names
        # of torch's fully_shard (FSDP2), which manages the parameters of modules; () if nobody has imported it
        sharded: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
        rest: list[tuple[str, nn.Module]] = [("", module)]
        while rest:
            prefix, part = rest.pop()
            if isinstance(part, sharded):
                which = f"{prefix[:-1]!r} of " if prefix else ""
                raise UnsupportedError(
                    f"{what}: {which}{type(module).__name__} is under torch's fully_shard, which puts parameters of "
                    "its own into it. Call the module itself, and reduce its gradients: loss.backward(), then "
                    "ltx.sync_gradients({name: p.grad for name, p in module.named_parameters()}, axis=...)."
                )
            for kept_in in (part._parameters, part._buffers):
                for name, tensor in kept_in.items():
                    if tensor is None:
                        continue
                    path = prefix + name
                    slots[path] = kept_in, name
                    names.setdefault(id(tensor), []).append(path)
                    if kept_in is part._buffers:
                        persistent = name not in part._non_persistent_buffers_set
                        self.buffers.append(Buffer(path, kept_in, name, tensor, version_of(tensor), persistent))
                    # parameters of other types may be those that a train state has taken over
                    elif type(tensor) is nn.Parameter and any(_HOOKS(tensor)):
                        self.hooked.append(path)
            for name, child in part._modules.items():
                if child is not None:
                    path = f"{prefix}{name}."
                    wrapped = name == "_orig_mod" and given and not any(each.startswith(path) for each in given)
                    rest.append((prefix if wrapped else path, child))

    def tied(self) -> list[list[str]]:
        """The names of each tensor that has several."""
        return [names for names in self.names.values() if len(names) > 1]

    def untied(self, given: dict[str, torch.Tensor], tie_weights: bool) -> dict[str, torch.Tensor]:
        """`given`, checked, with entries added for all names of tensors that have several names in the module."""
        filled = dict(given)
        for name, tensor in given.items():
            if not isinstance(tensor, torch.Tensor):
                raise TreeError(f"{self.what}: {name!r} must be a tensor, got {type(tensor).__name__}.")
            if name not in self.slots:
                self._check_attribute(name)
        for group in self.tied() if tie_weights and len(self.names) < len(self.slots) else ():
            among = [name for name in group if name in given]
            for name in group if among else ():
                if filled.setdefault(name, given[among[0]]) is not given[among[0]]:
                    raise InputError(
                        f"{self.what}: {among[0]!r} and {name!r} are one tensor in {type(self.module).__name__}, "
                        "but two were given. Give one of them; or tie_weights=False, if they are to be apart."
                    )
        return filled

    def _check_attribute(self, name: str) -> None:
        """Raise unless `name` is an attribute of the module, a tensor, whose replacement would get a gradient."""
        *steps, last = name.split(".")
        part: Any = self.module
        for step in steps:
            part = getattr(part, step, None)
        if last in getattr(part, "parametrizations", ()):
            raise InputError(
                f"{self.what}: {name!r} of {type(self.module).__name__} is parametrized, and what is given for it "
                "would get no gradient. Give what it is computed from: dict(module.named_parameters()) has the names."
            )
        if not isinstance(getattr(part, last, None), torch.Tensor):
            known = ", ".join(repr(path) for path in list(self.slots)[:4])
            raise InputError(
                f"{self.what}: {type(self.module).__name__} has no parameter or buffer {name!r}. Of its "
                f"{len(self.slots)} the first are {known or 'none'}."
            )


def _tensors_of(fn: Any) -> Iterator[tuple[torch.Tensor, nn.Module | None]]:
    """The tensors that `fn` refers to; and the parameters of modules that it refers to, each with its module."""
    for value in reached_from(fn):
        if isinstance(value, torch.Tensor):
            yield value, None
        elif isinstance(value, nn.Module):
            yield from ((x, value) for x in value.parameters())


def modules_of(fn: Any) -> list[nn.Module]:
    """The modules that `fn` refers to, without modules that are inside another of them."""
    found = {id(value): value for value in reached_from(fn) if isinstance(value, nn.Module)}
    inner = {id(part) for module in found.values() for part in module.modules() if part is not module}
    return [module for key, module in found.items() if key not in inner]


def reached_from(fn: Any) -> Iterator[Any]:
    """The objects that `fn` refers to: in closures, globals, defaults, partials, and the object of a method."""
    seen: set[int] = set()
    queue: list[tuple[Any, int]] = [(fn, 0)]
    while queue and len(seen) < _MANY:
        value, depth = queue.pop()
        if id(value) in seen or depth > _DEPTH:
            continue
        seen.add(id(value))
        yield value
        if not isinstance(value, nn.Module):
            queue.extend((x, depth + 1) for x in _referred(value))


def _referred(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return list(value[:100])
    if isinstance(value, dict):
        return list(value.values())[:100]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if inspect.ismethod(value):
        return [value.__self__, value.__func__]
    if inspect.isfunction(value):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]  # not the empty ones
        library = str(value.__module__).partition(".")[0] in ("torch", "ltx")
        names = () if library else _names(value.__code__)
        globals_ = [value.__globals__[name] for name in names if name in value.__globals__]
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [*cells, *globals_, *defaults, getattr(value, "__wrapped__", None)]
    if inspect.ismodule(value) or inspect.isclass(value) or isinstance(value, torch.Tensor):
        return []
    return list(getattr(value, "__dict__", {}).values())[:100]


@functools.lru_cache(maxsize=1024)
def _names(code: Any) -> Sequence[str]:
    inner = [name for constant in code.co_consts if inspect.iscode(constant) for name in _names(constant)]
    return [*code.co_names, *inner]
