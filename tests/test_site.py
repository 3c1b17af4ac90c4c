"""The documentation as a site, by the command of ``make docs``: no warning, and a menu with a name for each page."""

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


def build(folder: Path, *more: str, config: str | None = None) -> subprocess.CompletedProcess[str]:
    """Build the site into a folder as ``make docs`` does."""
    (line,) = re.findall(r"^\t@(.*) -m mkdocs (build .*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    variables = dict(word.split("=", 1) for word in line[0].split() if "=" in word)
    argv = [sys.executable, "-m", "mkdocs", *shlex.split(line[1]), "--site-dir", str(folder), *more]
    return subprocess.run(
        argv, cwd=ROOT, env={**os.environ, **variables}, input=config, capture_output=True, text=True, timeout=TIMEOUT_S
    )


def test_the_site_is_built_without_a_warning_and_each_page_has_a_name_in_the_menu(tmp_path):
    done = build(tmp_path)
    assert (done.returncode, "Documentation built" in done.stderr) == (0, True), done.stderr
    assert not re.search("WARNING|ERROR", done.stdout + done.stderr), done.stderr
    start = (tmp_path / "index.html").read_text("utf-8")
    menu = re.findall(r'<span class="md-ellipsis">\s*(.*?)\s*</span>', start, re.DOTALL)
    assert len(menu) > 40 and {"", "None"}.isdisjoint(menu), menu
    assert f"kvdist {__version__}" in start and 'href="unequal.html"' in start
    texts = {path.name: path.read_text("utf-8") for path in tmp_path.rglob("*.html")}
    away = {name for name, text in texts.items() if re.search(r'href="https://[^"]*/(blob|raw)/main/docs/', text)}
    assert away == set(), "a page of the site is linked to by its address in the repository"


def test_a_page_that_is_not_there_and_an_argument_that_is_not_described_fail_the_build(tmp_path):
    config = (ROOT / "mkdocs.yml").read_text("utf-8")
    extension, entry = "            extensions: [docs/signatures.py]\n", "      - reliability.md\n"
    assert config.count(extension) == config.count(entry) == 1
    broken = config.replace(extension, "").replace(entry, entry + "      - gone.md\n")
    done = build(tmp_path, "--config-file", "-", config=broken)
    assert done.returncode == 1 and "warnings in strict mode" in done.stdout + done.stderr, done
    assert "'gone.md' is included in the 'nav' configuration" in done.stderr
    assert "griffe: " in done.stderr and "does not appear in the function signature" in done.stderr
