"""Defects in what becomes of gradients: strategies, optimizers; batch norm, notebooks."""

from tests.mutants.mutant import At, Mutant

MUTANTS = (
    Mutant(
        "strategies: a plain step gets a rank's part of the gradients -> "
        "ltx.grad with ZeroStrategy gives zeros for the parameters that other ranks update",
        At("hook_of_plain", 'return EXACT if strategy.layout.opt_state == "sharded" else strategy', "return strategy"),
        "tests/contract/strategies/test_gradients.py",
    ),
    Mutant(
        "strategies: outer momentum without Nesterov -> the outer step uses the velocity of the step before",
        At("DiLoCoStrategy._outer_step", "self.outer_momentum * v", "self.outer_momentum * state[VELOCITY]"),
        "tests/contract/strategies/test_conformance.py::test_a_world_of_one_does_what_the_reference_says",
    ),
    Mutant(
        "strategies: the anchor stays -> every outer step begins at the first parameters",
        At("DiLoCoStrategy._moved", "[path], outer_step)}", "[path], outer_step), ANCHOR: states[path][ANCHOR]}"),
        "tests/contract/strategies/test_diloco.py",
    ),
    Mutant(
        "strategies: ZeRO's last part is cut off -> parameters whose sizes the ranks don't divide lose their tails",
        At("_rows", "(pad(flat, (0, missing)) if missing else flat)", "flat[: flat.numel() // ranks * ranks]"),
        "tests/internal/strategies/test_zero.py",
    ),
    Mutant(
        "strategies: ZeRO's gradients in another rank's place -> "
        "each rank updates its part with gradients of 0, between processes",
        At("_placed", "there = whole[rank * m : (rank + 1) * m]", "there = whole[(n - 1 - rank) * m : (n - rank) * m]"),
        "tests/internal/strategies/test_zero.py",
    ),
    Mutant(
        "strategies: ZeRO clips by a rank's own norm -> clipping scales parts of one gradient by different factors",
        At("ZeroStrategy._together.norm", "if info.axis.size == 1:", "if info.axis.size >= 1:"),
        "tests/internal/strategies/test_zero.py::test_one_norm_is_measured_of_all_parts",
    ),
    Mutant(
        "strategies: ZeRO forgets what it hasn't sent -> what a hook leaves out of an update is lost",
        At("ZeroStrategy._coded", "new + rest for new, rest in zip", "new + 0 * rest for new, rest in zip"),
        "tests/internal/strategies/test_zero.py::test_nothing_is_lost",
    ),
    Mutant(
        "strategies: ZeRO's residual in another order -> what wasn't sent of one parameter is added to another",
        At("CodedPart.reduce", "finite(_in_order(left, inputs))", "finite(left.reshape(-1)[: inputs.bucket.numel])"),
        "tests/internal/strategies/test_zero.py::test_nothing_is_lost",
    ),
    Mutant(
        "strategies: averaging one step late -> ranks drift apart a whole period longer than asked",
        At("LocalSGDStrategy.group", "if step < self.warmup_steps or ranks", "if step <= self.warmup_steps or ranks"),
        "ltx/strategies/local_sgd.py",
    ),
    Mutant(
        "strategies: within a node divided by all ranks -> gradients within nodes are too small",
        At("WithinNode.packing", "1.0 if axis_size == 1 else 1.0 / self.ranks", "1.0 / axis_size"),
        "tests/contract/strategies/test_local_sgd.py::test_a_node_waits_for_no_other",
    ),
    Mutant(
        "strategies: gossip with the same peer each time -> pairs never hear of one another",
        At(
            "peers",
            "return tuple((k + r) % half + half if r < half else (r - half - k) % half for r in range(n))",
            "return tuple(r % half + half if r < half else (r - half) % half for r in range(n))",
        ),
        "ltx/strategies/decentralized.py",
    ),
    Mutant(
        "strategies: gossip doesn't tell steps apart -> ranks that are steps apart average their weights",
        At("Decentralized._check", "bool(((mine == 0) & (tag != 0)).any())", "bool(((mine == 1) & (tag == 2)).any())"),
        (
            "tests/contract/strategies/test_bagua.py::test_weights_of_another_step_are_refused",
            "tests/contract/strategies/test_bagua.py::test_means_over_different_steps_are_refused",
        ),
    ),
    Mutant(
        "strategies: QAdam's momentum isn't decayed -> momenta grow at every step",
        At("MeanMomentum.packing", "(state[MOMENTUM], self.beta1 / axis_size)", "(state[MOMENTUM], 1 / axis_size)"),
        "ltx/strategies/qadam.py",
    ),
    Mutant(
        "strategies: a round forgets the steps since it began -> "
        "asynchronous averaging throws local steps away, between processes",
        At(
            "AsyncAveraging._take_round",
            "deltas = [y - s for y, s in zip(reduced, pending.snapshot, strict=False)]",
            "deltas = [y - x for y, x in zip(reduced, tree.flatten(params)[0], strict=False)]",
        ),
        "tests/internal/strategies/test_async.py",
    ),
    Mutant(
        "optim: a pair of functions keeps the parameters themselves -> "
        "with donate=True an optimizer's state that is the parameters follows them",
        At(
            "FunctionPair._apart",
            "return state if recording() or optimizers.in_transform() else tree.unshared(state, params)",
            "return state",
        ),
        "tests/contract/optim/test_base.py::test_a_state_that_is_the_parameters",
    ),
    Mutant(
        "optim: a class with a step of its own runs by torch's kernel -> "
        "what the class does in its step, its hooks or its groups is left out",
        At(
            "build",
            "hooked = shell._optimizer_step_pre_hooks or shell._optimizer_step_post_hooks",
            "hooked, torchs = {}, ()",
        ),
        "tests/contract/optim/test_opaque.py::test_as_the_class_itself",
    ),
    Mutant(
        "optim: what a class of another author keeps on itself isn't looked at -> "
        "what it keeps there begins anew at each update",
        At(
            "_kept",
            'found = {f"self.{name}": x for name, x in vars(instance).items() if name not in _usual()}',
            "found: dict[str, Any] = {}",
        ),
        "tests/contract/optim/test_opaque.py::test_what_a_step_changes_beside_its_state_is_found",
    ),
    Mutant(
        "optim: a schedule's rate goes to the constructor of another author's class -> "
        "a class that keeps its first rate has the present one",
        At("ThirdParty._instance", 'base = getattr(self.lr, "base_lr", None)', "base = None"),
        "tests/contract/optim/test_opaque.py::test_the_rate_of_the_constructor_is_that_of_torchs_scheduler",
    ),
    Mutant(
        "optim: a schedule is asked for the next step -> the learning rate is a step ahead",
        At("ClassOptimizer._values", "else scheduled(name, own, count)", "else scheduled(name, own, count + 1)"),
        "tests/contract/optim/test_hyperparameters.py",
    ),
    Mutant(
        "optim: the first gradient is dampened too -> SGD with dampening isn't torch's",
        At("Kernel.run", '{**group, "params": first, "dampening": 0.0}', '{**group, "params": first}'),
        ("tests/contract/optim/test_opaque.py", "tests/contract/optim/test_from_torch.py"),
    ),
    Mutant(
        "optim: clipping scales small gradients up -> every gradient has the greatest norm that is allowed",
        At(
            "ClipByGlobalNorm.update",
            "factor = torch.clamp(float(self.max_norm) / (norm + float(self.eps)), max=1.0)",
            "factor = float(self.max_norm) / (norm + float(self.eps))",
        ),
        "tests/contract/optim/test_chain.py",
    ),
    Mutant(
        "optim: the norm of norms is their sum -> under transforms several leaves are clipped too much",
        At("global_norm.total", "torch.linalg.vector_norm(torch.stack(norms))", "torch.stack(norms).sum()"),
        "tests/contract/optim/test_chain.py",
    ),
    Mutant(
        "optim: QAdam without bias correction -> steps after a short warm-up are too small",
        At("QAdamOptimizer._run", "rate = lr * settled / (1 - beta1**step)", "rate = lr * settled"),
        "tests/internal/optim/test_quantized_adam.py",
    ),
    Mutant(
        "nn: sync batch norm counts samples, not values -> "
        "variances of images are wrong, and the correction of running ones",
        At("_values", "return x.shape[0] * math.prod(x.shape[2:])", "return x.shape[0]"),
        "tests/contract/nn/test_sync_batch_norm.py",
    ),
    Mutant(
        "nn: sync batch norm takes the mean of ranks' means -> ranks with fewer samples count as much as others",
        At("_statistics.mean", "mean = near + (counts * (means - near)).sum(0) / divisor", "mean = means.mean(0)"),
        "tests/contract/nn/test_sync_batch_norm.py",
    ),
    Mutant(
        "notebook: a cell's own values are replaced by the notebook's -> what cells have set or changed is lost",
        At("Cell", 'has.get(name, "none") not in ("", told)', "True"),
        "tests/contract/notebook/test_magics.py",
    ),
    Mutant(
        "notebook: functions of the notebook have globals of their own -> "
        "evaluate() in a later cell has the untrained model",
        At("Pickler.reducer_override", 'obj.__globals__ is self._main and obj.__module__ == "__main__"', "False"),
        "tests/contract/notebook/test_magics.py",
    ),
    Mutant(
        "closures: a leaf of the outer step isn't seen -> "
        "the outer gradient lacks what comes through an inner step's closure",
        At("_is_traced", "in_step.get() or x.grad_fn is not None", "x.grad_fn is not None"),
        "tests/contract/transforms/test_bilevel.py",
    ),
    Mutant(
        "closures: a value computed before isn't seen -> "
        "the outer gradient lacks what comes through an inner step's closure",
        At(
            "_Watch.__torch_function__",
            "before = id(x) in self._captured or (node is not None and private.number_of(node) < self._begin)",
            "before = False",
        ),
        "tests/contract/transforms/test_bilevel.py",
    ),
    Mutant(
        "closures: an inner train step takes them for constants -> "
        "the outer gradient lacks what comes through an inner train step's closure",
        At("TrainStep.__call__", "given.append(captured(self.step.fn))", "pass"),
        "tests/contract/transforms/test_bilevel.py",
    ),
    Mutant(
        "vmap: ranks' numbers of samples aren't compared -> "
        "per-sample gradients of unequal numbers are wrong, or wait for ever",
        At("Pending.launch", "if program.samples:", "if False:"),
        "tests/contract/transforms/test_torch_func.py::test_unequal_numbers_of_samples_are_refused",
    ),
    Mutant(
        "passes: an enclosing run of the engine is taken for one that was left -> "
        "a step in a Function's backward pass ends the world",
        At("Passes.find_dropped", "earlier.depth >= depth", "True"),
        "tests/contract/transforms/test_bilevel.py",
    ),
    Mutant(
        "step: it holds itself -> batches lie in memory until Python collects garbage",
        At("EagerStep.__post_init__", "self._calls = Calls()", "self.itself = self; self._calls = Calls()"),
        "tests/internal/strategies/test_leaks.py",
    ),
)
