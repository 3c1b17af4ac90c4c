"""`Model`: the parameters of a trainer in this process, their gradients, and their update in this process.

Keys of parameters are their positions: 0, 1, 2, …; where parameters have names, the positions are those of worker 0, so
that a name is the same parameter on all workers. `Steps` decide what to send, and when; `grad_checks` reads torch's
version counters.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

import torch

from kvdist.kvstore.base import KVStore
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.states import SliceState
from kvdist.training.grad_checks import Stale, Watch, refuse_changed, refuse_nonfinite, refuse_untrained
from kvdist.training.param_groups import ParamGroups
from kvdist.training.parameters import Grads, Parameter, identities, reordered, scale
from kvdist.training.trainer_config import model_statement
from kvdist.training.weights import LocalUpdate, SharedWeights

LOG = logging.getLogger("kvdist")


class Model:
    """The parameters of a trainer in this process.

    Args:
        parameters: all parameters, trained or not, each with the same number of replicas.
        optimizer: the rule, whose hyper-parameters the user may change at any time.
        clip_norm: largest norm of the gradient of a step; None for no clipping.
        rejects_nonfinite: whether gradients are checked for NaN and infinity before a step uses them.
        given: an optimizer of torch by the user, whose parameter groups count; or None.

    Raises:
        ValueError: as of `ParamGroups`.
    """

    def __init__(
        self,
        parameters: list[Parameter],
        optimizer: Optimizer,
        clip_norm: float | None,
        rejects_nonfinite: bool,
        given: torch.optim.Optimizer | None = None,
    ) -> None:
        self.parameters = parameters
        self.optimizer = optimizer
        self.clip_norm = clip_norm
        self.num_devices = len(parameters[0].replicas)
        self.scale = optimizer.rescale_grad
        """The user's factor on gradients."""
        self.grad_norm: torch.Tensor | float | None = None
        """Norm of the last step's gradient before it was clipped."""
        self.nonfinite_steps = 0
        """Steps in which gradients of this worker were not finite and not used."""
        self.updates = 0
        """Updates in the weights of this process, those before a loaded checkpoint included."""
        self.samples = 0
        """Examples in the weights of this process, where no server counts them."""
        self._assign_keys()
        self.groups = ParamGroups(parameters, optimizer, given)
        """The hyper-parameters of the next step."""
        self.shared: SharedWeights | None = None
        """The parameters that show the servers' memory; None without ``share_weights``."""
        self.loaded_states: Sequence[SliceState | None] = [None] * sum(one.trained for one in parameters)
        """Loaded states of the trained parameters, until the first step gives them to who updates."""
        self.rank = 0
        """Rank of this worker, for messages."""
        self._rejects_nonfinite = rejects_nonfinite
        self._has_warned = False

    def _assign_keys(self) -> None:
        """Let the position of each parameter be its key."""
        for key, parameter in enumerate(self.parameters):
            parameter.key = key
        self.local = LocalUpdate(self.optimizer, self.parameters)
        self.trained = [one for one in self.parameters if one.trained]
        self._untrained = [one for one in self.parameters if not one.trained]
        self.watch = Watch(self.trained)

    def match_names(self, store: KVStore) -> str:
        """Give parameters with names the keys that they have on worker 0, whatever their order is.

        Returns:
            What the workers have agreed on so far, for `statement`; '' without names, where positions count.

        Raises:
            InitMismatch: another worker has other parameters.
        """
        known_by = identities(self.parameters)
        if known_by is None or (store.num_workers == 1 and store.on_loss == "fail"):
            return ""
        store.agree(model_statement(self.parameters, known_by))
        (others,) = store.from_rank_0([known_by])
        order = reordered(known_by, others)
        if order == sorted(order):
            return "by their names, "
        key_of = {place: key for key, place in enumerate(order)}
        states = {id(one): state for one, state in zip(self.trained, self.loaded_states, strict=True)}
        self.parameters[:] = [self.parameters[place] for place in order]
        self._assign_keys()
        self.loaded_states = [states[id(one)] for one in self.trained]
        self.groups.rekey(key_of)
        return "by their names, "

    # Gradients of a step.

    def refuse_untrained(self) -> None:
        """Raises a `RuntimeError`: a parameter that was frozen at the creation of the trainer has a gradient."""
        refuse_untrained(self._untrained)

    def require_unchanged(self) -> None:
        """Raises a `RuntimeError`: weights of the store were changed other than by steps."""
        if self.shared is not None:
            self.shared.require_unchanged()
        refuse_changed(self.watch.changed(), "nothing was sent in this step")

    def gradients(self, on_stale: Stale) -> Grads:
        """Return the gradients of a step.

        Raises:
            RuntimeError: a gradient is stale, and `on_stale` is `REFUSE`.
            FloatingPointError: a gradient is not finite (``reject_nonfinite``); the step counts as not finite.
        """
        grads = self.watch.grads(on_stale)
        self.warn_without(any(grads))
        self.require_finite(grads)
        return grads

    def require_finite(self, grads: Grads) -> None:
        """Raises a `FloatingPointError`: a gradient is not finite (``reject_nonfinite``)."""
        if not self._rejects_nonfinite:
            return
        try:
            refuse_nonfinite(self.trained, grads, self.rank, self.local.devices)
        except FloatingPointError:
            self.nonfinite_steps += 1
            raise

    def warn_without(self, has_grads: bool) -> None:
        """Warn once about a step without any gradient of this worker; other workers may have some."""
        if self._has_warned or has_grads:
            return
        self._has_warned = True
        LOG.warning(
            "step() found no gradient of the %d trained parameters (%s, ...): call loss.backward() before step(). Where"
            " it was called, the parameters were replaced after the Trainer was created (a new layer, weight_norm,"
            " load_state_dict(assign=True)): create it later. A worker without examples calls skip_step()",
            len(self.trained),
            self.trained[0].label,
        )

    # The update in this process.

    @contextlib.contextmanager
    def rescaled(self, divisor: float) -> Iterator[None]:
        """Divide gradients within the context; afterwards the user's optimizer has its own factor again."""
        self.optimizer.rescale_grad = self.scale / divisor
        try:
            yield
        finally:
            self.optimizer.rescale_grad = self.scale

    def update(self, divisor: float, has_grad: Sequence[bool], samples: int, *, counts: bool = True) -> None:
        """Update the weights of this process with the present gradients.

        Args:
            divisor: gradients are divided by it.
            has_grad: for each trained parameter whether a gradient is to be applied.
            samples: examples of these gradients; 0 if that is not known.
            counts: whether this is an update of `version`.
        """
        members = [one for one, is_applied in zip(self.trained, has_grad, strict=True) if is_applied]
        with self.rescaled(divisor):
            if self.clip_norm is not None:
                self._clip(members, self.clip_norm)
            self.local.apply(members)
        for parameter in self.trained:
            parameter.drop_filled()
        self.updates += counts
        self.samples += samples
        self.watch.note_grads()

    def _clip(self, parameters: Sequence[Parameter], clip_norm: float) -> None:
        """Scale ``grad`` to what the rule applies, and clip it; all replicas of a parameter have the same gradient."""
        scale(parameters, self.optimizer.rescale_grad)
        self.optimizer.rescale_grad = 1.0
        for device in reversed(range(self.num_devices)):  # the norm on the first device is kept
            replicas = [parameter.replicas[device] for parameter in parameters]
            self.grad_norm = torch.nn.utils.clip_grad_norm_(replicas, clip_norm)
