"""The interface for writing hooks, strategies, optimizers and layers. ltx's own use nothing else of ltx.core.

Base classes to derive from. Their instances compare, hash, pickle and print by their fields.

* :class:`CommHook <ltx.hooks.CommHook>`: how a bucket of gradients is reduced; you only have to define
  ``reduce(inputs)``.
* :class:`PostUpdateHook`: how parameters are communicated that the optimizer has updated, bucket by bucket.
* :class:`Strategy <ltx.Strategy>`: what ranks communicate, and when; you only have to define ``hook(step)``.
* :class:`Optimizer <ltx.optim.Optimizer>`: two pure functions, ``init(params)`` and ``update(grads, state, params)``.
* :class:`HookOffers`, :class:`StrategyOffers`, :class:`OptimizerOffers`: what a hook, a strategy or an optimizer can
  do, its ``offers``.

What a hook gets and returns.

* :class:`BucketInput <ltx.hooks.BucketInput>`: a bucket's gradients, their parameters' states, and the ranks.
* :class:`Bucket`: the shapes and sizes of the tensors in a flat buffer. ``Bucket.of(index, tensors)`` makes one.
* :class:`CollectiveRequest <ltx.hooks.CollectiveRequest>`: a collective that ``reduce`` yields, to get its result back.
* :class:`StartedWork`: communication that ``reduce`` has started itself, by another engine, and yields to wait for it.
* :data:`Reduction`: the type of ``reduce``: a generator that returns :data:`Reduced`, the buffer and the next states.
* :data:`LeafState`: the tensors that a hook keeps of one parameter, by name.
* :class:`Packing`: what ``packing`` returns: dtype and scale of what is packed, and what the result is of it.
* :class:`AllReduce <ltx.hooks.AllReduce>`: the hook of the exact mean.
* :func:`around`: the decorator of a hook or strategy that wraps another: it takes what it doesn't define from the
  wrapped one.
* :func:`drive_within`: runs another hook's ``reduce`` inside your own, and answers its requests.
* :func:`states_of`: the part of a parameter's state that a hook reads.

What a strategy gets and returns.

* :class:`Axis <ltx.Axis>`: the ranks; ``axis.size``, ``axis.rank``. :func:`inner` gives the axis of this rank's node,
  :func:`outer` that of the ranks with the same place in their nodes.
* :class:`StepInfo`: the number of steps before this one, and the axis.
* :class:`StateLayout`: which parts of a train state are the same on every rank.
* :data:`States`: the communication state, a :data:`LeafState` by the path of each parameter.
* :class:`Update`: the optimizer's part of a step; ``update.apply()`` runs it.
* :class:`Updated`: everything that a step changes: parameters and states.
* :class:`Exchange`: a communication that :func:`exchange` has started; ``wait()`` returns its results.
* :func:`negotiate`: lets ranks check in advance that they will start the same exchange.
* :func:`communicate_after_update`: the end of a step that a :class:`PostUpdateHook` does for all buckets together.
* :class:`Old`, :class:`PostUpdateResult`: the old state that ``PostUpdateHook.finish_bucket`` gets, and what it
  returns.

Tensors and messages.

* :func:`recording`: whether a tracer is recording the code that runs now; then no values may be read.
* :func:`unwrapped`: a tensor without the wrappers of torch.func's levels.
* :func:`brief`: the ``repr`` of a user's value for an error, shortened; it never raises.

Modules. The names listed here are stable.

* :mod:`tree`: ``flatten``, ``unflatten``, ``map``, ``leaf_paths``, ``describe``, ``register_node``, ``check_dense``,
  ``check_open``, ``check_tensors``, ``filled``, ``wanted``: trees of tensors, with dicts' keys sorted on every rank.
* :mod:`buffers`: ``pack``, ``unpack`` for a bucket's gradients as one flat buffer, and views of it in their shapes;
  ``is_plain`` (eager, on the CPU: pieces of it can be changed in place), ``prefers_few_calls`` (eager, on an
  accelerator); ``chunks``, slices that stay in the cache, and ``CHUNK``, the elements of one.
* :mod:`arguments`: ``shown``, ``name_of``, ``lacks`` for messages; ``checked``, ``check_fields``, ``check_whole``,
  ``check_number``, ``whole``, ``number``, ``is_whole``, ``is_number`` for what users give.
* :mod:`needs`: ``TABLE`` has the requirements for combinations; ``require`` raises by a row of it.
* :mod:`noise`: ``key_of``, ``uniform``, ``normal``: random numbers that are a function of seed, step, place and rank.
* :mod:`optimizers`: ``LeafTransform``, ``LeafPart``, ``apply_leaves``, ``leaves_like`` for updates leaf by leaf;
  ``TorchOptimizer``, ``identity``, ``unless``, ``donated``, ``apply_updates``; ``TorchState``, ``Hyperparameter`` and
  ``Kept``, ``check_state``, ``at_nodes`` for states; ``at_trace_time``; ``members_of``, ``with_members``
  for chains; ``times_lr``, an optimizer with a multiple of its rate; ``advanced``, a state with another count of steps;
  ``ClipByGlobalNorm``, of which a strategy replaces ``norm`` if ranks have parts of the gradients.
* :mod:`collectives`: ``Rule``, which defines a collective: what is sent, the result, and the derivative; ``collective``
  applies it to a tree of tensors, on processes, on simulated ranks and in graphs; ``counted`` decorates a function
  that calls it: peers learn of its errors. ``wide``: the dtype in which numbers are summed, float32 at least. ``told``
  gives every rank's host a few integers of every rank; ``Halving`` is a rank's part of :func:`ltx.adasum`.
* :mod:`comm`: the communication of an axis of processes, for code that issues collectives like ``to_torch``:
  ``resolve``, ``AxisComm``, ``Signature``, ``to_device``; ``as_bytes``, ``view_as``, a tensor's bits as another
  dtype's, under vmap too; ``HOST_BLOCKING``, the names of backends whose waits block the host: add yours if it is one.
* :class:`Pending`: buckets that are reduced at the same time, with their phases in order.
"""

from typing import Any

from ltx.core import collectives, comm
from ltx.core import optim as optimizers
from ltx.core.base import arguments, needs, noise, tree
from ltx.core.base.arguments import brief
from ltx.core.base.private import unwrapped
from ltx.core.base.traced import recording
from ltx.core.gradients import buffers
from ltx.core.gradients.comm_hook import AllReduce, CommHook, HookOffers, around, states_of
from ltx.core.gradients.exchange import Exchange
from ltx.core.gradients.pending import Pending
from ltx.core.gradients.reduction import (
    Bucket,
    BucketInput,
    CollectiveRequest,
    LeafState,
    Packing,
    Reduced,
    Reduction,
    StartedWork,
    drive_within,
)
from ltx.core.optim.base import Optimizer, OptimizerOffers, Update
from ltx.core.ranks.axis import Axis, inner, outer
from ltx.core.transforms.strategy import (
    Old,
    PostUpdateHook,
    PostUpdateResult,
    StateLayout,
    States,
    StepInfo,
    Strategy,
    StrategyOffers,
    Updated,
    communicate_after_update,
    exchange,
    negotiate,
)

__all__ = [
    "AllReduce",
    "Axis",
    "Bucket",
    "BucketInput",
    "CollectiveRequest",
    "CommHook",
    "Exchange",
    "HookOffers",
    "LeafState",
    "Old",
    "Optimizer",
    "OptimizerOffers",
    "Packing",
    "Pending",
    "PostUpdateHook",
    "PostUpdateResult",
    "Reduced",
    "Reduction",
    "StartedWork",
    "StateLayout",
    "States",
    "StepInfo",
    "Strategy",
    "StrategyOffers",
    "Update",
    "Updated",
    "arguments",
    "around",
    "brief",
    "buffers",
    "collectives",
    "comm",
    "communicate_after_update",
    "drive_within",
    "exchange",
    "inner",
    "needs",
    "negotiate",
    "noise",
    "optimizers",
    "outer",
    "recording",
    "states_of",
    "tree",
    "unwrapped",
]


#: Names of before, by the module that has them now.
_MOVED = {
    "buffers": "CHUNK chunks is_plain pack prefers_few_calls unpack",
    "collectives": "Halving told wide",
    "comm": "as_bytes view_as",
    "optimizers": "ClipByGlobalNorm advanced members_of times_lr with_members",
}


def __getattr__(name: str) -> Any:
    for module, names in _MOVED.items():
        if name in names.split():  # of an AttributeError, `from ltx.extend import name` shows nothing
            raise ImportError(f"ltx.extend.{name} is ltx.extend.{module}.{name} now.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
