"""Optimizers that run in the process that holds the weights: in local stores and on servers."""

from kvdist.optimizer.adagrad import AdaDelta, AdaGrad, GroupAdaGrad, RMSProp
from kvdist.optimizer.adam import AdaBelief, Adam, Adamax, AdamW, Nadam
from kvdist.optimizer.base import Extent, Optimizer, Step
from kvdist.optimizer.ftrl import FTML, Ftrl
from kvdist.optimizer.layerwise import LAMB, LANS, LARS
from kvdist.optimizer.registry import create, from_description, register
from kvdist.optimizer.sgd import DCASGD, NAG, SGD, SGLD, Signum, Test
from kvdist.optimizer.states import SliceState
from kvdist.optimizer.torch_rules import TorchRule
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
    "TorchRule",
    "Updater",
    "create",
    "from_description",
    "register",
]
