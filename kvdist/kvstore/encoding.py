"""A push of which some keys are compressed: its contributions encoded, and laid out as payloads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvdist.core.worker.requests import Encoded, Plan, RunData, RunPlan
from kvdist.kernels.interface import Kernels
from kvdist.kvstore.compressing import Compressing
from kvdist.kvstore.contribution import Contribution, Terms, contribute
from kvdist.kvstore.descent import Descent
from kvdist.kvstore.device_codes import encode_all
from kvdist.kvstore.handed import EncodedSlices, Given
from kvdist.kvstore.settings import Settings
from kvdist.kvstore.staging import Reads, Staging
from kvdist.optimizer.compression import GradientCompression
from kvdist.protocol.arrays import U32

EncodedRun = tuple[memoryview, U32]
"""The payload of a run, and the entries of each slice."""


def contribute_encoded(
    compressing: Compressing,
    staging: Staging,
    given: Given,
    settings: Settings,
    terms: Terms,
    kernels: Kernels,
    lent: Sequence[memoryview | None],
    reads: Reads,
    descent: Descent,
) -> Contribution:
    """As `contribute`, with the runs of compressed keys encoded."""
    encoded = given.encoded
    if encoded is None:
        encoded = encode_all(compressing, given)
    payloads = assembled(staging.plan, encoded)
    lent = [own if found is None else found[0] for own, found in zip(lent, payloads, strict=True)]
    contribution = contribute(staging, given, settings, terms, kernels, lent, reads, descent)
    contribution.runs = as_encoded(contribution.runs, payloads, compressing.compression)
    return contribution


def assembled(plan: Plan, encoded: Sequence[EncodedSlices | None]) -> list[EncodedRun | None]:
    """The payload and the entries of each run of a plan whose keys are compressed; None for the others.

    A slice that travels alone is not copied.

    Args:
        plan: how the keys travel.
        encoded: per key of the plan what `Compressing.encode` made of it; None where it has no value.
    """
    return [_assembled(run, encoded) if plan.keys[run.pieces[0].index].is_compressed else None for run in plan.runs]


def _assembled(run: RunPlan, encoded: Sequence[EncodedSlices | None]) -> EncodedRun:
    found = [None if (own := encoded[piece.index]) is None else own[piece.start] for piece in run.pieces]
    entries = np.array([0 if one is None else one[1] for one in found], np.uint32)
    present = [one[0].data for one in found if one is not None]
    return present[0] if len(present) == 1 else memoryview(b"".join(present)), entries


def as_encoded(
    runs: Sequence[RunData],
    payloads: Sequence[EncodedRun | None],
    compression: GradientCompression,
) -> list[RunData]:
    """The runs of a push, those that are encoded saying so. They are sent from ordinary memory."""
    codec = compression.codec
    return [
        run if own is None else replace(run, encoded=Encoded(codec.encoding, codec.parameter, own[1]), stays=False)
        for run, own in zip(runs, payloads, strict=True)
    ]
