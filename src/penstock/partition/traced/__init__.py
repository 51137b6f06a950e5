"""Cut a model into stages along the graph of a call, made by ``torch.export``."""

from penstock.partition.traced.blocks import Balance, Block, cut_into, weigh_blocks
from penstock.partition.traced.marks import Point, SplitPoint, pipe_split
from penstock.partition.traced.stages import TracedCut, TracedStage, cut_traced, summary
from penstock.partition.traced.traces import Cuts, Traces

__all__ = [
    "Balance",
    "Block",
    "Cuts",
    "Point",
    "SplitPoint",
    "TracedCut",
    "TracedStage",
    "Traces",
    "cut_into",
    "cut_traced",
    "pipe_split",
    "summary",
    "weigh_blocks",
]
