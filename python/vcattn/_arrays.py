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
_torch_arrays: ModuleType | None = None  # once it is needed


def library_of(x: Any) -> ModuleType | None:
    """_torch_arrays or _numpy_arrays; None for other types. Does not import torch."""
    global _torch_arrays
    if isinstance(x, np.ndarray):
        return _numpy_arrays
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor):
        return None
    # Kept rather than imported once a call: the import statement takes half a microsecond.
    if _torch_arrays is None:
        from . import _torch_arrays as found  # a statement, which torch.compile can trace

        _torch_arrays = found
    return _torch_arrays


def adopt(**arrays: Any) -> list[Any]:
    """The arrays of a call by name: torch tensors and numpy arrays themselves, and others' memory, through DLPack and
    without a copy, as numpy arrays where all of the call may be, else (CUDA memory, dtypes that numpy lacks, torch
    tensors beside them) as torch tensors.

    Raises InvalidArgumentError for objects without DLPack, UnsupportedError where torch would be needed.
    """
    found = {name: _adopted(name, x) for name, x in arrays.items()}
    foreign = [name for name, x in found.items() if x is not arrays[name]]
    if any(library_of(x) is not _numpy_arrays for x in found.values()):
        for name in foreign:
            if isinstance(found[name], np.ndarray):
                found[name] = _torch(name).from_dlpack(arrays[name])
    return list(found.values())


def _adopted(name: str, x: Any) -> Any:
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
    return _torch(name).from_dlpack(x)


def _torch(name: str) -> ModuleType:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise UnsupportedError(
            f"{name}: CUDA memory, and dtypes that numpy lacks, are taken over through torch, which is not installed"
        ) from error
