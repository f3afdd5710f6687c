"""What hooks, strategies, optimizers and layers are written with; ltx's own use nothing else of the kernel.

Contracts, to derive from. A value of one compares, hashes, pickles and prints by its fields.

* :class:`CommHook <ltx.hooks.CommHook>`: what is done to a bucket of gradients; ``reduce(inputs)`` is all it needs.
* :class:`PostUpdateHook`: the same of parameters that the optimizer has updated, bucket by bucket.
* :class:`Strategy <ltx.Strategy>`: what ranks agree on, and when; ``hook(step)`` is all that it needs.
* :class:`Optimizer <ltx.optim.Optimizer>`: two pure functions, ``init(params)`` and ``update(grads, state, params)``.
* :class:`HookOffers`, :class:`StrategyOffers`, :class:`OptimizerOffers`: what each says of itself, its ``offers``.
* :class:`BucketSettings`: the fields that every strategy has.

What a hook gets, and what it gives.

* :class:`BucketInput <ltx.hooks.BucketInput>`: a bucket's gradients, their parameters' states, and the ranks.
* :class:`Bucket`: the shapes and sizes of what lies in a flat buffer. ``Bucket.of(index, tensors)`` makes one.
* :class:`CollectiveRequest <ltx.hooks.CollectiveRequest>`: a collective that ``reduce`` yields; it is sent the result.
* :data:`Reduction`: the generator that ``reduce`` is; it returns :data:`Reduced`, the buffer and the next states.
* :data:`LeafState`: the tensors that a hook keeps of one parameter, by name.
* :data:`Terms`: tensors that are added to a gradient as it is packed, each with its factor.
* :class:`AllReduce <ltx.hooks.AllReduce>`: the hook of the exact mean.
* :func:`around`: the decorator of a hook or strategy that wraps another: what it doesn't define is the other's.
* :func:`drive_within`: runs another hook's ``reduce`` inside of one's own, and answers what that asks for.
* :func:`states_of`: what a hook reads of the tensors that are kept of one parameter.
* :func:`unchanging`: the hook that a compiled graph can hold; raises where the hook changes with the step.

What a strategy gets, and what it gives.

* :class:`Axis <ltx.Axis>`: the ranks; ``axis.size``, ``axis.rank``. :func:`inner` and :func:`outer` are the ranks
  of this rank's node, and those with this rank's place in the other nodes.
* :class:`StepInfo`: the number of steps before this one, and the axis.
* :class:`StateLayout`: which parts of a train state are the same on every rank.
* :data:`States`: the communication state, a :data:`LeafState` by the path of each parameter.
* :class:`Update`: the optimizer's part of a step before it is done; ``update.apply()`` does it.
* :class:`Updated`: all that a step changes.
* :class:`Exchange`: what ``Strategy.exchange`` has started; ``wait()`` gives its results.
* :func:`negotiate`: compares an exchange to come with those of the peers, and sends nothing.
* :func:`communicate_after_update`: the end of a step that a :class:`PostUpdateHook` does for all buckets together.
* :class:`Old`, :class:`PostUpdateResult`: what ``PostUpdateHook.finish_bucket`` gets of the old state, and returns.
* :func:`members_of`, :func:`with_members`: what a chain of optimizers is made of; the chain made of others.
* :func:`times_lr`: an optimizer with a multiple of its learning rate.
* :func:`advanced`, :func:`sees_loss`: an optimizer's state at another count; whether it asks for the loss.
* :class:`ClipByGlobalNorm`: the clipping whose ``norm`` a strategy replaces where ranks have parts of gradients.
* :class:`QAdamOptimizer`: the class of :func:`ltx.optim.qadam`'s optimizers, a part of Bagua's qadam.

A collective, linear or not.

* :class:`Rule`: what it sends, what it makes of the answer, and its derivative: a transpose, or weights.
* :func:`collective`: what a rule describes, of a tree of tensors, on processes, simulated ranks and in graphs.
* :func:`one_message`: the decorator of a function that calls it once: peers learn of its errors, ``async_`` takes it.
* :data:`HOST_BLOCKING`: the names of backends whose waits block the host, as gloo's do. Add yours if it is one.

Buffers and messages.

* :func:`pack`, :func:`unpack`: a bucket's gradients as one flat buffer; its parts in their parameters' shapes, views.
* :func:`is_plain`: whether a tensor is eager and on the CPU, where it may be worked on piece by piece, in place.
* :func:`chunks`, :data:`CHUNK`: slices that stay in the cache, and the largest number of elements of one.
* :func:`prefers_few_calls`: whether a tensor is eager and on an accelerator.
* :func:`wide`: the dtype in which numbers of another are added up, float32 at least.
* :func:`as_bytes`, :func:`view_as`: a tensor's bits as another dtype's, under vmap too.
* :func:`recording`: whether what is called now is recorded to run later; then no value may be read.
* :func:`unwrapped`: a tensor without the wrappers of torch.func's levels.
* :func:`brief`: the ``repr`` of what a user gave, cut where it is long; it never raises.

Modules, of which what is named here is stable.

* :mod:`tree`: ``flatten``, ``unflatten``, ``map``, ``leaf_paths``, ``describe``, ``register_node``, ``check_dense``,
  ``check_open``, ``wanted``: trees of tensors, with dicts' keys sorted on every rank.
* :mod:`arguments`: ``shown``, ``name_of`` for messages; ``checked``, ``check_fields``, ``check_whole``,
  ``check_number``, ``whole``, ``number``, ``is_whole``, ``is_number`` for what users give.
* :mod:`needs`: ``TABLE``, what needs something of a hook, strategy or optimizer; ``require`` raises by a row of it.
* :mod:`noise`: ``key_of``, ``uniform``, ``normal``: random numbers that are a function of seed, step, place and rank.
* :mod:`comm`: what stands behind an axis of processes, for what drives collectives itself as ``to_torch`` does:
  ``resolve``, ``AxisComm``, ``Signature``, ``Network``, ``to_device``.
* :class:`Pending`: buckets that are reduced at once, each phase of theirs in order.
* :class:`Halving`: a rank's part of the adaptive sum, between the collectives of :func:`ltx.adasum`.
* :func:`told`: a few whole numbers of every rank, on every rank's host.
"""

from ltx.core import comm
from ltx.core.base import arguments, needs, noise, tree
from ltx.core.base.arguments import brief
from ltx.core.base.traced import recording
from ltx.core.collectives.adasum import Halving
from ltx.core.collectives.calls import collective
from ltx.core.collectives.futures import one_message
from ltx.core.collectives.reduce import wide
from ltx.core.collectives.uneven import told
from ltx.core.comm.backends import HOST_BLOCKING
from ltx.core.comm.operations import as_bytes, view_as
from ltx.core.gradients.comm_hook import AllReduce, CommHook, HookOffers, around, states_of, unchanging
from ltx.core.gradients.packing import CHUNK, chunks, is_plain, pack, prefers_few_calls, unpack
from ltx.core.gradients.pending import Exchange, Pending
from ltx.core.gradients.planning import BucketSettings
from ltx.core.gradients.reduction import (
    Bucket,
    BucketInput,
    CollectiveRequest,
    LeafState,
    Reduced,
    Reduction,
    Terms,
    drive_within,
)
from ltx.core.optim.base import Optimizer, OptimizerOffers, Update, advanced, sees_loss, times_lr
from ltx.core.optim.combine import members_of, with_members
from ltx.core.optim.grad_transforms import ClipByGlobalNorm
from ltx.core.optim.quantized_adam import QAdamOptimizer
from ltx.core.ranks.axis import Axis, inner, outer
from ltx.core.ranks.backings import Rule
from ltx.core.ranks.batched import unwrapped
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
    "QAdamOptimizer",
    "Reduced",
    "Reduction",
    "Rule",
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
