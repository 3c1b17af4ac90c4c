"""``did you mean ...?``"""

from __future__ import annotations

from kvdist.config.suggestions import did_you_mean
from tests.cases import each

STORES = ["local", "device", "dist", "dist_sync", "dist_async", "collective"]


@each(
    "word, question",
    [
        ("dist_asinc", "did you mean dist_async or dist_sync?"),
        ("dst", "did you mean dist?"),
        ("Colective", "did you mean collective?"),
        ("sync", "did you mean dist_sync or dist_async?"),  # a part of both
        ("coll", "did you mean collective?"),  # its beginning
        ("banana", ""),
        ("", ""),
        (" ", ""),
    ],
)
def test_a_word_is_like_those_with_its_letters_and_those_that_it_is_a_part_of(word, question):
    assert did_you_mean(word, STORES) == question


def test_known_words_are_shown_as_the_caller_says_and_none_twice():
    shown = {"-n": "-n WORKERS", "--num-workers": "-n WORKERS", "--hidden": ""}
    assert did_you_mean("--num", shown) == "did you mean -n WORKERS?"
    assert did_you_mean("--hiden", shown) == ""
