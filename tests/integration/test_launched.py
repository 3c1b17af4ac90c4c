"""Clusters start, work and end, by the launcher and by hand."""

from __future__ import annotations

import pytest

def test_a_launched_job_ends_well(job):
    job.launch(2, 2, "nothing.py")
    job.succeed()

def test_a_job_started_by_hand_ends_well(job):
    job.cluster(2, 2, "nothing.py")
    job.succeed()
