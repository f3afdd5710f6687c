"""Defects on backends that order streams, which show on GPUs alone, or on the tests' fake of one."""

from tests.mutants.mutant import Mutant

_STEPS = "tests/streams/test_steps.py"

MUTANTS = (
    Mutant(
        name="streams: buckets don't wait for collectives in the graph",
        where="ProcessSchedule.begin",
        old="self._held = self._shared and _issued_in_graphs() != self._in_graphs",
        new="self._held = False",
        breaks="NCCL hangs where a sum in the loss meets a bucket in another order on each rank",
        tests=(f"{_STEPS}::test_buckets_wait_for_collectives_in_the_graph",),
    ),
    Mutant(
        name="streams: the host waits for each step summary",
        where="end_pass",
        old="return summary.enqueued()",
        new="return summary.wait()",
        breaks="the host drains the device in every step",
        tests=(f"{_STEPS}::test_a_default_step_reads_nothing",),
    ),
    Mutant(
        name="streams: nobody reads the last step summary",
        where="read_last_summary",
        old="if among.unread is None:\n    return",
        new="return",
        breaks="ranks that have issued different things never hear of it, and the host runs ahead without limit",
        tests=(
            f"{_STEPS}::test_ranks_that_differ_are_found_a_step_later",
            f"{_STEPS}::test_a_default_step_reads_nothing",
        ),
    ),
    Mutant(
        name="streams: weights that add up to nothing are applied",
        where="scale_of",
        old=".masked_fill(empty, 0.0) / work.loss_scale, empty",
        new=".masked_fill(empty, 0.0) / work.loss_scale, None",
        breaks="weight decay and momentum go on in a step that says it has changed nothing",
        tests=(f"{_STEPS}::test_weights_that_add_up_to_nothing",),
    ),
    Mutant(
        name="streams: a guarded update isn't conditional",
        where="Update.apply",
        old="if donate and isinstance(self.finite, Tensor):",
        new="if donate and self.finite is None:",
        breaks="donated parameters become NaN though the step says that it was skipped",
        tests=(f"{_STEPS}::test_a_guarded_step_reads_nothing", f"{_STEPS}::test_weights_and_a_guard"),
    ),
    Mutant(
        name="streams: a state that the device couldn't complete stays usable",
        where="incomplete",
        old="state.invalidate",
        new="str",
        breaks="training goes on from parameters that a lost peer has left as garbage",
        tests=("tests/streams/test_failures.py::test_a_rank_that_raises_in_its_backward_pass",),
    ),
    Mutant(
        name="streams: a world that is bound to a device is split",
        where="open_group",
        old="bound, world.bound_device_id = world.bound_device_id, None",
        new="bound = world.bound_device_id",
        breaks="with NCCL the ranks of a process set wait for those that aren't in it",
        tests=("tests/streams/test_backends.py::test_a_bound_world_isn_t_split",),
    ),
    Mutant(
        name="streams: lists of tensors get the states of others",
        where="multiply_all",
        old="zip(places, products, strict=True)",
        new="zip(reversed(places), products, strict=True)",
        breaks="on GPUs PowerSGD mixes up parameters of one shape",
        tests=("tests/internal/hooks/test_plain.py::test_many_matrices_at_once",),
    ),
)
