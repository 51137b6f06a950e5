"""The colours of the ops, told apart by colour-blind eyes too."""

from __future__ import annotations

from penstock.schedule.action import Op

# Okabe and Ito, "Color Universal Design", 2008: eight colours that every kind of colour vision separates.
COLOURS = {Op.F: "#56b4e9", Op.I: "#e69f00", Op.W: "#009e73", Op.B: "#cc79a7"}
OTHER = "#999999"
NAMES = {
    Op.F: "forward",
    Op.I: "input backward",
    Op.W: "weight backward",
    Op.B: "full backward",
}
RESET = "\x1b[0m"
PALEST = 0.6
"""How far towards white the last of several stages on a rank goes."""


def colour(op: Op, place: int = 0, places: int = 1) -> str:
    """The colour of an op on the ``place``-th of a rank's ``places`` stages: later ones are paler."""
    white = PALEST * place / max(1, places - 1)
    parts = (int(COLOURS.get(op, OTHER)[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)


def painted(text: str, op: Op) -> str:
    """A text on the colour of an op, for a terminal of 256 colours."""
    red, green, blue = (round(int(colour(op)[at : at + 2], 16) / 51) for at in (1, 3, 5))
    return f"\x1b[30;48;5;{16 + 36 * red + 6 * green + blue}m{text}{RESET}"
