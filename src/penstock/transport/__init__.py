"""How messages and agreements travel between ranks."""

from penstock.transport.base import BACKWARD, FORWARD, SHARED, Channel, Relay, Ticket, Transport
from penstock.transport.in_process import InProcessTransport, in_process
from penstock.transport.process_group import (
    Circle,
    ProcessGroupTransport,
    connect,
    launched,
)

__all__ = [
    "BACKWARD",
    "FORWARD",
    "SHARED",
    "Channel",
    "Circle",
    "InProcessTransport",
    "ProcessGroupTransport",
    "Relay",
    "Ticket",
    "Transport",
    "connect",
    "in_process",
    "launched",
]
