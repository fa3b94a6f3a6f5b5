"""Low-bit attention for video diffusion transformers, over the C ABI of libvcattn; see docs/integrations.md."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ._abi import VERSION as __version__
from ._library import Backend, backends
from .attention import attention
from .errors import (
    Error,
    InternalError,
    InvalidArgumentError,
    LibraryError,
    NonfiniteInputError,
    ScoreOverflowError,
    UnsupportedError,
    WorkspaceError,
)
from .policy import Choice, Policy
from .recipe import Recipe, recipe_names
from .report import Report
from .schedule import Schedule
from .sensitivity import Sensitivity, sensitivity
from .state import State

if TYPE_CHECKING:
    from .torch_patch import patch_sdpa
    from .torch_sdpa import sdpa

# What needs torch, by the module that has it: imported at first use, so that `import vcattn` works without torch.
_NEEDS_TORCH = {"patch_sdpa": "torch_patch", "sdpa": "torch_sdpa"}
_HAS_TORCH = find_spec("torch") is not None


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not _HAS_TORCH:
        raise AttributeError(f"{__name__}.{name} needs torch, which is not installed")
    module = import_module(f"{__name__}.{_NEEDS_TORCH[name]}")
    value = globals()[name] = getattr(module, name)
    return value


__all__ = [
    "Backend",
    "Choice",
    "Error",
    "InternalError",
    "InvalidArgumentError",
    "LibraryError",
    "NonfiniteInputError",
    "Policy",
    "Recipe",
    "Report",
    "Schedule",
    "ScoreOverflowError",
    "Sensitivity",
    "State",
    "UnsupportedError",
    "WorkspaceError",
    "__version__",
    "attention",
    "backends",
    "patch_sdpa",
    "recipe_names",
    "sdpa",
    "sensitivity",
]
if not _HAS_TORCH:
    for _name in _NEEDS_TORCH:
        __all__.remove(_name)
