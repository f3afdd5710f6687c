"""What is written by habit from DDP, Lightning, Horovod or JAX, and what to write here.

One table serves modules, values and calls: a name that one of them lacks means the same wherever it is looked for.
"""

_NAMES = """
hessian jacfwd jacrev jvp linearize vjp: torch.func.{name}; jit: torch.compile; stop_gradient: x.detach();
checkpoint_name remat: torch.utils.checkpoint.checkpoint(f, *args, use_reentrant=False); pcast: ltx.pvary(x);
lax: ltx.psum, ltx.pmean, ltx.all_gather, which are in ltx itself; pgather allgather: ltx.all_gather(x);
device_put: ltx.to_device(tree); tree_map tree_util: ltx.tree.map; reduce_scatter: ltx.psum_scatter(x);
value_and_grad: ltx.grad_and_value(step), which gives (gradients, value); process_index rank get_rank: ltx.world().rank;
all_reduce allreduce psum_invariant: ltx.psum(x) for the sum, ltx.pmean(x) for the mean;
pbroadcast broadcast_parameters: ltx.broadcast(x, src); pshuffle send recv: ltx.ppermute(x, [(source, destination)]);
pswapaxes: ltx.all_to_all(x, split_dim, concat_dim); strategy: ltx.train_step(ltx.data_parallel(step, strategy), ...);
pmap: ltx.vmap(f) on simulated ranks, and ltx.Pool(n).run(f) or ltx.launch on processes;
shard_map: ltx.data_parallel(step) under `with ltx.init():`, whose batch ltx.shard cuts;
PartitionSpec NamedSharding Mesh: ltx.init(mesh={{'node': 2, 'data': 4}}) for axes, ltx.shard(batch) for parts;
process_count world_size get_world_size: ltx.world().size, or ltx.axis_size() in a step;
init_process_group device_ids: `with ltx.init():` around the program; comm_hook: ltx.DDPStrategy(comm_hook=...);
DDP DistributedDataParallel DistributedOptimizer module: ltx.train_step(ltx.data_parallel(step), optimizer);
no_sync: ltx.accumulate(step, n), which sends once for n micro-batches, or ltx.block_backward_sync(step);
parameters named_parameters: state.params, of an ltx.TrainState; zero_grad: nothing, as each step has new gradients;
step apply_gradients: state, metrics = train(state, batch), with train = ltx.train_step(step, optimizer);
progress: tqdm.auto.tqdm(items, disable=ltx.world().rank > 0); show: display(x) in cells, print(x) elsewhere;
pargmax pargmin: ltx.all_gather(x).argmax(0) or .argmin(0);
item backward: metrics.loss.item() after a step, which returns its loss and is differentiated by ltx;
clip_grad_norm_: ltx.optim.clip_by_global_norm, in ltx.optim.chain; lr_scheduler: ltx.optim.from_scheduler;
ClipByGlobalNorm: ltx.optim.clipping.{name}; Halving: ltx.hooks.adasum.{name}; chain identity: ltx.optim.{name};
LeafPart LeafTransform members_of with_members: ltx.optim.combine.{name}; told wide: ltx.extend.collectives.{name};
CHUNK chunks is_plain pack prefers_few_calls unpack: ltx.extend.buffers.{name};
as_bytes view_as: ltx.extend.comm.{name}; advanced times_lr: ltx.extend.optimizers.{name}; noise: ltx.hooks.{name}
"""
#: {names: what to write}
WRITE = dict(entry.split(": ", 1) for entry in _NAMES.strip().replace("\n", " ").split("; "))
for _name in ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"):
    WRITE[f"{_name} {_name.lower()}"] = f"ltx.optim.from_torch(torch.optim.{_name}, lr=...)"


def hint(name: str) -> str:
    """What an error about the missing `name` adds: what to write, or ""."""
    return next((f" Write {text.format(name=name)}." for names, text in WRITE.items() if name in names.split()), "")


def lacks(owner: object, name: str) -> AttributeError:
    """The error for an attribute that `owner` hasn't got."""
    return AttributeError(f"{owner} has no attribute {name!r}{'.' if (said := hint(name)) else ''}{said}")
