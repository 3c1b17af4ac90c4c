"""MXNet's optimizers in kvdist's words: which of them do the same, and what to do about the others.

kvdist has the equations of MXNet's last master, and so of MXNet 2. Where those of the MXNet that is installed differ,
an optimizer is refused rather than replaced by one that nearly does the same.

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
        ignored: attributes that MXNet's rule does not use, where kvdist's would.
    """

    name: str
    numbers: dict[str, str] = field(default_factory=dict)
    constants: dict[str, float] = field(default_factory=dict)
    decays: bool = True
    clips_decay: bool = False
    has_rate: bool = True
    ignored: tuple[str, ...] = ()


def same(*names: str) -> dict[str, str]:
    """Hyper-parameters with one name in both."""
    return {name: name for name in names}


MOMENTS = ("beta1", "beta2", "epsilon")
BOUNDS = ("lower_bound", "upper_bound")
ALIKE = {
    "SGD": Rule("sgd", same("momentum")),
    "Signum": Rule("signum", same("momentum", "wd_lh")),
    "SGLD": Rule("sgld"),
    "Ftrl": Rule("ftrl", same("lamda1", "beta")),
    "LAMB": Rule("lamb", same(*MOMENTS, *BOUNDS, "bias_correction")),
}
RULES_OF_1 = {
    **ALIKE,
    "ccSGD": Rule("sgd", same("momentum")),
    "NAG": Rule("nag", same("momentum"), decays=False),
    "DCASGD": Rule("dcasgd", same("momentum", "lamda"), decays=False),
    "Adam": Rule("adam", same(*MOMENTS), clips_decay=True),
    "Adamax": Rule("adamax", same("beta1", "beta2"), {"epsilon": 0.0}, clips_decay=True),
    "AdaDelta": Rule("adadelta", same("rho", "epsilon"), decays=False, has_rate=False),
    "RMSProp": Rule(
        "rmsprop",
        {"rho": "gamma1", "momentum": "gamma2", **same("epsilon", "centered", "clip_weights")},
        clips_decay=True,
    ),
    "FTML": Rule("ftml", same(*MOMENTS), clips_decay=True),
    "Test": Rule("test", ignored=("clip_gradient",)),
}
DIFFERENT_IN_1 = {
    "AdaGrad": "MXNet 1.9 has its eps inside the root and its decay beside it",
    "GroupAdaGrad": "MXNet 1.9 has its eps inside the root",
    "Nadam": "in MXNet 1.9 all parameters share one momentum schedule",
    "LARS": "MXNet 1.9 corrects the momentum when the rate changes, and tells biases by their names",
    "LBSGD": "kvdist does not have it",
}
RULES_OF_2 = {
    **ALIKE,
    "NAG": Rule("nag", same("momentum")),
    "DCASGD": Rule("dcasgd", same("momentum", "lamda")),
    "Adam": Rule("adam", same(*MOMENTS)),
    "AdamW": Rule("adamw", same(*MOMENTS, "correct_bias")),
    "AdaBelief": Rule("adabelief", same(*MOMENTS, "correct_bias")),
    "Adamax": Rule("adamax", same(*MOMENTS)),
    "AdaGrad": Rule("adagrad", same("epsilon")),
    "GroupAdaGrad": Rule("groupadagrad", same("epsilon")),
    "AdaDelta": Rule("adadelta", same("rho", "epsilon")),
    "RMSProp": Rule("rmsprop", same("rho", "momentum", "epsilon", "centered", "clip_weights")),
    "FTML": Rule("ftml", same(*MOMENTS)),
    "LANS": Rule("lans", same(*MOMENTS, *BOUNDS)),
    "Test": Rule("sgd", ignored=("clip_gradient",)),
}
DIFFERENT_IN_2 = {
    "Nadam": "in MXNet 2 all parameters share one momentum schedule",
    "LARS": "MXNet 2 tells biases by their names",
}
IS_1 = mx.__version__.startswith("1.")
RULES = RULES_OF_1 if IS_1 else RULES_OF_2
"""By the class of MXNet."""
DIFFERENT = DIFFERENT_IN_1 if IS_1 else DIFFERENT_IN_2
"""What is not translated → why."""
COUNTING = ("adam", "adamw", "adabelief", "adamax", "ftml", "lamb", "lans")
"""Rules of kvdist in which the number of an update matters."""


def translated(optimizer: mx.optimizer.Optimizer) -> kvdist_optimizer.Optimizer:
    """An optimizer of kvdist that does the same.

    Its rates are 1, and each key's own are multipliers; `tell` keeps them up to date.

    Raises:
        TypeError: it is no optimizer of MXNet, or a class of somebody's own.
        ValueError: kvdist has none that does the same.
    """
    rule = rule_of(optimizer)
    require_carried(optimizer, rule)
    numbers = {ours: getattr(optimizer, theirs) for ours, theirs in rule.numbers.items()}
    return kvdist_optimizer.create(
        rule.name,
        learning_rate=1.0,
        wd=1.0,
        rescale_grad=optimizer.rescale_grad,
        clip_gradient=optimizer.clip_gradient,
        multi_precision=optimizer.multi_precision,
        lazy_update=getattr(optimizer, "lazy_update", rule.name == "ftrl"),
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
    if cls.__name__ not in RULES or not cls.__module__.startswith("mxnet."):
        raise TypeError(f"{cls.__module__}.{cls.__name__} is not one of MXNet's optimizers that kvdist has; {INSTEAD}")
    return RULES[cls.__name__]


def require_carried(optimizer: mx.optimizer.Optimizer, rule: Rule) -> None:
    """Refuse what an optimizer was made with and kvdist would lose.

    Raises:
        ValueError: there is something; it is named.
    """
    name = type(optimizer).__name__
    if IS_1 and name == "RMSProp" and not optimizer.centered:
        raise ValueError(f"RMSProp is not translated: MXNet 1.9 has its epsilon inside the root; {INSTEAD}")
    if optimizer.begin_num_update and rule.name in COUNTING:
        raise ValueError(
            f"{name} with begin_num_update={optimizer.begin_num_update} is not translated: servers count the updates of"
            f" {name} from 0, and load_optimizer_states goes on from a saved count; {INSTEAD}"
        )
    for attribute in rule.ignored:
        if getattr(optimizer, attribute):
            raise ValueError(f"{name} with {attribute} is not translated: MXNet's {name} does not use it; leave it out")


def require_same_on_dense(chosen: kvdist_optimizer.Optimizer, key) -> None:
    """Refuse rows as the gradient of a dense key where MXNet would leave the other rows alone, and kvdist would not.

    Raises:
        ValueError: so it is.
    """
    if chosen.lazy_update and not chosen.rests(chosen.wd_for(key)):
        raise ValueError(
            f"key {key!r} is dense and its gradient row_sparse: servers would move every row by momentum or decay,"
            f" where MXNet's {chosen.name} moves those of the gradient; make the key row_sparse, or lazy_update False"
        )


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
