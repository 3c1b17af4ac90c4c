"""Replicas of a network, one on each device of a worker, which a `Trainer` keeps equal; and the sync of buffers.

Invariants:

* The first replica is the caller's own network, moved as ``net.to(device)`` moves it. The others are copies.
* Errors are raised before anything is moved or copied.
* Parameters come in the order of the network, each once, as a list with its replica on every device: what a `Trainer`
  takes. What is tied or frozen in the network is tied or frozen in every replica.
* Buffers, such as BatchNorm's running statistics, are each device's own until `kvdist.sync_buffers` averages them.
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
    """The replicas of one network, in the order of their devices. `replicate` makes it."""

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
        """Each parameter as the list of its replicas, for a `Trainer`."""
        for _, replicas in self.named_parameters():
            yield replicas

    def named_parameters(self) -> Iterator[tuple[str, list[torch.nn.Parameter]]]:
        """Each parameter's name, and the list of its replicas."""
        for named in zip(*(net.named_parameters() for net in self._nets), strict=True):
            yield named[0][0], [parameter for _, parameter in named]

    def train(self, mode: bool = True) -> None:
        """Put all replicas into training mode, or with False into that of `eval`."""
        for net in self._nets:
            net.train(mode)

    def eval(self) -> None:
        """Put all replicas into evaluation mode."""
        self.train(False)

    def zero_grad(self) -> None:
        """Forget the gradients of all replicas. Call it before each batch."""
        for net in self._nets:
            net.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """The first replica's. Its parameters are those of all; its buffers are so after `kvdist.sync_buffers`."""
        return self._nets[0].state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state into all replicas. After a step, call ``trainer.broadcast_parameters()`` behind it.

        Raises:
            RuntimeError: as torch's: a name or a shape is not the network's. The first replica is tried first.
        """
        for net in self._nets:
            net.load_state_dict(state)


def replicate(net: torch.nn.Module, devices: Sequence[Any]) -> Replicas:
    """Put a network on several devices, for data parallel training by one worker.

    Split each batch with `split_and_load`, run each replica on its part, and give ``replicas.parameters()`` or
    ``replicas.named_parameters()`` to a `Trainer`, which sums the gradients and keeps the weights the same.

    Args:
        net: the network, with its first weights. It becomes the first replica: it is moved, not copied.
        devices: torch devices or their names, such as ``["cuda:0", "cuda:1"]``. There may be one, or the same one
            twice, each time with a replica of its own.

    Returns:
        The replicas, a sequence of modules: ``[loss(net(x), y) for net, x, y in zip(replicas, data, labels)]``.

    Raises:
        TypeError: `net` is not a module, or `devices` no list of devices.
        ValueError: there is no device, or the network is spread over several devices, or has no memory yet (``meta``),
            or torch cannot copy it.
        RuntimeError: a lazy module has no shape yet.
        DeviceError: a device cannot be used here.
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
    """Refuse what cannot be replicated."""
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
            f"the network is spread over {' and '.join(lies_on)}, and a replica lies on one device: move it to one"
            " first, if it fits there"
        )
    if "meta" in lies_on:
        raise ValueError("the network is on the device 'meta' and has no weights yet: give it some, as by to_empty()")


def sync_buffers(net: torch.nn.Module | Replicas, store: KVStore | None, *, samples: int | None = None) -> None:
    """Make the buffers of a network the same on all workers and devices, in place; every worker calls it.

    Buffers of floating and complex types, such as a running mean, become the mean over the workers; integers and
    booleans, such as a count of batches, and others that no store sums become rank 0's. Of `Replicas` they are first
    the mean over this worker's devices, and the first device's. Buffers are matched by their names. Call it before an
    evaluation, or before saving the ``state_dict``. The keys and the optimizer of the store are not touched.

    Args:
        net: the network, on each worker with the same buffers; or its replicas.
        store: whose workers take part. None: only the devices of these replicas.
        samples: of how many examples this worker's buffers are, since the last call, say: each worker's weigh so much
            in the mean, which is right where workers make different numbers of steps. All workers give theirs. With 0
            a worker only gets the others'; if all give 0, the mean is unweighted. None: all workers count equally.

    Raises:
        InitMismatch: the workers' networks have different buffers, or only some give their samples.
        TypeError: the store is not a `KVStore`, or a buffer is of a type that none can hold, or `samples` is no whole
            number.
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
    """All members in one array of host memory; halves are added in float32."""
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
