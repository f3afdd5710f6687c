"""The one door to the network: every collective of every layer is issued through here."""

from ltx.comm.axis_comm import AxisComm
from ltx.comm.channel import Channel, Work
from ltx.comm.debug import Checks, debug_checks
from ltx.comm.events import Event, Span
from ltx.comm.heartbeat import DEFAULT_HEARTBEAT_S
from ltx.comm.ledger import record, span
from ltx.comm.measure import measure_network, measured
from ltx.comm.network import Network
from ltx.comm.notes import Notes
from ltx.comm.operations import bytes_sent
from ltx.comm.recovery import BackwardPass, nested_run
from ltx.comm.registry import axis_from_group, close_axis, open_axes, open_axis, resolve, size_and_rank
from ltx.comm.signature import Agreement, Signature, list_values, mismatch
from ltx.comm.signed_messages import opened, sealed
from ltx.comm.step_summary import SUMMARY_BYTES, PendingSummary, StepSummary, send_summary
from ltx.comm.thread_comm import ThreadComm
from ltx.comm.timeline import Trace
from ltx.comm.turns import Turns

__all__ = [
    "DEFAULT_HEARTBEAT_S",
    "SUMMARY_BYTES",
    "Agreement",
    "AxisComm",
    "BackwardPass",
    "Channel",
    "Checks",
    "Event",
    "Network",
    "Notes",
    "PendingSummary",
    "Signature",
    "Span",
    "StepSummary",
    "ThreadComm",
    "Trace",
    "Turns",
    "Work",
    "axis_from_group",
    "bytes_sent",
    "close_axis",
    "debug_checks",
    "list_values",
    "measure_network",
    "measured",
    "mismatch",
    "nested_run",
    "open_axes",
    "open_axis",
    "opened",
    "record",
    "resolve",
    "sealed",
    "send_summary",
    "size_and_rank",
    "span",
]
