"""``did you mean ...?``: known words that are spelled like an unknown word."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

ALIKE = 0.75
"""Two words of at least this ratio of common letters are spelled alike (`difflib.SequenceMatcher.ratio`)."""
PART_MIN = 4
"""A word of at least so many letters also resembles words of which it is a part, as ``sync`` is of ``dist_sync``."""


def nearest(name: str, names: Iterable[str], ratio: float, most: int = 1) -> list[str]:
    """The names that are spelled most like a name, with at least this ratio of common letters, the nearest first."""
    from difflib import get_close_matches  # here, as few need it and every process would wait for it

    return get_close_matches(name, list(names), most, ratio)


def did_you_mean(word: str, known: Mapping[str, str] | Iterable[str], most: int = 2) -> str:
    """The question whether a known word was meant, such as ``did you mean dist_sync or dist_async?``.

    Args:
        word: the unknown word; upper and lower case are the same.
        known: the known words; or known word → how the question shows it.
        most: how many known words the question may have.

    Returns:
        The question; '' if no known word resembles `word`.
    """
    shown = known if isinstance(known, Mapping) else {one: one for one in known}
    candidates = {one.lower(): text for one, text in shown.items() if text}
    lowered = word.strip().lower()
    if not lowered:
        return ""
    longer = [one for one in candidates if one.startswith(lowered)]
    if not longer and len(lowered) >= PART_MIN:
        longer = [one for one in candidates if lowered in one]
    near = nearest(lowered, longer or candidates, 0.0 if longer else ALIKE, most)
    near = near or [one for one in candidates if sorted(one) == sorted(lowered)][:most]  # two letters changed places
    names = dict.fromkeys(candidates[one] for one in near)
    return f"did you mean {' or '.join(names)}?" if names else ""
