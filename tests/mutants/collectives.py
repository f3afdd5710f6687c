"""Defects in collectives, axes and trees."""

from tests.mutants.mutant import At, Mutant

MUTANTS = (
    Mutant(
        "collectives: psum's transpose dropped -> gradients through psum are this rank's alone",
        At("add_rule psum", 'lambda shape, static: ("psum", ())', 'lambda shape, static: ("pvary", ())'),
        "tests/contract/conformance/test_conformance.py",
    ),
    Mutant(
        "collectives: pvary's transpose dropped -> the gradient of replicated parameters isn't summed",
        At("add_rule pvary", 'lambda shape, static: ("psum", ())', 'lambda shape, static: ("pvary", ())'),
        "tests/contract/conformance/test_conformance.py",
    ),
    Mutant(
        "collectives: broadcast's transpose on every rank -> "
        "ranks other than the source get its gradient too, between processes",
        At("add_rule psum_to", "result if rank == static[0] else torch.zeros_like(result)", "result"),
        "tests/contract/collectives/test_scatter.py::test_only_src_s_values_matter",
    ),
    Mutant(
        "collectives: simulated broadcast from rank 0 -> simulated ranks get rank 0's values whatever src is",
        At("add_rule broadcast", "(xs[static[0]].clone(), False)", "(xs[0].clone(), False)"),
        "ltx/core/collectives/psum.py",
    ),
    Mutant(
        "collectives: all_gather's mean gradient undivided -> "
        'grad_scale="mean" is the sum: n times Horovod\'s gradient',
        At("all_gather", "axis, grad_scale, lambda n: 1 / n", "axis, grad_scale, lambda n: 1.0"),
        "tests/contract/collectives/test_reduce.py",
    ),
    Mutant(
        "collectives: all_gather batched along the wrong dim -> under vmap the samples' dimension is gathered",
        At("_one_more_dim", "static[-2] + 1", "static[-2]"),
        "tests/contract/conformance/test_conformance.py",
    ),
    Mutant(
        "collectives: all_to_all's transpose is itself -> "
        "the gradient of an all_to_all along two dimensions has parts in wrong places",
        At("add_rule all_to_all", '("all_to_all", (static[1], static[0], static[2]))', '("all_to_all", static)'),
        ("tests/contract/collectives/test_scatter.py", "tests/contract/conformance/test_conformance.py"),
    ),
    Mutant(
        "collectives: ppermute's transpose goes on forwards -> gradients are sent on instead of back",
        At("add_rule ppermute", 'shape, static: ("ppermute", static[::-1])', 'shape, static: ("ppermute", static)'),
        "tests/contract/conformance/test_conformance.py",
    ),
    Mutant(
        "collectives: ranks that tie get the whole gradient -> pmax of equal values has n times its gradient",
        At("_by_weights", "found.append(w * total / whole if backward", "found.append(w * total if backward"),
        "tests/contract/conformance/test_conformance.py",
    ),
    Mutant(
        "collectives: a NaN on one rank isn't seen -> pmin drops NaN over sockets, and pmax those with a sign",
        At("_nans", "return int(1 / torch.finfo(dtype).eps) - 1", "return 0"),
        "tests/contract/collectives/test_reduce.py::test_nan_over_sockets",
    ),
    Mutant(
        "collectives: weighted_mean divides by n -> "
        "a mean over samples is divided by the number of ranks instead of the weights' sum",
        At("weighted_mean.whole", "> 0, torch.nan, whole", "> 0, torch.nan, torch.full_like(whole, axis_size(axis))"),
        "tests/contract/collectives/test_reduce.py",
    ),
    Mutant(
        "collectives: weight 0 doesn't silence NaN -> a rank with an empty batch turns the mean of all into NaN",
        At("weighted_mean", "torch.where((own == 0) & ~torch.isfinite(x), 0.0, x) * own", "x * own"),
        "tests/contract/collectives/test_reduce.py",
    ),
    Mutant(
        "collectives: shard gives the neighbour's part -> "
        "between processes each rank gets another one's samples than simulated",
        At("shard.part", "return parts[rank]", "return parts[(rank + 1) % size]"),
        "tests/contract/collectives/test_index.py",
    ),
    Mutant(
        "collectives: rank_seed without the rank -> all ranks draw the same numbers",
        At("rank_seed", "z = (seed + (found.ranks.rank + 1) * 0x9E3779B97F4A7C15)", "z = (seed + 0x9E3779B97F4A7C15)"),
        "tests/contract/collectives/test_index.py",
    ),
    Mutant(
        "collectives: uneven parts joined with their padding -> zeros between the ranks' parts",
        At("_joined", "part.narrow(at, 0, length) for part", "part for part"),
        "tests/contract/collectives/test_uneven.py",
    ),
    Mutant(
        "collectives: adasum with half of the correction -> equal gradients add up to more than their mean",
        At("Halving.weights", "dot / (2 * torch.where(zero, 1.0, square)", "dot / (4 * torch.where(zero, 1.0, square)"),
        "tests/contract/collectives/test_adasum.py",
    ),
    Mutant(
        "axis: simulated ranks all come first -> every simulated rank is rank 0",
        At("VmapRanks.index", "arange(size, device=self.device)", "zeros(size, dtype=torch.int64, device=self.device)"),
        "ltx/core/ranks/axis.py",
    ),
    Mutant(
        "axis: several axes, and None takes the innermost -> ranks of the other axes drift apart",
        At("_choice", "if len(names) > 1:", "if len(names) > 9:"),
        "tests/internal/collectives/test_joined_axes.py::test_what_none_means",
    ),
    Mutant(
        "collectives: groups put back in their own order -> simulated ranks get what belongs to ranks of other groups",
        At("VmapRanks.on_stack", "return by_group[part.order.to(xs.device)], True", "return by_group, True"),
        "tests/contract/collectives/test_groups.py::test_simulated_ranks",
    ),
    Mutant(
        "collectives: unequal groups have one size -> means of simulated groups are divided by the size of the largest",
        At("pmean", "n = _count(axis, axis_index_groups)", "n = axis_size(axis)"),
        "tests/contract/collectives/test_groups.py::test_simulated_ranks",
    ),
    Mutant(
        "collectives: inferred lengths are this rank's -> padding counts as data where lengths differ",
        At("_all_gather_inferred", "zip(*told_lengths, strict=True)", "[(x.shape[dim],) * found.size for x in leaves]"),
        "tests/contract/collectives/test_uneven.py::test_inferred_dtypes",
    ),
    Mutant(
        "collectives: gather keeps everything on every rank -> ranks that aren't dst get its result too",
        At("gather", "if job.rank == job.arguments[0]:", "if True:"),
        "tests/contract/conformance/test_dtypes.py",
    ),
    Mutant(
        "axis: names of an outer axis hide those of an inner one -> nested axes of one name reduce over the wrong one",
        At("find", "for candidate in reversed(scope):", "for candidate in scope:"),
        "tests/internal/collectives/test_joined_axes.py::test_of_nested_axes_of_one_name_the_innermost_is_meant",
    ),
    Mutant(
        "axis: draws are shared by simulated ranks -> all simulated ranks have one dropout mask",
        At("vmap.mapped", "randomness=randomness)", 'randomness="same")'),
        "tests/contract/ranks/test_simulated.py",
    ),
    Mutant(
        "containers: an order of keys is lost -> a mapping comes back with its keys sorted",
        At("_mapping_whole", "items = {key: values[key] for key in rest.order}", "items = dict(values)"),
        "tests/contract/base/test_tree.py",
    ),
    Mutant(
        "containers: tensors behind attributes aren't seen -> an object that holds tensors passes for a constant",
        At("_inside", 'yield from list(getattr(node, "__dict__", {}).values())', ""),
        "tests/contract/base/test_tree.py",
    ),
    Mutant(
        "tree: the order of arrival is that of the keys -> buckets are ready in another order than they are sent",
        At("insertion_order.walk", "for key in node.keys() for number", "for key in sorted_keys(node) for number"),
        ("tests/contract/base/test_tree.py", "ltx/core/base/tree.py"),
    ),
)
