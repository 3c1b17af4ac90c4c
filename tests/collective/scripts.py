"""Scripts in the shape of Horovod's examples, started by `kvdist-run` as those are by horovodrun."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.integration.processes import TIMEOUT_S, Job


def horovodrun(
    job: Job, folder: Path, script: Path, *arguments: object, ranks: int = 2, timeout_s: float = TIMEOUT_S
) -> list[dict[str, str]]:
    """Run a script in a folder; of each rank what it says of itself, once all have the same weights."""
    command = [sys.executable, str(script), *map(str, arguments)]
    words = ["-m", "kvdist_launch.run_cli", "-np", str(ranks), "--", *command]
    # What TensorFlow and torch compile they leave behind: TensorFlow beside a temporary file, torch in a folder.
    left = {"PYTHONDONTWRITEBYTECODE": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    launcher = job.start("launcher", ["env", "-C", str(folder), sys.executable, *words], **left)
    job.succeed(timeout_s)
    return reports(launcher.text, ranks)


def reports(text: str, ranks: int) -> list[dict[str, str]]:
    """What each rank has said of itself in a text, once all have told the same digest."""
    assert len(set(re.findall(r"digest (\S+)", text))) == 1, text
    said = sorted(re.findall(r"rank (\d) of (\d): (.*)$", text, re.MULTILINE))
    assert [line[:2] for line in said] == [(str(rank), str(ranks)) for rank in range(ranks)], text
    return [dict(zip(words[::2], words[1::2], strict=True)) for words in (line[2].split() for line in said)]
