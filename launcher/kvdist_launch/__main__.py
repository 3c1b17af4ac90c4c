"""The commands ``kvdist-launch``, which ``python -m kvdist_launch`` is too, and ``kvdist-run``.

They can be interrupted while they import the rest.
"""

from __future__ import annotations

from kvdist_launch.start import begin, end


def launch() -> int:
    """Be ``kvdist-launch``. Returns the exit code."""
    begin("kvdist-launch")
    from kvdist_launch.cli import main

    return end(main())


def run() -> int:
    """Be ``kvdist-run``. Returns the exit code."""
    begin("kvdist-run")
    from kvdist_launch.run_cli import main

    return end(main())


if __name__ == "__main__":
    raise SystemExit(launch())
