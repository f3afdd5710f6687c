"""Ranks that are processes: how each kind of call on an axis uses its channels and the store."""

from __future__ import annotations

import ctypes
import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch

from ltx.core.base import private
from ltx.core.base.errors import UnsupportedError
from ltx.core.base.handed_in import HandedIn
from ltx.core.comm.axis_comm import AxisComm, compare_unusual
from ltx.core.comm.backends import HostCopy
from ltx.core.comm.channel import Work
from ltx.core.comm.operations import OPERATIONS
from ltx.core.comm.peers import under_way
from ltx.core.comm.signature import Agreement, Signature
from ltx.core.ranks.backings import Describe, Dumped, Key, OfTensors, Rule, Static, Tensors, fresh, nothing


class ProcessRanks(AxisComm):
    """The ranks of an axis as one of their processes sees them; they use the channels of the process' communicator."""

    overlaps = True
    _caller = 0  # the thread that is in a collective of the program's

    @property
    def ended(self) -> str:
        return "by its close(), the end of its `with`, or of its world" if self.closed else ""

    def collective(self, rule: Rule, static: Static, xs: Tensors, compiled: bool) -> tuple[torch.Tensor, ...]:
        if compiled:
            pairs = zip([self._record(rule, static, x) for x in xs], xs, strict=True)
            return tuple(fresh(rule.after(wait(), x, self.rank, self.size, static), x) for wait, x in pairs)
        xs = [x if private.has_memory(x) else private.in_memory(x) for x in xs]
        thread = threading.get_ident()
        if self._caller not in (0, thread):
            error = UnsupportedError(
                f"rank {self.rank}: {rule.name} was called while another thread of this rank is in a collective on "
                f"axis {self.name!r}: ranks may come to them in different orders, and take one's values for the "
                "other's. Call collectives in one thread, or give each thread an axis: ltx.axis_from_group(group, ...)."
            )
            self.passes.end_world(error, rule.name)
            raise error
        self._caller = thread
        try:
            with private.below_modes():
                with self.passes.aborted_by(torch.OutOfMemoryError, MemoryError, what=rule.name):
                    works = [self._issue(rule, static, x) for x in xs]
                return tuple(self._finished(rule, static, x, work.wait()) for x, work in zip(xs, works, strict=True))
        finally:
            self._caller = 0

    def _issue(self, rule: Rule, static: Static, x: torch.Tensor) -> Work:
        operation = rule.operation
        if operation is None:
            return Work.arrived(self.user, rule.before(x, self.size, static))
        said = f"arguments {static}" if static else ""
        key = key_of(rule.name, x, static)
        self.negotiate_issue(self.user, key, lambda: Signature.of(rule.name, ["<tensor>"], [x], said))
        buffer = rule.before(x, self.size, static)
        if rule.coded is not None and (self.user.transport is None or buffer.device.type != "cpu"):
            buffer = rule.coded(buffer)
        shared = buffer.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        if shared and OPERATIONS[operation].in_place:
            buffer = buffer.clone()
        if buffer.numel() == 0:  # backends refuse empty buffers; all ranks' buffers are empty
            return Work.arrived(self.user, OPERATIONS[operation].new_result(buffer, self.size))
        return self.user.issue(operation, buffer, rule.name, rule.arguments(static))

    def _finished(self, rule: Rule, static: Static, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        y = fresh(rule.after(result, x, self.rank, self.size, static), x)
        return y if x.is_contiguous() or not rule.keeps_strides else torch.empty_like(x).copy_(y)

    def _record(self, rule: Rule, static: Static, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        n, name = self.size, self.user.group_for(x.device).group_name
        buffer = rule.before(x, n, static)
        if rule.operation is None:
            return lambda: buffer
        if rule.coded is not None:
            buffer = rule.coded(buffer)
        operation = OPERATIONS[rule.operation]
        if buffer.numel() == 0:  # as in _issue
            return lambda: operation.new_result(buffer, n)
        started, wait = operation.begin_in_graph(buffer, n, name, rule.arguments(static))
        return partial(wait, started)

    def confirm(self, key: Key, describe: Describe, offer: Callable[[], Any] = nothing, channel: str = "user") -> Any:
        on = self.user if channel == "user" else self.background if channel == "background" else self.first_phase
        if on.habit is not None:  # an exception may have left parts of the last call out
            on.habit.compared(on.issued)
        agreed = self.negotiate(on, key(), describe, offer)
        if on is self.user:
            compare_unusual(self, on, agreed)
        return agreed

    def announce(self, agreement: Agreement) -> None:
        self.user.advance(agreement)

    @cached_property
    def in_step(self) -> Any:  # once bound, nothing stands between a step and this
        return self.passes.in_step

    def exchange(self, signature: Signature, value: Any) -> list[Any]:
        if under_way:
            return [post.value for post in under_way[-1].exchange(self, signature, value)]
        return self.peers.exchange(signature, value)

    def start_anew(self) -> None:
        # Complete what some ranks have begun in the background for states that were dropped.
        told = Signature("train.init of a strategy that exchanges parameters", ())
        for each in (self, *self.parts) if self.size > 1 else ():
            if not any(each.exchange(told, each.background.failed is not None)):
                each.background.drain(partial(each.exchange, told))
                # Ranks may have called it unequally often, but have issued as much by now: they count from there.
                each.background.issued = each.background.begun
                each.background.recent.clear()

    def read(self, x: torch.Tensor, label: str) -> torch.Tensor:
        # bool(x) and x.item() would stand still for as long as the device waits for a peer.
        return self.user.wait_for_host(HostCopy(x), label)

    def by_rank(self, signature: Signature, f: OfTensors = lambda xs, apart: None, tensors: Tensors = ()) -> list[Any]:
        """Each rank sends one digest through the store; only if digests differ do values follow."""
        mine = f(tensors, [True] * len(tensors))
        digests = self.exchange(signature, hashlib.blake2b(json.dumps(mine).encode(), digest_size=16).hexdigest())
        return [mine] * len(digests) if len(set(digests)) == 1 else self.exchange(signature, mine)

    def tell(self, label: str, numbers: list[int], describe: Describe, key: Key) -> list[list[int]]:
        user, signature = self.user, describe()
        agreed = replace(self.negotiate(user, key(), lambda: signature), signature=signature)
        compare_unusual(self, user, agreed)
        user.advance(agreed)
        with private.below_transforms():  # the numbers are sizes, which transforms don't change
            mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
            rows: list[list[int]] = user.issue("all_gather", mine, label, on_host=True).wait().tolist()
        return rows

    def objects(self, what: str, dump: Callable[[], Dumped], src: int | None = None) -> list[Dumped]:
        user, senders = self.user, range(self.size) if src is None else [src]
        issue = user.issued
        payload, failed = dump() if self.rank in senders else (b"", True)
        if not failed:
            payload = HandedIn.pickling.sealed(self, payload, issue)
        call = Signature(what, (), "2 lengths" if src is None else f"src={src}")
        sizes = self.tell(f"{what}: lengths", [len(payload), int(failed)], lambda: call, lambda: (what, src))
        body = torch.zeros(max(length for length, _ in sizes), dtype=torch.uint8, device="cpu")
        if payload:
            body[: len(payload)].copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        if src is None:
            bodies = user.issue("all_gather", body, what, on_host=True).wait()
        elif body.numel():
            bodies = user.issue("broadcast", body.to(self.device), what, (src,)).wait().cpu().expand(self.size, -1)
        rows = [(b"", True)] * self.size
        for rank in senders:
            length, broken = sizes[rank]
            # Not by NumPy, which may not be installed.
            text = ctypes.string_at(bodies[rank].data_ptr(), length) if length else b""
            known = broken or rank == self.rank
            rows[rank] = text if known else HandedIn.pickling.opened(self, text, rank, issue), bool(broken)
        return rows


def key_of(name: str, x: torch.Tensor, static: Static = ()) -> tuple[Any, ...]:
    """The key of a single tensor's collective: equal keys mean equal signatures."""
    return (name, x.shape, x.dtype, static)
