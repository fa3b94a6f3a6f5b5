"""numpy arrays in host memory, as _call.py describes them to the library. The twin of _torch_arrays.py."""

from __future__ import annotations

from contextlib import nullcontext
from types import ModuleType
from typing import Any

import numpy as np

from . import _abi, _call
from .errors import InvalidArgumentError

_DTYPE_CODES = {np.dtype(np.float16): _abi.FP16, np.dtype(np.float32): _abi.FP32}
_BFLOAT16 = "bfloat16"  # ml_dtypes', which registers with numpy; known by name, so that ml_dtypes need not be there


def describe(name: str, x: np.ndarray) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    """(address, vcattn_dtype, shape, strides in elements) of `x`, of rank 4.

    Raises InvalidArgumentError for other dtypes and for strides that are not whole elements.
    """
    code = _DTYPE_CODES.get(x.dtype)
    if code is None:
        if x.dtype.name != _BFLOAT16:
            raise InvalidArgumentError(f"{name}: dtype is bfloat16, float16 or float32; found {x.dtype.name}")
        code = _abi.BF16
    if not _is_plain(x):
        raise InvalidArgumentError(f"{name}: an array without a mask of elements; found {type(x).__name__}")
    size = x.dtype.itemsize  # a power of two
    a, b, c, d = x.strides
    if (a | b | c | d) & (size - 1):
        raise InvalidArgumentError(f"{name}: strides {x.strides} are not multiples of the element size of {size} bytes")
    return _address(x), code, x.shape, (a // size, b // size, c // size, d // size)


def _is_plain(x: Any) -> bool:
    """Whether `x` is an array of which every element counts."""
    return type(x) is np.ndarray or (isinstance(x, np.ndarray) and not isinstance(x, np.ma.MaskedArray))


def _address(x: np.ndarray) -> int:
    return x.__array_interface__["data"][0]


def describe_mask(mask: Any, like: np.ndarray) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """(address, shape, strides) of a key-padding mask of bool or uint8."""
    if not _is_plain(mask) or mask.dtype not in (np.bool_, np.uint8):
        raise InvalidArgumentError(
            f"key_padding_mask: a bool array like q, True admits the key; found {getattr(mask, 'dtype', type(mask))}"
        )
    return _address(mask), mask.shape, mask.strides


def describe_table(name: str, table: Any, like: np.ndarray) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """(address, shape, strides in elements) of a float32 table."""
    if not _is_plain(table) or table.dtype != np.float32:
        raise InvalidArgumentError(f"{name}: a float32 array like q; found {getattr(table, 'dtype', type(table))}")
    if any(step % 4 for step in table.strides):
        raise InvalidArgumentError(f"{name}: strides {table.strides} are not multiples of the element size of 4 bytes")
    return _address(table), table.shape, tuple(step // 4 for step in table.strides)


def check_same_place(name: str, x: Any, like: np.ndarray) -> None:
    """Raises InvalidArgumentError unless `x` is a numpy array too."""
    if not isinstance(x, np.ndarray):
        raise InvalidArgumentError(f"{name}: a numpy array like q; found {type(x).__name__}")


def check_differentiable(*arrays: np.ndarray) -> None:
    """numpy has no gradients."""


def empty(shape: tuple[int, ...], like: np.ndarray) -> np.ndarray:
    """Dense, of the dtype of `like`, contents undefined."""
    return np.empty(shape, like.dtype)


def empty_float32(shape: tuple[int, ...], like: np.ndarray) -> tuple[np.ndarray, int]:
    """Dense float32 and its address."""
    x = np.empty(shape, np.float32)
    return x, _address(x)


def empty_int32(shape: tuple[int, ...], like: np.ndarray) -> tuple[np.ndarray, int]:
    """Dense int32 and its address."""
    x = np.empty(shape, np.int32)
    return x, _address(x)


def copy(x: np.ndarray) -> tuple[np.ndarray, int]:
    """A dense copy and its address."""
    x = x.copy()
    return x, _address(x)


def swap_heads(x: np.ndarray) -> np.ndarray:
    """[batch, seqlen, num_heads, head_dim] seen as [batch, num_heads, seqlen, head_dim]."""
    return x.swapaxes(1, 2)


def address(x: np.ndarray) -> int:
    """Address of the first element."""
    return _address(x)


def workspace(size: int, like: np.ndarray) -> tuple[np.ndarray, int]:
    """Memory of at least `size` bytes: its owner, and the first address aligned as the library asks."""
    owner = np.empty(size + _abi.WORKSPACE_ALIGNMENT, np.uint8)
    return owner, -(-_address(owner) // _abi.WORKSPACE_ALIGNMENT) * _abi.WORKSPACE_ALIGNMENT


def place(like: np.ndarray) -> tuple[int, int]:
    """(vcattn_memory, stream) of a call on arrays like this one."""
    return _abi.MEMORY_HOST, 0


def current_device(like: np.ndarray) -> Any:
    """A context in which the device of `like` is current."""
    return nullcontext()


def identity(x: np.ndarray) -> tuple[Any, ...]:
    """What must agree for a state to be reused: where the array lies."""
    return ("host",)


def calls(*arrays: Any) -> ModuleType:
    """The module whose functions make the calls."""
    return _call
