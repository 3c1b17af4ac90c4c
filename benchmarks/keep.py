"""Keeps what a benchmark prints in ``benchmarks/results/``, for the pages of docs/measured/ that quote its figures.

    python benchmarks/keep.py startup
    python benchmarks/keep.py failure --repeats 20

runs ``benchmarks/startup.py`` or ``benchmarks/failure.py`` with these options, shows its lines, and writes them to
``results/startup.txt`` or ``results/failure.txt`` below the command, the day, and the machine with its load before.
Benchmarks with an option ``--write`` or ``--save`` write their own tables, and need no copy of their lines.
"""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path

from cluster import end_on_terminate, machine

FOLDER = Path(__file__).resolve().parent


def main() -> None:
    if len(sys.argv) < 2 or not (script := FOLDER / f"{sys.argv[1]}.py").is_file():
        sys.exit(f"{__doc__}\nThe first word must name a script of {FOLDER}, without .py.")
    name, *options = sys.argv[1:]
    end_on_terminate()
    described = ", ".join(
        f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}"
        for key, value in machine().items()
        if key != "system"
    )
    lines = [f"$ python benchmarks/{' '.join([name + '.py', *options])}", f"# {datetime.date.today()}; {described}"]
    with subprocess.Popen([sys.executable, str(script), *options], stdout=subprocess.PIPE, text=True) as run:
        for line in run.stdout or ():
            print(line, end="", flush=True)
            lines.append(line.rstrip("\n"))
    if run.returncode:
        sys.exit(f"{script.name} ended with code {run.returncode}, so nothing was written")
    (FOLDER / "results" / f"{name}.txt").write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
