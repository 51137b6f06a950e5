"""The traced pipe where torch has it."""

from penstock.pipelining.pipe import Pipe
from penstock.pipelining.split import SplitPoint, pipe_split, pipeline
from penstock.pipelining.stage import PipeInfo

__all__ = ["Pipe", "PipeInfo", "SplitPoint", "pipe_split", "pipeline"]
