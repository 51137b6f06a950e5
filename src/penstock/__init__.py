"""Penstock: pipeline parallelism for PyTorch."""
