"""`python -m tests.simulation`, which runs many seeds on all cores."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

PROGRAM = """
import sys
from unittest import mock

from tests import simulation
from tests.core import test_simulation

names = ["storm", "calm", "two workers"]
simulation.SCENARIOS = {name: simulation.SCENARIOS.get(name, simulation.Scenario()) for name in names}
_, patches = test_simulation.MUTANTS["what comes twice is handled twice"]  # which calm weather does not show
for owner, name, function in patches:
    mock.patch.object(owner, name, function).start()
sys.exit(simulation.main(sys.argv[1:]))
"""


def test_a_violation_is_printed_with_the_command_that_repeats_it_and_ends_no_other_run(tmp_path: Path) -> None:
    program = tmp_path / "soak.py"
    program.write_text(textwrap.dedent(PROGRAM))
    # A process of its own, since this one may have threads, which a fork would lack.
    command = [sys.executable, str(program), "--total", "8", "--first", "0", "--processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(" in ")[0] for line in lines[-4:]] == [
        "storm: 3 runs", "calm: 3 runs", "two workers: 2 runs", "3 scenarios: 8 runs",
    ]  # fmt: skip
    commands = [line.strip() for line in lines if line.startswith("    python -m")]
    assert commands and all(one.startswith("python -m tests.simulation --scenario storm --seed ") for one in commands)
    assert lines[-1].endswith(f", {len(commands)} violations")
