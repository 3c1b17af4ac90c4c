"""docs/decisions/proof.md names tests that there are, and each rule of the protocol with the mutant that breaks it."""

from __future__ import annotations

import re
from pathlib import Path

from tests.core.test_simulation import MUTANTS
from tests.simulation import SCENARIOS

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "decisions" / "proof.md").read_text()
SCENARIO_TABLE, RULE_TABLE = PAGE.split("\n## Rules and their mutants\n")
IDENTIFIER = re.compile(r"^\| ([KPNSDCWLF][1-8]) ", re.MULTILINE)


def test_every_test_that_the_page_names_exists() -> None:
    there = {name for path in TESTS.rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
    rows = [row for row in SCENARIO_TABLE.splitlines() if IDENTIFIER.match(row)]
    named = {row: re.findall(r"`(test_\w+)`", row) for row in rows}
    assert len(rows) == 38 and all(named.values())
    assert {name for names in named.values() for name in names} <= there
    assert {*re.findall(r"`(test_\w+)`", RULE_TABLE)} <= there
    assert set(re.findall(r'"([a-z ]+)"', SCENARIO_TABLE)) <= set(SCENARIOS)


def test_the_page_has_each_rule_that_a_mutant_breaks() -> None:
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| (\d+) \|$", RULE_TABLE, re.MULTILINE)
    assert {(rule, scenario) for rule, scenario, _ in rows} == {(rule, one) for rule, (one, _) in MUTANTS.items()}
