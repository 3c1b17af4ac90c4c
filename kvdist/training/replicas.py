"""Replicas of a network, a replica on each device of a worker, which a `Trainer` keeps equal; and the sync of buffers.

Invariants:

* The first replica is the caller's network itself, moved as ``net.to(device)`` moves it. The other replicas are copies.
* Errors are raised before anything is moved or copied.
* Parameters come in the order of the network, each once, as a list with its replica on every device: what a `Trainer`
  takes. Parameters that are tied or frozen in the network are tied or frozen in every replica.
* Buffers, such as BatchNorm's running statistics, differ between devices until `kvdist.sync_buffers` averages them.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from kvdist.errors import DeviceError, first_line
from kvdist.kvstore.base import KVStore
from kvdist.kvstore.values import is_key_type, require_plain

if TYPE_CHECKING:
    import torch


class Replicas(Sequence["torch.nn.Module"]):
    """Replicas of a network in the order of their devices, as `replicate` returns them."""

    def __init__(self, nets: Sequence[torch.nn.Module]) -> None:
        self._nets = list(nets)

    def __len__(self) -> int:
        return len(self._nets)

    @overload
    def __getitem__(self, index: int) -> torch.nn.Module: ...

    @overload
    def __getitem__(self, index: slice) -> list[torch.nn.Module]: ...

    def __getitem__(self, index: int | slice) -> torch.nn.Module | list[torch.nn.Module]:
        return self._nets[index]

    def parameters(self) -> Iterator[list[torch.nn.Parameter]]:
        """Iterate over the parameters; each item is the list of replicas of a parameter, for a `Trainer`."""
        for _, replicas in self.named_parameters():
            yield replicas

    def named_parameters(self) -> Iterator[tuple[str, list[torch.nn.Parameter]]]:
        """Iterate over pairs of a parameter's name and the list of its replicas."""
        for named in zip(*(net.named_parameters() for net in self._nets), strict=True):
            yield named[0][0], [parameter for _, parameter in named]

    def train(self, mode: bool = True) -> None:
        """Put all replicas into training mode, or with False into evaluation mode."""
        for net in self._nets:
            net.train(mode)

    def eval(self) -> None:
        """Put all replicas into evaluation mode."""
        self.train(False)

    def zero_grad(self) -> None:
        """Reset the gradients of all replicas. Call it before each batch."""
        for net in self._nets:
            net.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return the ``state_dict()`` of the first replica.

        Parameters are equal on all replicas; buffers only after `kvdist.sync_buffers`.
        """
        return self._nets[0].state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state into all replicas. After the first step, call ``trainer.broadcast_parameters()`` afterwards.

        Raises:
            RuntimeError: as in torch, a name or a shape does not match the network. The first replica is checked first.
        """
        for net in self._nets:
            net.load_state_dict(state)


def replicate(net: torch.nn.Module, devices: Sequence[Any]) -> Replicas:
    """Copy a network to several devices, for data-parallel training within a worker.

    Split each batch with `split_and_load`, run each replica on its part, and pass ``replicas.parameters()`` or
    ``replicas.named_parameters()`` to a `Trainer`, which sums the gradients and keeps the weights equal.

    Args:
        net: network with its initial weights. It is moved to the first device and becomes the first replica.
        devices: list of torch devices or their names, such as ``["cuda:0", "cuda:1"]``. A single device is allowed, and
            a repeated device gets a separate replica each time.

    Returns:
        A `Replicas` object, a sequence of modules: ``[loss(net(x), y) for net, x, y in zip(replicas, data, labels)]``.

    Raises:
        TypeError: `net` is not a module, or `devices` is not a list of devices.
        ValueError: `devices` is empty, or the network is spread over several devices, is on the ``meta`` device, or
            cannot be copied by torch.
        RuntimeError: a lazy module has no shape yet.
        DeviceError: a device is not usable in this process.
    """
    places = _devices(devices)
    _check(net)
    copies = [_copy(net).to(place) for place in places[1:]]
    return Replicas([net.to(places[0]), *copies])


def _copy(net: torch.nn.Module) -> torch.nn.Module:
    try:
        return copy.deepcopy(net)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"the network cannot be copied ({first_line(error)}): make it once for each device and give the Trainer"
            " list(zip(net0.parameters(), net1.parameters()))"
        ) from error


def _devices(devices: Sequence[Any]) -> list[torch.device]:
    """Resolve the devices, and check that each can be used."""
    import torch

    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise TypeError(f"devices is a list, one for each replica, such as ['cuda:0', 'cuda:1'], not {devices!r}")
    if not devices:
        raise ValueError("devices is empty; name at least one, such as ['cpu']")
    places = []
    for device in devices:
        try:
            place = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise TypeError(f"{device!r} is not a device; name one such as 'cuda:0' or 'cpu'") from error
        if place.type == "meta":
            raise ValueError("a network on the device 'meta' has no memory and cannot be trained; name another device")
        try:
            torch.empty(1, device=place)
        except (AssertionError, NotImplementedError, RuntimeError) as error:  # torch without CUDA asserts
            raise DeviceError(
                f"the device {str(place)!r} cannot be used here ({first_line(error)}): torch sees"
                f" {torch.cuda.device_count()} CUDA devices, counted from 0, after CUDA_VISIBLE_DEVICES"
            ) from error
        places.append(place)
    return places


def _check(net: torch.nn.Module) -> None:
    """Refuse an argument or a network that cannot be replicated."""
    import torch
    from torch.nn.parameter import is_lazy

    if not isinstance(net, torch.nn.Module):
        raise TypeError(f"replicate takes a network, which is a torch.nn.Module, not {type(net).__name__}")
    named = [*net.named_parameters(), *net.named_buffers()]
    lazy = [name for name, tensor in named if is_lazy(tensor)]
    if lazy:
        raise RuntimeError(
            f"{', '.join(lazy)} has no shape yet, as its module is lazy: run one forward pass before replicate()"
        )
    lies_on = list(dict.fromkeys(str(parameter.device) for parameter in net.parameters()))
    if len(lies_on) > 1:
        raise ValueError(
            f"the network is spread over {' and '.join(lies_on)}, but a replica must be on a single device: move the"
            " network to one device first"
        )
    if "meta" in lies_on:
        raise ValueError("the network is on the device 'meta' and has no weights yet: give it some, as by to_empty()")


def sync_buffers(net: torch.nn.Module | Replicas, store: KVStore | None, *, samples: int | None = None) -> None:
    """Make the buffers of a network, such as BatchNorm statistics, equal on all workers and devices, in place.

    Every worker calls it, before an evaluation or before saving the ``state_dict``. Floating-point and complex buffers,
    such as a running mean, become the mean over the workers. Integer and boolean buffers, such as a count of batches,
    and types that no store can sum become those of rank 0. For `Replicas`, the mean over the devices of this worker, or
    the value of the first device, is taken first. Buffers are matched by name. Keys and optimizer of the store are not
    involved.

    Args:
        net: network with the same buffers on each worker, or its replicas.
        store: store whose workers take part; None for the devices of the replicas only.
        samples: weight of this worker in the mean: the number of examples behind its buffers, for example since the
            last call. Use it if workers make different numbers of steps; then all workers pass it. A worker with 0 only
            receives; if all pass 0, the mean is unweighted. None: all workers weigh the same.

    Raises:
        InitMismatch: the networks of the workers have different buffers, or only some workers pass `samples`.
        TypeError: `store` is not a `KVStore`, a buffer has a type that no store can hold, or `samples` is not an
            integer.
        ValueError: `samples` is negative.
    """
    import torch

    if samples is not None and (isinstance(samples, bool) or operator.index(samples) < 0):
        raise ValueError(f"samples is {samples}; it is the number of examples that these buffers are of, 0 or more")

    nets = list(net) if isinstance(net, Replicas) else [net]
    if not isinstance(store, KVStore) and not (store is None and isinstance(net, Replicas)):
        raise TypeError(f"sync_buffers needs a store of kvdist, such as kv.create('dist'), not {type(store).__name__}")
    named = [sorted(one.named_buffers(), key=operator.itemgetter(0)) for one in nets]
    for name, buffer in itertools.chain.from_iterable(named):
        try:
            require_plain(buffer)
        except TypeError as error:
            raise TypeError(f"the buffer {name} cannot be made the same on all workers: {error}") from None
    said = "; ".join(f"{name} of {buffer.dtype}, {tuple(buffer.shape)}" for name, buffer in named[0])
    replicas = list(zip(*([_as_real(buffer.detach()) for _, buffer in one] for one in named), strict=True))
    floating = [one for one in replicas if _is_averaged(one[0])]
    if store is not None:  # in every call, as others may be at a later one: a worker that has joined, say
        digest = hashlib.blake2b(said.encode(), digest_size=8).hexdigest()  # as a statement that is long is cut
        store.agree(f"{len(named[0])} buffers, {digest}: {said}")
    share, counts = 1.0, True
    if store is not None and samples is not None and floating:
        mean = store.average(float(samples), counts=samples > 0)  # over those with examples; NaN: there are none
        share, counts = (1.0, True) if math.isnan(mean) else (samples / mean, samples > 0)
    for dtype in dict.fromkeys(one[0].dtype for one in floating):
        members = [one for one in floating if one[0].dtype == dtype]
        flat = _mean_over_devices(members)
        if samples is not None:
            flat = flat.to(torch.promote_types(dtype, torch.float32)) * share
        _scatter(flat if store is None else store.average(flat, counts=counts), members)
    others = [one for one in replicas if not _is_averaged(one[0])]
    plain = [one[0].cpu().contiguous() for one in others]
    sent = [value if is_key_type(value) else value.reshape(-1).view(torch.uint8) for value in plain]
    for one, value in zip(others, sent if store is None else store.from_rank_0(sent), strict=True):
        for buffer in one:
            buffer.copy_(value.view(buffer.dtype).view(buffer.shape))


def _is_averaged(buffer: torch.Tensor) -> bool:
    return buffer.is_floating_point() and is_key_type(buffer)


def _as_real(buffer: torch.Tensor) -> torch.Tensor:
    """The buffer, or its real and imaginary parts, which show its memory."""
    import torch

    return torch.view_as_real(buffer) if buffer.is_complex() else buffer


def _mean_over_devices(members: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """The mean over devices of all members, as a flat tensor in host memory; halves are summed in float32."""
    import torch

    flats = [torch.cat([one.reshape(-1).cpu() for one in of_device]) for of_device in zip(*members, strict=True)]
    if len(flats) == 1:
        return flats[0]
    wide = torch.stack(flats).to(torch.promote_types(flats[0].dtype, torch.float32))
    return wide.mean(0).to(flats[0].dtype)


def _scatter(flat: Any, members: Sequence[Sequence[torch.Tensor]]) -> None:
    parts = flat.split([one[0].numel() for one in members])
    for one, part in zip(members, parts, strict=True):
        for buffer in one:
            buffer.copy_(part.view(buffer.shape))
