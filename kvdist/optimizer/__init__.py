"""Optimizers that run where the weights live: in local stores and on servers."""

from kvdist.optimizer.accumulating import AdaDelta, AdaGrad, GroupAdaGrad, RMSProp
from kvdist.optimizer.adaptive import AdaBelief, Adam, Adamax, AdamW, Nadam
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.follow_leader import FTML, Ftrl
from kvdist.optimizer.gradient_descent import DCASGD, NAG, SGD, Signum, Test
from kvdist.optimizer.langevin import SGLD
from kvdist.optimizer.layerwise import LAMB, LANS, LARS
from kvdist.optimizer.registry import create, from_description, register
from kvdist.optimizer.states import SliceState
from kvdist.optimizer.step import Extent, Step
from kvdist.optimizer.updater import Updater

__all__ = [
    "DCASGD",
    "FTML",
    "LAMB",
    "LANS",
    "LARS",
    "NAG",
    "SGD",
    "SGLD",
    "AdaBelief",
    "AdaDelta",
    "AdaGrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Extent",
    "Ftrl",
    "GroupAdaGrad",
    "Nadam",
    "Optimizer",
    "RMSProp",
    "Signum",
    "SliceState",
    "Step",
    "Test",
    "Updater",
    "create",
    "from_description",
    "register",
]
