"""simulate: ranks are threads of this process that take turns, and can run code that torch.vmap can't."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ltx.core import comm
from ltx.core.base import private, tree
from ltx.core.base.arguments import checked
from ltx.core.collectives import rank_seed
from ltx.core.ranks.axis import DEFAULT_NAME, OTHERS, Axis, axes_in_scope, open_alone, set_opened_aside
from ltx.core.ranks.simulated import mapped_arguments, mapped_size
from ltx.core.training.train_state import set_random_states, torch_states
from ltx.core.transforms.closure_check import reached_from, version_of
from ltx.core.transforms.functional_call import calls_of_torch, set_placed_aside
from ltx.errors import AxisError, UnsupportedError
from ltx.runtime.per_rank import PerRank


@checked("f", "ranks", "axis_name", "randomness")
def simulate(
    f: Callable[..., Any],
    in_dims: Any = 0,
    *,
    ranks: int | None = None,
    axis_name: str = DEFAULT_NAME,
    randomness: Literal["different", "same"] = "different",
) -> Callable[..., PerRank[Any]]:
    """Run `f` on simulated ranks that take turns: each is a thread, and lets the others run when it waits for them.

    :func:`ltx.vmap` runs all ranks at once as one batch, which is faster, but allows only code that ``torch.vmap``
    allows. Here each rank runs `f` by itself on tensors of its own. So `f` may read values (``.item()``, boolean masks,
    control flow by data), write in place (batch norm in training), use activation checkpointing, ``loss.backward()``
    and optimizers of torch, and its tensors may have other shapes on each rank. Collectives of unequal shapes and of
    objects work too. One rank runs at a time, in the order of ranks between two collectives, so every run is the same.

    Args:
        f: the function that one rank runs. What it refers to from outside (a closure, a global) is shared by all ranks.
            If it writes to a tensor from outside, to such a module's tensors or to their ``.grad``, the call raises at
            its end.
        in_dims: as in :func:`ltx.vmap`: along which dimension the tensors among the arguments are divided; None gives
            each rank the whole tensor. Each rank gets copies, also of modules and optimizers; all ranks get the same
            other objects. An argument that is a :class:`ltx.PerRank` gives each rank its own value.
        ranks: the number of ranks; needed only if no argument is divided.
        axis_name: what collectives call the axis.
        randomness: "different": each rank has its own random stream of torch's default generators, seeded by a number
            that is drawn from the caller's generator. "same": the ranks have equal streams. Either way the caller's
            generator advances by that one number. Python's and NumPy's generators are shared by all ranks.

    Returns:
        A function with `f`'s arguments that returns a :class:`ltx.PerRank`: what each rank returned, with tensors
        detached. Its ``.stack()`` is what ``ltx.vmap`` returns.

    Raises:
        RankMismatchError: ranks disagree on a collective, or one returns while others wait for it; raised on all ranks
            that wait.
        AxisError: the mapped inputs disagree on the number of ranks, or there are none and `ranks` isn't given.
        UnsupportedError: the call is inside a transform of torch.func, a compiled graph or another simulate, or another
            thread runs simulate, or the world has several processes. Or `f` calls a collective under forward mode,
            inside ``torch.func.functional_call``, or in a compiled graph. Or a thread that isn't a rank calls a
            collective meanwhile, outside of an ``ltx.vmap`` of its own. Or an argument is part of a graph.

        When a rank raises, the others get PeerLostError in the collective that they wait in, and simulate raises the
        first error, with a note that names its rank. An interrupt ends the ranks at their next collective.

    Gradient:
        Inside `f`, gradients are those between processes: ``backward()``, ``torch.autograd.grad``, reverse mode of
        torch.func, nested. No gradient flows through the call of simulate itself.

    Example:
        >>> import torch, ltx
        >>> def f(x):
        ...     kept = x[x > 0]  # its length differs between ranks
        ...     return len(kept), ltx.psum(kept.sum())
        >>> ltx.simulate(f)(torch.tensor([[1.0, -2.0], [3.0, 4.0]]))
        PerRank(rank 0: (1, tensor(8.)), rank 1: (2, tensor(8.)))
    """

    def on_ranks(*args: Any, **named: Any) -> PerRank[Any]:
        with _alone():
            inputs = _Inputs.of(axis_name, ranks, in_dims, args, named)
            turns = comm.Turns(inputs.size, _set_aside)
            mapped = (x for x, dim in zip(inputs.leaves, inputs.dims, strict=True) if dim is not None)
            device = next((x.device for x in mapped if isinstance(x, torch.Tensor)), None)
            modes, shared = _modes(), _written_from(f)
            seed = int(torch.randint(2**62, (), device="cpu"))
            states, reopen = torch_states(), set_opened_aside()

            def axis_of(rank: int) -> Axis:
                members = tuple(range(inputs.size))
                return Axis(axis_name, inputs.size, comm.ThreadRanks(turns, axis_name, members, rank, device))

            # This axis refuses collectives of other threads: a thread may belong to a rank, which isn't alone.
            close_for_others = open_alone(axis_of(0), OTHERS)

            def one_rank(rank: int) -> Any:
                close = open_alone(axis_of(rank))
                try:
                    torch.manual_seed(rank_seed(seed) if randomness == "different" else seed)
                    with modes():
                        own_args, own_named = inputs.of_rank(rank)
                        return tree.map(_detached, f(*own_args, **own_named))
                except BaseException as error:
                    error.add_note(f"ltx.simulate: on rank {rank} of {inputs.size}, axis {axis_name!r}")
                    raise
                finally:
                    close()

            try:
                results = turns.run(one_rank)
            finally:
                set_random_states(states)
                reopen()
                close_for_others()
            for name, x, state in shared if inputs.size > 1 else ():
                if _state_of(x) != state:
                    raise UnsupportedError(
                        f"ltx.simulate: f wrote to {name}, or to its .grad. f refers to it from outside, so all ranks "
                        "share it, where each process would have its own. Pass it to f (each rank gets a copy), make "
                        "it in f, or, for a module, use ltx.functional_call(module, params, inputs). What ranks find, "
                        "f returns."
                    )
            return PerRank(results)

    return on_ranks


_run = threading.Lock()
_ONE_ONLY = (
    "ltx.simulate inside of ltx.simulate, or in a thread beside it: ranks take turns with what a process has once, "
    "such as its random numbers. Use one, with the product of the numbers of ranks, or call one after the other."
)


@contextmanager
def _alone() -> Iterator[None]:
    """Use it around the run of all ranks: raises where they can't run, as inside a transform or beside another run."""
    if torch.compiler.is_compiling():
        raise UnsupportedError("ltx.simulate can't be compiled: its ranks wait for each other in Python.")
    if private.in_transform() or private.has_tangents():
        raise UnsupportedError(
            "ltx.simulate runs ranks in threads, into which no transform (torch.func, ltx.vmap, forward mode) leads. "
            "Use the transform inside of f."
        )
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    if others := [type(mode).__name__ for mode in modes if not isinstance(mode, DeviceContext)]:
        raise UnsupportedError(
            f"ltx.simulate runs ranks in threads, into which no mode leads, and {others[0]} is on. Enter it in f."
        )
    scope = axes_in_scope()
    if any(axis.ranks.in_turn for axis in scope):
        raise UnsupportedError(_ONE_ONLY)
    if several := [axis for axis in scope if axis.size > 1]:
        raise UnsupportedError(
            f"ltx.simulate runs in one process, and this world has {several[0].size} ranks on axis "
            f"{several[0].name!r}. Call it before ltx.init(), or in a program of its own."
        )
    if not _run.acquire(blocking=False):
        raise UnsupportedError(_ONE_ONLY)
    try:
        yield
    finally:
        _run.release()


def _set_aside() -> Callable[[], None]:
    """At the end of a rank's turn: put aside its state of the process. The result restores that state."""
    if calls := calls_of_torch():
        raise UnsupportedError(
            f"torch.func.functional_call of {type(calls[0][0]).__name__}: it puts this rank's tensors into a module "
            "that other ranks use too, and calls a collective meanwhile. Write ltx.functional_call, which takes the "
            "same arguments."
        )
    states, reopen, put_back = torch_states(), set_opened_aside(), set_placed_aside()

    def come_back() -> None:
        set_random_states(states)
        reopen()
        put_back()

    return come_back


def _modes() -> Callable[[], AbstractContextManager[None]]:
    """A context that enters the caller's modes of torch, which a new thread doesn't inherit."""
    grad, inference, device = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_device()
    casts = [(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]

    @contextmanager
    def entered() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            # Else one thread runs all ranks' backward passes on a GPU, and one pass would wait there for the other.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            if device.type != "cpu":
                stack.enter_context(device)
            for kind, dtype in casts:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            yield

    return entered


@dataclass(frozen=True)
class _Inputs:
    """The leaves of a call's arguments; the keyword arguments are the last argument."""

    size: int
    leaves: list[Any]
    spec: Any
    dims: list[Any]  # the dimension of each leaf that is divided among ranks; None for leaves that each rank gets whole

    @staticmethod
    def of(axis_name: str, ranks: int | None, in_dims: Any, args: tuple[Any, ...], named: dict[str, Any]) -> _Inputs:
        leaves, spec, dims = mapped_arguments(axis_name, in_dims, args, (*args, named), _COPIED | PerRank)
        for x in leaves:
            if isinstance(x, PerRank):
                if ranks not in (None, len(x)):
                    raise AxisError(
                        f"axis {axis_name!r} has {ranks} ranks, but an argument has the values of {len(x)}."
                    )
                ranks = len(x)
        of_graph = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.grad_fn is not None]
        if torch.is_grad_enabled() and of_graph:
            path = tree.leaf_paths((*args, named))[of_graph[0]]
            raise UnsupportedError(
                f"ltx.simulate: the argument {path!r} is part of a graph, and no gradient flows "
                "back through the call. Differentiate inside of f, or give x.detach()."
            )
        size = Axis(axis_name, mapped_size(axis_name, ranks, leaves, dims, "ranks")).size  # Axis checks the number
        return _Inputs(size, leaves, spec, dims)

    def of_rank(self, rank: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of `rank`, copied. An object that is in two places is copied once."""
        memo: dict[int, Any] = {}
        values = [_own(x, dim, rank, memo) for x, dim in zip(self.leaves, self.dims, strict=True)]
        *args, named = tree.unflatten(self.spec, values)
        return tuple(args), named


_COPIED = torch.nn.Module | torch.optim.Optimizer


def _own(x: Any, dim: int | None, rank: int, memo: dict[int, Any]) -> Any:
    if isinstance(x, PerRank):
        return tree.map(lambda value: _own(value, None, rank, memo), x.rank(rank))
    if not isinstance(x, torch.Tensor):
        return copy.deepcopy(x, memo) if isinstance(x, _COPIED) else x
    if dim is not None:
        return x.detach().select(dim, rank).clone().requires_grad_(x.requires_grad)
    if isinstance(x, torch.nn.Parameter):
        return copy.deepcopy(x, memo)
    if id(x) not in memo:  # deepcopy would copy the whole memory of which a view shows a part
        memo[id(x)] = x.detach().clone().requires_grad_(x.requires_grad)
    return memo[id(x)]


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, torch.Tensor) and x.grad_fn is not None else x


#: A tensor that all ranks share: (its name, the tensor, its version and that of its .grad before the ranks ran).
_Shared = tuple[str, torch.Tensor, tuple[Any, ...]]


def _state_of(x: torch.Tensor) -> tuple[Any, ...]:
    grad = x.grad if x.is_leaf else None
    return version_of(x), id(grad), 0 if grad is None else version_of(grad)


def _written_from(f: Any) -> list[_Shared]:
    """The tensors, parameters and buffers that `f` refers to from outside."""
    found = []
    for value in reached_from(f):
        if isinstance(value, torch.nn.Module):
            named = [*value.named_parameters(), *value.named_buffers()]
            found += [(f"{name!r} of {type(value).__name__}", x) for name, x in named]
        elif isinstance(value, torch.Tensor):
            found.append((f"a tensor of shape {list(value.shape)}", value))
    return [(name, x, _state_of(x)) for name, x in found]
