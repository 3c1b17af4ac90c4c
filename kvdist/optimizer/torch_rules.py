"""The optimizers of ``torch.optim``, as ``torch.sgd``, ``torch.adam``, …: torch's names, defaults and equations.

They agree with torch up to rounding; torch itself is not needed. What holds here:

* A user writes ``lr``, ``weight_decay`` and ``betas``; the fields are `learning_rate`, `wd`, `beta1` and `beta2`,
  because rate and decay travel with every push.
* `groups` has what differs between torch's parameter groups besides rate and decay. A group is a rule of its own with
  the same states. Keys are whole numbers then, as a `Trainer`'s.
* States have torch's names, so that they can be saved in torch's format.
* The expressions' gradient is summed and clipped, and negated with `maximize`.

Equations: `torch.optim` of torch 2.13, the single-tensor implementations. g is the gradient, −g with `maximize`, t the
number of updates, λ `weight_decay`; ĝ = g + λ·w.
"""

from __future__ import annotations

import json
import math
import re
from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from kvdist.kernels.elementwise import decayed, evaluate, maximum, pull_of, pulled, sqrt
from kvdist.kernels.interface import Array, Equation
from kvdist.optimizer.adagrad import adagrad, is_above_zero
from kvdist.optimizer.adam import adam, corrected, share, toward
from kvdist.optimizer.base import Optimizer, Step
from kvdist.optimizer.registry import register
from kvdist.optimizer.sgd import sgd
from kvdist.schema import TEXT_BYTES_MAX, flag, number, text

WORDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"lr": ("learning_rate",), "weight_decay": ("wd",), "betas": ("beta1", "beta2")}
)
"""Torch's names of hyper-parameters that have others here; the rest have the same."""

IGNORED = ("foreach", "fused", "capturable")
"""Torch's choices between implementations of one equation: they have no effect on what is computed."""

_SHARED = frozenset((*(field.name for field in fields(Optimizer)), "groups"))
"""Fields that all groups of a rule have in common, and rate and decay, which travel with every push."""


@dataclass(kw_only=True, eq=False)
class TorchRule(Optimizer):
    """Base class of the rules of ``torch.optim``.

    Attributes:
        maximize: whether to maximise: the gradient is negated.
        groups: result of `grouped` for parameter groups; empty if the groups do not differ.
    """

    maximize: bool = flag(False)
    groups: str = text()

    def __post_init__(self) -> None:
        self._rules: list[tuple[range, TorchRule]] | None = None
        super().__post_init__()
        self._check()
        self._grouped()

    def _check(self) -> None:
        """Refuse numbers that do not fit each other."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """Arrays that any group needs; all keys have the same."""
        needed = dict.fromkeys(name for rule in self._each() for name in rule.own_states)
        return tuple(name for name in self.all_states if name in needed)

    all_states: ClassVar[tuple[str, ...]] = ()
    """Names, in torch, of all arrays that some setting of the rule needs."""

    @property
    def own_states(self) -> tuple[str, ...]:
        """Entries of `all_states` that this setting of the rule needs."""
        return self.all_states

    @property
    def is_elementwise(self) -> bool:
        """True without groups, which differ from key to key."""
        return not self.groups

    def rests(self, wd: float) -> bool:
        """True if `rests_alone` is True in every group."""
        return all(rule.rests_alone(wd) for rule in self._each())

    def rests_alone(self, wd: float) -> bool:
        """Result of `rests` for a rule without groups."""
        return False

    def equation(self, lr: float, wd: float, count: int) -> Equation | None:
        """Return `compiled`, with `maximize`; None with groups, which differ from key to key."""
        return None if self.groups else self._signed(self.compiled(lr, wd, count))

    def compiled(self, lr: float, wd: float, count: int) -> Equation | None:
        """Return the rule without groups and `maximize`; None if it needs more of `Step`; see `Optimizer.equation`."""
        return None

    def _own_formula(self, step: Step) -> Equation | None:
        """Return `compiled` for a rule whose numbers need more of the step."""
        return self.compiled(step.lr, step.wd, step.count)

    def _signed(self, equation: Equation | None) -> Equation | None:
        return equation._replace(is_negative=True) if self.maximize and equation is not None else equation

    def _formula(self, step: Step) -> Equation | None:
        """Return the rule of the key's group, which takes its own states out of those of all groups."""
        if not self.groups:
            return self._signed(self._own_formula(step))
        rule, names = self.for_key(step.extent.key), self.state_names
        equation = rule._signed(rule._own_formula(step))
        places = tuple(names.index(name) for name in rule.own_states)
        return None if equation is None else equation._replace(places=places)

    def update(
        self, weight: Array, grad: Array, out: Array, state: Mapping[str, Array], scratch: Array, step: Step
    ) -> None:
        """Compute `apply` without `maximize`, with the states by name, which may include states of other groups."""
        equation = self._own_formula(step)
        if equation is None:
            raise NotImplementedError(f"{self.name} has no equation, so it must define apply() or update()")
        states = [state[name] for name in self.own_states]
        evaluate(equation.expression, (grad, weight, *states), equation.numbers, (out, *states), scratch)

    def for_key(self, key: Hashable) -> TorchRule:
        """Return the rule of the key's group."""
        if self.groups and isinstance(key, int):
            return next((rule for keys, rule in self._grouped() if key in keys), self)
        return self

    def change_here(self, field: str, value: Any) -> None:
        """See `Optimizer.change_here`."""
        super().change_here(field, value)
        self._rules = None

    def words(self) -> dict[str, Any]:
        """Return the hyper-parameters under the names of torch's parameter groups."""
        live = vars(self)
        own = {name: live[name] for name in own_fields(type(self))}
        words: dict[str, Any] = {"lr": live["learning_rate"]}
        if "beta1" in own:
            words["betas"] = (own.pop("beta1"), own.pop("beta2"))
        return words | own | {"weight_decay": live["wd"]}

    @classmethod
    def arguments(cls, given: Mapping[str, object]) -> dict[str, object]:
        """Translate torch's hyper-parameter names into fields; see `Optimizer.arguments`."""
        ours: dict[str, object] = {}
        for name, value in given.items():
            if name == "differentiable" and value:
                raise ValueError(
                    f"{cls.name} cannot be differentiable=True: gradients do not flow through a store; leave it out"
                )
            if name in IGNORED or name == "differentiable":
                continue
            renamed = WORDS.get(name, (name,))
            if name == "betas":
                if not isinstance(value, Sequence) or len(value) != 2:
                    raise TypeError(f"betas must be two numbers, such as (0.9, 0.999), not {value!r}")
                ours.update(zip(renamed, value, strict=True))
            else:
                ours[renamed[0]] = value
        return ours

    def _each(self) -> list[TorchRule]:
        return [self, *(rule for _, rule in self._grouped())]

    def _grouped(self) -> list[tuple[range, TorchRule]]:
        """The rules of other keys, by ranges of keys."""
        if self._rules is None:
            self._rules = [(keys, rule) for text, own in _parsed(self.groups) for keys, rule in self._one(text, own)]
        return self._rules

    def _one(self, keys: str, own: Mapping[str, object]) -> list[tuple[range, TorchRule]]:
        live, names = vars(self), own_fields(type(self))
        if not own.keys() <= set(names):
            raise ValueError(f"groups of {self.name} differ in {', '.join(names)}, not in {', '.join(own)}")
        rule = type(self)(**{name: live[name] for name in names} | dict(own))
        return [(keys_of_rule, rule) for keys_of_rule in _ranges(keys)]


def own_fields(cls: type[TorchRule]) -> tuple[str, ...]:
    """The hyper-parameters in which groups of the rule may differ, but for rate and decay."""
    return tuple(field.name for field in fields(cls) if field.name not in _SHARED)


def known_words(cls: type[TorchRule], group: Mapping[str, Any]) -> dict[str, Any]:
    """What the rule must know of a parameter group of torch, by torch's names."""
    known = {*own_fields(cls), *WORDS, "differentiable"}
    return {word: value for word, value in group.items() if word in known}


def grouped(cls: type[TorchRule], groups: Sequence[tuple[Sequence[int], Mapping[str, Any]]]) -> dict[str, Any]:
    """The fields, `TorchRule.groups` among them, that make a rule act on each group as torch does on it.

    Rate and decay are left out: they travel with every push.

    Args:
        cls: the rule.
        groups: the keys of each parameter group, and its hyper-parameters by torch's names, all of them; what the rule
            does not know is left out.

    Raises:
        ValueError: what differs is too long to travel.
    """
    names = own_fields(cls)
    keys_of: dict[tuple[Any, ...], list[int]] = {}
    for keys, words in ((keys, words) for keys, words in groups if keys):
        own = cls.arguments(known_words(cls, words))
        keys_of.setdefault(tuple(own[name] for name in names), []).extend(keys)
    listed = {numbers: _listed(sorted(keys)) for numbers, keys in keys_of.items()}
    usual = max(listed, key=lambda numbers: len(listed[numbers]))  # the shortest text is without the longest list
    others = [
        (keys, {name: own for name, own, one in zip(names, numbers, usual, strict=True) if own != one})
        for numbers, keys in listed.items()
        if numbers is not usual
    ]
    said = json.dumps(others, separators=(",", ":")) if others else ""
    if len(said) > TEXT_BYTES_MAX:
        differ = sorted({name for _, own in others for name in own})
        raise ValueError(
            f"the parameter groups differ in {', '.join(differ)}, which takes {len(said)} bytes as text; a server takes"
            f" {TEXT_BYTES_MAX}. Let fewer groups differ in these (any number may in lr and weight_decay), list the"
            " parameters of a group one after the other, or step torch's own optimizer on each worker (docs/pytorch.md)"
        )
    return dict(zip(names, usual, strict=True)) | {"groups": said}


def _listed(keys: Sequence[int]) -> str:
    """Ascending keys, as in ``0-3,7``."""
    starts = [key for i, key in enumerate(keys) if i == 0 or keys[i - 1] != key - 1]
    ends = [key for i, key in enumerate(keys) if i + 1 == len(keys) or keys[i + 1] != key + 1]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _ranges(listed: str) -> list[range]:
    if not re.fullmatch(r"\d{1,15}(-\d{1,15})?(,\d{1,15}(-\d{1,15})?)*", listed):
        raise ValueError(f"keys of a group are listed as in '0-3,7', not {listed!r:.80}")
    ends = [part.partition("-") for part in listed.split(",")]
    return [range(int(first), int(last or first) + 1) for first, _, last in ends]


def _parsed(groups: str) -> list[tuple[str, dict[str, Any]]]:
    try:
        found = json.loads(groups) if groups else []
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or any(
        not isinstance(one, list) or [type(part) for part in one] != [str, dict] for one in found
    ):
        raise ValueError(f"groups must be a list of [keys, numbers] in JSON, not {groups!r:.80}")
    return [(keys, numbers) for keys, numbers in found]


def torch_sgd(grad, weight, buffer, lr, wd, mu, rest):
    """ĝ = g + wd·w;  b ← μ·b + rest·ĝ;  w ← w − lr·b."""
    buffer = buffer * mu + decayed(grad, weight, wd) * rest
    return weight - buffer * lr, buffer


def torch_sgd_nesterov(grad, weight, buffer, lr, wd, mu, rest):
    """ĝ = g + wd·w;  b ← μ·b + rest·ĝ;  w ← w − lr·(ĝ + μ·b)."""
    grad = decayed(grad, weight, wd)
    buffer = buffer * mu + grad * rest
    return weight - (grad + buffer * mu) * lr, buffer


@register
@dataclass(kw_only=True, eq=False)
class TorchSGD(TorchRule):
    """``torch.optim.SGD``: b ← μ·b + (1 − dampening)·ĝ, from b = ĝ;  w ← w − lr·b, or with nesterov w − lr·(ĝ + μ·b).

    Without momentum w ← w − lr·ĝ. The learning rate is outside of b, so a new one acts on all of it.

    Attributes:
        momentum: μ, at least 0.
        dampening: of new gradients in b.
        nesterov: needs a momentum, and no dampening.
    """

    name: ClassVar[str] = "torch.sgd"
    all_states: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    learning_rate: float = number(0.001, at_least=0)
    momentum: float = number(0.0, at_least=0)
    dampening: float = number(0.0)
    nesterov: bool = flag(False)

    def _check(self) -> None:
        if self.nesterov and (not self.momentum or self.dampening):
            raise ValueError(
                f"nesterov=True needs a momentum above 0 and no dampening, not momentum={self.momentum:g} and"
                f" dampening={self.dampening:g}"
            )
        if self.lazy_update and self.dampening:
            raise ValueError("dampening needs lazy_update=False: a row's first gradient is not dampened")

    @property
    def own_states(self) -> tuple[str, ...]:
        """Nothing without momentum."""
        return self.all_states if self.momentum else ()

    def rests_alone(self, wd: float) -> bool:
        """Without momentum and decay."""
        return not (self.momentum or wd)

    def compiled(self, lr: float, wd: float, count: int) -> Equation:
        """Return `torch_sgd` or `torch_sgd_nesterov`; without momentum the rule of `SGD`."""
        if not self.momentum:
            return Equation(sgd, (lr, wd))
        rest = 1.0 if count == 1 else 1.0 - self.dampening  # b = ĝ at first
        return Equation(torch_sgd_nesterov if self.nesterov else torch_sgd, (lr, wd, self.momentum, rest))


def second_moment(variance, grad, beta, rest):
    """β·v + (1 − β)·g², with rest = 1 − β, multiplied in torch's order."""
    return variance * beta + grad * rest * grad


def torch_adamw(grad, weight, mean, variance, rate, kept, beta1, rest1, beta2, rest2, epsilon):
    """`adam` without weight decay, from kept·w, with kept = 1 − lr·λ."""
    mean, variance = toward(mean, grad, beta1, rest1), toward(variance, grad * grad, beta2, rest2)
    return weight * kept - mean / (sqrt(variance) + epsilon) * rate, mean, variance


def torch_amsgrad(grad, weight, mean, variance, largest, rate, wd, kept, beta1, rest1, beta2, rest2, epsilon):
    """ĝ, m and v as of `adam`;  x ← max(x, v);  w ← kept·w − rate·m/(√x + ε). Either wd is 0, or kept is 1."""
    grad = decayed(grad, weight, wd)
    mean, variance = toward(mean, grad, beta1, rest1), toward(variance, grad * grad, beta2, rest2)
    largest = maximum(largest, variance)
    return weight * kept - mean / (sqrt(largest) + epsilon) * rate, mean, variance, largest


def decay_of(lr: float, wd: float, decoupled: bool) -> tuple[float, float]:
    """wd for the gradient, and the factor of the weight: 1 − lr·λ is rounded to the weight's type, as in torch."""
    return (0.0, 1.0 - lr * wd) if decoupled else (wd, 1.0)


@dataclass(kw_only=True, eq=False)
class _TorchAdam(TorchRule):
    """What `TorchAdam` and `TorchAdamW` have in common: all but the decay."""

    all_states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

    learning_rate: float = number(0.001, at_least=0)
    beta1: float = number(0.9, at_least=0, below=1)
    beta2: float = number(0.999, at_least=0, below=1)
    eps: float = number(1e-8, at_least=0)
    amsgrad: bool = flag(False)

    @property
    @abstractmethod
    def decoupled(self) -> bool:
        """Whether the decay is no part of the gradient."""

    @property
    def own_states(self) -> tuple[str, ...]:
        """Three with amsgrad."""
        return self.all_states if self.amsgrad else self.all_states[:2]

    def compiled(self, lr: float, wd: float, count: int) -> Equation:
        """Return `adam`, `torch_adamw` or `torch_amsgrad`.

        With η = lr·√(1 − β2ᵗ)/(1 − β1ᵗ) for the rate, and ε·√(1 − β2ᵗ) for ε, the expression of
        `kvdist.optimizer.Adam` is torch's.
        """
        rate = corrected(lr, self.beta1, self.beta2, count)
        moments = (*share(self.beta1), *share(self.beta2), self.eps * math.sqrt(1.0 - self.beta2**count))
        decay, kept = decay_of(lr, wd, self.decoupled)
        if self.amsgrad:
            return Equation(torch_amsgrad, (rate, decay, kept, *moments))
        return Equation(torch_adamw, (rate, kept, *moments)) if self.decoupled else Equation(adam, (rate, wd, *moments))


@register
@dataclass(kw_only=True, eq=False)
class TorchAdam(_TorchAdam):
    """``torch.optim.Adam``: w ← w − lr·m̂/(√v̂ + ε), with m̂ = m/(1 − β1ᵗ) and v̂ = v/(1 − β2ᵗ).

    m ← β1·m + (1 − β1)·ĝ;  v ← β2·v + (1 − β2)·ĝ².

    Attributes:
        beta1, beta2: torch's ``betas``, from 0 to below 1.
        eps: ε, at least 0.
        amsgrad: take the largest v so far.
        decoupled_weight_decay: w ← w − lr·λ·w before, and g for ĝ.
    """

    name: ClassVar[str] = "torch.adam"

    decoupled_weight_decay: bool = flag(False)

    @property
    def decoupled(self) -> bool:
        """As the user chose."""
        return self.decoupled_weight_decay


@register
@dataclass(kw_only=True, eq=False)
class TorchAdamW(_TorchAdam):
    """``torch.optim.AdamW``: `TorchAdam` with decoupled weight decay, by default 0.01.

    Attributes:
        beta1, beta2: torch's ``betas``, from 0 to below 1.
        eps: ε, at least 0.
        amsgrad: take the largest v so far.
    """

    name: ClassVar[str] = "torch.adamw"

    wd: float = number(0.01, at_least=0)

    @property
    def decoupled(self) -> bool:
        """Always."""
        return True


def torch_adamax(grad, weight, mean, largest, rate, wd, pull, from_mean, beta2, epsilon):
    """ĝ = g + wd·w;  m ← m + (1 − β1)·(ĝ − m);  u ← max(β2·u, |ĝ| + ε);  w ← w − rate·m/u."""
    grad = decayed(grad, weight, wd)
    mean, largest = pulled(mean, grad, pull, from_mean), maximum(largest * beta2, abs(grad) + epsilon)
    return weight - mean / largest * rate, mean, largest


@register
@dataclass(kw_only=True, eq=False)
class TorchAdamax(TorchRule):
    """``torch.optim.Adamax``: m ← β1·m + (1 − β1)·ĝ;  u ← max(β2·u, |ĝ| + ε);  w ← w − lr/(1 − β1ᵗ)·m/u.

    Attributes:
        beta1, beta2: torch's ``betas``, from 0 to below 1.
        eps: ε, at least 0.
    """

    name: ClassVar[str] = "torch.adamax"
    all_states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_inf")

    learning_rate: float = number(0.002, at_least=0)
    beta1: float = number(0.9, at_least=0, below=1)
    beta2: float = number(0.999, at_least=0, below=1)
    eps: float = number(1e-8, at_least=0)

    def compiled(self, lr: float, wd: float, count: int) -> Equation:
        """Return `torch_adamax` with the bias-corrected rate."""
        rate = lr / (1.0 - self.beta1**count)
        return Equation(torch_adamax, (rate, wd, *pull_of(1.0 - self.beta1), self.beta2, self.eps))


def torch_nadam(
    grad, weight, mean, variance, wd, kept, pull, from_mean, beta2, rest2, of_variance, epsilon, of_grad, of_mean
):
    """w ← kept·w − of_grad·ĝ/s − of_mean·m/s, with s = √(of_variance·v) + ε. Either wd is 0, or kept is 1."""
    grad = decayed(grad, weight, wd)
    mean, variance = pulled(mean, grad, pull, from_mean), second_moment(variance, grad, beta2, rest2)
    root = sqrt(variance * of_variance) + epsilon
    return weight * kept - grad * of_grad / root - mean * of_mean / root, mean, variance


@register
@dataclass(kw_only=True, eq=False)
class TorchNAdam(TorchRule):
    """``torch.optim.NAdam``: w ← w − lr·((1 − μᵗ)·ĝ/(1 − P) + μᵗ⁺¹·m/(1 − P·μᵗ⁺¹))/(√(v/(1 − β2ᵗ)) + ε).

    m and v as of `TorchAdam`;  μᵗ = β1·(1 − ½·0.96^(t·momentum_decay));  P ← P·μᵗ, from 1.

    Attributes:
        beta1, beta2: torch's ``betas``, from 0 to below 1.
        eps: ε, at least 0.
        momentum_decay: how soon μ comes to β1, at least 0.
        decoupled_weight_decay: w ← w − lr·λ·w before, and g for ĝ.
    """

    name: ClassVar[str] = "torch.nadam"
    all_states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    initial_scalars: ClassVar[Mapping[str, float]] = MappingProxyType({"mu_product": 1.0})

    learning_rate: float = number(0.002, at_least=0)
    beta1: float = number(0.9, at_least=0, below=1)
    beta2: float = number(0.999, at_least=0, below=1)
    eps: float = number(1e-8, at_least=0)
    momentum_decay: float = number(0.004, at_least=0)
    decoupled_weight_decay: bool = flag(False)

    def _mu(self, count: int) -> float:
        return self.beta1 * (1.0 - 0.5 * math.pow(0.96, count * self.momentum_decay))

    def advance(self, scalars: tuple[float, ...], count: int) -> tuple[float, ...]:
        """P ← P·μᵗ, in float32 as torch keeps it."""
        return (float(np.float32(scalars[0]) * np.float32(self._mu(count))),)

    def _own_formula(self, step: Step) -> Equation:
        """Return `torch_nadam` with the factors that follow from P."""
        now, following, product = self._mu(step.count), self._mu(step.count + 1), step.scalars[0]
        decay = decay_of(step.lr, step.wd, self.decoupled_weight_decay)
        moments = (*pull_of(1.0 - self.beta1), *share(self.beta2), 1.0 / (1.0 - self.beta2**step.count))
        of_grad = step.lr * (1.0 - now) / (1.0 - product)
        of_mean = step.lr * following / (1.0 - product * following)
        return Equation(torch_nadam, (*decay, *moments, self.eps, of_grad, of_mean))


def torch_radam(grad, weight, mean, variance, rate, wd, kept, pull, from_mean, beta2, rest2, epsilon):
    """w ← kept·w − rate·m/(√v + ε). Either wd is 0, or kept is 1."""
    grad = decayed(grad, weight, wd)
    mean, variance = pulled(mean, grad, pull, from_mean), second_moment(variance, grad, beta2, rest2)
    return weight * kept - mean / (sqrt(variance) + epsilon) * rate, mean, variance


def torch_radam_at_first(grad, weight, mean, variance, rate, wd, kept, pull, from_mean, beta2, rest2):
    """w ← kept·w − rate·m, while the variance is not used."""
    grad = decayed(grad, weight, wd)
    mean, variance = pulled(mean, grad, pull, from_mean), second_moment(variance, grad, beta2, rest2)
    return weight * kept - mean * rate, mean, variance


@register
@dataclass(kw_only=True, eq=False)
class TorchRAdam(TorchRule):
    """``torch.optim.RAdam``: w ← w − lr·m̂, and where ρ > 5 times r·√(1 − β2ᵗ)/(√v + ε).

    m̂ and v as of `TorchAdam`;  ρ∞ = 2/(1 − β2) − 1;  ρ = ρ∞ − 2·t·β2ᵗ/(1 − β2ᵗ);
    r² = (ρ − 4)·(ρ − 2)·ρ∞/((ρ∞ − 4)·(ρ∞ − 2)·ρ).

    Attributes:
        beta1, beta2: torch's ``betas``, from 0 to below 1.
        eps: ε, at least 0.
        decoupled_weight_decay: w ← w − lr·λ·w before, and g for ĝ.
    """

    name: ClassVar[str] = "torch.radam"
    all_states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    learning_rate: float = number(0.001, at_least=0)
    beta1: float = number(0.9, at_least=0, below=1)
    beta2: float = number(0.999, at_least=0, below=1)
    eps: float = number(1e-8, at_least=0)
    decoupled_weight_decay: bool = flag(False)

    def _rectified(self, count: int) -> float:
        """r·√(1 − β2ᵗ); 0 while the variance is not used."""
        power = self.beta2**count
        longest = 2.0 / (1.0 - self.beta2) - 1.0
        length = longest - 2.0 * count * power / (1.0 - power)
        if length <= 5.0:
            return 0.0
        share = (length - 4.0) * (length - 2.0) * longest / ((longest - 4.0) * (longest - 2.0) * length)
        return math.sqrt(share * (1.0 - power))

    def compiled(self, lr: float, wd: float, count: int) -> Equation:
        """Return `torch_radam`, or `torch_radam_at_first`."""
        rate, rectified = lr / (1.0 - self.beta1**count), self._rectified(count)
        numbers = *decay_of(lr, wd, self.decoupled_weight_decay), *pull_of(1.0 - self.beta1), *share(self.beta2)
        if rectified:
            return Equation(torch_radam, (rate * rectified, *numbers, self.eps))
        return Equation(torch_radam_at_first, (rate, *numbers))


def torch_rmsprop(grad, weight, squares, lr, wd, alpha, rest, epsilon):
    """ĝ = g + wd·w;  v ← α·v + (1 − α)·ĝ²;  w ← w − lr·ĝ/(√v + ε)."""
    grad = decayed(grad, weight, wd)
    squares = second_moment(squares, grad, alpha, rest)
    return weight - grad * lr / (sqrt(squares) + epsilon), squares


def torch_rmsprop_momentum(grad, weight, squares, buffer, lr, wd, alpha, rest, epsilon, mu):
    """ĝ and v as of `torch_rmsprop`;  b ← μ·b + ĝ/(√v + ε);  w ← w − lr·b."""
    grad = decayed(grad, weight, wd)
    squares = second_moment(squares, grad, alpha, rest)
    buffer = buffer * mu + grad / (sqrt(squares) + epsilon)
    return weight - buffer * lr, squares, buffer


def torch_rmsprop_centered(grad, weight, squares, mean, lr, wd, alpha, rest, epsilon, pull, from_mean):
    """ĝ and v as of `torch_rmsprop`;  q ← q + (1 − α)·(ĝ − q);  w ← w − lr·ĝ/(√(v − q²) + ε)."""
    grad = decayed(grad, weight, wd)
    squares, mean = second_moment(squares, grad, alpha, rest), pulled(mean, grad, pull, from_mean)
    return weight - grad * lr / (sqrt(squares - mean * mean) + epsilon), squares, mean


def torch_rmsprop_centered_momentum(
    grad, weight, squares, buffer, mean, lr, wd, alpha, rest, epsilon, pull, from_mean, mu
):
    """ĝ, v and q as of `torch_rmsprop_centered`;  b ← μ·b + ĝ/(√(v − q²) + ε);  w ← w − lr·b."""
    grad = decayed(grad, weight, wd)
    squares, mean = second_moment(squares, grad, alpha, rest), pulled(mean, grad, pull, from_mean)
    buffer = buffer * mu + grad / (sqrt(squares - mean * mean) + epsilon)
    return weight - buffer * lr, squares, buffer, mean


@register
@dataclass(kw_only=True, eq=False)
class TorchRMSprop(TorchRule):
    """``torch.optim.RMSprop``: v ← α·v + (1 − α)·ĝ²;  w ← w − lr·ĝ/(√v + ε).

    Centered: q ← α·q + (1 − α)·ĝ, and √(v − q²) for √v. With momentum b ← μ·b + ĝ/(√v + ε) and w ← w − lr·b.

    Attributes:
        alpha: α, from 0 to 1.
        eps: ε, at least 0.
        momentum: μ, at least 0.
        centered: whether to divide by the deviation from the mean.
    """

    name: ClassVar[str] = "torch.rmsprop"
    all_states: ClassVar[tuple[str, ...]] = ("square_avg", "momentum_buffer", "grad_avg")

    learning_rate: float = number(0.01, at_least=0)
    alpha: float = number(0.99, at_least=0)
    eps: float = number(1e-8, at_least=0)
    momentum: float = number(0.0, at_least=0)
    centered: bool = flag(False)

    @property
    def own_states(self) -> tuple[str, ...]:
        """v, with momentum b, centered q."""
        return (
            "square_avg",
            *(("momentum_buffer",) if self.momentum else ()),
            *(("grad_avg",) if self.centered else ()),
        )

    def compiled(self, lr: float, wd: float, count: int) -> Equation:
        """Return one of the four expressions above."""
        numbers: tuple[float, ...] = (lr, wd, *share(self.alpha), self.eps)
        momentum = (self.momentum,) if self.momentum else ()
        if not self.centered:
            return Equation(torch_rmsprop_momentum if momentum else torch_rmsprop, (*numbers, *momentum))
        numbers = (*numbers, *pull_of(1.0 - self.alpha), *momentum)
        return Equation(torch_rmsprop_centered_momentum if momentum else torch_rmsprop_centered, numbers)


def torch_adagrad_at_first(grad, weight, history, lr, wd, epsilon, initial):
    """`adagrad` from a history of zeros that counts as the initial value."""
    return adagrad(grad, weight, history + initial, lr, wd, epsilon)


@register
@dataclass(kw_only=True, eq=False)
class TorchAdagrad(TorchRule):
    """``torch.optim.Adagrad``: h ← h + ĝ²;  w ← w − lr/(1 + (t − 1)·lr_decay)·ĝ/(√h + ε).

    Attributes:
        lr_decay: at least 0.
        initial_accumulator_value: the first h, at least 0.
        eps: ε, at least 0.
    """

    name: ClassVar[str] = "torch.adagrad"
    all_states: ClassVar[tuple[str, ...]] = ("sum",)

    learning_rate: float = number(0.01, at_least=0)
    lr_decay: float = number(0.0, at_least=0)
    initial_accumulator_value: float = number(0.0, at_least=0)
    eps: float = number(1e-10, at_least=0)

    def _check(self) -> None:
        if self.lazy_update and self.initial_accumulator_value:
            raise ValueError("initial_accumulator_value needs lazy_update=False: each row begins at another update")

    def rests_alone(self, wd: float) -> bool:
        """Without decay, if ε keeps a row that never had a gradient from 0/0, and all rows begin with zeros."""
        return not (wd or self.initial_accumulator_value) and is_above_zero(self.eps)

    def compiled(self, lr: float, wd: float, count: int) -> Equation:
        """Return the rule of `AdaGrad`, or `torch_adagrad_at_first`."""
        numbers = lr / (1.0 + (count - 1) * self.lr_decay), wd, self.eps
        if self.initial_accumulator_value and count == 1:
            return Equation(torch_adagrad_at_first, (*numbers, self.initial_accumulator_value))
        return Equation(adagrad, numbers)


def torch_adadelta(grad, weight, squares, deltas, lr, wd, rho, rest, epsilon):
    """ĝ = g + wd·w;  a ← ρ·a + (1 − ρ)·ĝ²;  Δ = ĝ/√(a + ε)·√(b + ε);  b ← ρ·b + (1 − ρ)·Δ²;  w ← w − lr·Δ."""
    grad = decayed(grad, weight, wd)
    squares = second_moment(squares, grad, rho, rest)
    step = grad / sqrt(squares + epsilon) * sqrt(deltas + epsilon)
    return weight - step * lr, squares, second_moment(deltas, step, rho, rest)


@register
@dataclass(kw_only=True, eq=False)
class TorchAdadelta(TorchRule):
    """``torch.optim.Adadelta``: a ← ρ·a + (1 − ρ)·ĝ²;  Δ = √(b + ε)/√(a + ε)·ĝ;  b ← ρ·b + (1 − ρ)·Δ²;  w ← w − lr·Δ.

    Attributes:
        rho: ρ, from 0 to 1.
        eps: ε, at least 0.
    """

    name: ClassVar[str] = "torch.adadelta"
    all_states: ClassVar[tuple[str, ...]] = ("square_avg", "acc_delta")

    learning_rate: float = number(1.0, at_least=0)
    rho: float = number(0.9, at_least=0, at_most=1)
    eps: float = number(1e-6, at_least=0)

    def compiled(self, lr: float, wd: float, count: int) -> Equation:
        """Return `torch_adadelta`."""
        return Equation(torch_adadelta, (lr, wd, *share(self.rho), self.eps))


TORCH_RULES: tuple[type[TorchRule], ...] = (
    TorchSGD,
    TorchAdam,
    TorchAdamW,
    TorchAdamax,
    TorchNAdam,
    TorchRAdam,
    TorchRMSprop,
    TorchAdagrad,
    TorchAdadelta,
)
"""Every rule of torch; the class is called ``Torch`` and what torch calls it."""
