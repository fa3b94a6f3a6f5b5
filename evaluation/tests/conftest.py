"""The evaluation is run from the repository's root: `evaluation` is importable from there."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

if importlib.util.find_spec("torch") is not None:
    import torch

    torch.set_num_threads(1)
