"""What a step does with gradients: exchange them with the store, or update the weights in this process.

Invariants of `Exchange` (what leaves during the backward pass is in `overlap`):

* All parameters travel in one list call, in the order given, so the first layers, which the next forward pass needs
  first, come first. Keys are positions: 0, 1, 2, ….
* Where workers update, all must update the same parameters. One more key, the ballot, tells which gradients each
  worker has: a parameter without a gradient on any worker stays as it is everywhere. The ballot also tells whether a
  worker averages; all workers with gradients must do the same where no server divides.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from kvdist.config.environment import read_setting
from kvdist.kernels.interface import Device
from kvdist.kernels.reference import REFERENCE
from kvdist.kvstore import values
from kvdist.kvstore.adapter import Adapted
from kvdist.kvstore.base import KVStore
from kvdist.kvstore.local_values import Updaters
from kvdist.kvstore.placement import Devices, OnDevice, as_host_bits
from kvdist.kvstore.registry import DIST_NAMES
from kvdist.naming import NamedKey
from kvdist.optimizer.base import Extent, Optimizer
from kvdist.training.parameters import Parameter, named_keys

if TYPE_CHECKING:
    import torch
    from torch import Tensor


CONVENTIONS = 2
"""Elements of a ballot after those of the parameters: one for averages, one for sums."""

Grads: TypeAlias = "Sequence[list[Tensor] | None]"
"""For each trained parameter its gradients, one per device; None without a gradient."""


class Exchange:
    """The exchange of a trainer with its store.

    Args:
        store: the store.
        parameters: all of the trainer's.
        trained: keys and parameters that have gradients.
        shared: the parameters that show the servers' memory; None without ``share_weights``.
    """

    def __init__(
        self,
        store: KVStore | Adapted,
        parameters: Sequence[Parameter],
        trained: Sequence[tuple[int, Parameter]],
        shared: SharedWeights | None = None,
    ) -> None:
        self._store = store
        self._parameters = parameters
        self._trained = trained
        self._keys = [key for key, _ in trained]
        self._ballot_key = len(parameters)
        self._shared = shared
        self.always_averages = False
        """Whether sums are averages in steps with a batch size too."""

    def broadcast(self) -> None:
        """Copy rank 0's weights to all workers."""
        if self._shared is not None:
            self._shared.own()
        replicas = [parameter.replicas for parameter in self._parameters]
        self._store.broadcast(named_keys(self._parameters), [one[0] for one in replicas], out=replicas)

    def fetch(self) -> None:
        """Write the store's current values into all parameters."""
        if self._shared is not None:
            self._shared.own()
        assert isinstance(self._store, KVStore)
        self._store.pull(list(range(len(self._parameters))), out=[one.replicas for one in self._parameters])

    def open_ballot(self) -> int | None:
        """Make the ballot's key, which `sum` needs; None for a single worker."""
        if self._store.num_workers == 1:
            return None
        self._store.leave_uncompressed([self._ballot_key])
        ballot = torch.zeros(len(self._trained) + CONVENTIONS, dtype=torch.float32, device="cpu")
        named = NamedKey(self._ballot_key, "the vote on who has which gradients")
        self._store.broadcast([named], [ballot], out=[[ballot]])
        return self._ballot_key

    def update(self, grads: Grads, average: bool, samples: int) -> None:
        """Send gradients to a store that updates, and get the new weights."""
        weights = [parameter.replicas for _, parameter in self._trained]
        if self._shared is None:
            self._store.pushpull(self._keys, grads, out=weights, average=average, samples=samples)
            return
        assert isinstance(self._store, KVStore)
        shown = self._store.pushpull_shared(self._keys, grads, weights, average=average, samples=samples)
        self._shared.take(shown)

    def sum(self, grads: Grads, average: bool) -> list[bool]:
        """Replace the gradients, on every device, by their sums over devices and workers.

        Returns:
            For each trained parameter whether any worker had a gradient. Without one, it has none afterwards.

        Raises:
            ValueError: some workers average and others sum, on a store that cannot mix the two.
        """
        average = average or self.always_averages
        if self._store.num_workers == 1:
            here = [grad is not None for grad in grads]
            self._sum([position for position, is_here in enumerate(here) if is_here], grads, average)
            return here
        given = self._sum(range(len(grads)), grads, average, is_voted=True)
        for (_, parameter), is_given in zip(self._trained, given, strict=True):
            if not is_given:
                parameter.drop_filled()
        return given

    def _sum(self, positions: Sequence[int], grads: Grads, average: bool, is_voted: bool = False) -> list[bool]:
        """Sum the gradients at these positions; with a vote, return for which of them any worker had one."""
        members = [self._trained[position] for position in positions]
        for _, parameter in members:
            parameter.fill_grads()
        keys = [key for key, _ in members]
        given = [grads[position] for position in positions]
        places = [parameter.grads() or [] for _, parameter in members]
        here = [grad is not None for grad in given]
        # A worker without gradients, as in a skipped step, accepts either convention.
        convention = [any(here) and average, any(here) and not average]
        ballot = torch.tensor([*here, *convention], dtype=torch.float32, device="cpu")
        if is_voted:
            keys, given, places = [*keys, self._ballot_key], [*given, [ballot]], [*places, [ballot]]
        # In place is cheaper, and the usual case: every result has a given gradient.
        complete = all(one is not None and len(one) == len(place) for one, place in zip(given, places, strict=True))
        if keys:
            self._store.pushpull(keys, given, out=None if complete else places, average=average)
        *shares, averaging, summing = ballot.tolist()
        if averaging > 0 and summing > 0 and isinstance(self._store, KVStore) and self._store.type not in DIST_NAMES:
            raise ValueError(
                "some workers called step(), which averages over the workers, and others step(batch_size), which sums:"
                f" the store {self._store.type!r} cannot do both in one step. Call the same on all workers"
            )
        return [share > 0 for share in shares]


def divide(grads: Grads, divisor: float) -> None:
    """Divide gradients in place."""
    present = [grad for given in grads for grad in given or ()]
    if present and divisor != 1:
        torch._foreach_div_(present, divisor)


def scale(parameters: Sequence[Parameter], factor: float) -> None:
    """Multiply the gradients of parameters, on every device, in place."""
    present = [grad for parameter in parameters for grad in parameter.grads() or ()]
    if present and factor != 1:
        torch._foreach_mul_(present, factor)


class SharedWeights:
    """The parameters that show servers' memory, and whether the user's code has changed them.

    Args:
        parameters: the trained ones, each with one replica.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = parameters
        self._versions: list[int | None] = [None] * len(parameters)
        """torch's version counter at the last step; None for a parameter with memory of its own."""
        self._changed: list[str] = []

    def require_unchanged(self) -> None:
        """Refuse weights that were written to since the last step.

        Raises:
            RuntimeError: some were, and `own` was not called since.
        """
        self._changed = self._changed or [
            parameter.label
            for parameter, version in zip(self._parameters, self._versions, strict=True)
            if version is not None and _weight(parameter)._version != version
        ]
        if self._changed:
            raise RuntimeError(
                f"{', '.join(self._changed)} was changed outside of step(). With share_weights=True parameters show the"
                " servers' memory, and no other worker sees a change here. Call trainer.broadcast_parameters() on every"
                " worker after changing weights, such as by load_state_dict(); nothing was sent in this step"
            )

    def take(self, shown: Sequence[Any]) -> None:
        """Show a step's results: per parameter a tensor with its new value, or None if it was written in place."""
        for i, (parameter, tensor) in enumerate(zip(self._parameters, shown, strict=True)):
            if tensor is None:
                self._versions[i] = None
                continue
            weight = _weight(parameter)
            # An operation on no elements writes nothing, but advances the version counter that autograd checks.
            weight.detach().view(-1)[:0].zero_()
            weight.data = tensor
            self._versions[i] = weight._version

    def own(self) -> None:
        """Give every parameter memory of its own with its current value, including the user's changes."""
        self._changed = []
        for i, parameter in enumerate(self._parameters):
            if self._versions[i] is not None:
                weight = _weight(parameter)
                weight.data = weight.detach().clone()
                self._versions[i] = None


def _weight(parameter: Parameter) -> torch.Tensor:
    return parameter.replicas[0]


class LocalUpdate:
    """An optimizer that runs in this process, without a store or on the sums of one, with states for each device.

    A replica on a GPU is updated there, with its states beside it.

    Args:
        optimizer: the rule and its hyper-parameters.
        parameters: all, in the order of their keys, with the same number of replicas.
        devices: the GPUs that are used; None reads the environment.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[Parameter], devices: Devices | None = None) -> None:
        self.devices = Devices(read_setting("KVDIST_GPU"), insists=False) if devices is None else devices
        self._parameters = parameters
        count = len(parameters[0].replicas)
        self._updaters = [Updaters(optimizer, REFERENCE, self._home(place)) for place in range(count)]

    @property
    def updater(self) -> Updaters:
        """The first device's; those of the others have the same states."""
        return self._updaters[0]

    def spread(self) -> None:
        """Copy the first device's new states to the others."""
        for key in range(len(self._parameters)) if len(self._updaters) > 1 else ():
            state = self.updater.state_of(key)
            for other in self._updaters[1:]:
                other.restore(key, None if state is None else state.copy())

    def apply(self, parameters: Iterable[tuple[int, Parameter]]) -> None:
        """Update every replica that has a gradient, in place.

        Args:
            parameters: with their keys.

        Raises:
            TypeError, ValueError: a gradient does not fit its weight.
            DeviceError: the optimizer cannot run on a weight's GPU.
        """
        for key, parameter in parameters:
            for updaters, replica in zip(self._updaters, parameter.replicas, strict=True):
                if replica.grad is not None:
                    self._update(updaters, key, replica, replica.grad)

    def _home(self, place: int) -> Callable[[Hashable], Device | None]:
        def home(key: Hashable) -> Device | None:
            assert isinstance(key, int), "states are named by keys"
            return self.devices.of(self._parameters[key].replicas[place])

        return home

    def _update(self, updaters: Updaters, key: int, weight: torch.Tensor, grad: torch.Tensor) -> None:
        shape, dtype = values.describe(weight)
        values.require(key, grad, shape, dtype)
        updater, extent = updaters.of(key), Extent(key, shape)
        scales = [updater.optimizer.rescale_grad]
        present, gradient = self.devices.read(weight, dtype), self.devices.read(grad, dtype)
        if isinstance(present, OnDevice):
            assert isinstance(gradient, OnDevice), "torch gives a gradient where its weight is"
            # A non-contiguous weight was copied, and takes its new value from the copy.
            target = self.devices.place(weight, dtype) or present
            updater.update(key, present.array, [gradient.array], scales, dtype, target.array, extent=extent)
            if target is present:
                values.write_bits(weight, target.on_host())
            return
        bits = values.writable_bits(weight)
        own = present.copy() if bits is None else bits
        updater.update(key, own, as_host_bits([gradient]), scales, dtype, own, extent=extent)
        if bits is None:
            values.write_bits(weight, own)
