"""Which array library a call's inputs belong to: torch tensors, numpy arrays, or anything that speaks DLPack."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import numpy as np

from . import _numpy_arrays
from .errors import InvalidArgumentError, UnsupportedError

_DLPACK_CPU = 1
_TORCH_ARRAYS = f"{__package__}._torch_arrays"


def library_of(x: Any) -> ModuleType | None:
    """_torch_arrays or _numpy_arrays; None for other types. Does not import torch."""
    if isinstance(x, np.ndarray):
        return _numpy_arrays
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor):
        return None
    # Looked up rather than imported once a call: the import statement takes half a microsecond.
    return sys.modules.get(_TORCH_ARRAYS) or importlib.import_module(_TORCH_ARRAYS)


def adopt(name: str, x: Any) -> Any:
    """`x` itself where it is a torch tensor or numpy array; else its memory, through DLPack and without a copy, as a
    numpy array or, for CUDA memory and for dtypes that numpy lacks, as a torch tensor.

    Raises InvalidArgumentError for objects without DLPack, UnsupportedError where torch would be needed.
    """
    if library_of(x) is not None:
        return x
    if not hasattr(x, "__dlpack__"):
        raise InvalidArgumentError(
            f"{name}: a torch tensor, a numpy array or an array with DLPack; found {type(x).__name__}"
        )
    if x.__dlpack_device__()[0] == _DLPACK_CPU:
        try:
            return np.from_dlpack(x)
        except (BufferError, RuntimeError):  # a dtype that numpy does not have
            pass
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise UnsupportedError(
            f"{name}: CUDA memory, and dtypes that numpy lacks, are taken over through torch, which is not installed"
        ) from error
    return torch.from_dlpack(x)
