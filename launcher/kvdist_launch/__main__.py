"""``python -m kvdist_launch``: the same as the command ``kvdist-launch``."""

from __future__ import annotations

from kvdist_launch.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
