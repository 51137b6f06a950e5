"""Cut a model by the calls of its modules: every stage runs the author's own forward.

A *unit* is a module that is placed as a whole. In a stage the units of other stages are not run: what they
would have returned is known from an analysis of the call without data (``recorder``), which also tells which
tensors each stage needs from earlier ones (``routing``). What the author's code does between the units is
done by the stage that can know it first. Nothing is changed in the model but while a stage runs.
"""

from penstock.partition.calls.cut import cut_calls, cut_points, units_in_order

__all__ = ["cut_calls", "cut_points", "units_in_order"]
