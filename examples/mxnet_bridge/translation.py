"""MXNet's optimizers in kvdist's words: which of them do the same, and what to do about the others.

The equations of MXNet 1.9 are meant. kvdist has those of its last master, and where the two differ an optimizer is
refused rather than replaced by one that nearly does the same.

`lr_scheduler` is asked here, on the worker, at each push, so any schedule will do. It counts this worker's pushes of a
key: in a synchronous store that is the number of updates.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import mxnet as mx

from kvdist import optimizer as kvdist_optimizer

INSTEAD = "update_on_kvstore=False leaves the updates to MXNet, and kvdist makes the sums"


@dataclass(frozen=True)
class Rule:
    """How one of MXNet's optimizers is called in kvdist.

    Attributes:
        name: kvdist's.
        numbers: kvdist's hyper-parameters by the attributes of MXNet's object.
        constants: what MXNet has no attribute for.
        decays: whether weight decay acts alike in both.
        clips_decay: whether MXNet clips the gradient together with its decay, where kvdist clips before.
        has_rate: whether there is a learning rate at all.
    """

    name: str
    numbers: dict[str, str] = field(default_factory=dict)
    constants: dict[str, float] = field(default_factory=dict)
    decays: bool = True
    clips_decay: bool = False
    has_rate: bool = True


def same(*names: str) -> dict[str, str]:
    """Hyper-parameters with one name in both."""
    return {name: name for name in names}


MOMENTS = ("beta1", "beta2", "epsilon")
RULES = {
    "SGD": Rule("sgd", same("momentum")),
    "ccSGD": Rule("sgd", same("momentum")),
    "NAG": Rule("nag", same("momentum"), decays=False),
    "Signum": Rule("signum", same("momentum", "wd_lh")),
    "SGLD": Rule("sgld"),
    "DCASGD": Rule("dcasgd", same("momentum", "lamda"), decays=False),
    "Adam": Rule("adam", same(*MOMENTS), clips_decay=True),
    "Adamax": Rule("adamax", same("beta1", "beta2"), {"epsilon": 0.0}, clips_decay=True),
    "AdaDelta": Rule("adadelta", same("rho", "epsilon"), decays=False, has_rate=False),
    "RMSProp": Rule(
        "rmsprop",
        {"rho": "gamma1", "momentum": "gamma2", **same("epsilon", "centered", "clip_weights")},
        clips_decay=True,
    ),
    "Ftrl": Rule("ftrl", same("lamda1", "beta")),
    "FTML": Rule("ftml", same(*MOMENTS), clips_decay=True),
    "LAMB": Rule("lamb", same(*MOMENTS, "lower_bound", "upper_bound", "bias_correction")),
    "Test": Rule("test"),
}
"""By the class of MXNet."""

DIFFERENT = {
    "AdaGrad": "MXNet 1.9 has its eps inside the root and its decay beside it",
    "GroupAdaGrad": "MXNet 1.9 has its eps inside the root",
    "Nadam": "in MXNet 1.9 all parameters share one momentum schedule",
    "LARS": "MXNet 1.9 corrects the momentum when the rate changes, and tells biases by their names",
    "LBSGD": "kvdist does not have it",
}
"""What is not translated → why."""


def translated(optimizer: mx.optimizer.Optimizer) -> kvdist_optimizer.Optimizer:
    """An optimizer of kvdist that does the same.

    Its rates are 1, and each key's own are multipliers; `tell` keeps them up to date.

    Raises:
        TypeError: it is no optimizer of MXNet, or a class of somebody's own.
        ValueError: kvdist has none that does the same.
    """
    rule = rule_of(optimizer)
    if rule.name == "rmsprop" and not optimizer.centered:
        raise ValueError(f"RMSProp is not translated: MXNet 1.9 has its epsilon inside the root; {INSTEAD}")
    numbers = {ours: getattr(optimizer, theirs) for ours, theirs in rule.numbers.items()}
    return kvdist_optimizer.create(
        rule.name,
        learning_rate=1.0,
        wd=1.0,
        rescale_grad=optimizer.rescale_grad,
        clip_gradient=optimizer.clip_gradient,
        multi_precision=optimizer.multi_precision,
        **numbers,
        **rule.constants,
    )


def tell(chosen: kvdist_optimizer.Optimizer, optimizer: mx.optimizer.Optimizer, keys) -> None:
    """Count an update of these keys, and give the translated optimizer the present numbers for them.

    Raises:
        ValueError: the decay is one that kvdist applies in another way.
    """
    rule = rule_of(optimizer)
    optimizer._update_count(list(dict.fromkeys(keys)))
    rates = dict(zip(keys, optimizer._get_lrs(keys), strict=True)) if rule.has_rate else {}
    decays = dict(zip(keys, optimizer._get_wds(keys), strict=True))
    if any(decays.values()):
        require_same_decay(optimizer, rule)
    chosen.set_lr_mult(rates)
    chosen.set_wd_mult(decays)
    chosen.rescale_grad = optimizer.rescale_grad


def rule_of(optimizer: mx.optimizer.Optimizer) -> Rule:
    """The row of `RULES`.

    Raises:
        TypeError, ValueError: there is none.
    """
    cls = type(optimizer)
    if cls.__name__ in DIFFERENT:
        raise ValueError(f"{cls.__name__} is not translated: {DIFFERENT[cls.__name__]}; {INSTEAD}")
    if cls.__name__ not in RULES or cls is not getattr(mx.optimizer, cls.__name__, None):
        raise TypeError(f"{cls.__module__}.{cls.__name__} is not one of MXNet's optimizers that kvdist has; {INSTEAD}")
    return RULES[cls.__name__]


def require_same_decay(optimizer: mx.optimizer.Optimizer, rule: Rule) -> None:
    """Refuse weight decay where it would act in another way than in MXNet.

    Raises:
        ValueError: it would.
    """
    name = type(optimizer).__name__
    if not rule.decays:
        raise ValueError(f"{name} with wd is not translated: MXNet 1.9 applies the decay in another way; {INSTEAD}")
    if rule.clips_decay and optimizer.clip_gradient:
        raise ValueError(f"{name} with wd and clip_gradient is not translated: MXNet 1.9 clips both; {INSTEAD}")
