"""What the tests of Keras on the torch backend share; Keras is imported by the first of them, not by collecting."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import pytest

from tests.collective.conftest import descriptors_of_the_process  # noqa: F401 (a fixture)


@pytest.fixture(scope="session")
def keras(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Keras on the torch backend, whatever the user's own settings are."""
    pytest.importorskip("torch")
    if importlib.util.find_spec("keras") is None:
        pytest.skip("Keras is not installed")
    os.environ["KERAS_BACKEND"] = "torch"
    os.environ["KERAS_HOME"] = str(tmp_path_factory.mktemp("keras"))
    return importlib.import_module("keras")


@pytest.fixture(scope="session")
def hvd(keras: Any) -> Any:
    """`kvdist.keras` under the name that scripts give it."""
    return importlib.import_module("kvdist.keras")
