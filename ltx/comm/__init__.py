"""The one door to the network: every collective of every layer is issued through here."""

from ltx.comm.axis_comm import AxisComm
from ltx.comm.backends import HostCopy, to_device
from ltx.comm.channel import Channel
from ltx.comm.debug import Checks, debug_checks
from ltx.comm.heartbeat import DEFAULT_HEARTBEAT_S
from ltx.comm.ledger import record, span
from ltx.comm.network import Network, measure_network, measured
from ltx.comm.operations import bytes_sent
from ltx.comm.pickling import opened, sealed
from ltx.comm.recovery import BackwardPass, nested_run
from ltx.comm.registry import (
    InBackground,
    InGroups,
    axis_from_group,
    close_axis,
    open_axes,
    open_axis,
    resolve,
    size_and_rank,
)
from ltx.comm.signature import Agreement, Signature, list_values, mismatch
from ltx.comm.step_summary import SUMMARY_BYTES, PendingSummary, StepSummary, begin_pass, end_pass, read_last_summary
from ltx.comm.store_exchange import StoreExchange, poll_until
from ltx.comm.timeline import Event, Span, Trace
from ltx.comm.turns import ThreadComm, Turns
from ltx.comm.work import Work

__all__ = [
    "DEFAULT_HEARTBEAT_S",
    "SUMMARY_BYTES",
    "Agreement",
    "AxisComm",
    "BackwardPass",
    "Channel",
    "Checks",
    "Event",
    "HostCopy",
    "InBackground",
    "InGroups",
    "Network",
    "PendingSummary",
    "Signature",
    "Span",
    "StepSummary",
    "StoreExchange",
    "ThreadComm",
    "Trace",
    "Turns",
    "Work",
    "axis_from_group",
    "begin_pass",
    "bytes_sent",
    "close_axis",
    "debug_checks",
    "end_pass",
    "list_values",
    "measure_network",
    "measured",
    "mismatch",
    "nested_run",
    "open_axes",
    "open_axis",
    "opened",
    "poll_until",
    "read_last_summary",
    "record",
    "resolve",
    "sealed",
    "size_and_rank",
    "span",
    "to_device",
]
