"""Draw the memory that a stage holds while microbatches go through F, I and W, as measured.

``python -m benchmarks.backward_picture`` writes the picture of ``docs/backward.md``.
"""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.backward import MICROBATCHES, WAYS, finish, kept_by, stage_of
from benchmarks.live import LiveBytes

PICTURE = Path("docs/backward/memory.svg")
WAYS_SHOWN = {
    "peer": ("torch.distributed.pipelining", "#999999"),
    "plain": ("a full backward in I", "#e69f00"),
    "split": ("Penstock's halves", "#0072b2"),
}
LEFT, TOP, WIDTH, HEIGHT = 64, 34, 560, 240
STEPS = 3 * MICROBATCHES


def measure(name: str, width: int) -> list[float]:
    """MiB alive before the first action and after each: all F, then all I, then all W."""
    stage = stage_of(width)
    probe, way = LiveBytes(), WAYS[name](stage)
    finish(way)
    found = [0.0]

    def look() -> None:
        found.append(probe.count(kept_by(stage)) / 2**20)

    with probe:
        made, states = [], []
        for _ in range(MICROBATCHES):
            made.append(way.forward())
            look()
        for _ in range(MICROBATCHES):
            states.append(way.input_half(made.pop(0)))
            look()
        for _ in range(MICROBATCHES):
            way.weight_half(states.pop(0))
            look()
    return found


def draw(lines: dict[str, list[float]]) -> str:
    """The picture as SVG."""
    top = max(max(line) for line in lines.values()) * 1.05
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 16} {TOP + HEIGHT + 48}" '
        'font-family="sans-serif" font-size="12" fill="#333">',
        "<title>Memory a stage holds during F, I and W of six microbatches</title>",
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    parts += [
        _phase(index, name)
        for index, name in enumerate(("forward", "inputs' half", "weights' half"))
    ]
    parts += [_rule(value, top) for value in range(0, int(top), 200)]
    parts += [_line(name, line, top) for name, line in lines.items()]
    parts += [_legend(index, name) for index, name in enumerate(lines)]
    return "\n".join([*parts, "</svg>", ""])


def _x(step: float) -> float:
    return round(LEFT + WIDTH * step / STEPS, 1)


def _y(value: float, top: float) -> float:
    return round(TOP + HEIGHT * (1 - value / top), 1)


def _phase(index: int, name: str) -> str:
    left, width = _x(index * MICROBATCHES), _x(MICROBATCHES) - LEFT
    shade = "#f4f6f8" if index % 2 == 0 else "#fff"
    middle, below = left + width / 2, TOP + HEIGHT + 18
    return (
        f'<rect x="{left}" y="{TOP}" width="{width:.1f}" height="{HEIGHT}" fill="{shade}"/>'
        f'<text x="{middle:.1f}" y="{below}" text-anchor="middle">'
        f"{MICROBATCHES} microbatches: {name}</text>"
    )


def _rule(value: int, top: float) -> str:
    y = _y(value, top)
    return (
        f'<path d="M{LEFT} {y}H{LEFT + WIDTH}" stroke="#ddd"/>'
        f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{value} MiB</text>'
    )


def _line(name: str, line: list[float], top: float) -> str:
    points = " ".join(f"{_x(step)},{_y(value, top)}" for step, value in enumerate(line))
    dash = ' stroke-dasharray="6 4"' if name == "plain" else ""
    color = WAYS_SHOWN[name][1]
    return f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2.5"{dash}/>'


def _legend(index: int, name: str) -> str:
    label, color = WAYS_SHOWN[name]
    x = LEFT + index * 210
    return (
        f'<rect x="{x}" y="12" width="12" height="12" fill="{color}"/>'
        f'<text x="{x + 18}" y="22">{label}</text>'
    )


def main() -> None:
    """Measure and write the picture."""
    torch.set_num_threads(1)
    lines = {name: measure(name, 512) for name in WAYS_SHOWN}
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(draw(lines))
    print({name: [round(value) for value in line[::MICROBATCHES]] for name, line in lines.items()})


if __name__ == "__main__":
    main()
