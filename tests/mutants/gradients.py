"""Defects in how gradients travel: buckets, their schedule, hooks."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="gradients: buckets launched as they come",
        file="gradients/process_schedule.py",
        old="while len(self._pending) < len(self._order) and "
        "(place := self._order[len(self._pending)]) in self._ready:",
        new="while self._ready and (place := next(iter(self._ready))) is not None:",
        breaks="ranks whose gradients come in another order issue their buckets in another order",
        tests=(
            "tests/gradients/test_schedule.py::test_any_order_of_arrival_on_processes",
            "tests/gradients/test_schedule.py::test_issues_go_out_in_bucket_order_on_each_channel",
        ),
    ),
    Mutant(
        name="gradients: buckets aren't waited for",
        file="gradients/pending.py",
        old="result = pending.work.wait() if pending.work is not None else None",
        new="result = pending.work._value if pending.work is not None else None",
        breaks="the step reads buckets that are still on their way",
        tests=("tests/gradients/test_schedule.py::test_any_order_of_arrival_on_processes",),
    ),
    Mutant(
        name="gradients: a later phase overtakes an earlier bucket",
        file="gradients/pending.py",
        old="return all(self._is_past(earlier, phase) for earlier in range(place))",
        new="return True",
        breaks="second collectives of buckets go out as the first ones complete, which is another order on each rank",
        tests=("tests/gradients/test_pending.py",),
    ),
    Mutant(
        name="gradients: the hook's scale isn't applied to large gradients",
        file="gradients/packing.py",
        old="    if not extra_terms:\n        torch.mul(given, scale, out=view)",
        new="    if not extra_terms:\n        view.copy_(given)",
        breaks="the sum over ranks instead of the mean",
        tests=("tests/transforms/test_data_parallel.py", "tests/gradients/test_schedule.py"),
    ),
    Mutant(
        name="gradients: simulated ranks drop the residual",
        file="gradients/packing.py",
        old="""    if not extra_terms:
        return grad * scale
    (first, times), *others = extra_terms""",
        new="""    if not extra_terms or len(extra_terms) == 1:
        return grad * scale
    (first, times), *others = extra_terms""",
        breaks="error feedback keeps residuals but never sends them, on simulated ranks and in compiled graphs",
        tests=("tests/hooks/test_conformance.py",),
    ),
    Mutant(
        name="gradients: a bucket exceeds its size by one leaf",
        file="gradients/buckets.py",
        old="filled[kind] + leaf.nbytes > limit:",
        new="filled[kind] > limit:",
        breaks="buckets are larger than bucket_bytes",
        tests=("tests/gradients/test_buckets.py",),
    ),
    Mutant(
        name="gradients: buckets in the order of their first gradient",
        file="gradients/buckets.py",
        old="closed.sort(key=lambda members: max(due[position] for position in members))",
        new="closed.sort(key=lambda members: min(due[position] for position in members))",
        breaks="buckets that are ready wait for ones that aren't",
        tests=("tests/gradients/test_buckets.py",),
    ),
    Mutant(
        name="gradients: gradients of gradients go through the hook",
        file="gradients/schedule.py",
        old="return ExactSum(self.plan.hook.derivative_scale(self.plan.axis.size)) if self.again else self.plan.hook",
        new="return self.plan.hook",
        breaks="second derivatives are compressed",
        tests=("tests/hooks/test_hooks.py::test_gradients_of_gradients_are_exact",),
    ),
    Mutant(
        name="gradients: each rank keeps its own order of arrival",
        file="gradients/planning.py",
        old="order = tuple(agreement.offer)",
        new="order = tuple(arrival())",
        breaks="ranks whose gradients are expected in another order make other buckets",
        tests=("tests/comm/test_axis_comm.py::test_orders_of_arrival_that_differ_are_rank_0_s",),
    ),
    Mutant(
        name="hooks: the residual isn't added back",
        file="hooks/lossy.py",
        old="return [(state[RESIDUAL], 1.0)] if self.error_feedback and RESIDUAL in state else ()",
        new="return ()",
        breaks="error feedback is kept and never sent",
        tests=("tests/hooks/test_conformance.py",),
    ),
    Mutant(
        name="hooks: the residual's sign turned round",
        file="hooks/lossy.py",
        old="return [(state[RESIDUAL], 1.0)]",
        new="return [(state[RESIDUAL], -1.0)]",
        breaks="error feedback doubles the error",
        tests=("tests/hooks/test_conformance.py",),
    ),
    Mutant(
        name="hooks: what isn't finite stays in the residual",
        file="hooks/lossy.py",
        old="            left.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)",
        new="            pass",
        breaks="one overflow makes every later step NaN",
        tests=(
            "tests/hooks/test_plain.py",
            "tests/hooks/test_conformance.py",
        ),
    ),
    Mutant(
        name="hooks: the second encoding's error is lost",
        file="hooks/lossy.py",
        old="                rows[rank] += rest\n",
        new="                pass\n",
        breaks="what the sum loses when it is encoded is nobody's to feed back",
        tests=("tests/hooks/test_plain.py", "tests/hooks/test_conformance.py"),
    ),
    Mutant(
        name="hooks: ByteGrad's zero isn't on the grid",
        file="hooks/eight_bit.py",
        old="return Grid(torch.zeros_like(low), torch.round(high * inverse) - 127, step, inverse)",
        new="return Grid(torch.zeros_like(low), high * inverse - 127, step, inverse)",
        breaks="parameters without gradient get one",
        tests=("tests/hooks/test_plain.py", "tests/hooks/test_bounds.py", "tests/hooks/test_conformance.py"),
    ),
    Mutant(
        name="hooks: Quantize's step for 7 bits",
        file="hooks/eight_bit.py",
        old="""        low, high = low.clamp(max=0), high.clamp(min=0)
        step = high / 255 - low / 255""",
        new="""        low, high = low.clamp(max=0), high.clamp(min=0)
        step = high / 127 - low / 127""",
        breaks="twice the error that eight bits have",
        tests=("tests/hooks/test_bounds.py",),
    ),
    Mutant(
        name="hooks: OneBit's sizes are sums",
        file="hooks/onebit.py",
        old="torch.mean(torch.abs(chunk, out=signs), 1, keepdim=True, out=sizes[some])",
        new="torch.sum(torch.abs(chunk, out=signs), 1, keepdim=True, out=sizes[some])",
        breaks="gradients are a block's length too large, between processes",
        tests=(
            "tests/hooks/test_bounds.py",
            "tests/hooks/test_plain.py",
        ),
    ),
    Mutant(
        name="hooks: QSGD rounds to nearest",
        file="hooks/eight_bit.py",
        old="levels = torch.floor(scaled + drawn)",
        new="levels = torch.floor(scaled + 0.5 + 0 * drawn)",
        breaks="the result is biased: small gradients are 0 at every step",
        tests=("tests/hooks/test_bounds.py::test_qsgd_is_unbiased_within_its_variance",),
    ),
    Mutant(
        name="hooks: RandomK isn't scaled up",
        file="hooks/sparse.py",
        old="            values = values * lengths\n",
        new="            pass\n",
        breaks="without error feedback the expectation is a hundredth of the mean",
        tests=(
            "tests/hooks/test_bounds.py",
            "tests/hooks/test_conformance.py",
        ),
    ),
    Mutant(
        name="hooks: RandomK's places don't change",
        file="hooks/sparse.py",
        old="key = key_of(self.seed, inputs.step, inputs.bucket.index, device=flat.device)",
        new="key = key_of(self.seed, 0, inputs.bucket.index, device=flat.device)",
        breaks="the same hundredth of the parameters is trained at every step",
        tests=(
            "tests/hooks/test_bounds.py",
            "tests/hooks/test_conformance.py",
        ),
    ),
    Mutant(
        name="hooks: TopK keeps what it has sent",
        file="hooks/sparse.py",
        old="        rows.scatter_(1, places, 0)\n",
        new="",
        breaks="what was sent is sent again at the next step",
        tests=("tests/hooks/test_plain.py", "tests/hooks/test_conformance.py"),
    ),
    Mutant(
        name="hooks: PowerSGD's residual is of the total",
        file="hooks/powersgd.py",
        old="total = _assembled(parts, products, sums, 1 / n if early else None)",
        new="total = _assembled(parts, products, sums, 1 if early else None)",
        breaks="residuals are off by n - 1 times what was sent",
        tests=("tests/hooks/test_plain.py", "tests/hooks/test_conformance.py"),
    ),
    Mutant(
        name="hooks: PowerSGD starts anew at every step",
        file="hooks/powersgd.py",
        old="states[m][Q] = second / norm if regular else torch.where(_regular(norm), second / norm, start)",
        new="states[m][Q] = start",
        breaks="the power iteration never converges",
        tests=("tests/hooks/test_bounds.py", "tests/hooks/test_conformance.py"),
    ),
)
