"""The contract of a communication hook: what is done to a bucket of gradients on its way over the network."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from ltx.arguments import brief, check_fields
from ltx.axis import Axis
from ltx.errors import StrategyError, UnsupportedError
from ltx.gradients.buckets import Bucket
from ltx.gradients.reduction import BucketInput, LeafState, Reduction, Terms


@dataclass(frozen=True, repr=False)
class CommHook:
    """A pure reduction of buckets, with explicit state.

    A hook is a value: it compares, hashes, pickles and prints. :meth:`reduce` is a generator written with
    :class:`ltx.gradients.reduction.CollectiveRequest`, so that the same lines run asynchronously between processes, on
    simulated ranks and in compiled graphs.

    Attributes:
        exact: the result is the mean up to rounding in the gradients' own dtype. Others count as the exact mean under
            second derivatives.
        averages: the result stands for the sum of the shares, exactly or not. Hooks of which that isn't true have no
            derivative, and can't do another hook's sums.
        elementwise: each element's result depends on that element alone.
        needs_whole: the result for a parameter depends on the whole of it (its rows and columns, its norm), or in a way
            that isn't known. So it would be another one where ranks hold parts of parameters (DTensors).
        sums: whether it requests sums of floating numbers, which another hook may provide (:func:`ltx.hooks.chain`).
        gives_gradients: whether its result scales with the gradients, as a mean of them does. A step whose loss is a
            :class:`ltx.Weighted` divides the result by the sum of the weights, which isn't known before.
        reads_step: whether :meth:`reduce` or :meth:`at` reads the number of steps so far, for randomness too.
        bucket_factor: a bucket, the first excepted, holds this many times the bytes that the strategy says. More than 1
            where far less than the gradients is sent, so that the arithmetic works on fewer and longer buffers.
        phases: the largest number of requests that :meth:`reduce` yields for a bucket. Each has a channel of its own,
            which ranks open together when they meet a plan; in the backward pass they couldn't, as they arrive in any
            order. Where it depends on the number of ranks, :meth:`phases_on` says so.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__repr__" not in vars(cls):  # in the class itself, where dataclass leaves it alone
            cls.__repr__ = CommHook.__repr__  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        check_fields(self, StrategyError)

    def __repr__(self) -> str:
        """Fields that have their default values are left out."""
        said = ((f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default)
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in said)})"

    exact: ClassVar[bool] = True
    averages: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True
    needs_whole: ClassVar[bool] = False
    sums: ClassVar[bool] = True
    gives_gradients: ClassVar[bool] = True
    reads_step: ClassVar[bool] = False
    bucket_factor: ClassVar[int] = 1
    phases: ClassVar[int] = 1

    @property
    def state_names(self) -> tuple[str, ...]:
        """The tensors of one parameter's state; empty for a hook without."""
        return ()

    @property
    def stateful(self) -> bool:
        """Whether a step needs communication state: the hook's tensors, or the count of steps."""
        return bool(self.state_names) or self.reads_step

    def init(self, param: torch.Tensor, path: str = "") -> LeafState:
        """The state of the parameter at `path` before the first step: floating tensors named as in `state_names`.

        A parameter may have fewer than all of them.
        """
        return {}

    @property
    def constant_after(self) -> int:
        """The number of steps after which :meth:`at` gives the same hook at every step."""
        return 0

    def states_of(self, entries: LeafState) -> LeafState:
        """The part of a leaf's state that this hook reads."""
        return {name: entries[name] for name in self.state_names if name in entries}

    def at(self, step: int) -> CommHook:
        """The hook in force at synchronised step `step`; states that it doesn't name pass through unchanged.

        What the hook in force asks for has the same shapes at every step.
        """
        return self

    def in_graph(self, step: int) -> CommHook | None:
        """The hook in force at `step` and ever after, which a compiled graph can hold; None if there is none.

        In graphs :meth:`reduce` gets the step as a tensor, which will do for randomness. A hook that defines :meth:`at`
        defines this too: from when on does it no longer change?
        """
        return self if type(self).at is CommHook.at else None

    def with_error_feedback(self) -> CommHook | None:
        """The hook with error feedback (:func:`ltx.hooks.error_feedback`); None if it has no error of its own."""
        return None

    def axes(self, axis: Axis) -> tuple[Axis, ...]:
        """The parts of `axis` (:func:`ltx.axis.inner`, :func:`ltx.axis.outer`) on which :meth:`reduce` requests
        collectives.

        Ranks open them together when they meet a plan.
        """
        return ()

    def within(self, axis: Axis) -> Axis | None:
        """The part of `axis` that a reduction stays in, if it does: one of :meth:`axes`. None for all ranks.

        The step summary, with losses and weights, stays there too.
        """
        return None

    def cast(self, dtype: torch.dtype) -> CommHook | None:
        """The hook whose sums travel in `dtype` (:func:`ltx.hooks.cast`); None where a chain does that."""
        return None

    def scale(self, axis_size: int) -> float:
        """The factor of gradients when they are packed; the step gets their sum over ranks."""
        return 1.0 / axis_size

    def phases_on(self, axis_size: int) -> int:
        """`phases` on that many ranks."""
        return self.phases

    def derivative_scale(self, axis_size: int) -> float:
        """The factor of the sum over ranks that the result counts as in derivatives."""
        if not self.averages:
            raise UnsupportedError(
                f"{self!r} isn't a mean of gradients, so derivatives of its result have no meaning. Take "
                "second derivatives of ltx.block_backward_sync(step), or of a step with another strategy."
            )
        return 1.0 / axis_size

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of `dtype` are packed and given to :meth:`reduce`."""
        return dtype

    def extra_terms(self, state: LeafState, axis_size: int) -> Terms:
        """Tensors of a parameter's state that are added to its gradient as it is packed, with their factors."""
        return ()

    def output_bucket(self, bucket: Bucket, axis_size: int) -> Bucket:
        """The shapes that a strategy's exchange of `bucket` gives; a gradient's are always its parameter's."""
        return bucket

    def reduce(self, inputs: BucketInput) -> Reduction:
        """Yield collective requests; return (the sum of all ranks' inputs, the next states)."""
        raise NotImplementedError(f"{type(self).__name__} must define reduce(share)")


def check_whole(owner: object, least: int, *names: str, most: int = 2**63 - 1) -> None:
    """Raise unless the fields `names` of a hook or strategy are whole numbers from `least` to `most`."""
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            upper = f", and at most {most}" if most < 2**63 - 1 or (isinstance(value, int) and value > most) else ""
            raise StrategyError(
                f"{type(owner).__name__}.{name} must be a whole number of at least {least}{upper}, got {brief(value)}."
            )
