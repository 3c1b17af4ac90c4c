"""How messages name keys."""

import copy
import json
import re
from pathlib import Path

from kvdist.naming import NamedKey, minority_first, name_of, names_of, waiting, who_says_what, workers_of

ROOT = Path(__file__).parent.parent


def test_a_key_is_called_as_its_user_did():
    assert [name_of(key) for key in (3, "fc1", NamedKey(3, "'layer1.weight'"))] == [
        "key 3",
        "key 'fc1'",
        "'layer1.weight'",
    ]
    assert names_of(["fc1"]) == "key 'fc1'"
    assert names_of([1, NamedKey(2, "'w'")]) == "2 keys (1, 'w')"
    assert names_of([1, 2, 3], 7) == "7 keys (1, 2, 3, …)"
    assert waiting(10.66, "worker-1", "push 'w' (step 12)") == "waiting 10.7 s for worker-1 to push 'w' (step 12)"


def test_workers_that_say_the_same_stand_together_and_the_fewest_first():
    said = [(3, "a"), (0, "a"), (2, "b"), (1, "a")]
    assert minority_first(said) == [("worker-2", "b"), ("worker-0, worker-1 and worker-3", "a")]
    assert who_says_what([(1, "b"), (0, "a")]) == "worker-0 says: a; worker-1 says: b"
    assert workers_of(range(30)).endswith("worker-6, worker-7 and 22 more")


def test_a_named_key_takes_the_place_of_its_number():
    key = NamedKey(7, "'w'")
    assert key == 7 and {7: "there"}[key] == "there" and f"{key} {key!r} {json.dumps([key])}" == "7 7 [7]"
    assert [name_of(one) for one in (copy.copy(key), copy.deepcopy([key])[0])] == ["'w'"] * 2


def test_every_message_asks_for_the_name_of_a_key():
    """`key {key!r}` says a number where the user has given a name."""
    for path in (ROOT / "kvdist").rglob("*.py"):
        found = re.findall(r"\bkey \{[^{}!\[]+!r\}", path.read_text("utf-8"))
        assert not found or path.name == "naming.py", f"{path} has {found}: use kvdist.naming.name_of"
