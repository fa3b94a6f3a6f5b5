"""The Python layer costs less than 30 microseconds a call."""

from __future__ import annotations

import pytest

from reference import normal
from vcattn.overhead import layer_seconds

LIMIT = 30e-6


def test_numpy():
    assert layer_seconds(*[normal(i, 1, 8, 2, 64) for i in range(3)]) < LIMIT


def test_torch():
    torch = pytest.importorskip("torch", reason="needs torch")
    assert layer_seconds(*[torch.from_numpy(normal(i, 1, 8, 2, 64)) for i in range(3)]) < LIMIT
