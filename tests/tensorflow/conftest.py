"""What the tests of TensorFlow share. They run in an environment of their own, by ``make test-tensorflow``."""

from __future__ import annotations

import importlib.util
import os

import pytest

from tests.collective.conftest import descriptors_of_the_process  # noqa: F401 (a fixture)

if importlib.util.find_spec("tensorflow") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    # Before TensorFlow is imported, which otherwise says much about the machine.
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    os.environ["KERAS_BACKEND"] = "tensorflow"
    # Ranks are threads of one process here, and an operation in a function keeps one of TensorFlow's while it waits.
    os.environ["TF_NUM_INTEROP_THREADS"] = "8"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say aloud what nobody ran."""
    if importlib.util.find_spec("tensorflow") is None:
        terminalreporter.write_line("LEFT OUT: tests/tensorflow, without TensorFlow; `make test-tensorflow` runs them")
