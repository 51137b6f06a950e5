"""Messages between ranks that are processes, over gloo, NCCL, and sockets for small ones."""

from penstock.transport.groups import FIRST_TAG, Arrival, Circle, Transport, launched

__all__ = ["FIRST_TAG", "Arrival", "Circle", "Transport", "launched"]
