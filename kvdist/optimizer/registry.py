"""Optimizers by name: for users, who may write the name as they like, and for the network, which may not.

The table is closed but for `register`, which only code in this process can call. A description from a peer can choose
a row of the table and numbers within its schema, nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TypeVar

from kvdist import lr_scheduler as schedules
from kvdist.config.suggestions import did_you_mean
from kvdist.optimizer import mxnet_1_9
from kvdist.optimizer.base import HINTS, REMOVED, Optimizer, has_rule, numbers_of
from kvdist.removed import removed_keywords

_OptimizerClass = TypeVar("_OptimizerClass", bound=type[Optimizer])

_BY_NAME: dict[str, type[Optimizer]] = {}


def register(cls: _OptimizerClass) -> _OptimizerClass:
    """Class decorator that registers an optimizer under its `name`.

    Servers must know the class too: name its module when they are started (``--server-module``).

    Raises:
        TypeError: the class is not a dataclass derived from `Optimizer`, a field has no schema, or the rule is missing.
        ValueError: the name is not lower case, or belongs to another class.
    """
    if not (inspect.isclass(cls) and issubclass(cls, Optimizer)):
        raise TypeError(f"{cls!r} is not a class derived from kvdist.optimizer.Optimizer")
    if "__dataclass_fields__" not in vars(cls):
        raise TypeError(f"{cls.__name__} must be decorated with @dataclass(kw_only=True, eq=False), below @register")
    if inspect.isabstract(cls) or not has_rule(cls):
        raise TypeError(f"{cls.__name__} has no rule: define state_names, and equation() or apply()")
    numbers_of(cls)
    name = cls.name
    if not name or name != name.lower():
        raise ValueError(f"{cls.__name__}.name must be in lower case, not {name!r}")
    known = _BY_NAME.get(name)
    # The same definition run again (a notebook's cell, a reloaded module) replaces the old one.
    if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"the name {name!r} belongs to {known.__module__}.{known.__qualname__}: choose another")
    cls.__init__ = removed_keywords(**REMOVED)(cls.__init__)  # type: ignore[method-assign]
    _BY_NAME[name] = cls
    return cls


def registered() -> tuple[str, ...]:
    """The names of all optimizers that this process knows."""
    return tuple(sorted(_BY_NAME))


@removed_keywords(**REMOVED)
def create(optimizer: str | Optimizer, /, *, defaults: str | None = None, **hyperparameters: object) -> Optimizer:
    """Create an optimizer by name and hyper-parameters. An instance is returned unchanged.

    Args:
        optimizer: a name such as ``'sgd'``, in any case; or an `Optimizer`.
        defaults: ``'mxnet-1.9'`` for the defaults of that version, with a warning if its equation differs; None for the
            defaults of MXNet's main branch.
        hyperparameters: fields of the class, such as ``learning_rate=0.1``.

    Raises:
        ValueError: the name or `defaults` is unknown, or a value is out of range.
        TypeError: a hyper-parameter is unknown or of a wrong type, or an instance is combined with hyper-parameters.
    """
    if isinstance(optimizer, Optimizer):
        given = [*hyperparameters, *([] if defaults is None else ["defaults"])]
        if given:
            raise TypeError(
                f"an Optimizer object takes no further hyper-parameters ({', '.join(given)}): pass them when you create"
                " it, or pass its name"
            )
        return optimizer
    if not isinstance(optimizer, str):
        raise TypeError(
            f"an optimizer is a name, such as 'adam' or 'torch.adamw', or an Optimizer of kvdist, not"
            f" {_kind_of(optimizer)}; one of torch.optim belongs in a Trainer"
        )
    cls = _BY_NAME.get(optimizer.lower())
    if cls is None:
        near = did_you_mean(optimizer, registered()) or "a rule of your own needs @register, and its module imported"
        raise ValueError(f"unknown optimizer {optimizer!r}: known are {', '.join(registered())}; {near}")
    arguments = cls.arguments(hyperparameters)
    _refuse_unknown(cls, arguments)
    if defaults is not None:
        arguments = mxnet_1_9.with_defaults(cls.name, defaults, arguments)
    made = cls(**arguments)  # type: ignore[arg-type]  # the class checks every value against its schema
    if defaults is not None:
        mxnet_1_9.warn_of_equations(made)
    return made


def _refuse_unknown(cls: type[Optimizer], hyperparameters: Mapping[str, object]) -> None:
    known = (*numbers_of(cls), schedules.ENTRY)
    for name in hyperparameters:
        if name not in known:
            hint = f" (here it is called {HINTS[name]})" if name in HINTS else ""
            near = "" if hint else did_you_mean(name, known)
            takes = f"it takes {', '.join(known)}{near and f'; {near}'}"
            raise TypeError(f"{cls.name} has no hyper-parameter {name}{hint}; {takes}")


def from_description(description: object) -> Optimizer:
    """Create an optimizer from the result of `Optimizer.describe`, possibly of another process.

    Args:
        description: untrusted data; must be a dict with exactly the entries of a registered optimizer.

    Raises:
        ValueError: the description is invalid; the message says why.
    """
    if type(description) is not dict:
        raise ValueError(f"an optimizer's description is a table, not {type(description).__name__}")
    name = description.get("name")
    cls = _BY_NAME.get(name) if type(name) is str else None
    if cls is None:
        raise ValueError(
            f"unknown optimizer {name!r:.80} in a description: this process knows {', '.join(registered())}. A custom"
            " optimizer must be registered in a module that scheduler and servers import: kvdist-launch --server-module"
        )
    values = {key: value for key, value in description.items() if key != "name" and not _of_schedule(key)}
    values.setdefault("lazy_update", False)  # descriptions in older checkpoints are without it
    expected = numbers_of(cls)
    if values.keys() != expected.keys() or schedules.ENTRY not in description:
        raise ValueError(f"a description of {cls.name} has exactly name, {', '.join(expected)}, {schedules.ENTRY}")
    entries = {key: value for key, value in description.items() if _of_schedule(key)}
    for key, value in {**values, **entries}.items():
        text_fits = _of_schedule(key) or expected[key].kind is str
        if type(value) not in (float, int, bool, type(None)) and not (type(value) is str and text_fits):
            raise ValueError(f"{key} in a description of {cls.name} cannot be of type {type(value).__name__}")
    schedule = None
    if len(entries) > 1 or entries[schedules.ENTRY] is not None:
        schedule = schedules.from_description(entries)
    try:
        return cls(**values, lr_scheduler=schedule)
    except TypeError as error:
        raise ValueError(f"in a description of {cls.name}: {error}") from None


def _of_schedule(entry: object) -> bool:
    return type(entry) is str and (entry == schedules.ENTRY or entry.startswith(f"{schedules.ENTRY}."))


def _kind_of(value: object) -> str:
    """What a message calls a value of a wrong type."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
