"""What is usual in a program, so that nobody has to be asked."""

from kvdist.collective import consistency
from kvdist.collective.consistency import PAST, ResponseCache


def digest(name):
    return name.encode().rjust(8, b"\0")


def run(it, names):
    """Which of these the program begins without asking."""
    usual = ""
    for name in names:
        is_usual = it.begin(digest(name))
        usual += name if is_usual else "."
        if not is_usual:
            it.agree(digest(name))
    return usual


def test_what_was_agreed_on_behind_the_same_operation_is_usual():
    assert run(ResponseCache(), "abababa") == "...baba"


def test_what_was_called_and_not_agreed_on_changes_nothing():
    it = ResponseCache()
    run(it, "abab")
    assert not it.begin(digest("b")) and not it.begin(digest("c"))
    assert run(it, "abab") == "abab"


def test_where_several_have_come_the_last_operations_tell():
    it = ResponseCache()
    step = "aab" * (PAST // 3) + "m"  # behind one "a" comes another, or "b"; behind "b" comes "a", or "m"
    run(it, step * 3)
    assert run(it, step * 3) == step * 3


def test_where_even_these_do_not_tell_the_others_are_asked_each_time():
    it = ResponseCache()
    epoch = "ab" * PAST
    run(it, epoch + "m" + epoch + epoch)
    for _ in range(3):
        assert run(it, "m")[0] == "."
        assert run(it, epoch)[-1] == "b"
        assert run(it, "a")[0] == "."
        assert run(it, "b" + epoch)[-1] == "b"


def test_whatever_two_ranks_call_where_they_differ_is_usual_for_one_at_most():
    words = ["abac", "abab", "aaab", "mabc", "abcabd"]
    for first in words:
        for second in words:
            for x in "abcdm":
                for y in "abcdm":
                    ranks = ResponseCache(), ResponseCache()
                    assert run(ranks[0], first * 6 + second * 5) == run(ranks[1], first * 6 + second * 5)
                    assert x == y or run(ranks[0], x) == "." or run(ranks[1], y) == "."


def test_a_program_whose_names_never_end_is_forgotten_now_and_then(monkeypatch):
    monkeypatch.setattr(consistency, "STEPS_MAX", 10)
    it = ResponseCache()
    for number in range(100):
        assert run(it, [str(number)]) == "."
        assert len(it._next) <= 22


def test_after_a_difference_everything_is_new():
    it = ResponseCache()
    run(it, "abab")
    it.restart()
    assert run(it, "abab") == "...b"
