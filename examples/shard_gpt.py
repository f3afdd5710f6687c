"""A small GPT whose parameters lie sharded: each rank holds 1/n of all that is trained, as with torch's fully_shard.

    ltx run -n 2 examples/shard_gpt.py

    w_i = all_gather(w_i,r)                  where layer i is called, and again where its backward pass needs it
    g_i,r = psum_scatter(dL/dw_i) / n        the transpose of that gather
    w_i,r, m_i,r = update(g_i,r, m_i,r)      on rank r alone

The strategy is a file to take along: it imports what ltx says is public. Model and data are those of train_gpt.py.
"""

import argparse
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from plain.train_gpt import GPT, batch, learning_rate
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy, pad

import ltx
from ltx.extend import CommHook, Packing, StateLayout, Updated, needs, tree, unwrapped
from ltx.optim.clipping import ClipByGlobalNorm
from ltx.optim.combine import members_of, with_members


@dataclass(frozen=True)
class Arrived(CommHook):
    """Gradients come as sums over all ranks. What is left is to divide them, as is done where they are packed."""

    alike = False  # each rank has its part
    sums = False

    def packing(self, dtype, axis_size):
        return Packing(dtype, 1 / axis_size, None)  # has no second derivatives

    def reduce(self, inputs):
        yield from ()
        return inputs.flat, inputs.states


@dataclass(frozen=True, kw_only=True)
class Sharded(ltx.Strategy):
    """Parameters, gradients and optimizer state of 1/n each; `layers`: the classes of modules that are gathered alone.

    What lies outside of them is gathered once a step. For optimizers that work element by element, and clipping.
    """

    layers: type | tuple[type, ...]

    layout = StateLayout(params="per_rank", opt_state="per_rank")

    def hook(self, step):
        return Arrived()

    def check(self, optimizer, axis=None):
        super().check(optimizer, axis)
        for member in members_of(optimizer):
            if not isinstance(member, ClipByGlobalNorm):
                needs.require("ZeRO, optimizer", member, "Sharded")

    def init_optimizer(self, optimizer, params, axis):
        return ()  # shard() makes it

    def update(self, update, states, info, pending):
        def of_all(member):
            if not isinstance(member, ClipByGlobalNorm):
                return member
            return replace(member, norm=lambda parts: ltx.psum(member.norm(parts).square(), info.axis).sqrt())

        optimizer = with_members(update.optimizer, [of_all(member) for member in members_of(update.optimizer)])
        params, opt_state = replace(update, optimizer=optimizer).apply()
        return Updated(params, opt_state, states, pending)

    def shard(self, train, state):
        """The state that ``train.init`` gives, sharded."""
        index, n = ltx.axis_index(), ltx.axis_size()
        params = tree.map(lambda x: part(x, index, n), state.params)
        return replace(state, params=params, opt_state=train.optimizer.init(params))

    def whole(self, model, shards):
        """All parameters on every rank."""
        shapes = shapes_of(model)
        return dict(zip(shards, gather([*shards.values()], [shapes[name] for name in shards]), strict=True))

    def call(self, model, shards, args):
        """``ltx.functional_call(model, parameters, args)``: each layer has its own while it runs."""
        shapes, rest = shapes_of(model), dict(shards)
        if any(x.ndim != 1 for x in shards.values()):
            raise ValueError("Sharded: the parameters are whole. Shard the state first: strategy.shard(train, state).")
        with ExitStack() as stack:
            for path, layer in model.named_modules():
                if isinstance(layer, self.layers):
                    names = [name for name in rest if name.startswith(f"{path}.")]
                    own = {name.removeprefix(f"{path}."): rest.pop(name) for name in names}
                    stack.enter_context(gathered(layer, own, [shapes[name] for name in names]))
            return ltx.functional_call(model, self.whole(model, rest), args)


def shapes_of(model):
    return {name: x.shape for name, x in model.named_parameters()}


def part(x, index, n):
    """One of the n parts of a parameter, which is filled up with zeros."""
    width = -(-x.numel() // n)
    rows = pad(x.reshape(-1), (0, n * width - x.numel())).view(n, width)
    return rows.index_select(0, index.reshape(1)).squeeze(0)


def gather(shards, shapes):
    """Whole parameters, by one message."""
    blocks = ltx.all_gather(torch.cat(shards)).split([x.numel() for x in shards], 1)
    return [block.reshape(-1)[: shape.numel()].view(shape) for block, shape in zip(blocks, shapes, strict=True)]


@contextmanager
def gathered(layer, shards, shapes):
    """In the block, `layer` gathers its parameters when it is called, and gives them back when it returns."""

    def forward(*args, **kwargs):
        parts = [*shards.values()]
        tensors, hooks = gather(parts, shapes), nullcontext()
        if unwrapped(parts[0]) is parts[0]:  # torch.func, and so a simulated rank, keeps what it needs
            again = Again(tensors, parts, shapes)
            hooks = saved_tensors_hooks(again.pack, again.unpack)
        del layer.forward
        try:
            with hooks:
                return ltx.functional_call(layer, dict(zip(shards, tensors, strict=True)), args, kwargs)
        finally:
            layer.forward = forward

    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward


class Again:
    """In place of gathered parameters autograd keeps which they are; its backward pass has them gathered again."""

    def __init__(self, tensors, parts, shapes):
        self.places = {x.untyped_storage().data_ptr(): place for place, x in enumerate(tensors)}
        self.gather = partial(gather, parts, shapes)
        self.kept, self.left, self.tensors = 0, 0, None

    def pack(self, x):
        place = self.places.get(x.untyped_storage().data_ptr())
        if place is None:
            return x
        self.kept += 1
        return place, x.shape, x.stride(), x.storage_offset()

    def unpack(self, kept):
        if isinstance(kept, torch.Tensor):
            return kept
        if self.tensors is None:
            with torch.no_grad():
                self.tensors, self.left = self.gather(), self.kept
        place, *view = kept
        found = self.tensors[place].as_strided(*view)
        self.left -= 1
        if self.left == 0:  # the layer's backward pass has all that it needs
            self.tensors = None
        return found


def main(steps=300):
    torch.manual_seed(0)
    model = GPT()
    strategy = Sharded(layers=torch.nn.TransformerEncoderLayer)

    @partial(ltx.data_parallel, strategy=strategy)
    def step_fn(params, x, y):
        return cross_entropy(strategy.call(model, params, (x,)).flatten(0, 1), y.flatten())

    rate = partial(learning_rate, total=steps)
    adamw = ltx.optim.from_torch(torch.optim.AdamW, lr=rate, weight_decay=0.1)
    train = ltx.train_step(step_fn, ltx.optim.chain(ltx.optim.clip_by_global_norm(1.0), adamw))
    losses = []
    with ltx.init() as world:
        state = strategy.shard(train, train.init(model.to(world.device)))  # the model's tensors are the state's
        for step in range(steps):
            state, metrics = train(state, *ltx.to_device(ltx.shard(batch(step))))
            losses.append(metrics.loss.item())
            if world.is_global_zero and (step % 20 == 0 or step == steps - 1):
                print(f"step {step}: loss {losses[-1]:.4f}")
        params = strategy.whole(model, state.params)
        if world.is_global_zero:
            held, all_of_them = (sum(x.numel() for x in each.values()) for each in (state.params, params))
            print(f"rank 0 holds {held} of {all_of_them} parameters")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    main(parser.parse_args().steps)
