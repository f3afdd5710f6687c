"""Defects in ltx.core.comm and ltx.shared_memory: what ranks send, compare, and find out about one another."""

from tests.mutants.mutant import At, Mutant

MUTANTS = (
    Mutant(
        "comm: a slot is filled before all have emptied it -> a fast rank overwrites what a slow one hasn't read yet",
        At("SharedMemoryTransport._fill", "self._least(EMPTIED) + SLOTS", "self._counters[self.rank][EMPTIED] + SLOTS"),
        "tests/internal/shared_memory/test_faults.py",
    ),
    Mutant(
        "comm: a chunk is reduced before all have filled it -> sums of what lay in the memory before",
        At("SharedMemoryTransport._reduce", "or self._least(FILLED) <= entry.place", ""),
        "tests/internal/shared_memory/test_transport.py",
    ),
    Mutant(
        "comm: a chunk is taken before all have reduced it -> "
        "parts of a sum that other ranks add up are read too early",
        At("SharedMemoryTransport._empty", "chunk.reduce is not None and self._least(REDUCED) <= entry.place", "False"),
        "tests/internal/shared_memory/test_transport.py",
    ),
    Mutant(
        "comm: every input in the room stays there -> "
        "what isn't reduced is taken out of slots, in which it doesn't lie",
        At("SharedMemoryTransport._give", "chunk.reduce is not None and ROOM <= place < self", "ROOM <= place < self"),
        "tests/internal/shared_memory/test_faults.py",
    ),
    Mutant(
        "comm: tags aren't compared -> ranks that issue different things in shared memory add them up",
        At("SharedMemoryTransport._reduce", "|= len({*map(itemgetter(TAGS + slot), self._counters)}) > 1", "|= False"),
        "tests/contract/comm/test_axis_comm.py::test_known_collectives_in_swapped_order_are_refused_by_shared_memory",
    ),
    Mutant(
        "comm: a process that died isn't seen -> its peers wait for the timeout",
        At("SharedMemoryTransport.lost_peers", "lost.append(rank)", "pass"),
        "tests/internal/shared_memory/test_transport.py::test_a_survivor_names_the_peer",
    ),
    Mutant(
        "comm: a failure halfway isn't told -> peers wait for a rank whose end of the shared memory has failed",
        At("SharedMemoryTransport._fail", "self._counters[self.rank][FAILED] = len(reason)", ""),
        (
            "tests/internal/shared_memory/test_faults.py::test_progress_that_always_raises_fails_the_transport_and_tells",
            "tests/internal/shared_memory/test_faults.py::test_all_ranks_hear_of_it",
        ),
    ),
    Mutant(
        "comm: the step summary's digests aren't compared -> ranks that have issued different collectives train on",
        At(
            "IssuedSummary.wait",
            "[*map(mul, limbs[::2], limbs[::2])] != [*map(mul, limbs[1::2], repeat(self.channel.size))]",
            "not limbs",
        ),
        "tests/internal/comm/test_step_summary.py",
    ),
    Mutant(
        "comm: what is known is expected anywhere -> "
        "over sockets, ranks that call known collectives of other sizes are ended by the backend",
        At(
            "Habit.expects",
            "return issue < self._compared or self._calls[self._next : self._next + 1] == [fingerprint]",
            "return True",
        ),
        "tests/contract/comm/test_axis_comm.py::test_known_collectives_in_another_order_are_refused_over_sockets",
    ),
    Mutant(
        "comm: what is refused waits for its last chunk -> "
        "of two collectives of other sizes that meet in shared memory the longer one waits for ever",
        At("TransportWork.completed", "return self.refused or self.transport.emptied", "return self.transport.emptied"),
        "tests/contract/comm/test_axis_comm.py::test_the_longer_of_two_collectives_is_refused_at_once",
    ),
    Mutant(
        "comm: the digest takes no note of the order -> the same collectives in another order aren't noticed",
        At("Channel.advance", "self.digest * 1_000_003 + agreement.fingerprint", "self.digest + agreement.fingerprint"),
        "tests/contract/comm/test_axis_comm.py::test_known_collectives_in_swapped_order_are_caught_at_the_fence",
    ),
    Mutant(
        "comm: no timeout -> a rank that waits for one that never comes waits for ever",
        At("Channel.look_around", "if waited_s > self.timeout_s:\n    raise self.timed_out(number, label)", ""),
        "tests/contract/comm/test_axis_comm.py::test_a_peer_that_does_not_come",
    ),
    Mutant(
        "comm: an issue after a failure goes out -> "
        "after a timeout what is issued next pairs with what peers issued before",
        At("Work.wait", "self._channel.failed = error", ""),
        ("tests/contract/comm/test_axis_comm.py", "tests/internal/shared_memory/test_faults.py"),
    ),
    Mutant(
        "comm: signatures aren't compared -> ranks with different shapes read each other's memory",
        At("Negotiation.compare_at", "self._refuse(dict(enumerate(posts)))", ""),
        "tests/contract/comm/test_axis_comm.py::test_signatures_that_differ",
    ),
    Mutant(
        "comm: nothing is looked for while a rank polls the store -> "
        "a rank that waits in the store for a peer that is gone waits for the timeout",
        At("poll_until", "while_waiting()", ""),
        "tests/internal/peers/test_store_exchange.py",
    ),
    Mutant(
        "comm: polling has no end -> a rank that waits in the store for one that never comes waits for ever",
        At("poll_until", "if now - began > timeout_s:\n    return ready()", ""),
        "tests/internal/peers/test_store_exchange.py::test_who_doesnt_come_is_named_with_the_fix",
    ),
    Mutant(
        "comm: a peer that came and went counts as lost -> a checkpoint fails whose ranks have all done their part",
        At(
            "StoreExchange.refuse_lost",
            "if (lost := [rank for rank in self._lost() if rank in ranks]) and not self.has(place, lost):",
            "if lost := [rank for rank in self._lost() if rank in ranks]:",
        ),
        "tests/internal/peers/test_store_exchange.py::test_a_peer_that_came_and_went_has_come",
    ),
    Mutant(
        "comm: nobody looks for deadlocks -> ranks that wait for each other wait for the timeout",
        At("Negotiation.waiting", "if PATIENCE_S < waited_s < channel.timeout_s:", "if False:"),
        "tests/internal/peers/test_deadlock.py::test_a_collective_that_one_rank_alone_calls",
    ),
    Mutant(
        "comm: who goes on counts as stuck -> a rank that waits for a slow one is told of a deadlock",
        At("stuck", "for node in going_on:\n    del left[node]", "break"),
        "tests/internal/peers/test_deadlock.py::test_who_is_stuck",
    ),
    Mutant(
        "comm: who leaves a world after a failure doesn't wait until it is told -> peers say that its process is gone",
        At("Negotiation.tell", "self.watcher.tell(wait or ended)", "self.watcher.tell(wait or self._ended)"),
        "tests/internal/comm/test_passes.py::test_who_begins_a_new_world_at_once_has_told_why_it_left_the_old_one",
    ),
    Mutant(
        "comm: a silent peer isn't seen -> a peer whose machine is gone is waited for until the timeout",
        At("Watcher._look_after_peers", "record.beat and (why == kernel.GONE or (why and late))", "False"),
        "tests/internal/peers/test_watcher.py",
    ),
    Mutant(
        "comm: an object's seal isn't checked -> whoever reaches the port has a rank unpickle anything",
        At("opened", "if not hmac.compare_digest(seal, _seal(axis_comm, data, rank, issue))", "if len(seal) != _BYTES"),
        "tests/internal/collectives/test_objects.py::test_what_isnt_from_a_rank_of_this_job_is_not_unpickled",
    ),
    Mutant(
        "comm: a seal holds for any issue -> an object that was sent once can be sent again",
        At(
            "_seal",
            'about = f"{axis_comm.name} {axis_comm.peers.world} {rank} {issue} "',
            'about = f"{axis_comm.name} {axis_comm.peers.world} {rank} "',
        ),
        "tests/internal/collectives/test_objects.py::test_a_seal_is_for_one_rank_issue_and_world",
    ),
    Mutant(
        "comm: memory that is in use is used again -> gradients that somebody holds change at the next step",
        At(
            "BufferPool.take",
            "(storage._cdata) == _USES and sys.getrefcount(storage) == _UNUSED",
            "(storage._cdata) >= 1",
        ),
        "tests/internal/comm/test_buffer_pool.py",
    ),
    Mutant(
        "comm: a pass that was left isn't told -> "
        "the peers of a rank that raises in its backward pass wait for the timeout",
        At("Passes.fail", "self.failed = failed", ""),
        "tests/internal/comm/test_passes.py",
    ),
    Mutant(
        "comm: a step that one rank has left counts for nothing -> "
        "a rank's next batch is averaged with its peers' current one",
        At("Passes.begin", "self._comm.first_phase.advance(RAISED)", ""),
        "tests/internal/comm/test_passes.py",
    ),
)
