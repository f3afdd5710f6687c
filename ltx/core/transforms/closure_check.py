"""Checks for tensors that a step uses without getting them as arguments.

Such a parameter's gradient would silently stay local; a module's buffer would change on one rank only; and a value that
a surrounding transform differentiates would have no derivative, since a step runs below that transform.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ltx.core.base import private, tree
from ltx.core.base.errors import InputError, StepError, TreeError, UnsupportedError
from ltx.core.comm.signature import Seen
from ltx.typing import Tree

# The functions whose graphs were checked, with the number of nodes that their call made: looking takes long.
_looked_at = Seen(forgets=True)


def captured(fn: Any, outputs: Iterable[Any], given: Iterable[Any]) -> torch.Tensor | None:
    """A leaf that requires gradients and isn't in `given`, but on which `outputs` depend; None if there is none.

    Leaves that the step `fn` has created, such as inputs for its own derivatives, don't count: they aren't parameters,
    and the function doesn't refer to them.
    """
    given = [x for x in given if isinstance(x, torch.Tensor)]
    known = {id(x) for x in given}
    seen: set[Any] = {x.grad_fn for x in given}  # what the given tensors were made of is the caller's business
    queue = [x.grad_fn for x in outputs if isinstance(x, torch.Tensor) and x.grad_fn is not None]
    while queue:
        node = queue.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor) and id(variable) not in known and _is_kept(variable, fn):
            return variable
        queue.extend([parent for parent, _ in node.next_functions if parent is not None])
    return None


def _is_kept(leaf: torch.Tensor, fn: Any) -> bool:
    """Whether a leaf is a parameter, or `fn` refers to it, so that it existed before the call."""
    parts = [part for module in modules_of(fn) for part in module.modules()]
    kept = [x for part in parts for x in (*part._buffers.values(), *vars(part).values())]
    return isinstance(leaf, nn.Parameter) or any(x is leaf for x in (*reached_from(fn), *kept))


def refuse_captured(fn: Any, outputs: Tree, given: Tree, made: int = 0, to_given: bool = False) -> list[torch.Tensor]:
    """Raise if `outputs` of `fn` depend on parameters that aren't among `given`, the arguments of the call.

    Returns :func:`own_leaves`.

    Buffers of modules that require gradients count too, unless derivatives are taken only with respect to `given`. Each
    function is checked once, and again if a call makes another number of nodes, `made`. The check is for plain
    autograd: torch.func differentiates only arguments.
    """
    if _looked_at.has(fn, made):
        return []
    known, buffers = tree.flatten(given)[0], [b for m in modules_of(fn) for b in m.buffers()] if to_given else []
    variable = captured(fn, tree.flatten(outputs)[0], [*known, *buffers])
    if variable is not None:
        raise StepError(
            f"the step uses {_name_of(fn, variable)} of shape {list(variable.shape)} that isn't one of its arguments, "
            "so its gradient would stay local to this rank without a word. Pass it in: params = "
            "dict(module.named_parameters()) and ltx.functional_call(module, params, inputs) inside the step. "
            "If it is meant to be frozen, call requires_grad_(False) on it."
        )
    if not (own := own_leaves(fn, outputs, given, made)):
        _looked_at.add(fn, made)
    return own


_without_own = Seen(forgets=True)


def own_leaves(fn: Any, outputs: Tree, given: Tree, made: int = 0) -> list[torch.Tensor]:
    """The tensors that `fn` has made to which an autograd.Function leads, and to none of the `given` ones.

    Autograd goes to what it is asked for. A reversible layer with a dummy argument, whose backward pass brings the
    gradients of parameters by itself, is only called if the dummy's gradient is asked for too.
    """
    if _without_own.has(fn, made):
        return []
    wanted = [x for x in tree.flatten(given)[0] if isinstance(x, torch.Tensor)]
    ids, leading = {*map(id, wanted)}, [x.grad_fn for x in wanted if x.grad_fn is not None]
    queue = [x.grad_fn for x in tree.flatten(outputs)[0] if isinstance(x, torch.Tensor) and x.grad_fn is not None]
    users: dict[Any, list[Any]] = {node: [] for node in queue}
    for node in queue:  # the loops append to what they go through
        if id(getattr(node, "variable", None)) in ids:
            leading.append(node)
        for following in (n for n, _ in node.next_functions if n is not None):
            if following not in users:
                users[following] = []
                queue.append(following)
            users[following].append(node)
    leads = set(leading)
    for node in leading:
        leading += (new := {*users.get(node, ())} - leads)
        leads |= new
    own = dict[int, torch.Tensor]()
    queue = [node for node in queue if hasattr(node, "_forward_cls") and node not in leads]
    for node in queue:
        if (leaf := getattr(node, "variable", None)) is not None:
            own[id(leaf)] = leaf
        queue.extend(n for n, _ in node.next_functions if n is not None)
    if not own:
        _without_own.add(fn, made)
    return [*own.values()]


def closes_over_variables(fn: Any, outputs: Tree, given: Tree, made: int) -> bool:
    """Whether `outputs` of `fn` depend on what :func:`refuse_captured` refuses."""
    try:
        refuse_captured(fn, outputs, given, made)
    except StepError:
        return True
    return False


def _name_of(fn: Any, tensor: torch.Tensor) -> str:
    for module in modules_of(fn):
        for what, held in (("a parameter", module.named_parameters()), ("a buffer", module.named_buffers())):
            for path in (path for path, x in held if x is tensor):
                return f"{path!r} of {type(module).__name__}, {what}"
    return "a parameter"


class TracedValueError(Exception):
    """The step closes over a value that a surrounding transform of torch.func differentiates or maps."""


class _Watch(TorchFunctionMode):
    """Raises :class:`TracedValueError` at the first operation on a tensor of a level above the one that runs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != "__get__":  # reading a shape is harmless
            here = private.maybe_current_level() or 0
            for x in tree.flatten((args, tuple(kwargs.values())))[0]:
                if is_wrapped(x) and private.level_of(x) > here:
                    raise TracedValueError
        return func(*args, **kwargs)


def is_wrapped(x: Any) -> bool:
    """Whether `x` is a tensor at a level of torch.func."""
    return isinstance(x, torch.Tensor) and private.is_wrapped(x)


_watched = Seen(forgets=True)


@contextmanager
def watch_for_traced_values(fn: Any) -> Iterator[None]:
    """Raise TracedValueError if `fn` uses a traced value. Only the first run of `fn` is watched.

    A function that closes over a traced value was made inside the transform, so it is new. Watching costs microseconds
    per operation.
    """
    with nullcontext() if _watched.has(fn) else _Watch():
        yield
    _watched.add(fn)


_called = Seen(forgets=True)


def look_at_modules(
    fn: Any, in_place: Callable[[], set[int]], given: Callable[[], Iterable[Any]]
) -> AbstractContextManager[bool | None]:
    """While `fn` is called for the first time: raise StepError if it writes to a buffer of a module that it uses.

    Also raise if it uses an embedding that renormalises its rows in place, or a module whose trained parameters have
    hooks for gradients and aren't among the `given` tensors. `in_place`: as in :func:`own_written`. The block gets True
    if it is the first time.
    """
    return nullcontext() if _called.has(fn) else _looking(fn, in_place, given)


@contextmanager
def _looking(fn: Any, in_place: Callable[[], set[int]], given: Callable[[], Iterable[Any]]) -> Iterator[bool]:
    modules, tensors = modules_of(fn), [x for x in given() if isinstance(x, torch.Tensor)]
    ids, derived = {*map(id, tensors)}, any(x.grad_fn is not None for x in tensors)
    for module in modules:
        refuse_max_norm(module)
        own = [(name, x) for name, x in module.named_parameters() if type(x) is nn.Parameter and id(x) not in ids]
        left = [(name, x) for name, x in own if x.requires_grad]
        if not derived and (place := first_hooked([x for _, x in left])) is not None:
            raise StepError(hooked_text(f"the step uses a module whose {left[place][0]!r} ({type(module).__name__})"))
    watched = [(module, buffer, _value(buffer.tensor)) for module in modules for buffer in Members(module).buffers]
    try:
        yield True
    except RuntimeError as error:
        # torch can't write values that differ between simulated ranks to a tensor that the ranks share.
        norms = [
            f"{f'{path}.running_mean' if path else 'running_mean'!r} of {type(module).__name__}"
            for module in modules
            for path, part in module.named_modules()
            if isinstance(part, nn.modules.batchnorm._NormBase) and part.training and part.running_mean is not None
        ]
        if norms and any(text in str(error) for text in _IN_PLACE):
            raise StepError(own_buffer_text(norms[0])) from error
        raise
    for module, buffer, value in watched:
        x = buffer.tensor
        other = not x.is_meta and x.shape == value.shape and not same_values([x], [value])
        own_written([buffer._replace(version=-1) if other else buffer], type(module).__name__, in_place)
    _called.add(fn)


def first_hooked(tensors: Sequence[torch.Tensor]) -> int | None:
    """The place of the first tensor that has hooks for its gradient; None if none has."""
    with private.plain_tensors():
        found = zip(map(_HOOKS[0], tensors), map(_HOOKS[1], tensors), strict=True)
        return next((place for place, hooks in enumerate(found) if any(hooks)), None)


_HOOKS = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")


def hooked_text(which: str) -> str:
    return (
        f"{which} has hooks (register_hook), which are called for the gradient of this very tensor, and here another "
        "one is differentiated. Remove them (handle.remove()), and do what they do to the gradients that you get: "
        'grads["name"] * mask after ltx.grad(step)(params, ...); in a train step in the optimizer, '
        "ltx.optim.chain(ltx.optim.from_functions(...), optimizer)."
    )


def refuse_max_norm(module: nn.Module) -> None:
    for path, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            where = f"{path}.weight" if path else "weight"
            raise StepError(
                f"{where!r} of {type(module).__name__}: {type(part).__name__}(max_norm={part.max_norm}) renormalises, "
                "in place, the rows that this rank's batch looks up, so each rank would change other rows. Set "
                "max_norm=None and renormalise all rows in the step: w = params[...]; w = w * (max_norm / "
                "w.norm(dim=1, keepdim=True)).clamp(max=1)."
            )


def own_written(buffers: Sequence[Buffer], where: str, in_place: Callable[[], set[int]]) -> None:
    """Raise if one of `buffers` has changed; errors call their module `where`.

    `in_place` returns the ids of tensors that outer calls have put into modules; the outer calls check these.
    """
    written = [buffer for buffer in buffers if buffer.written()]
    if not written:
        return
    given = in_place()
    for path, *_, tensor, _, _ in written:
        if id(tensor) not in given:
            raise StepError(own_buffer_text(f"{path!r} of {where}"))


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


class Members:
    """The places of a module's tensors by name, found in one pass through the module."""

    def __init__(self, module: nn.Module, what: str = "functional_call"):
        if not isinstance(module, nn.Module):
            raise TreeError(f"{what} takes a torch.nn.Module, got {type(module).__name__}.")
        if isinstance(module, torch.jit.ScriptModule | nn.DataParallel):
            which = "module.module" if isinstance(module, nn.DataParallel) else "the module that was scripted"
            raise UnsupportedError(f"{what} can't put tensors into a {type(module).__name__}. Give it {which}.")
        self.module, self.what = module, what
        self.slots: dict[str, tuple[dict[str, Any], str]] = {}  # path -> the dict that holds the tensor, and its key
        self.tied: dict[int, list[str]] = {}  # the names of tensors with several names, by id
        self.buffers: list[Buffer] = []
        self.hooked: list[str] = []  # the names of parameters with hooks for their gradients
        slots, first, sharded = self.slots, dict[int, str](), _fully_sharded()
        rest: list[tuple[str, nn.Module]] = [("", module)]
        while rest:
            prefix, part = rest.pop()
            if isinstance(part, sharded):
                which = f"{prefix[:-1]!r} of " if prefix else ""
                raise UnsupportedError(
                    f"{what}: {which}{type(module).__name__} is under torch's fully_shard, which puts "
                    "parameters of its own into it. Call the module itself, and reduce its gradients: "
                    "loss.backward(), then ltx.sync_gradients({name: p.grad for name, p in "
                    "module.named_parameters()}, axis=...)."
                )
            for kept_in in (part._parameters, part._buffers):
                for name, tensor in kept_in.items():
                    if tensor is None:
                        continue
                    path, key = prefix + name, id(tensor)
                    slots[path] = kept_in, name
                    if (other := first.setdefault(key, path)) is not path:
                        self.tied.setdefault(key, [other]).append(path)
                    if kept_in is part._parameters:
                        # parameters of other types may be those that a train state has taken over
                        if type(tensor) is nn.Parameter and (
                            tensor._backward_hooks or tensor._post_accumulate_grad_hooks
                        ):
                            self.hooked.append(path)
                    else:
                        persistent = name not in part._non_persistent_buffers_set
                        self.buffers.append(Buffer(path, kept_in, name, tensor, version_of(tensor), persistent))
            for name, child in part._modules.items():
                if child is not None:
                    rest.append((f"{prefix}{name}.", child))

    def tensor(self, path: str) -> torch.Tensor:
        """The tensor that the module has now."""
        kept_in, name = self.slots[path]
        found: torch.Tensor = kept_in[name]
        return found

    def untied(self, given: dict[str, torch.Tensor], tie_weights: bool) -> dict[str, torch.Tensor]:
        """`given`, checked, with entries added for all names of tensors that have several names in the module."""
        filled = dict(given)
        for name, tensor in given.items():
            if not isinstance(tensor, torch.Tensor):
                raise TreeError(f"{self.what}: {name!r} must be a tensor, got {type(tensor).__name__}.")
            if name not in self.slots:
                self._check_attribute(name)
        for group in self.tied.values() if tie_weights else ():
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


def _fully_sharded() -> Any:
    """The class of modules whose parameters torch's fully_shard (FSDP2) manages; () if nobody has imported it."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())


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


# A step may refer to everything in a program, so the search is limited.
_DEPTH, _MANY = 6, 10_000


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
        cells = [cell for cell in value.__closure__ or () if _filled(cell)]
        library = str(value.__module__).partition(".")[0] in ("torch", "ltx")
        names = () if library else _names(value.__code__)
        globals_ = [value.__globals__[name] for name in names if name in value.__globals__]
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [*(cell.cell_contents for cell in cells), *globals_, *defaults, getattr(value, "__wrapped__", None)]
    if inspect.ismodule(value) or inspect.isclass(value) or isinstance(value, torch.Tensor):
        return []
    return list(getattr(value, "__dict__", {}).values())[:100]


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _names(code: Any) -> Sequence[str]:
    inner = [name for constant in code.co_consts if inspect.iscode(constant) for name in _names(constant)]
    return [*code.co_names, *inner]


_IN_PLACE = ("which will be updated in place, were not batched", "that would mutate a captured Tensor")


def _value(tensor: torch.Tensor) -> torch.Tensor:
    with private.below_transforms(), torch.no_grad():
        return tensor.detach().clone()
