"""Measurements of Penstock, side by side with ``torch.distributed.pipelining``: ``make bench``."""
