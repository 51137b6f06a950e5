"""What carries messages between ranks that are processes: gloo, NCCL, and sockets for small messages."""

from penstock.transport.groups import FIRST_TAG, Arrival, Circle, Transport, launched

__all__ = ["FIRST_TAG", "Arrival", "Circle", "Transport", "launched"]
