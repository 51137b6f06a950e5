"""Timelines drawn: as SVG for a browser, as text for a terminal."""

from penstock.schedule.drawing.svg import draw_svg
from penstock.schedule.drawing.text import draw_text

__all__ = ["draw_svg", "draw_text"]
