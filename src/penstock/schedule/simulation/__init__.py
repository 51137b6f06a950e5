"""Simulated time: costs in, times, bubbles and memory out."""

from penstock.schedule.simulation.costs import Costs
from penstock.schedule.simulation.simulate import Gap, Simulation, replay, simulate

__all__ = ["Costs", "Gap", "Simulation", "replay", "simulate"]
