"""Start one process per rank on this machine; when one fails, end the others."""

from penstock.launch.launcher import Launcher, Outcome, launch

__all__ = ["Launcher", "Outcome", "launch"]
