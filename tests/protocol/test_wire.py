"""Messages survive the way through frames, and what may not be sent is refused where it was made."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdist.dtypes import DType
from kvdist.nodes import UNRANKED, Member, NodeId, Role
from kvdist.protocol import messages as m
from kvdist.protocol import wire
from kvdist.protocol.layout import offsets
from kvdist.protocol.limits import DEFAULT, WireLimits

_spec = importlib.util.spec_from_file_location("protocol_examples", Path(__file__).with_name("conftest.py"))
assert _spec is not None and _spec.loader is not None
support = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(support)
