"""The one door to the network: every collective of every layer is issued through here."""

from ltx.wire.channel import Channel as Channel
from ltx.wire.channel import Ticket as Ticket
from ltx.wire.debug import Checks as Checks
from ltx.wire.debug import debug_checks as debug_checks
from ltx.wire.header import HEADER_BYTES as HEADER_BYTES
from ltx.wire.header import Header as Header
from ltx.wire.header import HeaderTicket as HeaderTicket
from ltx.wire.header import send_header as send_header
from ltx.wire.ledger import Event as Event
from ltx.wire.ledger import Trace as Trace
from ltx.wire.ledger import record as record
from ltx.wire.line import Line as Line
from ltx.wire.line import axis_from_group as axis_from_group
from ltx.wire.line import close_axis as close_axis
from ltx.wire.line import open_axes as open_axes
from ltx.wire.line import open_axis as open_axis
from ltx.wire.line import resolve as resolve
from ltx.wire.line import size_and_rank as size_and_rank
from ltx.wire.operations import bytes_sent as bytes_sent
from ltx.wire.passes import BackwardPass as BackwardPass
from ltx.wire.passes import nested_run as nested_run
from ltx.wire.signature import Agreement as Agreement
from ltx.wire.signature import Signature as Signature
from ltx.wire.signature import list_values as list_values
from ltx.wire.signature import mismatch as mismatch
