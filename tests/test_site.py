"""The documentation as a site, by the command of ``make docs``: what fails it, and a menu with a name for each page."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvdist.version import __version__

pytest.importorskip("mkdocs", reason="THE SITE IS NOT BUILT: pip install -e '.[docs]'")

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 800.0

pytestmark = pytest.mark.timeout(TIMEOUT_S + 20)


def build(folder: Path, config: str) -> subprocess.CompletedProcess[str]:
    """Build the site into a folder as ``make docs`` does, but with another configuration."""
    (line,) = re.findall(r"^\t@(.*) -m mkdocs (build .*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    variables = dict(word.split("=", 1) for word in line[0].split() if "=" in word)
    argv = [sys.executable, "-m", "mkdocs", *shlex.split(line[1]), "--site-dir", str(folder), "--config-file", "-"]
    return subprocess.run(
        argv, cwd=ROOT, env={**os.environ, **variables}, input=config, capture_output=True, text=True, timeout=TIMEOUT_S
    )


def test_a_missing_page_and_an_argument_that_is_not_described_fail_the_build_and_all_pages_have_names_in_the_menu(
    tmp_path,
):
    """One build of 17 seconds shows both: warnings are counted when the pages are written.

    That the site is built without a warning is what ``make docs`` shows.
    """
    config = (ROOT / "mkdocs.yml").read_text("utf-8")
    extension, entry = "            extensions: [docs/signatures.py]\n", "      - reliability.md\n"
    assert config.count(extension) == config.count(entry) == 1
    done = build(tmp_path, config.replace(extension, "").replace(entry, entry + "      - Gone: gone.md\n"))
    assert done.returncode == 1 and "warnings in strict mode" in done.stdout + done.stderr, done
    warnings = re.findall(r"^(?:WARNING|ERROR) +- +(.*)$", done.stderr, re.MULTILINE)
    (missing,) = [text for text in warnings if not text.startswith("griffe: ")]
    assert "'gone.md' is included in the 'nav' configuration" in missing
    assert any("does not appear in the function signature" in text for text in warnings)
    start = (tmp_path / "index.html").read_text("utf-8")
    menu = re.findall(r'<span class="md-ellipsis">\s*(.*?)\s*</span>', start, re.DOTALL)
    assert len(menu) > 40 and {"", "None"}.isdisjoint(menu), menu
    assert f"kvdist {__version__}" in start and 'href="unequal.html"' in start
    texts = {path.name: path.read_text("utf-8") for path in tmp_path.rglob("*.html")}
    away = {name for name, text in texts.items() if re.search(r'href="https://[^"]*/(blob|raw)/main/docs/', text)}
    assert away == set(), "a page of the site is linked to by its address in the repository"
