"""from_torch: a hook written for DistributedDataParallel.register_comm_hook, in steps of ltx.

Such a hook issues collectives of its own, in callbacks too, whose order between buckets differs from rank to rank. So
each bucket's future is awaited before the next bucket, and all of it is done once every gradient is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ltx.errors import AxisError, HookError, StrategyError, UnsupportedError
from ltx.extend import Axis, BucketInput, CommHook, Reduction, comm, unpack

TorchHook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]


class LookAlike:
    """A bucket as hooks know it from torch: ``dist.GradBucket`` has no constructor."""

    def __init__(self, inputs: BucketInput, owner: FromTorch):
        self._buffer = inputs.flat
        self._share = inputs
        self._owner = owner
        self.refused: UnsupportedError | None = None

    def index(self) -> int:
        """Its place in the order of launches."""
        return self._share.bucket.index

    def is_last(self) -> bool:
        """Whether no bucket comes after it."""
        return self._share.last

    def buffer(self) -> torch.Tensor:
        """All gradients, flat, not divided by the number of ranks."""
        return self._buffer

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Replace the buffer."""
        self._buffer = tensor

    def gradients(self) -> list[torch.Tensor]:
        """Views of the buffer in the parameters' shapes."""
        return unpack(self._buffer[: self._share.bucket.numel], self._share.bucket, cast=False)

    def parameters(self) -> list[torch.Tensor]:
        """Not to be had."""
        # Kept, as one that is raised in a future's callback comes out of it as a RuntimeError.
        self.refused = UnsupportedError(
            f"{self._owner!r} asks for the bucket's parameters, which a step of ltx doesn't change: it gives new ones. "
            'Hooks that update parameters while gradients arrive are ltx.train_step(..., overlap="update") here.'
        )
        raise self.refused


@dataclass(frozen=True, eq=False, repr=False)
class FromTorch(CommHook):
    """What :func:`from_torch` gives. Two are equal if they have the same function and the very same state."""

    hook: TorchHook
    state: Any = None

    exact: ClassVar[bool] = False
    needs_whole: ClassVar[bool] = True
    sums: ClassVar[bool] = False
    phases: ClassVar[int] = 0  # collectives of ltx; those of the hook's own group don't count

    def __post_init__(self) -> None:
        if not callable(self.hook):
            raise HookError(
                f"from_torch takes a function (state, bucket) -> Future[Tensor], got {type(self.hook).__name__}."
            )
        if self._name.rpartition(".")[2] in ("bf16_compress_hook", "bf16_compress_wrapper_hook"):
            _check_bf16(self)

    @property
    def _name(self) -> str:
        hook = getattr(self.hook, "func", self.hook)  # a partial's
        return str(getattr(hook, "__qualname__", type(hook).__qualname__))

    def __repr__(self) -> str:
        # Compared between ranks: no addresses.
        return f"FromTorch({self._name}, {type(self.state).__name__})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FromTorch) and self.hook == other.hook and self.state is other.state

    def __hash__(self) -> int:
        return hash((self.hook, id(self.state)))

    def scale(self, axis_size: int) -> float:
        return 1.0  # DDP doesn't divide for hooks either

    def reduce(self, inputs: BucketInput) -> Reduction:
        axis_comm = self._comm(inputs)
        label = f"{self!r} of bucket {inputs.bucket.index}"
        axis_comm.recovery.begin_external(label)
        bucket = LookAlike(inputs, self)
        try:
            future = self.hook(self.state, bucket)
            if not isinstance(future, torch._C.Future):
                raise StrategyError(
                    f"rank {axis_comm.rank}: {label}: expected a torch.futures.Future, got {type(future).__name__}."
                )
            with axis_comm.recovery.waiting_for_external(label):
                axis_comm.bucket_channel(0).wait_for_future(future, label)
            result = future.wait()
        except RuntimeError as error:
            if bucket.refused is None or bucket.refused is error:
                raise
            raise bucket.refused from error
        yield from ()  # no collective of ltx
        return self._checked(result, inputs, label, axis_comm), inputs.states

    def _comm(self, inputs: BucketInput) -> comm.AxisComm:
        if type(inputs.flat) is not torch.Tensor:
            raise UnsupportedError(
                f"{self!r} can't be part of a compiled graph. Compile the step inside: "
                "ltx.data_parallel(torch.compile(f), strategy)."
            )
        if inputs.axis is not None and inputs.axis.meta:
            raise UnsupportedError(
                f"{self!r} communicates over a process group of torch.distributed, so what it sends isn't known ahead. "
                "Explain or plan the step with a hook of ltx.hooks."
            )
        if inputs.axis is None or inputs.axis.comm is None:
            where = "in a world of one without a process group" if inputs.axis_size == 1 else "on simulated ranks"
            raise UnsupportedError(
                f"{self!r} communicates over a process group of torch.distributed, so it can't run {where}. Use a "
                "hook of ltx.hooks there, or start the program with a launcher (ltx run, torchrun)."
            )
        axis_comm: comm.AxisComm = inputs.axis.comm
        self._check_ranks(inputs.axis, axis_comm)
        return axis_comm

    def _check_ranks(self, axis: Axis, axis_comm: comm.AxisComm) -> None:
        group = self.state if isinstance(self.state, dist.ProcessGroup) else getattr(self.state, "process_group", None)
        theirs = sorted(dist.get_process_group_ranks(group))  # None: the default group, as hooks have it
        ours = sorted(axis_comm.global_ranks)
        if theirs != ours:
            whose = "the default process group" if group is None else "the process group of its state"
            raise AxisError(
                f"rank {axis_comm.rank}: {self!r} communicates with ranks {theirs} of {whose}, but axis {axis.name!r} "
                f"has ranks {ours}. Give the hook's state a process group over the axis' ranks, or use the axis of "
                "that group."
            )

    def _checked(self, result: Any, inputs: BucketInput, label: str, axis_comm: comm.AxisComm) -> torch.Tensor:
        if not isinstance(result, torch.Tensor) or result.numel() != inputs.flat.numel():
            got = list(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
            raise StrategyError(
                f"rank {axis_comm.rank}: {label}: expected its future to hold a tensor of {inputs.flat.numel()} "
                f"elements, got {got}. The future of a collective holds a list: add .then(lambda f: f.value()[0])."
            )
        # What isn't our buffer is the hook's, which may write into it at the next step.
        is_ours = result.untyped_storage().data_ptr() == inputs.flat.untyped_storage().data_ptr()
        return result.reshape(-1) if is_ours else result.reshape(-1).to(inputs.flat.dtype, copy=True)


def _check_bf16(hook: FromTorch) -> None:
    """DDP's condition for these two."""
    nccl = dist.is_nccl_available() and torch.cuda.nccl.version() >= (2, 10)
    if not ((torch.version.cuda or torch.version.hip) and nccl):
        raise HookError(
            f"{hook!r} needs CUDA 11 and NCCL 2.10 at least, here as under DistributedDataParallel. ltx.hooks.BF16() "
            "works everywhere."
        )


def from_torch(hook: TorchHook, state: Any = None) -> FromTorch:
    """A hook written for ``DistributedDataParallel.register_comm_hook``, as a communication hook of ltx.

    It gets each rank's own gradients, not divided by the number of ranks, in buckets that look like
    ``torch.distributed.GradBucket``, and does with them what it does under DDP, to the same bits where the buckets are
    the same. It communicates over the process group of its `state`, or over the default one, which must have the axis'
    ranks.

    What differs from other hooks:

    * Its state is the caller's and changes while it runs. It isn't part of the communication state, so a step that is
      run again, or fails halfway, has moved it on all the same. State that is kept by the bucket's index, as
      PowerSGD's is, lasts as long as the buckets do.
    * Each bucket's future is awaited before the next bucket, once all gradients are there: nothing overlaps. In return
      hooks run with several buckets that under DDP on gloo abort or hang.
    * It runs eagerly and between processes only. Second derivatives take the exact mean.
    * :func:`ltx.profile.record` doesn't see what it sends.

    Args:
        hook: ``(state, bucket) -> Future[Tensor]``.
        state: its first argument.

    Raises:
        HookError: (a TypeError) `hook` isn't callable, or it is one of torch's bfloat16 hooks and there is no NCCL.
        UnsupportedError: on simulated ranks, in a world of one without a process group, in a compiled graph, under
            vmap between processes; and if the hook asks for the bucket's parameters.
        AxisError: the hook's process group doesn't have the axis' ranks.
        StrategyError: the hook doesn't give a future that holds a tensor of the bucket's size.
        DeadlockDetectedError: a peer has failed in its hook; and from then on, as the collectives on the hook's process
            group no longer pair.

    What the hook raises is raised as it is, and ends the backward pass on all ranks.

    Example:
        >>> import ltx
        >>> from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
        >>> state = PowerSGDState(process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=10)
        >>> ltx.DDPStrategy(comm_hook=ltx.hooks.from_torch(powerSGD_hook, state)).comm_hook
        FromTorch(powerSGD_hook, PowerSGDState)
    """
    return FromTorch(hook, state)
