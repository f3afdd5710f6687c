"""The interface for writing hooks, strategies, optimizers and layers. ltx's own use nothing else of ltx.core.

Base classes to derive from. Their instances compare, hash, pickle and print by their fields.

* :class:`CommHook <ltx.hooks.CommHook>`: how a bucket of gradients is reduced; you only have to define
  ``reduce(inputs)``.
* :class:`PostUpdateHook`: how parameters are communicated that the optimizer has updated, bucket by bucket.
* :class:`Strategy <ltx.Strategy>`: what ranks communicate, and when; you only have to define ``hook(step)``.
* :class:`Optimizer <ltx.optim.Optimizer>`: two pure functions, ``init(params)`` and ``update(grads, state, params)``.
* :class:`HookOffers`, :class:`StrategyOffers`, :class:`OptimizerOffers`: what a hook, a strategy or an optimizer can
  do, its ``offers``.
* :class:`BucketSettings`: the fields that every strategy has.

What a hook gets and returns.

* :class:`BucketInput <ltx.hooks.BucketInput>`: a bucket's gradients, their parameters' states, and the ranks.
* :class:`Bucket`: the shapes and sizes of the tensors in a flat buffer. ``Bucket.of(index, tensors)`` makes one.
* :class:`CollectiveRequest <ltx.hooks.CollectiveRequest>`: a collective that ``reduce`` yields, to get its result back.
* :class:`StartedWork`: communication that ``reduce`` has started itself, by another engine, and yields to wait for it.
* :data:`Reduction`: the type of ``reduce``: a generator that returns :data:`Reduced`, the buffer and the next states.
* :data:`LeafState`: the tensors that a hook keeps of one parameter, by name.
* :data:`Terms`: tensors that are added to a gradient as it is packed, each with its factor.
* :class:`AllReduce <ltx.hooks.AllReduce>`: the hook of the exact mean.
* :func:`around`: the decorator of a hook or strategy that wraps another: it takes what it doesn't define from the
  wrapped one.
* :func:`drive_within`: runs another hook's ``reduce`` inside your own, and answers its requests.
* :func:`states_of`: the part of a parameter's state that a hook reads.
* :func:`unchanging`: the hook that a compiled graph can hold; raises where the hook changes with the step.

What a strategy gets and returns.

* :class:`Axis <ltx.Axis>`: the ranks; ``axis.size``, ``axis.rank``. :func:`inner` gives the axis of this rank's node,
  :func:`outer` that of the ranks with the same place in their nodes.
* :class:`StepInfo`: the number of steps before this one, and the axis.
* :class:`StateLayout`: which parts of a train state are the same on every rank.
* :data:`States`: the communication state, a :data:`LeafState` by the path of each parameter.
* :class:`Update`: the optimizer's part of a step; ``update.apply()`` runs it.
* :class:`Updated`: everything that a step changes: parameters and states.
* :class:`Exchange`: a communication that ``Strategy.exchange`` has started; ``wait()`` returns its results.
* :func:`negotiate`: lets ranks check in advance that they will start the same exchange.
* :func:`communicate_after_update`: the end of a step that a :class:`PostUpdateHook` does for all buckets together.
* :class:`Old`, :class:`PostUpdateResult`: the old state that ``PostUpdateHook.finish_bucket`` gets, and what it
  returns.
* :func:`members_of`, :func:`with_members`: the members of a chain of optimizers; the chain with other members.
* :func:`times_lr`: an optimizer with a multiple of its learning rate.
* :func:`advanced`, :func:`sees_loss`: an optimizer's state with another count of steps; whether a state takes the loss.
* :class:`ClipByGlobalNorm`: clips by a norm; a strategy replaces ``norm`` if ranks have parts of the gradients.

New collectives.

* :class:`Rule`: defines a collective: what is sent, the result, and the derivative.
* :func:`collective`: applies a rule to a tree of tensors, on processes, on simulated ranks and in graphs.
* :func:`one_message`: decorates a function that calls it once: peers learn of its errors, ``async_`` accepts it.
* :data:`HOST_BLOCKING`: the names of backends whose waits block the host, as gloo's do. Add yours if it is one.

Buffers and messages.

* :func:`pack`, :func:`unpack`: a bucket's gradients as one flat buffer; views of the buffer in their shapes.
* :func:`is_plain`: whether a tensor is eager and on the CPU, so that pieces of it can be changed in place.
* :func:`chunks`, :data:`CHUNK`: slices that stay in the cache, and the largest number of elements of one.
* :func:`prefers_few_calls`: whether a tensor is eager and on an accelerator.
* :func:`wide`: the dtype in which numbers of a given dtype are summed, float32 at least.
* :func:`as_bytes`, :func:`view_as`: a tensor's bits as another dtype's, under vmap too.
* :func:`recording`: whether a tracer is recording the code that runs now; then no values may be read.
* :func:`unwrapped`: a tensor without the wrappers of torch.func's levels.
* :func:`brief`: the ``repr`` of a user's value for an error, shortened; it never raises.

Modules. The names listed here are stable.

* :mod:`tree`: ``flatten``, ``unflatten``, ``map``, ``leaf_paths``, ``describe``, ``register_node``, ``check_dense``,
  ``check_open``, ``check_tensors``, ``filled``, ``wanted``: trees of tensors, with dicts' keys sorted on every rank.
* :mod:`arguments`: ``shown``, ``name_of``, ``lacks`` for messages; ``checked``, ``check_fields``, ``check_whole``,
  ``check_number``, ``whole``, ``number``, ``is_whole``, ``is_number`` for what users give.
* :mod:`needs`: ``TABLE`` has the requirements for combinations; ``require`` raises by a row of it.
* :mod:`noise`: ``key_of``, ``uniform``, ``normal``: random numbers that are a function of seed, step, place and rank.
* :mod:`optimizers`: ``LeafTransform``, ``LeafPart``, ``apply_leaves``, ``leaves_like`` for updates leaf by leaf;
  ``TorchOptimizer``, ``identity``, ``unless``, ``donated``, ``apply_updates``; ``TorchState``, ``LossState``,
  ``Hyperparameter`` and ``Kept``, ``check_state``, ``all_of``, ``at_nodes`` for states; ``at_trace_time``.
* :mod:`comm`: the communication of an axis of processes, for code that issues collectives like ``to_torch``:
  ``resolve``, ``AxisComm``, ``Signature``, ``to_device``.
* :class:`Pending`: buckets that are reduced at the same time, with their phases in order.
* :class:`Halving`: a rank's part of the adaptive sum, between the collectives of :func:`ltx.adasum`.
* :func:`told`: gives every rank's host a few integers of every rank.
"""

from ltx.core import comm
from ltx.core import optim as optimizers
from ltx.core.base import arguments, needs, noise, tree
from ltx.core.base.arguments import brief
from ltx.core.base.private import unwrapped
from ltx.core.base.traced import recording
from ltx.core.collectives.adasum import Halving
from ltx.core.collectives.calls import collective
from ltx.core.collectives.futures import one_message
from ltx.core.collectives.reduce import wide
from ltx.core.collectives.uneven import told
from ltx.core.comm.backends import HOST_BLOCKING
from ltx.core.comm.operations import as_bytes, view_as
from ltx.core.gradients.comm_hook import (
    CHUNK,
    AllReduce,
    CommHook,
    HookOffers,
    around,
    chunks,
    is_plain,
    pack,
    prefers_few_calls,
    states_of,
    unchanging,
    unpack,
)
from ltx.core.gradients.exchange import Exchange
from ltx.core.gradients.pending import Pending
from ltx.core.gradients.planning import BucketSettings
from ltx.core.gradients.reduction import (
    Bucket,
    BucketInput,
    CollectiveRequest,
    LeafState,
    Reduced,
    Reduction,
    StartedWork,
    Terms,
    drive_within,
)
from ltx.core.optim.base import Optimizer, OptimizerOffers, Update, advanced, sees_loss, times_lr
from ltx.core.optim.combine import members_of, with_members
from ltx.core.optim.grad_transforms import ClipByGlobalNorm
from ltx.core.ranks.axis import Axis, inner, outer
from ltx.core.ranks.backings import Rule
from ltx.core.transforms.strategy import Strategy, StrategyOffers, negotiate
from ltx.core.transforms.strategy_update import (
    Old,
    PostUpdateHook,
    PostUpdateResult,
    StateLayout,
    States,
    StepInfo,
    Updated,
    communicate_after_update,
)

__all__ = [
    "CHUNK",
    "HOST_BLOCKING",
    "AllReduce",
    "Axis",
    "Bucket",
    "BucketInput",
    "BucketSettings",
    "ClipByGlobalNorm",
    "CollectiveRequest",
    "CommHook",
    "Exchange",
    "Halving",
    "HookOffers",
    "LeafState",
    "Old",
    "Optimizer",
    "OptimizerOffers",
    "Pending",
    "PostUpdateHook",
    "PostUpdateResult",
    "Reduced",
    "Reduction",
    "Rule",
    "StartedWork",
    "StateLayout",
    "States",
    "StepInfo",
    "Strategy",
    "StrategyOffers",
    "Terms",
    "Update",
    "Updated",
    "advanced",
    "arguments",
    "around",
    "as_bytes",
    "brief",
    "chunks",
    "collective",
    "comm",
    "communicate_after_update",
    "drive_within",
    "inner",
    "is_plain",
    "members_of",
    "needs",
    "negotiate",
    "noise",
    "one_message",
    "optimizers",
    "outer",
    "pack",
    "prefers_few_calls",
    "recording",
    "sees_loss",
    "states_of",
    "times_lr",
    "told",
    "tree",
    "unchanging",
    "unpack",
    "unwrapped",
    "view_as",
    "wide",
    "with_members",
]


def __dir__() -> list[str]:
    return sorted(__all__)
