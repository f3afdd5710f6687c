"""Hooks of DistributedDataParallel: from_torch runs torch's hooks in steps of ltx, to_torch runs ltx's hooks in DDP."""

# Annotations must not be strings: DDP compares a hook's annotations with the classes themselves.

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from ltx.errors import AxisError, HookError, StrategyError, SyncStateError, UnsupportedError
from ltx.extend import Bucket, LeafState, Packing, Pending, brief, buffers, comm, needs, states_of, tree
from ltx.hooks import BucketInput, CommHook, Reduction

TorchHook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]


class LookAlike:
    """A bucket, not divided by the number of ranks, with the interface of DDP's, which Python can't construct."""

    def __init__(self, inputs: BucketInput, owner: "FromTorch"):
        self._buffer, self._share, self._owner = inputs.flat, inputs, owner
        self.refused: UnsupportedError | None = None

    def index(self) -> int:
        return self._share.bucket.index

    def is_last(self) -> bool:
        return self._share.last

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def set_buffer(self, tensor: torch.Tensor) -> None:
        self._buffer = tensor

    def gradients(self) -> list[torch.Tensor]:
        return buffers.unpack(self._buffer[: self._share.bucket.numel], self._share.bucket, cast=False)

    def parameters(self) -> list[torch.Tensor]:
        # The error is kept, since a future turns an error in its callback into a RuntimeError.
        self.refused = UnsupportedError(
            f"{self._owner!r} asks for the bucket's parameters, which a step of ltx doesn't change; it makes new ones. "
            'Hooks that update parameters while gradients arrive are ltx.train_step(..., overlap="update") here.'
        )
        raise self.refused


@dataclass(frozen=True, eq=False, repr=False)
class FromTorch(CommHook):
    """Made by :func:`from_torch`. Two are equal if they have the same function and the same state object."""

    hook: TorchHook
    state: Any = None

    exact: ClassVar[bool] = False
    reach: ClassVar[str] = "parameter"
    sums: ClassVar[bool] = False
    phases: ClassVar[int] = 0  # counts ltx's collectives, and not those on the hook's own group

    def __post_init__(self) -> None:
        if not callable(self.hook):
            kind = type(self.hook).__name__
            raise HookError(f"from_torch takes a function (state, bucket) -> Future[Tensor], got {kind}.")
        if self._name.rpartition(".")[2] in ("bf16_compress_hook", "bf16_compress_wrapper_hook"):
            nccl = dist.is_nccl_available() and torch.cuda.nccl.version() >= (2, 10)
            if not ((torch.version.cuda or torch.version.hip) and nccl):  # DDP's own condition
                raise HookError(
                    f"{self!r} needs CUDA 11 and NCCL 2.10, as under DDP. ltx.hooks.BF16() works everywhere."
                )

    @property
    def alike(self) -> bool:
        return self._name not in ("noop_hook", "post_localSGD_hook")

    @property
    def _name(self) -> str:
        hook = getattr(self.hook, "func", self.hook)  # the function inside a partial
        return str(getattr(hook, "__qualname__", type(hook).__qualname__))

    def __repr__(self) -> str:
        # Ranks compare this text, so it has no addresses.
        return f"FromTorch({self._name}, {type(self.state).__name__})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FromTorch) and self.hook == other.hook and self.state is other.state

    def __hash__(self) -> int:
        return hash((self.hook, id(self.state)))

    def packing(self, dtype: torch.dtype, axis_size: int) -> Packing:
        return Packing(dtype, 1.0, 1.0 / axis_size)  # DDP doesn't divide for hooks either

    def reduce(self, inputs: BucketInput) -> Reduction:
        axis_comm = self._comm(inputs)
        label = f"{self!r} of bucket {inputs.bucket.index}"
        axis_comm.peers.own.sent += 1
        bucket = LookAlike(inputs, self)
        try:
            future = self.hook(self.state, bucket)
            if not isinstance(future, torch._C.Future):
                raise StrategyError(
                    f"rank {axis_comm.rank}: {label}: expected a torch.futures.Future, got {type(future).__name__}."
                )
            axis_comm.first_phase.wait_for_future(future, label)
            result = future.wait()
        except RuntimeError as error:
            if bucket.refused is None or bucket.refused is error:
                raise
            raise bucket.refused from error
        yield from ()  # this makes a generator that issues no collective of ltx
        return self._checked(result, inputs, label, axis_comm), inputs.states

    def _comm(self, inputs: BucketInput) -> comm.AxisComm:
        if type(inputs.flat) is not torch.Tensor:
            raise UnsupportedError(
                f"{self!r} can't be part of a compiled graph. Compile the step inside: "
                "ltx.data_parallel(torch.compile(f), strategy)."
            )
        if inputs.axis is None or inputs.axis.comm is None:
            where = "in a world of one without a process group" if inputs.axis_size == 1 else "on simulated ranks"
            raise UnsupportedError(
                f"{self!r} communicates over a process group of torch.distributed, so it can't run {where}. Use a "
                "hook of ltx.hooks there, or start the program with a launcher (ltx run, torchrun)."
            )
        axis, axis_comm = inputs.axis, cast(comm.AxisComm, inputs.axis.comm)
        group = self.state if isinstance(self.state, dist.ProcessGroup) else getattr(self.state, "process_group", None)
        theirs = sorted(dist.get_process_group_ranks(group))  # group None means the default group
        ours = sorted(axis_comm.global_ranks)
        if theirs != ours:
            whose = "the default process group" if group is None else "the process group of its state"
            raise AxisError(
                f"rank {axis_comm.rank}: {self!r} communicates with ranks {theirs} of {whose}, but axis {axis.name!r} "
                f"has ranks {ours}. Give the hook's state a process group over these, or use the axis of that group."
            )
        return axis_comm

    def _checked(self, result: Any, inputs: BucketInput, label: str, axis_comm: comm.AxisComm) -> torch.Tensor:
        if not isinstance(result, torch.Tensor) or result.numel() != inputs.flat.numel():
            got = list(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
            raise StrategyError(
                f"rank {axis_comm.rank}: {label}: expected its future to hold a tensor of {inputs.flat.numel()} "
                f"elements, got {got}. The future of a collective holds a list: add .then(lambda f: f.value()[0])."
            )
        # A buffer that isn't ltx's belongs to the hook, which may write into it at the next step.
        is_ours = result.untyped_storage().data_ptr() == inputs.flat.untyped_storage().data_ptr()
        return result.reshape(-1) if is_ours else result.reshape(-1).to(inputs.flat.dtype, copy=True)


def from_torch(hook: TorchHook, state: Any = None) -> FromTorch:
    """A hook written for ``DistributedDataParallel.register_comm_hook``, as a communication hook of ltx.

    The hook gets each rank's gradients, not divided by the number of ranks, in buckets that look like
    ``torch.distributed.GradBucket``, and works as under DDP, to the same bits if the buckets are the same. It
    communicates over the process group of its `state`, or over the default group, which must have the axis' ranks.

    It differs from other hooks:

    * Its state belongs to the caller and changes while it runs. It isn't part of the communication state, so a step
      that is repeated, or fails halfway, has changed the state all the same. State that is kept by the bucket's index,
      such as PowerSGD's, is valid while the buckets stay the same.
    * It issues collectives of its own, also in callbacks, whose order differs between ranks. So the step waits for each
      bucket's future before the next bucket, once all gradients are there: nothing overlaps. In return, hooks that
      under DDP on gloo abort or hang with several buckets run here.
    * It runs eagerly and between processes only. Second derivatives use the exact mean.
    * :func:`ltx.profile.record` doesn't see what it sends.

    Args:
        hook: ``(state, bucket) -> Future[Tensor]``.
        state: the hook's first argument.

    Raises:
        HookError: (a TypeError) `hook` isn't callable, or it is one of torch's bfloat16 hooks and there is no NCCL.
        UnsupportedError: on simulated ranks, in a world of one without a process group, in a compiled graph, under
            vmap between processes; and if the hook asks for the bucket's parameters.
        AxisError: the hook's process group doesn't have the axis' ranks.
        StrategyError: the hook doesn't give a future that holds a tensor of the bucket's size.
        DeadlockDetectedError: a peer has failed in its hook. Later steps raise it too: collectives no longer match.

    Errors of the hook itself are raised unchanged, and end the backward pass on all ranks.

    Example:
        >>> import ltx
        >>> from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
        >>> state = PowerSGDState(process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=10)
        >>> ltx.DDPStrategy(comm_hook=ltx.hooks.from_torch(powerSGD_hook, state)).comm_hook
        FromTorch(powerSGD_hook, PowerSGDState)
    """
    return FromTorch(hook, state)


class ToTorch:
    """Made by :func:`to_torch`: a hook for torch, with its state. `step`: the number of backward passes so far."""

    def __init__(self, hook: CommHook, names: Mapping[str, torch.Tensor] | DistributedDataParallel | None = None):
        if not isinstance(hook, CommHook):
            raise HookError(f"to_torch takes an ltx.hooks.CommHook, got {type(hook).__name__}.")
        if not (names is None or isinstance(names, Mapping | DistributedDataParallel)):
            raise HookError(f"to_torch: names must be None, a DDP or its named parameters, got {brief(names)}.")
        needs.require("bucket of DDP, hook", hook, "", hook.each((), part=True) is None)
        self.hook, self.step = hook, 0
        self._group = names.process_group if isinstance(names, DistributedDataParallel) else None
        given = dict(names.module.named_parameters()) if isinstance(names, DistributedDataParallel) else names
        # The key is the id. The tensor is kept too, so that no other tensor can get the same id.
        self._named = given is not None
        self._names = {id(param): (name, param) for name, param in (given or {}).items()}
        self._states: dict[str, LeafState] = {}
        self._loaded: dict[str, LeafState] = {}
        self._pass: Pending | None = None  # the backward pass that is under way
        self.__name__ = self.__qualname__ = f"to_torch({hook!r})"  # DDP logs the name of its hook

    def __repr__(self) -> str:
        return self.__qualname__

    def __call__(self, state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        expected = len(self._pass.launched) if self._pass is not None and self._pass.going_on else 0
        if bucket.index() != expected:  # the bucket must be the next of this pass, or the first of a new one
            raise StrategyError(
                f"{self!r}: expected DDP's bucket {expected}, got bucket {bucket.index()}. Each DDP module needs a "
                "to_torch of its own."
            )
        try:
            if self._pass is None or bucket.index() == 0:
                self._pass = self._begin(state)
            future = self._launch(self._pass, bucket)
            if bucket.is_last():  # all buckets are launched: wait for them, then take over the next states together
                for names, (_, states) in zip(self._sent, self._pass.wait_each(), strict=True):
                    for name, state in zip(names, states, strict=True):
                        self._states[name] = {**self._states[name], **{k: t.detach() for k, t in state.items()}}
                self.step += 1
                self._pass.finish()
                self._pass = None
            return future
        except BaseException as error:
            if self._pass is not None:  # tell the peers, which may wait for the rest of this pass
                self._pass.abandon(error)
                self._pass = None
            raise

    def _begin(self, state: Any) -> Pending:
        group = state if state is not None else self._group
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise AxisError(
                f"{self!r}: register_comm_hook's state is the process group over which to reduce, or None for DDP's "
                f"default; got {type(group).__name__}."
            )
        self._axis = comm.resolve(dist.group.WORLD if group is None else group)
        self._sent: list[list[str]] = []  # the names of the parameters in each bucket of the pass
        pending = Pending(on := cast(comm.AxisComm, self._axis.comm))
        pending.enter()
        on.passes.begin()
        return pending

    def _launch(self, now: Pending, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer, grads = bucket.buffer(), bucket.gradients()
        if buffer.layout != torch.strided:
            raise UnsupportedError(
                f"{self!r}: bucket {bucket.index()} holds a sparse gradient. Use torch.nn.Embedding(sparse=False)."
            )
        names = [self._name(param) for param in bucket.parameters()]
        hook = self.hook.at(self.step)
        mine = Bucket.of(bucket.index(), grads)
        states = [self._state(name, param) for name, param in zip(names, bucket.parameters(), strict=True)]
        states = [states_of(hook, entry) for entry in states]
        now.flush_others()
        on = now.among
        # Ranks must have equal buckets and hooks: they compare each new bucket.
        last, state_names = bucket.is_last(), sorted({name for state in states for name in state})

        def describe() -> comm.Signature:
            how = f"{hook!r} with states {state_names}{', the last bucket' if last else ''}"
            return comm.Signature.of(f"bucket {mine.index} of DistributedDataParallel", names, grads, how)

        on.negotiate_issue(on.first_phase, ("to_torch", hook, tuple(names), mine, tuple(state_names), last), describe)
        on.open_phases(needs.phases_on(hook, on.size))
        # DDP doesn't divide a GradBucket. Packing copies, since the buffer is DDP's.
        flat = buffers.pack(grads, mine, hook, on.size, states)
        self._sent.append(names)
        # A stream that waits for the future runs after the work that its stream has when the future completes.
        future = torch.futures.Future[torch.Tensor](devices=[buffer.device] if buffer.device.type != "cpu" else None)
        inputs = BucketInput(flat, mine, on.size, on.rank, states, self.step, last, self._axis)
        now.reduce(hook, inputs, lambda reduced: future.set_result(reduced[0].to(buffer.dtype)))
        return future

    def _name(self, param: torch.Tensor) -> str:
        known = self._names.get(id(param))
        if known is None:
            if self._named:
                raise StrategyError(
                    f"{self!r}: DDP reduces a parameter of shape {list(param.shape)} that isn't among the "
                    f"{len(self._names)} of names=. Give all of them: to_torch(hook, dict(module.named_parameters()))."
                )
            known = self._names[id(param)] = (str(len(self._names)), param)
        return known[0]

    def _state(self, name: str, param: torch.Tensor) -> LeafState:
        if name not in self._states:
            fresh = self.hook.init(param.detach(), name)
            loaded = self._loaded.pop(name, fresh)
            kinds, given = ({k: f"{x.dtype}{list(x.shape)}" for k, x in state.items()} for state in (fresh, loaded))
            if kinds != given:
                raise SyncStateError(
                    f"the state of parameter {name!r}: expected {kinds}, got {given}, of another hook or model."
                )
            self._states[name] = {key: x.to(fresh[key].device) for key, x in loaded.items()}
        return self._states[name]

    def state_dict(self) -> dict[str, Any]:
        """A copy of this rank's state, which differs between ranks: "step", the number of steps so far, and "params",
        each parameter's tensors by name, or by number if there are no `names`; so buckets may change.
        """
        held = {name: state for name, state in {**self._loaded, **self._states}.items() if state}
        return {"step": self.step, "params": tree.map(lambda x: x.detach().clone(), held)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a dict of :meth:`state_dict`. Parameters that aren't in the dict begin with new state.

        Raises:
            SyncStateError: it isn't such a dict, or has parameters not in `names`; at the next step: it doesn't fit.
        """
        if not isinstance(state_dict, Mapping) or set(state_dict) != {"step", "params"}:
            keys = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__
            raise SyncStateError(f"{self!r}: expected a dict with 'step' and 'params' from state_dict(), got {keys}.")
        if self._pass is not None and self._pass.going_on:
            raise SyncStateError(f"{self!r}: a backward pass is under way. Load the state before or after it.")
        known = {name for name, _ in self._names.values()}
        unknown = sorted(set(state_dict["params"]) - known) if self._named else []
        if unknown:
            raise SyncStateError(
                f"{self!r}: the state is of parameters {unknown}, which aren't among names={sorted(known)}."
            )
        self.step = state_dict["step"]
        self._states = {}
        self._loaded = tree.map(lambda x: x.detach().clone(), state_dict["params"])


def to_torch(hook: CommHook, names: Mapping[str, torch.Tensor] | DistributedDataParallel | None = None) -> ToTorch:
    """A hook of ltx for torch's DistributedDataParallel. Nothing else in the program has to change.

    DDP's buckets are reduced as those of :func:`ltx.data_parallel`, asynchronously and in order over ltx's
    channels. On every rank: ``ddp.register_comm_hook(None, ltx.hooks.to_torch(hook, ddp))``, once for each DDP module.

    Args:
        hook: the hook.
        names: the DDP module itself, or ``dict(module.named_parameters())``. A parameter's state in the hook, and its
            random numbers, belong to the parameter's name. Without names they belong to its number in the order in
            which DDP first shows the parameters, on which a checkpoint shouldn't rely.

    The first argument of ``register_comm_hook`` is the process group over which to reduce; None means the group of the
    DDP module in `names`, else the default group. It has to be the group of the DDP module, which DDP doesn't tell its
    hook. All ranks of the group open an axis over it at their first bucket, if there is none yet. The gradient of a
    parameter that isn't contiguous is in DDP's buckets, and so reaches the hook, in the parameter's memory order.

    Returns:
        A :class:`ToTorch`. It holds the hook's state and changes with each backward pass; ``state_dict()`` and
        ``load_state_dict(...)`` save it in a checkpoint, with a dict for each rank. DDP doesn't divide what it gets.

    Raises:
        HookError: (a TypeError) `hook` isn't an ltx.hooks.CommHook.
        RankMismatchError: in a backward pass, ranks have different hooks or buckets; on all ranks.
        DeadlockDetectedError: in a backward pass, a peer has failed in its hook.

    After its backward pass has raised, a DDP module can't be used any more, with any hook: make a new one.

    Example:
        >>> import torch, ltx
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> def train(module, batches):  # on every rank, after torch.distributed.init_process_group
        ...     ddp = DistributedDataParallel(module)
        ...     ddp.register_comm_hook(None, ltx.hooks.to_torch(ltx.hooks.BF16(), ddp))
        ...     optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        ...     for x in batches:
        ...         optimizer.zero_grad()
        ...         ddp(x).square().mean().backward()
        ...         optimizer.step()
        >>> ltx.hooks.to_torch(ltx.hooks.BF16())
        to_torch(BF16())
    """
    return ToTorch(hook, names)
