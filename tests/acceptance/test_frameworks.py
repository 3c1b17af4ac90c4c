"""The examples for Lightning and Hugging Face, where these are installed: two workers, resumed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from textwrap import indent

import pytest
import torch

ROOT = Path(__file__).parents[2]
LIGHTNING, HUGGING_FACE = (ROOT / "examples" / name for name in ("lightning_fit.py", "hugging_face.py"))
TIMEOUT_S = 250


def run(program: Path, folder: Path, *epochs: int) -> None:
    """Run the program once for each number of epochs; later ones go on from the files of the earlier."""
    folder.mkdir()
    for number in epochs:
        words = [
            sys.executable,
            "-m",
            "kvdist_launch",
            "-n",
            "2",
            "-s",
            "2",
            "--",
            sys.executable,
            str(program),
            str(number),
        ]
        done = subprocess.run(words, cwd=folder, timeout=TIMEOUT_S, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def assert_equal(one, other):
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_equal(one[name], other[name])
    elif isinstance(one, list | tuple):
        for mine, theirs in zip(one, other, strict=True):
            assert_equal(mine, theirs)
    else:
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_what_the_page_shows_of_the_examples_is_in_them():
    page = (ROOT / "docs" / "pytorch.md").read_text("utf-8")
    shown = [indent(body, "    ") for body in re.findall(r"^```py\n(.*?)^```$", page, re.M | re.S)]
    assert [LIGHTNING.read_text().count(body) + HUGGING_FACE.read_text().count(body) for body in shown] == [1, 1]


@pytest.mark.slow
def test_a_run_of_lightning_goes_on_with_the_same_bits(tmp_path):
    pytest.importorskip("lightning")
    run(LIGHTNING, tmp_path / "whole", 2)
    run(LIGHTNING, tmp_path / "resumed", 1, 2)
    whole, resumed = (torch.load(tmp_path / name / "last.ckpt", weights_only=False) for name in ("whole", "resumed"))
    assert whole["global_step"] == 10
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert_equal(whole[part], resumed[part])


@pytest.mark.slow
def test_a_run_of_hugging_face_goes_on_with_the_same_bits_and_all_workers_have_the_same_weights(tmp_path):
    pytest.importorskip("transformers")
    run(HUGGING_FACE, tmp_path / "whole", 2)
    run(HUGGING_FACE, tmp_path / "resumed", 1, 2)
    wanted = tmp_path / "whole" / "run-0" / "checkpoint-10"
    for rank in (0, 1):
        resumed = tmp_path / "resumed" / f"run-{rank}" / "checkpoint-10"
        assert (resumed / "model.safetensors").read_bytes() == (wanted / "model.safetensors").read_bytes()
        states = [torch.load(folder / "optimizer.pt") for folder in (wanted, resumed)]
        assert_equal(*states)
