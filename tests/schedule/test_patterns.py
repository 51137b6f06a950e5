"""Which actions a pattern means."""

from __future__ import annotations

import pytest

from penstock.errors import ScheduleError
from penstock.schedule import Action, matching, parse_action

TEXTS = [
    "0F0",
    "3F0",
    "3F1",
    "13F0",
    "3B0",
    "3I10",
    "3SEND_F0",
    "0SEND_F1@5",
    "0SEND_F1",
    "3UNSHARD",
]
ACTIONS = {text: parse_action(text) for text in TEXTS}


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("3F0", ["3F0"]),
        ("*F*", ["0F0", "3F0", "3F1", "13F0"]),
        ("*F0", ["0F0", "3F0", "13F0"]),
        ("3F*", ["3F0", "3F1"]),
        ("3*0", ["3F0", "3B0", "3SEND_F0"]),
        ("3*", ["3F0", "3F1", "3B0", "3I10", "3SEND_F0", "3UNSHARD"]),
        ("3**", ["3F0", "3F1", "3B0", "3I10", "3SEND_F0", "3UNSHARD"]),
        ("*", TEXTS),
        ("*UNSHARD", ["3UNSHARD"]),
        ("*UNSHARD*", ["3UNSHARD"]),
        ("*SEND_F*", ["3SEND_F0", "0SEND_F1@5", "0SEND_F1"]),
        ("0SEND_F1", ["0SEND_F1@5", "0SEND_F1"]),
        ("0SEND_F1@5", ["0SEND_F1@5"]),
        ("0SEND_F1@1", ["0SEND_F1"]),
        ("***@4", ["3SEND_F0"]),
        ("7F0", []),
    ],
)
def test_what_is_meant(pattern: str, meant: list[str]) -> None:
    matches = matching(pattern)
    found = [
        text for text, action in ACTIONS.items() if isinstance(action, Action) and matches(action)
    ]
    assert found == meant


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("", "matches no kind of action"),
        ("F0", "matches no kind of action"),
        ("3X0", "ops are F, I, W"),
        ("3f0", "matches no kind of action"),
        ("3F0 ", "matches no kind of action"),
        ("3?0", "matches no kind of action"),
        ("03F0", "matches no kind of action"),
        ("3F", r"3F\* means all"),
        ("3UNSHARD0", "once for all microbatches"),
        ("3F0@1", "not a message"),
    ],
)
def test_what_is_no_pattern(pattern: str, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        matching(pattern)
