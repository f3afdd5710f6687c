"""BaguaStrategy: Bagua's algorithms by their names.

Gan et al., "BAGUA: Scaling up distributed learning with system relaxations", VLDB 2022. The two algorithms that are
communication hooks are here; :data:`ALGORITHMS` lists the files of the others.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from importlib import import_module
from typing import ClassVar, cast

from ltx import hooks
from ltx.errors import StrategyError
from ltx.extend import Strategy, arguments, around, brief
from ltx.strategies.horovod import Scaled
from ltx.strategies.nodes import ByNode, NodeStrategy

#: The module of each algorithm's strategy, which has fields of its own; it is imported when first used.
ALGORITHMS: dict[str, tuple[str, str]] = {
    "gradient_allreduce": ("ltx.strategies.bagua", "GradientAllReduce"),
    "bytegrad": ("ltx.strategies.bagua", "EightBitGradients"),
    "decentralized": ("ltx.strategies.decentralized", "Decentralized"),
    "low_precision_decentralized": ("ltx.strategies.decentralized", "LowPrecisionDecentralized"),
    "qadam": ("ltx.strategies.qadam", "QAdam"),
    "async": ("ltx.strategies.async_averaging", "AsyncAveraging"),
}


@around("inner", Strategy, but=())
@dataclass(frozen=True, kw_only=True)
class BaguaStrategy(Strategy):
    """One of Bagua's algorithms, by the name and with the options that the algorithm has in Bagua.

    Bagua is a library of training algorithms for slow networks: ranks send gradients in fewer bits, or average their
    parameters with one neighbour instead of all ranks. Where the network is fast, use :class:`ltx.DDPStrategy`.

    A field that is None takes the algorithm's default. A field that the algorithm doesn't have is refused.

    Args:
        algorithm: "gradient_allreduce", "bytegrad", "decentralized", "low_precision_decentralized", "qadam", "async".
        average: for gradient_allreduce and bytegrad: the mean of the ranks' gradients (default), or their sum.
        peer_selection_mode: for decentralized: "all" or "shift_one".
        communication_interval: for the decentralized algorithms: steps between communications.
        warmup_steps: for qadam and async: the number of first steps with mean gradients.
        betas, momentum_hook: for qadam; ``momentum_hook=hooks.OneBit()`` makes it 1-bit Adam.
        sync_interval_ms, schedule: for async: see its module.
        hierarchical: reduce within each node, apply the algorithm between nodes, and share the result within them.
            Off by default; in Bagua it is on for most algorithms.
        node_size: for `hierarchical`: the number of ranks of each node, which are next to one another.
        flatten: accepted for all algorithms, without effect: ltx's buckets are always contiguous.
        bucket_bytes, first_bucket_bytes, process_group_backend, timeout: as in :class:`ltx.Strategy`.

    Raises:
        StrategyError: (a ValueError) the algorithm isn't known or doesn't have a field, or a value isn't allowed.

    Example:
        >>> import ltx
        >>> ltx.BaguaStrategy("decentralized", peer_selection_mode="shift_one")
        BaguaStrategy('decentralized', peer_selection_mode='shift_one')

    Source: Lightning 1.7's ``BaguaStrategy``, Bagua's ``bagua.torch_api.algorithms``.
    """

    algorithm: str = field(kw_only=False)
    average: bool | None = None
    peer_selection_mode: str | None = None
    communication_interval: int | None = None
    warmup_steps: int | None = None
    betas: tuple[float, float] | None = None
    momentum_hook: str | hooks.CommHook | None = None
    sync_interval_ms: float | None = None
    schedule: tuple[int, int] | None = None
    hierarchical: bool | None = None
    node_size: int | None = None
    flatten: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.algorithm, str) or self.algorithm not in ALGORITHMS:
            raise StrategyError(f"BaguaStrategy.algorithm must be one of {[*ALGORITHMS]}, got {brief(self.algorithm)}.")
        arguments.check_fields(self, StrategyError, "flatten")
        _ = self.inner  # raises if another field is wrong

    def __repr__(self) -> str:
        return super().__repr__().replace("algorithm=", "", 1)

    @cached_property
    def inner(self) -> Strategy:
        """The strategy that implements the algorithm."""
        module, name = ALGORITHMS[self.algorithm]
        made = getattr(import_module(module), name)
        common = {f.name for f in fields(Strategy)}
        has = [f.name for f in fields(made) if f.name not in common]
        mine = [f.name for f in fields(self) if f.name not in (*common, "algorithm", "flatten")]
        given = {name: getattr(self, name) for name in mine if getattr(self, name) is not None}
        for other in given.keys() - has:
            raise StrategyError(f"BaguaStrategy({self.algorithm!r}) has no field {other!r}. It has: {', '.join(has)}.")
        for f in fields(made):
            if f.default is MISSING and f.name not in given:
                raise StrategyError(f"BaguaStrategy({self.algorithm!r}) needs {f.name}=.")
        return cast(Strategy, made(**{name: getattr(self, name) for name in common}, **given))


@dataclass(frozen=True, kw_only=True)
class GradientAllReduce(NodeStrategy):
    """Bagua's gradient_allreduce: the mean (`average`) or sum of the ranks' gradients at every step."""

    average: bool = True

    _mean: ClassVar[hooks.CommHook] = hooks.AllReduce()

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.check_fields(self, StrategyError, "average")

    def hook(self, step: int) -> hooks.CommHook:
        hook = self._mean if self.average else Scaled(self._mean, "sum")
        return hook if self.node_size is None else ByNode(self.node_size, hook)


@dataclass(frozen=True, kw_only=True)
class EightBitGradients(GradientAllReduce):
    """Bagua's bytegrad: gradients are sent in eight bits, without error feedback."""

    _mean: ClassVar[hooks.CommHook] = hooks.ByteGrad()
