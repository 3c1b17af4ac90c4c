"""Optimizers that run where the weights live: in local stores and on servers."""

from kvdist.optimizer.adaptive import Adam, AdamW
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.gradient_descent import NAG, SGD, Test
from kvdist.optimizer.registry import create, from_description, register
from kvdist.optimizer.updater import Updater

__all__ = ["create", "register", "from_description", "Optimizer", "Updater", "SGD", "NAG", "Adam", "AdamW", "Test"]
