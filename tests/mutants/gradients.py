"""Defects in how gradients travel: buckets, their schedule, hooks."""

from tests.mutants.mutant import At, Mutant

MUTANTS = (
    Mutant(
        "gradients: buckets launched as they come -> "
        "ranks whose gradients come in another order issue their buckets in another order",
        At(
            "Pending.launch",
            "while (program := ready.pop(place := len(self.launched), None)) is not None:",
            "while ready and (program := ready.pop(next(iter(ready)))) and (place := len(self.launched)) >= 0:",
        ),
        (
            "tests/contract/gradients/test_schedule.py::test_any_order_of_arrival_on_processes",
            "tests/contract/gradients/test_schedule.py::test_issues_go_out_in_bucket_order_on_each_channel",
        ),
    ),
    Mutant(
        "gradients: buckets aren't waited for -> the step reads buckets that are still on their way",
        At("Pending._advance.result", "program.work.wait() if program.work", "program.work._value if program.work"),
        "tests/contract/gradients/test_schedule.py::test_any_order_of_arrival_on_processes",
    ),
    Mutant(
        "gradients: a later phase overtakes an earlier bucket -> "
        "second collectives of buckets go out as the first ones complete, which is another order on each rank",
        At("Pending.poll", "if not all(earlier.completed", "if False and not all(earlier.completed"),
        "tests/internal/gradients/test_buckets.py",
    ),
    Mutant(
        "gradients: the hook's scale isn't applied to large gradients -> the sum over ranks instead of the mean",
        At("_pack_one", "torch.mul(given, scale, out=view)", "view.copy_(given)"),
        ("tests/contract/transforms/test_data_parallel.py", "tests/contract/gradients/test_schedule.py"),
    ),
    Mutant(
        "gradients: simulated ranks drop the residual -> "
        "error feedback keeps residuals but never sends them, on simulated ranks and in compiled graphs",
        At("_packed", "if not extra_terms:", "if not extra_terms or len(extra_terms) == 1:"),
        "tests/contract/hooks/test_conformance.py",
    ),
    Mutant(
        "gradients: a bucket exceeds its size by one leaf -> buckets are larger than bucket_bytes",
        At("plan_buckets", "filled[kind] + leaf.nbytes >", "filled[kind] >"),
        "tests/internal/gradients/test_buckets.py",
    ),
    Mutant(
        "gradients: buckets in the order of their first gradient -> buckets that are ready wait for ones that aren't",
        At("plan_buckets", "max(due[position] for position in members)", "min(due[position] for position in members)"),
        "tests/internal/gradients/test_buckets.py",
    ),
    Mutant(
        "gradients: gradients of gradients go through the hook -> second derivatives are compressed",
        At("Schedule.hook_of", "return ExactSum(counts_as(hook, self.plan.axis.size)) if self.again else", "return"),
        "tests/contract/reports/test_orders.py::test_every_hook_counts_as_the_mean",
    ),
    Mutant(
        "gradients: each rank keeps its own order of arrival -> "
        "ranks whose gradients are expected in another order make other buckets",
        At("make_plan.order", "order = tuple(agreement.offer)", "order = tuple(arrival())"),
        "tests/contract/comm/test_axis_comm.py::test_orders_of_arrival_that_differ_are_rank_0_s",
    ),
    Mutant(
        "hooks: the residual isn't added back -> error feedback is kept and never sent",
        At("_residual", "return [(state[RESIDUAL], 1.0)] if RESIDUAL in state else ()", "return ()"),
        "tests/contract/hooks/test_conformance.py",
    ),
    Mutant(
        "hooks: the residual's sign turned round -> error feedback doubles the error",
        At("_residual", "return [(state[RESIDUAL], 1.0)]", "return [(state[RESIDUAL], -1.0)]"),
        "tests/contract/hooks/test_conformance.py",
    ),
    Mutant(
        "hooks: what isn't finite stays in the residual -> one overflow makes every later step NaN",
        At("finite", "return left.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)", "return left"),
        ("tests/internal/hooks/test_plain.py", "tests/contract/hooks/test_conformance.py"),
    ),
    Mutant(
        "hooks: the second encoding's error is lost -> what the sum loses when it is encoded is nobody's to feed back",
        At("CompressedAllReduce.send.left", "unsent[rank] += rest[0]", "pass"),
        ("tests/internal/hooks/test_plain.py", "tests/contract/hooks/test_conformance.py"),
    ),
    Mutant(
        "hooks: ByteGrad's zero isn't on the grid -> parameters without gradient get one",
        At("_around_zero", "torch.round(high * inverse) - 127, step, inverse", "high * inverse - 127, step, inverse"),
        (
            "tests/internal/hooks/test_plain.py",
            "tests/contract/hooks/test_bounds.py",
            "tests/contract/hooks/test_conformance.py",
        ),
    ),
    Mutant(
        "hooks: Quantize's step for 7 bits -> twice the error that eight bits have",
        At("Quantize.grid", "_step(low, high)", "_step(low * (255 / 127), high * (255 / 127))"),
        "tests/contract/hooks/test_bounds.py",
    ),
    Mutant(
        "hooks: OneBit's sizes are sums -> gradients are a block's length too large, between processes",
        At("OneBit._in_chunks", "sizes[some].div_(self.block * part)", "sizes[some].div_(part)"),
        ("tests/contract/hooks/test_bounds.py", "tests/internal/hooks/test_plain.py"),
    ),
    Mutant(
        "hooks: QSGD rounds to nearest -> the result is biased: small gradients are 0 at every step",
        At("QSGD.encode.levels", "torch.floor(scaled + drawn)", "torch.floor(scaled + 0.5 + 0 * drawn)"),
        "tests/contract/hooks/test_bounds.py::test_qsgd_is_unbiased_within_its_variance",
    ),
    Mutant(
        "hooks: RandomK isn't scaled up -> without error feedback the expectation is a hundredth of the mean",
        At("RandomK.send.values", "values = values * lengths", "pass"),
        ("tests/contract/hooks/test_bounds.py", "tests/contract/hooks/test_conformance.py"),
    ),
    Mutant(
        "hooks: RandomK's places don't change -> the same hundredth of the parameters is trained at every step",
        At("RandomK.send.key", "inputs.step, inputs.bucket.index, device=flat", "0, inputs.bucket.index, device=flat"),
        ("tests/contract/hooks/test_bounds.py", "tests/contract/hooks/test_conformance.py"),
    ),
    Mutant(
        "hooks: TopK keeps what it has sent -> what was sent is sent again at the next step",
        At("TopK.encode_and_keep", "rows.scatter_(1, places, 0)", ""),
        ("tests/internal/hooks/test_plain.py", "tests/contract/hooks/test_conformance.py"),
    ),
    Mutant(
        "hooks: PowerSGD's residual is of the total -> residuals are off by n - 1 times what was sent",
        At("PowerSGD.send.total", "products, sums, 1 / n if early else None", "products, sums, 1 if early else None"),
        ("tests/internal/hooks/test_plain.py", "tests/contract/hooks/test_conformance.py"),
    ),
    Mutant(
        "hooks: PowerSGD starts anew at every step -> the power iteration never converges",
        At("PowerSGD.send", "states[m][Q] = start", "pass"),
        ("tests/contract/hooks/test_bounds.py", "tests/contract/hooks/test_conformance.py"),
    ),
)
