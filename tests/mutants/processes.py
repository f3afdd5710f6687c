"""Defects in processes and files: pools, launchers, checkpoints, replays."""

from tests.mutants.mutant import At, Mutant

MUTANTS = (
    Mutant(
        "runtime: a worker's failure isn't reported -> pool.run returns though a rank raised",
        At("Pool._do", "if kinds != {Result}:", "if not kept:"),
        "tests/internal/runtime/test_failures.py::test_an_exception_arrives_with_rank_type_text_and_cause",
    ),
    Mutant(
        "runtime: the last rank to fail is told -> a consequence is reported in the place of the cause",
        At("failure_error.first", "first = min", "first = max"),
        "tests/internal/runtime/test_failures.py::test_the_first_to_fail_is_shown_and_the_others_listed",
    ),
    Mutant(
        "runtime: after a failure the world isn't renewed -> after a failed call workers wait for what was left behind",
        At("Pool._ready", "is not None and self._workers.failed:", "is not None and self._workers.failed is None:"),
        (
            "tests/internal/runtime/test_failures.py::test_a_peer_that_waits_in_a_collective_is_told_at_once",
            "tests/internal/runtime/test_failures.py",
        ),
    ),
    Mutant(
        "runtime: a consequence counts as the cause -> the launcher names a rank that has only lost its peer",
        At("first_failure", "[rank for rank, end in told.items() if end.kind not in CONSEQUENCES]", "list(told)"),
        "ltx/runtime/run.py",
    ),
    Mutant(
        "runtime: tensors that share memory are sent apart -> views come out as copies on the workers",
        At("Pickler.reducer_override", "obj._untyped_storage", "obj._untyped_storage.clone()"),
        "tests/internal/runtime/test_messages.py::test_what_shares_memory_shares_it_afterwards_and_with_nobody_else",
    ),
    Mutant(
        "checkpoint: hashes aren't compared -> a changed byte is loaded",
        At("verify", 'elif (found := sha256(file)) != expected["sha256"]:', "elif not (found := sha256(file)):"),
        (
            "tests/internal/checkpoint/test_torn.py::test_the_one_before_is_taken",
            "tests/internal/checkpoint/test_torn.py::test_the_warning_names_file_and_digests",
        ),
    ),
    Mutant(
        "checkpoint: the manifest's digest isn't compared -> a changed manifest is believed",
        At("read_manifest", "if expected != found:", "if expected is None:"),
        "tests/internal/checkpoint/test_torn.py::test_a_flipped_digit_of_the_manifest",
    ),
    Mutant(
        "checkpoint: no rename -> "
        "a process that dies while it writes leaves half a checkpoint in the place of a whole one",
        At("begin_saving.offer", "temporary = directory.hidden(base, final.name)", "temporary = final"),
        ("tests/internal/checkpoint/test_torn.py", "tests/internal/checkpoint/test_failures.py"),
    ),
    Mutant(
        "checkpoint: nothing is written through to the disk -> "
        "after a power cut a checkpoint has its name and not its bytes",
        At("_to_disk", "os.fsync(opened)", "pass"),
        "tests/internal/checkpoint/test_torn.py::test_all_of_it_is_on_the_disk_when_it_gets_its_name",
    ),
    Mutant(
        "checkpoint: torch's generator isn't restored -> dropout goes on with other numbers",
        At("set_random_states", 'torch.set_rng_state(states["torch"])', ""),
        "tests/contract/checkpoint/test_resume.py::test_dropout_data_and_buffers_go_on",
    ),
    Mutant(
        "checkpoint: Python's generator isn't restored -> what a data loader shuffles goes on with other numbers",
        At("set_random_states", 'if "python" in states:\n    random.setstate(states["python"])', ""),
        "tests/contract/checkpoint/test_resume.py::test_generators_go_on_where_there_are_as_many_ranks",
    ),
    Mutant(
        "checkpoint: every rank gets rank 0's own part -> local SGD's parameters are rank 0's everywhere",
        At("_pieces", "names = [name_on(opened.rank, leaf.name)]", "names = [name_on(0, leaf.name)]"),
        "tests/contract/checkpoint/test_resume.py::test_every_strategy_goes_on_bit_for_bit",
    ),
    Mutant(
        "checkpoint: pickles are loaded -> a file runs code",
        At(
            "_Unpickler.find_class",
            'raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint\'s metadata")',
            "return super().find_class(module, name)",
        ),
        "tests/internal/checkpoint/test_torn.py::test_a_pickle_that_runs_code_is_refused",
    ),
    Mutant(
        "checkpoint: another run's are removed -> keep= removes checkpoints of others",
        At("prune", "if step < committed and run_of(step_path(path, step)) == run:", "if step < committed:"),
        "tests/internal/checkpoint/test_torn.py::test_another_runs_checkpoints_stay",
    ),
    Mutant(
        "checkpoint: save_async writes the state itself -> what is saved is of several steps",
        At("save_async", "x.clone() if x", "x if x"),
        "tests/internal/checkpoint/test_failures.py::test_steps_overwrite_nothing_that_is_being_saved",
    ),
    Mutant(
        "checkpoint: a rank's failure isn't told -> a checkpoint without a rank's part gets its name",
        At(
            "Together.conclude",
            "troubles = [trouble for _, trouble in parts]",
            "parts = [x for x in parts if x[0]]\ntroubles: list[Trouble] = [None for _ in parts]",
        ),
        "tests/internal/checkpoint/test_failures.py::test_a_full_disk_on_one_rank_is_the_same_error_on_all",
    ),
    Mutant(
        "replay: what a rank sends isn't looked at -> "
        "a rank that computes other values than then goes on, and looks like what it was",
        At("Replayed._issue", "if self._check_sent and sent != digest:", "if False:"),
        "tests/contract/replay/test_replay.py::test_other_values_sent",
    ),
    Mutant(
        "replay: a result is kept as it lies, not copied -> "
        "a record has what later steps have written over its messages",
        At("_Recorder._issue", "result.detach().clone()", "result.detach()"),
        "tests/contract/replay/test_replay.py::test_each_rank_alone_is_what_it_was",
    ),
    Mutant(
        "replay: random states aren't those of then -> dropout leaves out others than then",
        At("Replayed.step_begins", "set_random_states", "len"),
        "tests/contract/replay/test_replay.py::test_each_rank_alone_is_what_it_was",
    ),
)
