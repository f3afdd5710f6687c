"""Plans say which collectives every rank will issue: a pure function of shapes, dtypes, sizes and a hook, so that every
rank makes the same one. Buckets are launched in its order, whatever the order in which they become ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, lru_cache
from itertools import chain, repeat
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch.autograd import forward_ad

from ltx.core import comm
from ltx.core.base import private, tree
from ltx.core.base.arguments import check_fields, check_whole, seconds
from ltx.core.base.errors import StrategyError, UnsupportedError
from ltx.core.base.needs import phases_on
from ltx.core.base.private import Tensors
from ltx.core.base.readable import Readable
from ltx.core.gradients.buffers import pack_pure
from ltx.core.gradients.comm_hook import AllReduce, CommHook, shared_part, stateful_hook
from ltx.core.gradients.reduction import Bucket, BucketInput, Leaf, LeafState, UpdateShared
from ltx.core.ranks.axis import Axis
from ltx.typing import Tree

MIB = 1 << 20

# The bytes of a bucket, by what carries it. Shared memory and sockets have one size: with sizes that suit each link a
# step of two ranks took 1.00 of its time through shared memory, 0.95 to 1.00 through sockets at 1 Gbit/s (2 MiB) and
# 0.96 at 100 Mbit/s, but over n ranks each bucket more costs 2(n-1) messages. Measured with 21 MB of gradients:
# benchmarks/NOTES.md, "Sizes of buckets".
HOST_BYTES = 4 * MIB
#: On stream-ordered backends, such as NCCL, as in torch's DDP: an accelerator's kernels cost more to start.
STREAM_BYTES = 25 * MIB
#: One sum is the faster way for so many leaves: for more, one node of autograd that has all takes less time.
_ONE_SUM = 100
#: Leaves are tiny beside a leaf that is this many times larger than all of them.
_TINY = 64

#: For each leaf, the names of its communication state's tensors.
Names = tuple[tuple[str, ...], ...]
Order = tuple[int, ...]
Hooks = tuple[CommHook, ...]

#: Whether a data-parallel step runs in this thread, or a checkpoint runs a part of a step again.
in_step: ContextVar[bool] = ContextVar("in_step", default=False)


def arrival_order(params: Tree, wanted: Sequence[int]) -> list[int]:
    """The indices of the `wanted` leaves in the order in which their gradients are expected."""
    place = {leaf: i for i, leaf in enumerate(wanted)}
    return [place[i] for i in reversed(tree.insertion_order(params)) if i in place]


def tracked(tensor: torch.Tensor) -> bool:
    """Whether a gradient with respect to `tensor` is wanted, by plain autograd or at any level of torch.func."""
    if not private.in_transform():
        return tensor.requires_grad and torch.is_grad_enabled()
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    while not tensor.requires_grad and private.is_wrapped(tensor):  # a wrapper's is about its own level alone
        tensor = private.unwrapped_once(tensor)
    return tensor.requires_grad


def all_tracked(tensors: Tensors) -> list[int]:
    """The indices of the :func:`tracked` tensors."""
    if private.in_transform():
        return [i for i, x in enumerate(tensors) if tracked(x)]
    return [i for i, x in enumerate(tensors) if x.requires_grad] if torch.is_grad_enabled() else []


def any_derivative(tensors: Tensors) -> bool:
    """Whether some tensor is :func:`tracked` or has a tangent; under transforms, whether it may have one."""
    if all_tracked(tensors):
        return True
    if not private.has_tangents():
        return False
    if private.in_transform():
        return any(map(private.is_wrapped, tensors))
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def requires_grad(leaves: Iterable[Any]) -> bool:
    """Whether some leaf is a tensor that requires grad."""
    return any(map(getattr, leaves, repeat("requires_grad"), repeat(False)))


@contextmanager
def grads_kept(leaves: Tensors) -> Iterator[None]:
    """A backward pass in the block may be asked for these leaves, to come to what leads to them: ``.grad`` stays."""
    before = [x.grad if x.is_leaf or x.retains_grad else None for x in leaves]
    for x in leaves:
        x.grad = None
    try:
        yield
    finally:
        for x, grad in zip(leaves, before, strict=True):
            x.grad = grad


def differentiable(tensors: Tensors) -> list[int]:
    """The indices of the tensors that can have a gradient."""
    if all(map(torch.Tensor.is_floating_point, tensors)):
        return list(range(len(tensors)))
    return [i for i, x in enumerate(tensors) if x.is_floating_point() or x.is_complex()]


@dataclass(frozen=True)
class Plan:
    """Which buckets a synchronised step reduces, and how. A plan stays the same from step to step."""

    axis: Axis
    hook: CommHook  # reduces buckets
    buckets: tuple[Bucket, ...]  # in the order of launches
    state_names: Names
    step: int | None = None  # the number of synchronised steps before this one; None if the hook doesn't read it
    clock: torch.Tensor | None = None  # in a compiled graph, where `step` is constant: added to `step`
    hooks: Hooks = ()  # the buckets' hooks, if parameters have different ones
    agreement: comm.Agreement | None = None  # the ranks' agreement on the plan, if they compared it

    def hook_of(self, bucket: Bucket) -> CommHook:
        return self.hooks[bucket.index] if self.hooks else self.hook

    @staticmethod
    def tensors_of(bucket: Bucket, leaves: Tensors, states: Sequence[Tensors]) -> list[torch.Tensor]:
        """``[*leaves, *state tensors]`` of a bucket."""
        its_states = map(states.__getitem__, bucket.members)
        return [*map(leaves.__getitem__, bucket.members), *chain.from_iterable(its_states)]

    def states_of(self, bucket: Bucket, flat_states: Tensors) -> list[LeafState]:
        """State tensors of a bucket, by leaf and name; an empty dict for each leaf without state."""
        if not flat_states:
            return [*map(dict, repeat((), len(bucket.members)))]
        tensors = iter(flat_states)
        return [{name: next(tensors) for name in self.state_names[member]} for member in bucket.members]

    def flatten_states(self, bucket: Bucket, states: Sequence[LeafState]) -> list[torch.Tensor]:
        """Inverse of :meth:`states_of`."""
        return [x for state in self.states_by_leaf(bucket, states).values() for x in state.values()]

    def states_by_leaf(self, bucket: Bucket, states: Sequence[LeafState]) -> dict[int, LeafState]:
        """The states of a bucket by leaf, each with the names that the plan knows; empty for a hook without states."""
        if not self.keeps:
            return {}
        names = list(map(self.state_names.__getitem__, bucket.members))
        if len(states) != len(names) or not all(map(set.issuperset, map(set, states), names)):
            raise StrategyError(
                f"{self.hook!r} returned states {[sorted(state) for state in states]} for a bucket of {len(names)} "
                f"parameters: expected {[sorted(own) for own in names]}, in the order of inputs.states."
            )
        own = [{name: state[name] for name in given} for given, state in zip(names, states, strict=True)]
        return dict(zip(bucket.members, own, strict=True))

    @cached_property
    def is_state(self) -> tuple[bool, ...]:
        """For each tensor, in the order of :meth:`Schedule.wait`, whether it belongs to a state."""
        counts = [(len(b.members), sum(len(self.state_names[member]) for member in b.members)) for b in self.buckets]
        return tuple(flag for leaves, states in counts for flag in (*(False,) * leaves, *(True,) * states))

    def lasts(self, count: int) -> bool:
        """Whether it is the plan of later steps on these `count` leaves too: of all of them, by a stateless hook."""
        return self.step is None and sum(map(len, map(attrgetter("members"), self.buckets))) == count

    @cached_property
    def keeps(self) -> bool:
        """Whether some parameter has communication state in it."""
        return any(self.state_names)

    @cached_property
    def phases(self) -> int:
        """How many collectives each bucket may issue."""
        return phases_on(self.hook, self.axis.size)

    @cached_property
    def part(self) -> Axis | None:
        """The part of the axis whose ranks reduce among themselves; None if all ranks do it together."""
        return shared_part(self.hook, self.axis)

    @cached_property
    def one_sum(self) -> bool:
        """Whether one bucket on the host has all leaves, not too many, and one sum of all ranks reduces it."""
        if len(self.buckets) != 1 or self.hooks or self.axis.comm is None or self.part is not None:
            return False
        bucket, few = self.buckets[0], len(self.buckets[0].members) <= _ONE_SUM
        plain = type(self.hook).reduce is AllReduce.reduce and not self.keeps and not any(self.streams.values())
        return plain and few and self.lasts(max(bucket.members) + 1) and bucket.device.type == "cpu"

    @cached_property
    def streams(self) -> dict[torch.device, Any]:
        """The streams on which buckets are reduced, by their devices; None where waits block the host."""
        return {bucket.device: self.axis.ranks.stream_of(bucket.device) for bucket in self.buckets}

    def path_of(self, member: int) -> str | int:
        """The path of a leaf; its place if ranks haven't compared the plan."""
        return member if self.agreement is None else self.agreement.signature.leaves[member][0]

    def refuse_sparse(self, bucket: Bucket, grads: Tensors) -> None:
        """Raise unless all gradients of a bucket are dense."""
        for member, grad in zip(bucket.members, grads, strict=True):
            if grad.layout is not torch.strided:
                raise UnsupportedError(
                    f"rank {self.axis.rank}: the gradient of leaf {self.path_of(member)!r} (shape {list(grad.shape)}) "
                    f"has layout {grad.layout}, and buckets hold dense ones. Use nn.Embedding(sparse=False), or "
                    "ltx.sync_gradients on the local gradients."
                )

    def packed(
        self, hook: CommHook, bucket: Bucket, tensors: Tensors, by: Callable[..., Any] = pack_pure
    ) -> BucketInput:
        """The input of `hook`, from a bucket's ``[*gradients, *state tensors]``, packed `by` a function."""
        grads, states = tensors[: len(bucket.members)], self.states_of(bucket, tensors[len(bucket.members) :])
        return self.bucket_input(bucket, by(grads, bucket, hook, self.axis.size, states), states)

    def bucket_input(
        self, bucket: Bucket, flat: torch.Tensor, states: Sequence[LeafState], update: UpdateShared | None = None
    ) -> BucketInput:
        """The hook's view of a bucket."""
        # Each simulated rank has a clock, and all clocks are equal.
        step = self.step if self.step is None or self.clock is None else self.step + self.clock.max().long()
        last = bucket.index == len(self.buckets) - 1
        rank = self.axis.rank if self._rank is None else self._rank
        return BucketInput(flat, bucket, self.axis.size, rank, states, step, last, self.axis, update)

    @cached_property
    def _rank(self) -> int | None:
        """This rank's place, if ranks are processes: on simulated ranks each level of transforms has its own."""
        return None if self.axis.ranks.levels else self.axis.ranks.rank


@lru_cache(maxsize=256)
def plan_buckets(
    leaves: tuple[Leaf, ...], arrival: Order, sizes: tuple[int, int], groups: Order = (), hooks: Hooks = ()
) -> tuple[Bucket, ...]:
    """Fill buckets with `leaves` in the order in which their gradients are expected, given by the places in `arrival`.

    A bucket is closed before its gradients would exceed its size. Tiny leaves just before the leaf that doesn't fit go
    into the next bucket with it: a layer's bias arrives with its weights, and the closed bucket would wait for it. A
    bucket holds one dtype on one device, by one hook, whose factor multiplies its size; or a group's leaves, whatever
    their sizes. `groups`: each leaf's, -1 for none; () if there are none. `hooks`: each leaf's, or one for all.
    """
    open_members, filled, closed = dict[Any, list[int]](), dict[Any, int](), list[list[int]]()
    bucket_bytes, first_bucket_bytes = sizes
    for position in arrival:
        leaf, group = leaves[position], groups[position] if groups else -1
        hook = hooks[position % len(hooks)] if hooks else None
        kind = (leaf.dtype, leaf.device, group, hook)
        most = bucket_bytes * (hook.packing(leaf.dtype, 2).bucket_factor if hook else 1)
        mine = open_members.setdefault(kind, [])
        if group < 0 and mine and filled[kind] + leaf.nbytes > (most if closed else first_bucket_bytes):
            closed.append(mine)
            open_members[kind], filled[kind], room = [], 0, min(leaf.nbytes // _TINY, most - leaf.nbytes)
            while len(mine) > 1 and filled[kind] + leaves[mine[-1]].nbytes <= room:
                filled[kind] += leaves[mine[-1]].nbytes
                open_members[kind].insert(0, mine.pop())
        open_members[kind].append(position)
        filled[kind] = filled.get(kind, 0) + leaf.nbytes
    closed.extend(open_members.values())
    due = {position: place for place, position in enumerate(arrival)}
    closed.sort(key=lambda members: max(due[position] for position in members))
    return tuple(Bucket(i, tuple(own), tuple(leaves[position] for position in own)) for i, own in enumerate(closed))


@dataclass(frozen=True, kw_only=True)
class BucketSettings(Readable):
    """How gradients are put into buckets, and how ranks are connected: the fields that every strategy has."""

    _one_line = True

    bucket_bytes: int = HOST_BYTES
    first_bucket_bytes: int = MIB
    process_group_backend: str | None = None
    timeout: timedelta = timedelta(seconds=1800)

    def __post_init__(self) -> None:
        check_fields(self, StrategyError, "process_group_backend")
        check_whole(self, 1, "bucket_bytes", "first_bucket_bytes")
        length = seconds(f"{type(self).__name__}.timeout", self.timeout, StrategyError)
        object.__setattr__(self, "timeout", timedelta(seconds=length))

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of a bucket, and of the first one."""
        return self.bucket_bytes, self.first_bucket_bytes

    def grouping(self, paths: Callable[[], list[str]], arrival: Sequence[int]) -> tuple[int, ...]:
        """Which gradients share a bucket: for each of `paths` the number of its group, -1 for none; () for no groups.

        `arrival` has the parameters' places in the order in which gradients are expected, the last parameter first;
        equal on all ranks.
        """
        return ()


def by_path(
    owner: BucketSettings, hook: CommHook, paths: Callable[[], list[str]], order: Sequence[int], grouped: bool = True
) -> tuple[Order, Hooks]:
    """The tensors' groups and hooks, if either depends on paths; raises if a pattern matches no path."""
    groups = owner.grouping(paths, order) if grouped else ()
    same = type(hook).each is CommHook.each  # then the paths, which take time, aren't asked for
    return groups, () if same else tuple(hook.each(paths(), part=not grouped) or ())


def make_plan(
    owner: BucketSettings,
    hook: CommHook,
    axis: Axis,
    tensors: Tensors,
    arrival: Callable[[], Sequence[int]],
    names: Names,
    step: int,
    paths: Callable[[], list[str]],
    operation: str,
    structure: Any,
    *,
    background: bool = False,
    grouped: bool = True,
) -> Plan:
    """The plan for reducing `tensors`, leaves of a tree of this `structure`, by the form that `hook` has at `step`;
    ranks compare it when it is new, and take rank 0's `arrival`. `operation`: "" inside a graph, where ranks can't
    wait for each other. `background`: for the background channel. `grouped`: the strategy's groups apply.
    """
    hook = hook.at(step)
    leaves = tuple(map(Leaf._make, map(attrgetter("shape", "dtype", "device"), tensors)))
    if not operation:  # a plan is for these sizes, which Dynamo makes variables after several models
        leaves = tuple(leaf._replace(shape=torch.Size(map(int, leaf.shape))) for leaf in leaves)
    agreement = None
    key = (operation, owner, hook, leaves, names, structure)  # without the order of arrival, which may differ

    def described() -> comm.Signature:
        states = f"states {sorted({n for leaf in names for n in leaf})}, " if any(names) else ""
        text = f"{hook!r} with {states}buckets of {owner.sizes} bytes"
        return comm.Signature.of(operation, paths(), list(tensors), text)

    if operation:
        channel = "background" if background else "buckets"
        agreement = axis.ranks.confirm(lambda: key, described, lambda: list(arrival()), channel)
        if agreement is not None and agreement.plan is not None:
            known: Plan = agreement.plan
            return replace(known, step=step) if stateful_hook(hook) else known
        axes = dict.fromkeys((axis, *hook.axes(axis)))  # asking for them opens them, which all ranks do together
        for on in () if background else axes:
            on.ranks.open_phases(phases_on(hook, axis.size))
    order = tuple(agreement.offer) if agreement is not None else tuple(arrival())
    sizes, on_streams = owner.sizes, any(map(axis.ranks.stream_of, set(map(itemgetter(2), leaves))))
    if sizes[0] == HOST_BYTES and not background and on_streams:
        sizes = (STREAM_BYTES, sizes[1])
    groups, each = by_path(owner, hook, paths, order, grouped)
    buckets = plan_buckets(leaves, order, sizes, groups, each or (hook,))
    hooks = tuple(each[bucket.members[0]] for bucket in buckets) if each else ()
    plan = Plan(axis, hook, buckets, names, hooks=hooks, agreement=agreement)
    if agreement is not None:
        agreement.plan = plan
    return replace(plan, step=step) if stateful_hook(hook) else plan
