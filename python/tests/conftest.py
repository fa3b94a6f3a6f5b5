"""Fixtures that several files use; and one thread for torch, whose pool spins at every small operation, which takes
longest on a busy machine."""

from __future__ import annotations

import importlib.util

import pytest

from vcattn import _call

if importlib.util.find_spec("torch") is not None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def groupings(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each grouping that was made, whether it was warm."""
    made: list[bool] = []
    group = _call.group

    def recorded(*args: object, **options: object):
        made.append(options["centroids"] is not None)
        return group(*args, **options)

    monkeypatch.setattr(_call, "group", recorded)
    return made
