"""Defects on backends that order streams, which show on GPUs alone, or on the tests' fake of one."""

from tests.mutants.mutant import At, Mutant

_STEPS = "tests/streams/test_steps.py"

MUTANTS = (
    Mutant(
        "streams: buckets don't wait for collectives in the graph -> "
        "NCCL hangs where a sum in the loss meets a bucket in another order on each rank",
        At("ProcessSchedule.begin", "_held = self._shared and _issued_in_graphs() != self._in_graphs", "_held = False"),
        f"{_STEPS}::test_buckets_wait_for_collectives_in_the_graph",
    ),
    Mutant(
        "streams: the host waits for each step summary -> the host drains the device in every step",
        At("end_pass", "return summary.enqueued()", "return summary.wait()"),
        f"{_STEPS}::test_a_default_step_reads_nothing",
    ),
    Mutant(
        "streams: nobody reads the last step summary -> "
        "ranks that have issued different things never hear of it, and the host runs ahead without limit",
        At("read_last_summary", "if among.unread is None:\n    return", "return"),
        (f"{_STEPS}::test_ranks_that_differ_are_found_a_step_later", f"{_STEPS}::test_a_default_step_reads_nothing"),
    ),
    Mutant(
        "streams: weights that add up to nothing are applied -> "
        "weight decay and momentum go on in a step that says it has changed nothing",
        At("scale_of", "(empty, 0.0) / work.loss_scale, empty", "(empty, 0.0) / work.loss_scale, None"),
        f"{_STEPS}::test_weights_that_add_up_to_nothing",
    ),
    Mutant(
        "streams: a guarded update isn't conditional -> "
        "donated parameters become NaN though the step says that it was skipped",
        At("Update.apply", "if donate and isinstance(self.finite, Tensor):", "if donate and self.finite is None:"),
        f"{_STEPS}::test_weights_and_a_guard",
    ),
    Mutant(
        "streams: a state that the device couldn't complete stays usable -> "
        "training goes on from parameters that a lost peer has left as garbage",
        At("incomplete", "state.invalidate", "str"),
        "tests/streams/test_failures.py::test_a_rank_that_raises_in_its_backward_pass",
    ),
    Mutant(
        "streams: a world that is bound to a device is split -> "
        "with NCCL the ranks of a process set wait for those that aren't in it",
        At("open_group", "bound, world.bound_device_id = world.bound_device_id, None", "bound = world.bound_device_id"),
        "tests/streams/test_backends.py::test_a_bound_world_isn_t_split",
    ),
    Mutant(
        "streams: lists of tensors get the states of others -> on GPUs PowerSGD mixes up parameters of one shape",
        At("multiply_all", "zip(places, products, strict=True)", "zip(reversed(places), products, strict=True)"),
        "tests/internal/hooks/test_plain.py::test_many_matrices_at_once",
    ),
)
