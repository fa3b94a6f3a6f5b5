"""Low-bit attention for video diffusion transformers, over the C ABI of libvcattn; see docs/integrations.md."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ._abi import VERSION as __version__
from ._library import Backend, backends
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
from .rope import Rope
from .schedule import Schedule

try:
    from numpy import dtype, ndarray  # noqa: F401  (what a folder of that name does not have)
except Exception as error:  # absent, or broken in any way: `python -m vcattn doctor` goes on without it, to say so
    NUMPY_ERROR = str(error) or type(error).__name__
else:
    NUMPY_ERROR = ""
    from .attention import attention
    from .sensitivity import Sensitivity, sensitivity
    from .state import State

if TYPE_CHECKING:
    from .torch_patch import patch_sdpa
    from .torch_sdpa import sdpa

_NEEDS_NUMPY = ("Sensitivity", "State", "attention", "sensitivity")
# What needs torch, by the module that has it: imported at first use, so that `import vcattn` works without torch.
_NEEDS_TORCH = {"patch_sdpa": "torch_patch", "sdpa": "torch_sdpa"}
_HAS_TORCH = find_spec("torch") is not None


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if NUMPY_ERROR and name in (*_NEEDS_NUMPY, *_NEEDS_TORCH):
        raise AttributeError(f"{__name__}.{name} needs numpy: {NUMPY_ERROR}")
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
    "Rope",
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
if NUMPY_ERROR:
    for _name in _NEEDS_NUMPY:
        __all__.remove(_name)
if NUMPY_ERROR or not _HAS_TORCH:
    for _name in _NEEDS_TORCH:
        __all__.remove(_name)
