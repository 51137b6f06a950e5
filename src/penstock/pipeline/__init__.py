"""The pipeline: how it is set up, and what its calls do."""

from penstock.pipeline.pipeline import Pipeline

__all__ = ["Pipeline"]
