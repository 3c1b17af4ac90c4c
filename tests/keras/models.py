"""Small models and data for the tests of Keras."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

SAMPLES, FEATURES = 24, 3

of_keras = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning",
)
"""For every test: this is how Keras 3.15 makes arrays of torch's tensors, of which NumPy 2 disapproves."""


def linear(keras: Any, optimizer: Any, seed: int = 0, **compiling: Any) -> Any:
    """y = w x + b, compiled; the same weights for the same seed."""
    initializer = keras.initializers.RandomNormal(seed=seed)
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1, kernel_initializer=initializer)])
    model.compile(optimizer=optimizer, loss="mse", **compiling)
    return model


def data(rank: int = 0, size: int = 1) -> tuple[Any, Any]:
    """One rank's part of the samples."""
    generator = np.random.default_rng(7)
    x = generator.normal(size=(SAMPLES, FEATURES)).astype("float32")
    y = x @ np.array([[1.0], [-2.0], [0.5]], "float32") + 1
    return x[rank::size], y[rank::size]


def weights(model: Any) -> list[Any]:
    """The weights as copies."""
    return [array.copy() for array in model.get_weights()]
