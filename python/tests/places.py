"""Where the cases of test_cases.py run: numpy arrays on the CPU back end, and the same numbers as CUDA tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import vcattn

PLACES = ("cpu", "cuda")
_ALIGNMENT = 256  # bytes; a view keeps its place within this, so that odd offsets stay odd


def attend_on(place: str) -> Any:
    """vcattn.attention from numpy arrays to numpy arrays at `place`; skips where it cannot run, and where the back end
    refuses a case, which it may: what it must not is answer wrongly."""
    if place == "cpu":
        return vcattn.attention
    torch = pytest.importorskip("torch", reason="CUDA tensors need torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if not any(backend.available for backend in vcattn.backends() if backend.name != "cpu"):
        pytest.skip("no back end for this device")

    def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> Any:
        if options.get("key_padding_mask") is not None:
            options["key_padding_mask"] = to_cuda(torch, options["key_padding_mask"])
        try:
            found = vcattn.attention(*(to_cuda(torch, x) for x in (q, k, v)), **options)
        except vcattn.UnsupportedError as error:
            pytest.skip(f"refused: {error}")
        return tuple(x.cpu().numpy() for x in found) if isinstance(found, tuple) else found.cpu().numpy()

    return attend


def to_cuda(torch: Any, x: np.ndarray) -> Any:
    """A CUDA tensor with the values, strides and alignment of `x`."""
    size = x.dtype.itemsize
    strides = [stride // size for stride in x.strides]
    extent = 1 + sum((length - 1) * stride for length, stride in zip(x.shape, strides))
    offset = x.__array_interface__["data"][0] % _ALIGNMENT // size
    elements = np.lib.stride_tricks.as_strided(x, (extent,), (size,))
    memory = torch.empty(offset + extent, dtype=torch.from_numpy(np.empty(0, x.dtype)).dtype, device="cuda")
    memory[offset:].copy_(torch.from_numpy(np.array(elements)))
    return memory.as_strided(x.shape, strides, offset)
