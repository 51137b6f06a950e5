"""Random models and runs, each held against a plain loop; see docs/fuzzing.md."""

from penstock.testing.fuzz.telling import Told, check, differences, merged, parts, tensors

__all__ = ["Told", "check", "differences", "merged", "parts", "tensors"]
