"""The Trainer's arguments: contradictions are refused, names become objects, and where weights are updated is decided.

Where the update happens (MXNet's table, corrected):

| situation | store | the store updates |
|---|---|---|
| ``kvstore=None`` | none | no: each process alone |
| a single device, a local store by name | none: it would only copy | no |
| a synchronous store | yes | as requested; else if it can, the environment allows it, and (``local``) none is big |
| an asynchronous store | yes | always: it has no sums to return; requesting otherwise is an error |
| some gradient is sparse | yes | on servers always, requesting otherwise is an error; locally only on request |
| a store that cannot update | yes | no; requesting otherwise is an error |
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvdist.config.environment import cluster_from_env, read_setting
from kvdist.config.losses import LossPolicy
from kvdist.config.policies import COMPRESSIONS, LocalSteps, Pace, Quota, TrainingPolicy, updates_between
from kvdist.errors import ConfigError, KeyNotInitialised
from kvdist.kvstore.adapter import Adapted, KVStoreBase
from kvdist.kvstore.backend import SAMPLES_MAX
from kvdist.kvstore.base import KVStore
from kvdist.kvstore.registry import DIST_NAMES, require_known
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.compression import from_params
from kvdist.optimizer.registry import create as create_optimizer
from kvdist.optimizer.torch_rules import IGNORED, TORCH_RULES, TorchRule, known_words
from kvdist.schema import real_number
from kvdist.training.parameters import GROUP_ENTRIES, Grads, Parameter, ranges

BIG_PARAMETER_ELEMENTS = 16 * 1024 * 1024
"""With a larger parameter the store ``local`` leaves the update to the devices."""

ASYNCHRONOUS = frozenset({"dist_async", "dist_device_async", "dist_async_device"})
"""Stores without rounds, which cannot return the sum of a round."""


def would_only_copy(devices: int, workers: int, servers: int) -> bool:
    """Whether a store that was chosen by name has nothing to do: a single device, a single worker, and no server."""
    return devices == 1 and workers == 1 and servers == 0


def store_updates(
    store_type: str,
    capable: bool,
    wanted: bool | None,
    *,
    by_default: bool = True,
    sizes: Iterable[int] = (),
    has_servers: bool = False,
    has_sparse_grads: bool = False,
    clips: bool = False,
) -> bool:
    """Whether the store holds the optimizer.

    Args:
        store_type: the name of the store.
        capable: whether it can update.
        wanted: the user's ``update_on_kvstore``.
        by_default: the environment's default for None.
        sizes: elements of each parameter, for a store requested as ``local``.
        has_servers: whether its values are on servers.
        has_sparse_grads: whether some gradient is sparse.
        clips: whether gradients are clipped by a global norm.

    Raises:
        ValueError: `wanted` is impossible.
    """
    if wanted and not capable:
        raise ValueError(
            f"the store {store_type!r} cannot update weights, but update_on_kvstore=True asks for it; leave it out, and"
            " each worker updates with the sums of gradients"
        )
    if store_type in ASYNCHRONOUS:
        if wanted is False:
            raise ValueError(
                f"the store {store_type!r} trains asynchronously, which needs update_on_kvstore=True: without rounds"
                " the workers get no sums to update with. Leave update_on_kvstore out, or use 'dist'"
            )
        return True
    if has_sparse_grads and has_servers and (clips or wanted is False):
        raise ValueError(
            f"some gradients are sparse, and the store {store_type!r} keeps its values on servers, which needs"
            " update_on_kvstore=True then, and no clip_norm. Leave update_on_kvstore and clip_norm out, or make the"
            " layer with sparse=False"
        )
    if wanted is not None:
        return wanted
    if has_sparse_grads:
        return capable and has_servers
    return capable and by_default and all(size <= BIG_PARAMETER_ELEMENTS for size in sizes)


LOG = logging.getLogger("kvdist")

Wanted = str | KVStoreBase | None
"""The type of the Trainer's argument ``kvstore``."""


RULES: Mapping[type[torch.optim.Optimizer], type[TorchRule]] = MappingProxyType(
    {getattr(torch.optim, cls.__name__.removeprefix("Torch")): cls for cls in TORCH_RULES}
)
"""The rule for each optimizer of torch that can travel to servers."""

_KEEP_IT = (
    "it can run on each worker: let a Trainer with 'sgd' and update_on_kvstore=False make the mean of the gradients, by"
    " allreduce_grads(average=True), and call optimizer.step(); or take kvdist.horovod.DistributedOptimizer(optimizer)"
)
_WHY_NOT = {
    "LBFGS": "it evaluates its closure several times in a step",
    "Adafactor": "its states are means over whole rows and columns of a parameter, which servers have in slices",
    "Muon": "it multiplies whole matrices, which servers have in slices",
    "Rprop": "it is for full batches",
    "ASGD": "its rate comes from the lr of the step before",
    "SparseAdam": "on the rows of a kvdist.Embedding 'adam' with lazy_update=True has its equation",
}


def make_optimizer(params: object, optimizer: Any, optimizer_params: Mapping[str, Any] | None) -> Optimizer:
    """Resolve the optimizer by name or instance; the rule of an optimizer of torch.

    Args:
        params, optimizer, optimizer_params: the Trainer's first three arguments, of which none may stand in another's
            place.

    Raises:
        TypeError, ValueError: it is unknown, or its hyper-parameters are invalid; or another Trainer has it.
    """
    _require_order(params, optimizer, optimizer_params)
    made = _made(optimizer, optimizer_params)
    if made.is_taken:
        raise ValueError(
            f"this optimizer ({made.name}) belongs to another Trainer, which writes the multipliers of its parameters"
            " and the size of its batches into it: make an optimizer for each Trainer, or close() the other one before"
        )
    return made


def _require_order(params: object, optimizer: object, given: object) -> None:
    """Refuse an argument in the place of another argument, such as a store in the place of the optimizer."""
    if isinstance(params, str | KVStoreBase | Optimizer | torch.optim.Optimizer):
        what = repr(params) if isinstance(params, str) else f"a {type(params).__name__}"
        raise TypeError(
            "the first argument, params, has the network's parameters, such as net.named_parameters(), and not"
            f" {what}; write Trainer(params, optimizer, kvstore=…)"
        )
    if isinstance(optimizer, KVStoreBase):
        raise TypeError(
            f"the second argument, optimizer, is the name of an optimizer or an optimizer, and not a"
            f" {type(optimizer).__name__}; write Trainer(params, 'sgd', {{'learning_rate': 0.1}}, kvstore=…)"
        )
    if given is None or isinstance(given, Mapping):
        return
    kind = repr(given) if isinstance(given, str) else type(given).__name__
    is_store = isinstance(given, str | KVStoreBase)
    advice = "write Trainer(params, optimizer, kvstore=…) for the store" if is_store else "give a dict, or nothing"
    raise TypeError(
        "the third argument, optimizer_params, is a dict of hyper-parameters for the name of an optimizer, such as"
        f" {{'learning_rate': 0.1}}, not {kind}; {advice}"
    )


def _made(optimizer: Any, optimizer_params: Mapping[str, Any] | None) -> Optimizer:
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        name = RULES.get(optimizer, RULES[torch.optim.Adam]).name
        raise TypeError(
            f"{optimizer.__name__} is a class; give an instance, as torch.optim.{optimizer.__name__}(net.parameters(),"
            f" …), or a name and hyper-parameters, such as {name!r}, {{'lr': 0.001}}"
        )
    if isinstance(optimizer, torch.optim.Optimizer):
        if optimizer_params:
            raise TypeError(f"an optimizer that exists takes no hyper-parameters ({', '.join(optimizer_params)})")
        return _rule_of(optimizer)
    return create_optimizer(optimizer, **(optimizer_params or {}))


def _rule_of(given: torch.optim.Optimizer) -> Optimizer:
    """The rule with the numbers of the first group; `ParamGroups` gives it those of the others."""
    cls = RULES.get(type(given))
    if cls is None:
        kind = type(given).__name__
        why = _WHY_NOT.get(kind, f"known are {', '.join(one.__name__ for one in RULES)}, not classes derived from them")
        raise TypeError(f"torch's optimizer {kind} cannot travel to the servers ({why}); {_KEEP_IT}")
    for group in given.param_groups:
        cls.arguments(known_words(cls, group))
        for word, number in group.items():
            if word != "params" and isinstance(number, torch.Tensor):
                raise TypeError(
                    f"{word} is a tensor, which cannot travel to the servers: give a float, {word}=float(…)"
                )
    return create_optimizer(cls.name, **known_words(cls, given.param_groups[0]))


def group_entries(optimizer: Any, rule: Optimizer) -> Collection[str]:
    """What the Trainer's parameter groups may have: all numbers of the rule if it is a rule of torch.

    Args:
        optimizer: the Trainer's argument.
        rule: the result of `make_optimizer` for it.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        return ("params",)
    return ("params", *rule.words(), *IGNORED) if isinstance(rule, TorchRule) else GROUP_ENTRIES


def refuse_what_contradicts(
    kvstore: object,
    devices: int,
    compression_params: Mapping[str, Any] | None,
    update_on_kvstore: bool | None,
    overlap: bool,
    share_weights: bool,
    reject_nonfinite: bool,
) -> None:
    """Check the arguments of a `Trainer` that need no store to be checked.

    Raises:
        TypeError, ValueError: an argument is invalid, or two contradict each other.
    """
    if compression_params is not None:
        from_params(compression_params)
    if compression_params is not None and kvstore is None:
        raise ValueError("compression_params need a store: with kvstore=None nothing is sent")
    if kvstore is None and devices > 1:
        raise ValueError(
            f"the parameters have replicas on {devices} devices, whose gradients only a store sums; use"
            " kvstore='device'"
        )
    if kvstore is not None and not isinstance(kvstore, str | KVStoreBase):
        raise TypeError(
            "kvstore must be the name of a store, a KVStore (or your own subclass of kvdist.kv.KVStoreBase), or None,"
            f" not {type(kvstore).__name__}"
        )
    if isinstance(kvstore, str):
        require_known(kvstore)
    if share_weights and (overlap or devices > 1 or update_on_kvstore is False):
        raise ValueError(
            "share_weights=True needs one device, a store that updates the weights, and overlap=False: parameters"
            " show the servers' memory"
        )
    if reject_nonfinite and overlap:
        raise ValueError(
            "reject_nonfinite=True needs overlap=False: gradients are checked before the first of them is sent"
        )


def checked_clip_norm(
    clip_norm: object, kvstore: object, update_on_kvstore: bool | None, overlap: bool, share_weights: bool
) -> float | None:
    """Check the norm at which a `Trainer` clips, which needs the sums of all gradients before the first update.

    Raises:
        TypeError, ValueError: it is not a number above 0, or it contradicts another argument.
    """
    if clip_norm is None:
        return None
    if isinstance(clip_norm, bool) or not isinstance(clip_norm, int | float):
        raise TypeError(f"clip_norm must be a number or None, not {type(clip_norm).__name__}")
    if not clip_norm > 0:
        raise ValueError(f"clip_norm is {clip_norm}; the largest norm of a gradient must be more than 0")
    if overlap or share_weights:
        setting = "overlap" if overlap else "share_weights"
        raise ValueError(
            f"clip_norm={clip_norm} cannot be combined with {setting}=True: clipping needs all gradients of a step"
            " before the first weight is updated. Leave one of the two out"
        )
    name = kvstore if isinstance(kvstore, str) else kvstore.type if isinstance(kvstore, KVStoreBase) else ""
    if name.lower() in ASYNCHRONOUS:
        raise ValueError(
            f"clip_norm={clip_norm} needs the sum of the gradients of all workers, and the store {name!r} has none: it"
            " updates with each worker's gradient as it comes. Use 'dist', or leave clip_norm out"
        )
    if update_on_kvstore and name.lower() not in DIST_NAMES:
        raise ValueError(
            f"clip_norm={clip_norm} with update_on_kvstore=True needs the servers of a store 'dist', not {name!r}:"
            " leave update_on_kvstore out, and the workers update"
        )
    return float(clip_norm)


def choose_store(
    wanted: Wanted, devices: int, create: Callable[[str], object], compresses: bool = False
) -> KVStoreBase | None:
    """Return the store that a trainer uses; None where the process updates alone.

    Args:
        wanted: the Trainer's argument.
        devices: the number of replicas of each parameter.
        create: makes a store by name.
        compresses: whether gradients are compressed, so a store does more than copy.

    Raises:
        TypeError: a registered class is not a store that a trainer can use.
    """
    if not isinstance(wanted, str):
        return wanted
    store = create(wanted)
    if not isinstance(store, KVStoreBase):
        raise TypeError(
            f"the store {wanted!r} is a {type(store).__name__}, which a Trainer cannot use: derive it from"
            " kvdist.kv.KVStoreBase"
        )
    if isinstance(store, KVStore) and not compresses and would_only_copy(devices, store.num_workers, store.num_servers):
        store.close()
        _warn_if_alone(store.type)
        return None
    return store


def decide_update_on_kvstore(
    store: KVStoreBase,
    wanted: Wanted,
    update_on_kvstore: bool | None,
    parameters: Sequence[Parameter],
    clips: bool = False,
) -> bool:
    """Whether this store updates the weights; see the table of the module.

    Raises:
        ValueError: the user's request is impossible.
    """
    is_local = isinstance(wanted, str) and wanted.lower() == "local"
    return store_updates(
        store.type,
        store.is_capable(store.OPTIMIZER),
        update_on_kvstore,
        by_default=read_setting("KVDIST_UPDATE_ON_KVSTORE"),
        sizes=[one.replicas[0].numel() for one in parameters] if is_local else (),
        has_servers=isinstance(store, KVStore) and store.num_servers > 0,
        has_sparse_grads=any(one.has_sparse_grad for one in parameters),
        clips=clips,
    )


def model_statement(parameters: Sequence[Parameter], known_by: NDArray[np.uint8]) -> str:
    """Return what all workers must agree on of parameters with names, before their order is known.

    Args:
        parameters: all of the trainer's.
        known_by: their `identities`; the statement numbers them in the order of their names.
    """
    order = sorted(range(len(parameters)), key=lambda place: parameters[place].name)
    trained = ranges([number for number, place in enumerate(order) if parameters[place].trained])
    digest = hashlib.blake2b(known_by[order].tobytes(), digest_size=8).hexdigest()
    first, last = (parameters[place].name for place in (order[0], order[-1]))
    numbers = f"{len(parameters)} parameters, trained are {trained}"
    return f"{numbers}, names {digest} of {first!r} to {last!r}, numbered in the order of their names"


def statement(
    parameters: Sequence[Parameter], updates_here: Optimizer | None, clip_norm: float | None = None, loaded: str = ""
) -> str:
    """Return a sentence in which all workers must agree. Shapes and dtypes are compared key by key.

    Args:
        parameters: all of the trainer's.
        updates_here: the optimizer, where each worker updates. A store that updates compares optimizers itself.
        clip_norm: None for no clipping.
        loaded: a digest of loaded optimizer states; empty for none.
    """
    trained = ranges([key for key, parameter in enumerate(parameters) if parameter.trained])
    said = f"{len(parameters)} parameters, trained are {trained}"
    said += f", goes on from the optimizer state {loaded}" if loaded else ""
    said += "" if clip_norm is None else f", gradients clipped to norm {clip_norm}"
    return said if updates_here is None else f"{said}, on each worker by {updates_here.describe()}"


def prepare_store(
    store: KVStoreBase,
    parameters: Sequence[Parameter],
    needs_more: bool,
    compression_params: Mapping[str, Any] | None,
    updates_here: bool = False,
) -> KVStore | Adapted:
    """Prepare a store for a trainer: compression, sparse keys, and keys that need only sums.

    Args:
        store: the store.
        parameters: all of the trainer's.
        needs_more: whether ``overlap`` or ``share_weights`` is requested.
        compression_params: the Trainer's argument.
        updates_here: whether each worker updates, so the store only sums.

    Raises:
        ValueError: the store cannot fulfil a request.
    """
    if not isinstance(store, KVStore):
        if needs_more or compression_params is not None:
            raise ValueError(
                f"the store {store.type!r} does not support overlap=True, share_weights=True or compression_params;"
                " leave them out"
            )
        return Adapted(store)
    store.expect_rows([key for key, parameter in enumerate(parameters) if parameter.has_sparse_grad])
    if updates_here:
        store.leave_unkept(range(len(parameters) + 1))  # the last key is the ballot's
    # Parameters without gradients are only broadcast, which must be exact.
    store.leave_uncompressed([key for key, parameter in enumerate(parameters) if not parameter.trained])
    if compression_params is not None:
        store.set_gradient_compression(compression_params)
    return store


def require_unused(store: KVStore) -> None:
    """Check that no other trainer has its weights in this store.

    Raises:
        ValueError: another trainer does.
    """
    try:
        store.pull(0)
    except KeyNotInitialised:
        return
    except ValueError:
        pass  # the key exists, but its value is not kept
    raise ValueError(
        "the store holds key 0 already, so another Trainer uses it, and both would share their weights; give each a"
        f" separate store: kv.create({store.type!r})"
    )


def _warn_if_alone(name: str) -> None:
    try:
        cluster = cluster_from_env()
    except ConfigError:
        return
    if cluster is not None and cluster.num_workers > 1:
        LOG.warning(
            "this worker is one of %d, but its Trainer updates alone (kvstore=%r), so each worker trains a separate"
            " model. Pass kvstore='dist' to train one model together",
            cluster.num_workers,
            name,
        )


def check_losses(
    store: KVStoreBase, policy: TrainingPolicy | None, updates_there: bool = True, overlaps: bool = False
) -> None:
    """Raises a `ConfigError`: this way of training does not survive the losses that the job survives."""
    if isinstance(store, KVStore) and store.on_loss != "fail":
        snapshots = read_setting("KVDIST_SNAPSHOTS") if overlaps and store.on_loss == "continue" else None
        LossPolicy(
            store.on_loss, policy=policy, workers_update=not updates_there, overlaps=overlaps, snapshots=snapshots
        ).check()


def policy_of(store: KVStoreBase | None) -> TrainingPolicy | None:
    """The policy of a store that decides when a worker pushes; None if it pushes in each step, unasked."""
    return store._backend.policy if isinstance(store, KVStore) else None


def compression_of(policy: TrainingPolicy | None, given: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """How pushes are compressed: by the trainer's argument, or by its policy.

    Raises:
        ConfigError: both say something.
    """
    kind = COMPRESSIONS[policy.bits] if isinstance(policy, LocalSteps | Quota) else None
    if kind is not None and given is not None:
        raise ConfigError(
            f"the policy {policy} compresses as {kind}, and the Trainer has compression_params={dict(given)}: leave out"
            " one of them"
        )
    return given if kind is None else {"type": kind}


def require_policy(policy: TrainingPolicy, num_devices: int, clip_norm: float | None, sends_otherwise: bool) -> None:
    """Check what does not go together with a policy.

    Args:
        policy: which.
        num_devices: of this worker.
        clip_norm: of the trainer.
        sends_otherwise: whether it overlaps, or shares weights, or got update_on_kvstore.

    Raises:
        ConfigError: something does not.
    """
    obstacle = (
        "several devices: a worker has one" if num_devices > 1
        else "clip_norm, which is of the mean of all gradients: call torch.nn.utils.clip_grad_norm_ before step()"
        if clip_norm is not None
        else "overlap=True, share_weights=True or update_on_kvstore: leave them out" if sends_otherwise
        else ""
    )  # fmt: skip
    if obstacle:
        what = (
            "lets workers update their own weights" if updates_between(policy)
            else "asks before each push" if policy.pace is Pace.ALONE
            else "adds up gradients of steps"
        )  # fmt: skip
        raise ConfigError(f"the policy {policy} {what}, and does not work with {obstacle}")


def require_enough(policy: TrainingPolicy, num_workers: int) -> None:
    """Check that a policy which counts workers fits the number of workers.

    Raises:
        ConfigError: it wants more of them.
    """
    quorum = policy.quorum if isinstance(policy, LocalSteps) else None
    if quorum is not None and quorum > num_workers:
        raise ConfigError(
            f"the policy {policy} needs a quorum of {quorum} workers, but the job has {num_workers}: use a smaller"
            " quorum, or leave it out to wait for all"
        )


def require_joinable(store: KVStoreBase, overlap: bool) -> bool:
    """Whether workers of this store wait for each other, so that `Trainer.join` has something to do.

    Raises:
        NotImplementedError: they do, and a worker that is done cannot take part.
    """
    if store.num_workers == 1 or store.type in ASYNCHRONOUS:
        return False
    if overlap:
        raise NotImplementedError("join() with overlap=True is not offered: make the trainer with overlap=False")
    if store.type not in DIST_NAMES:
        raise NotImplementedError(
            f"join() needs a store 'dist', not {store.type!r}: give all workers the same number of batches, or use"
            " kvdist.horovod, which has join()"
        )
    return True


def refuse_size(call: str) -> None:
    """Raise for a number of examples that comes after gradients were sent."""
    raise ValueError(
        f"{call} with overlap=True: gradients were sent during backward(), before their divisor was known."
        " Make the loss a mean over its examples and call step() without a size, or make the trainer with"
        " overlap=False"
    )


def refuse_overflow(grads: Grads) -> None:
    """Raises a `ValueError`: workers multiply gradients by their numbers of samples, and float16 ends at 65504."""
    if any(grad.dtype is torch.float16 for given in grads for grad in given or ()):
        raise ValueError(
            "step(samples=n) multiplies gradients by n where workers update, which float16 has no room for: let the"
            " store update, or keep float32 parameters"
        )


def require_samples(samples: float, batch_size: float | None, delivered: int = 0) -> int:
    """Return the number of examples of a mean, as a whole number.

    Args:
        samples, batch_size: as of a step.
        delivered: number of examples that a `QueueSampler` has handed out since the last step; 0 without a sampler.

    Raises:
        ValueError: it is out of range or no whole number, or contradicts something.
    """
    if batch_size is not None:
        raise ValueError(
            f"step({batch_size}, samples={samples}): batch_size is for losses that are sums, samples for losses that"
            " are means; pass one of them"
        )
    if isinstance(samples, bool) or not 0 < real_number("samples", samples) <= SAMPLES_MAX or int(samples) != samples:
        raise ValueError(
            f"samples is {samples}; it is the number of examples of this worker's loss, whole, from 1 to {SAMPLES_MAX}."
            " Trainer.skip_step() is for a worker without any"
        )
    if delivered and samples != delivered:
        raise ValueError(
            f"samples is {samples}, but batches() has handed out {delivered} examples of the QueueSampler since the"
            " last step, and each must count once"
        )
    return int(samples)


def refuse_sent(method: str, first: str) -> None:
    """Raise for a call while gradients of a backward pass are on their way."""
    raise RuntimeError(
        f"{method}() while gradients of a backward pass are under way (overlap=True): call {first} before it,"
        " or put the pass into `with trainer.no_sync():` if its gradients are not used"
    )


def refuse_updated_there(method: str) -> None:
    """Raise for a call that makes no sense where the store updates the weights."""
    raise RuntimeError(
        f"{method}() cannot be used while the store updates the weights: it does not return gradients. Call step(),"
        " or make the trainer with update_on_kvstore=False"
    )
