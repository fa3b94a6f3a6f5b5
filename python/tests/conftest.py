"""One thread for torch: its pool spins at every small operation, which takes longest on a busy machine."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("torch") is not None:
    import torch

    torch.set_num_threads(1)
