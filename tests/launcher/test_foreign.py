"""Text of other machines in the launcher's own sentences."""

from __future__ import annotations

import pytest

from kvdist_launch.output import TEXT_MAX, all_printable, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("d1: Größe 3 │ ok", "d1: Größe 3 │ ok"),
        ("\x1b]0;title\x07\x1b[2Jred", "\\x1b]0;title\\x07\\x1b[2Jred"),
        ("a\r\nb\tc\x00", "a\\r\\nb\\tc\\x00"),
        ("\x9b1m \u202e \udcff", "\\x9b1m \\u202e \\udcff"),
        ("x" * 3 * TEXT_MAX, "x" * TEXT_MAX),
        ("", ""),
    ],
)
def test_what_cannot_be_seen_is_escaped_and_what_goes_on_for_ever_is_cut(text, shown):
    assert printable(text) == shown


def test_every_text_of_an_answer_is_made_printable_and_the_rest_stays():
    answer = {"folder": {"problem": "\x1b[31m", "free_bytes": 7}, "listen": ["\x07", 1.5, None, True]}
    assert all_printable(answer) == {
        "folder": {"problem": "\\x1b[31m", "free_bytes": 7}, "listen": ["\\x07", 1.5, None, True],
    }  # fmt: skip
