"""Number formats as torch functions on float32: each rounds to nearest even and returns the value that is stored."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as functional
from torch import Tensor

from .numerics import NVFP4_GROUP, SMALLEST_ABS_MAX

LARGEST = {"int8": 127.0, "e4m3": 448.0, "nvfp4": 6.0 * 448.0}  # of the codes under one scale


def round_int8(x: Tensor) -> Tensor:
    return x.round().clamp(-127.0, 127.0)


def round_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float()


def decode_e4m3(codes: Tensor) -> Tensor:
    """Whole float32 numbers 0 .. 126, read as E4M3 bytes."""
    return codes.to(torch.uint8).view(torch.float8_e4m3fn).float()


def round_e2m1(x: Tensor) -> Tensor:
    """Magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6. Halves of even steps go to even codes, as round() takes them."""
    magnitude = x.abs()
    step = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0))
    return ((x / step).round() * step).clamp(-6.0, 6.0)


def round_bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def round_tf32(x: Tensor) -> Tensor:
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def scales(abs_max: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """(encode, descale): x is stored as the code of x * encode and read as code * descale.

    Both are divisions of tensors: with a Python number torch multiplies by a rounded reciprocal instead.
    """
    top = abs_max.new_full((), largest)
    stored = abs_max >= SMALLEST_ABS_MAX
    safe = torch.where(stored, abs_max, 1.0)
    zero = torch.zeros_like(abs_max)
    return torch.where(stored, top / safe, zero), torch.where(stored, safe / top, zero)


def round_nvfp4(x: Tensor) -> Tensor:
    """x: [..., n] already times the tensor scale's encode, n a multiple of 16: E2M1 codes times a UE4M3 scale."""
    groups = x.unflatten(-1, (-1, NVFP4_GROUP))
    scale = round_e4m3(groups.abs().amax(-1, keepdim=True) / x.new_full((), 6.0))
    inverse = torch.where(scale > 0, 1.0 / scale.clamp(min=2.0**-9), torch.zeros_like(scale))
    return (round_e2m1(groups * inverse) * scale).flatten(-2)


def store(x: Tensor, name: str, encode: Tensor) -> Tensor:
    """x * encode as the codes' values in format `name`; NVFP4 groups lie along the last axis."""
    if name == "fp32":
        return x
    if name == "bf16":
        return round_bf16(x)
    rounding = {"int8": round_int8, "e4m3": round_e4m3, "nvfp4": round_nvfp4}[name]
    return rounding(x * encode)


@lru_cache(maxsize=8)
def hadamard_matrix(dim: int, device: torch.device) -> Tensor:
    """Normalised Walsh-Hadamard matrix [dim, dim], dim a power of two."""
    matrix = torch.ones(1, 1, device=device)
    while matrix.shape[0] < dim:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return matrix / math.sqrt(dim)


def rotate(x: Tensor) -> Tensor:
    """Rows times the Hadamard matrix; the number of channels is a power of two."""
    return x @ hadamard_matrix(x.shape[-1], x.device)


def pad_rows(x: Tensor, multiple: int) -> Tensor:
    """[n, d] with zero rows up to a multiple."""
    return functional.pad(x, (0, 0, 0, -x.shape[0] % multiple))
