"""Defects in training steps: transforms, donation, recomputation, guards, precision."""

from tests.mutants.mutant import At, Mutant

MUTANTS = (
    Mutant(
        "transforms: accumulate doesn't divide -> gradients are as many times too large as there are micro-batches",
        At("_Call.finish.first", "first: Any = (part.total / self.step.steps).to", "first: Any = part.total.to"),
        "ltx/core/training/accumulate.py",
    ),
    Mutant(
        "transforms: accumulate starts each micro-batch anew -> "
        "batch norm's buffers have seen the last micro-batch alone",
        At("_Call.run", "args[self.step.carry] = tree.detached(carry)", "pass"),
        "tests/contract/training/test_accumulate.py",
    ),
    Mutant(
        "transforms: digests aren't compared -> two ranks whose parameters differ train on",
        At("check_leaves", "if len(set(digests)) > 1]", "if len(set(digests)) > 2]"),
        "tests/internal/training/test_replicas.py",
    ),
    Mutant(
        "transforms: a digest takes no note of the order -> "
        "large parameters whose elements were exchanged count as equal",
        At("digest", "(bytes_of(table.sum(1)))\nfound.update(bytes_of(table.sum(0)))", "(bytes_of(table.sum()))"),
        "tests/internal/training/test_replicas.py::test_order_counts",
    ),
    Mutant(
        "transforms: parameters aren't compared at the first call -> "
        'with returns="grads" processes that drew their own weights train on',
        At(
            "DataParallel._check_given",
            "check_params_once(shared_part(hook, axis) or axis, params, self.fn, key, None)",
            "",
        ),
        "tests/contract/transforms/test_compare.py",
    ),
    Mutant(
        "transforms: a donated state stays readable -> an old state shows the new parameters without a word",
        At("hand_over", "state.lease[0] = state.step + 1", ""),
        "tests/contract/training/test_train_state.py",
    ),
    Mutant(
        "transforms: tensors read off a donated state stay readable -> "
        "`best = state.params` turns into NaN without a word",
        At("give_away", "x.__class__ = kind", "_ = kind"),
        "tests/contract/training/test_train_state.py",
    ),
    Mutant(
        "transforms: recomputation with the module's own parameters -> "
        "checkpointed layers have the gradients of other parameters",
        At("_run_again.again", "stack.enter_context(swap())", "pass"),
        "tests/contract/transforms/test_functional_call.py::test_steps_with_checkpoints_are_those_without",
    ),
    Mutant(
        "transforms: a Function's second call with the module's own parameters -> "
        "odeint_adjoint and reversible layers have the gradients of other parameters",
        At("Calls._called", "again.put()", "pass"),
        "tests/contract/reports/test_called_again.py::test_a_step_that_runs_its_own_backward_pass",
    ),
    Mutant(
        "transforms: torch's functional calls in steps aren't seen -> "
        "checkpointing in torch's functional_call gives the gradients of other parameters",
        At("_run_again", "for module, given in calls_of_torch():", "for module, given in ():"),
        "tests/contract/transforms/test_functional_call.py::test_steps_with_checkpoints_are_those_without",
    ),
    Mutant(
        "transforms: a rank without data counts -> placeholders count as samples",
        At("_turns", "else x, last), _weight(0.0)", "else x, last), _weight(share)"),
        "tests/contract/training/test_uneven.py::test_means",
    ),
    Mutant(
        "transforms: uneven divides by all ranks -> the last steps of an epoch are too small",
        At("_turns", 'len(states) / states.count(_HAS_DATA) if divisor == "data" else 1.0', "1.0"),
        "tests/contract/training/test_uneven.py",
    ),
    Mutant(
        "transforms: a failing iterable stops one rank alone -> the peers of a rank whose data fails wait for it",
        At("_turns", "state, error = _FAILED, raised", "raise"),
        "tests/contract/training/test_uneven.py::test_an_iterable_that_raises_reaches_every_rank",
    ),
    Mutant(
        "transforms: a Weighted step is divided by the weights alone -> "
        "gradients of weighted steps are n times too small, between processes",
        At("scale_of", "schedule.among.size / number / work.loss_scale, None", "1 / number / work.loss_scale, None"),
        (
            "tests/contract/training/test_uneven.py::test_training_by_samples_is_one_process_with_all_batches",
            "tests/contract/training/test_train_step.py",
        ),
    ),
    Mutant(
        "transforms: gradients that aren't finite aren't looked at exactly -> "
        "a step whose gradients' sum overflows is skipped though all are finite",
        At("not_finite", "return any_not_finite(grads)", "return torch.tensor(True)"),
        "tests/contract/training/test_guard.py::test_huge_gradients_are_no_alarm",
    ),
    Mutant(
        "transforms: NaN is found on a rank alone -> infinite gradients pass the guard",
        At("not_finite", "if all(map(cmath.isfinite, sums)):", "if all(x == x for x in sums):"),
        (
            "tests/internal/optim/test_unless.py",
            "tests/contract/training/test_guard.py::test_infinite_ones_on_several_ranks_are_listed",
        ),
    ),
    Mutant(
        "transforms: a broadcast state counts from 0 -> "
        "after train.broadcast ranks are in another phase of their strategy",
        At("TrainStep.broadcast", "replace(SyncState.new(entries), step=sync_step)", "SyncState.new(entries)"),
        "tests/contract/strategies/test_horovod.py::test_a_state_restored_on_one_rank_is_broadcast",
    ),
    Mutant(
        "transforms: an epoch's first samples come twice -> samples come twice, others never",
        At("DataPosition.indices.together", "self.done : self.done", "max(0, self.done - 1) : max(0, self.done - 1)"),
        "tests/contract/training/test_data_position.py",
    ),
    Mutant(
        "precision: gradients keep the loss scale -> updates are 65536 times too large, between processes",
        At("scale_of", "return 1.0 / work.loss_scale, None", "return 1.0, None"),
        "tests/contract/training/test_mixed_precision.py::test_a_scale_that_is_a_power_of_two_changes_no_bit",
    ),
    Mutant(
        "precision: gradients keep the loss scale in a world of one -> "
        "updates are 65536 times too large, in a world of one and on simulated ranks",
        At("Backward.divided", "if scaled else grads", "if False else grads"),
        "tests/contract/training/test_mixed_precision.py::test_a_scale_leaves_no_trace_without_a_wire",
    ),
    Mutant(
        "precision: the loss scale never comes down -> all steps are skipped once gradients overflow",
        At("DynamicLossScale.after.scale", "(state.scale * self.backoff).clamp(min=self.least)", "state.scale"),
        "tests/contract/training/test_mixed_precision.py::test_scales_and_skips_are_those_of_gradscaler",
    ),
    Mutant(
        "precision: keep_params is cast -> norms compute in half precision",
        At("Casted.__call__.inside", "leaf if path in kept else given(leaf) for path", "given(leaf) for path"),
        "tests/contract/training/test_mixed_precision.py::test_parameters_kept_by_path",
    ),
    Mutant(
        "steps: a state that somebody has looked at keeps the answers -> "
        "a parameter that was put into a state, or froze, is ignored, and an older one is trained",
        At("TrainState._look_at", 'self.__dict__["resolved"] = None', "pass"),
        "tests/internal/training/test_between_steps.py",
    ),
    Mutant(
        "steps: another train step takes the answers of the one before -> "
        "another optimizer, guard or set of trained parameters is ignored, and a state of another kind is taken",
        At("TrainStep.__call__", "if resolved is None or resolved.train is not self:", "if resolved is None:"),
        "tests/internal/training/test_between_steps.py",
    ),
    Mutant(
        "steps: a graph of another size isn't looked at -> "
        "a parameter that isn't given, and is used from a later step on, has each rank's own gradient",
        At("DataParallel.run", "if made != options.known.nodes:", "if options.known.nodes is None:"),
        "tests/internal/training/test_between_steps.py",
    ),
    Mutant(
        "steps: in a straight line a graph of another size isn't looked at -> "
        "a small model's parameter that isn't given, and is used from a later step on, has each rank's own gradient",
        At("Called.is_loss", "self.nodes == nodes", "self.nodes >= 0"),
        "tests/internal/training/test_between_steps.py",
    ),
    Mutant(
        "steps: an update by bucket goes on with what a straight line has prepared -> parameters get others' moments",
        At("StraightStep.differentiate", "self._called, self.prepared = called, None", "self._called = called"),
        "tests/internal/training/test_between_steps.py",
    ),
    Mutant(
        "steps: in a straight line nobody looks for gradients that the step has taken itself -> "
        "those of a small model's later calls count twice",
        At("DataParallel._called", "calls.refuse_backward(leaves)", "pass"),
        "tests/internal/training/test_between_steps.py",
    ),
    Mutant(
        "steps: gradients of one sum come in its bucket's order -> a small model's parameters get those of others",
        At("reduced", "[*map(found.__getitem__, range(len(found)))]", "[*found.values()]"),
        "tests/internal/training/test_between_steps.py",
    ),
    Mutant(
        "steps: nobody hears that a pass of one sum has failed -> "
        "a small model's peers wait for the timeout where ltx.grad raises on one rank",
        At("reduced", "among.passes.leave(error, sent)", "pass"),
        "tests/internal/comm/test_passes.py::test_a_rank_that_raises_in_a_pass_of_one_sum_tells",
    ),
    Mutant(
        "steps: a call on parameters of other kinds has the answers of the last -> "
        "gradients are packed by the shapes and dtypes of other parameters",
        At(
            "DataParallel.deferred",
            "asked == (hook, axis, [flat[1], *map(KIND, flat[0])])",
            "(*asked[:2], len(asked[2])) == (hook, axis, 1 + len(flat[0]))",
        ),
        "tests/internal/training/test_between_calls.py::test_a_call_after_a_change",
    ),
    Mutant(
        "steps: a call by another hook has the answers of the last -> "
        "a strategy that changes its hook goes on with the first",
        At("DataParallel.deferred", "asked == (hook, axis,", "hook is not None and asked[1:] == (axis,"),
        "tests/internal/training/test_between_calls.py::test_a_call_after_a_change",
    ),
    Mutant(
        "steps: a call on another axis has the answers of the last -> "
        "a step that is older than its world sends on an axis that is closed",
        At("DataParallel.deferred", "asked == (hook, axis", "(asked[0], asked[1].size, asked[2]) == (hook, axis.size"),
        "tests/internal/training/test_between_calls.py::test_another_axis_of_the_name",
    ),
    Mutant(
        "steps: each bucket's gradients are for the first parameters -> "
        'with overlap="update" parameters are updated with the gradients of others',
        At(
            "Prepared.of",
            "runs = [prepare([leaves[i] for i in group], [states[i] for i in group]) for group in each]",
            "runs = [prepare(leaves[: len(group)], states[: len(group)]) for group in each]",
        ),
        "tests/internal/training/test_between_steps.py",
    ),
    Mutant(
        "steps: an axis that equals the last one counts as another -> "
        "a step on some of a mesh's axes asks all questions anew each time",
        At("Resolved.holds", "(self.axis is axis or self.axis == axis)", "self.axis is axis"),
        "tests/internal/training/test_between_steps.py::test_an_equal_axis_is_the_same",
    ),
    Mutant(
        "steps: a hook is taken for that of the step before -> "
        "a strategy's own schedule of hooks is ignored where it doesn't set its cycle",
        At("Resolved.holds", "and self.train.step.hook(step, training=True) == self.hook", ""),
        "tests/internal/training/test_between_steps.py",
    ),
    Mutant(
        "steps: debug checks don't see a step that asks nothing -> "
        "ltx.debug_checks() doesn't compare the buckets of steady steps",
        At("AxisComm.goes_on", "return not under_way", "return True"),
        "tests/internal/peers/test_debug.py::test_a_steady_step_is_compared_too",
    ),
    Mutant(
        "steps: a state keeps leaves that somebody else has -> "
        "without donation a skipped step's parameters, which the old state gives too, can't be frozen any more",
        At("Resolved.after", "if not train.donate and any(map(is_, leaves, self.leaves)):", "if False:"),
        "tests/internal/training/test_between_steps.py",
    ),
    Mutant(
        "steps: the state that takes over tensors somebody holds keeps the answers -> "
        "the next step updates tensors that were given away",
        At("hand_over", "resolved=None)", ")"),
        "tests/internal/training/test_between_steps.py",
    ),
    Mutant(
        "module: what is put under its tensors is written into the old ones -> "
        "tensors that the program puts back later have other values",
        At("Follower.look", "data = x.detach().clone(memory_format=torch.preserve_format)", "copy_(x.detach())"),
        "tests/contract/training/test_module.py::test_weights_that_are_swapped_by_data_come_back",
    ),
    Mutant(
        "module: what is written to copies of to_module is dropped -> "
        "a new head, written after a checkpoint was loaded, is gone at the next step",
        At("Follower.look", "if self.shows is None and training:", "if False:"),
        "tests/contract/training/test_module.py::test_to_module_and_the_next_step",
    ),
)
