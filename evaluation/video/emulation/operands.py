"""Q, K and V of one head, quantised: the values of their codes, and the factors that belong to them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import formats
from .numerics import (
    CODES_PER_OCTAVE,
    F16_QUERY_MAX,
    LOG2_E,
    MEAN_FLOOR,
    NVFP4_GROUP,
    PHASE_FACTOR,
    SCALE_ROWS,
    TILE_KEYS,
    Numerics,
)


class Keys(NamedTuple):
    """K in the order of the values, padded with zeros to whole steps."""

    codes: Tensor  # [padded keys, dim]
    descale: Tensor  # [tiles]
    exact: Tensor | None  # [padded keys, dim], before quantisation; where queries are centred


class Queries(NamedTuple):
    codes: Tensor  # [queries, dim]
    factor: Tensor  # [queries]; code units = codes . keys * factor * descale
    means: Tensor | None  # [queries / SCALE_ROWS, dim] in code units: what was subtracted; where queries are centred


class Values(NamedTuple):
    """V in its order, padded with zeros to whole steps; the outputs are this times `descale`."""

    codes: Tensor  # [padded keys, dim]
    means: Tensor | None  # [padded keys / mean_rows, dim], in units of the scale
    descale: Tensor  # [dim]


def _pow2_exponent(abs_max: Tensor, limit: float) -> Tensor:
    """The least e with abs_max <= limit 2^e."""
    fraction, exponent = torch.frexp(abs_max / limit)
    return exponent - (fraction == 0.5).int()


def _code_units(scale: float) -> float:
    return scale * LOG2_E * CODES_PER_OCTAVE


def prepare_keys(k: Tensor, order: Tensor | None, numerics: Numerics) -> Keys:
    """k: [keys, dim] float32. order: the token at each place; None is the sequence."""
    if numerics.k_centred:
        k = k - k.double().mean(0).float()
    if numerics.qk_hadamard:
        k = formats.rotate(k)
    k = formats.pad_rows(k if order is None else k[order], numerics.step_keys)
    tiles = k.unflatten(0, (-1, TILE_KEYS))
    tile_max = tiles.abs().amax((1, 2))
    if numerics.qk_scale_kind == "pow2_f16":
        limit = F16_QUERY_MAX if k.shape[1] <= 128 else F16_QUERY_MAX / 2
        descale = torch.exp2(_pow2_exponent(tile_max.amax(), limit).float()).expand(len(tiles))
        encode = 1.0 / descale
    elif numerics.qk_format in formats.LARGEST:
        whole_head = numerics.k_scale_span == "head" or numerics.qk_format == "nvfp4"
        largest = tile_max.amax().expand(len(tiles)) if whole_head else tile_max
        encode, descale = formats.scales(largest, formats.LARGEST[numerics.qk_format])
    else:
        encode = descale = torch.ones_like(tile_max)
    codes = formats.store(tiles, numerics.qk_format, encode[:, None, None]).flatten(0, 1)
    return Keys(codes, descale, k if numerics.q_centred else None)


def prepare_queries(q: Tensor, keys: Keys, numerics: Numerics, scale: float) -> Queries:
    """q: [queries, dim] float32."""
    count, units = q.shape[0], _code_units(scale)
    blocks = formats.pad_rows(q, SCALE_ROWS).unflatten(0, (-1, SCALE_ROWS))
    means = None
    if numerics.q_centred:
        sizes = torch.full((len(blocks), 1, 1), SCALE_ROWS, dtype=torch.float64, device=q.device)
        sizes[-1] -= -count % SCALE_ROWS
        block_means = (blocks.double().sum(1, keepdim=True) / sizes).float()
        q = (blocks - block_means).flatten(0, 1)[:count]
        means = block_means[:, 0]
        means = (formats.rotate(means) if numerics.qk_hadamard else means) * units
    if numerics.qk_hadamard:
        q = formats.rotate(q)
    largest = q.abs().amax(1)
    if numerics.q_scale_span == "block":
        by_block = formats.pad_rows(q, SCALE_ROWS).unflatten(0, (-1, SCALE_ROWS)).abs().amax((1, 2))
        largest = by_block.repeat_interleave(SCALE_ROWS)[:count]
    if numerics.qk_scale_kind == "pow2_f16":
        # At least one code unit per raw unit, so that the product with K's power of two is an exact FP16 factor.
        least = -torch.log2(keys.descale[0]).round().int()
        descale = torch.exp2(torch.maximum(_pow2_exponent(largest * units, F16_QUERY_MAX), least).float())
        return Queries(formats.store(q, numerics.qk_format, units / descale[:, None]), descale, means)
    if numerics.qk_format in formats.LARGEST:
        encode, descale = formats.scales(largest, formats.LARGEST[numerics.qk_format])
    else:
        encode = descale = torch.ones_like(largest)
    return Queries(formats.store(q, numerics.qk_format, encode[:, None]), descale * units, means)


def prepare_values(v: Tensor, order: Tensor | None, numerics: Numerics) -> Values:
    """v: [keys, dim] float32. order: as for the keys."""
    count, rows = v.shape[0], numerics.mean_rows
    v = v if order is None else v[order]
    if numerics.v_hadamard:
        v = formats.rotate(v)
    v = formats.pad_rows(v, numerics.step_keys)
    phase = torch.ones(len(v), 1, device=v.device)
    if numerics.two_phases:
        phase[1::2] = PHASE_FACTOR
    present = (torch.arange(len(v), device=v.device) < count)[:, None]

    residuals, means, floor = v, None, torch.zeros((), device=v.device)
    if rows > 0:
        sizes = present.unflatten(0, (-1, rows)).sum(1).clamp(min=1)
        means = (v.unflatten(0, (-1, rows)).double().sum(1) / sizes).float()
        floor = means.abs().amax(0) * MEAN_FLOOR
        residuals = v - means.repeat_interleave(rows, 0)
    residuals = torch.where(present, residuals * phase, 0.0)

    largest = torch.maximum(residuals.abs().amax(0), floor)
    if numerics.v_format not in formats.LARGEST:
        encode = descale = torch.ones_like(largest)
    else:
        if numerics.v_scale_span == "head" or numerics.v_format == "nvfp4":
            largest = largest.amax().expand_as(largest)
        encode, descale = formats.scales(largest, formats.LARGEST[numerics.v_format])
    if numerics.v_format == "nvfp4":  # groups of 16 lie along the keys
        assert len(v) % NVFP4_GROUP == 0
        codes = formats.round_nvfp4((residuals * encode).T.contiguous()).T.contiguous()
    else:
        codes = formats.store(residuals, numerics.v_format, encode)
    if means is not None:
        if numerics.mean_centred:
            lost = torch.where(present, (residuals - codes * descale) / phase, 0.0)
            means = (means + (lost.unflatten(0, (-1, rows)).double().sum(1) / sizes)).float()
        rounding = {"bf16": formats.round_bf16, "tf32": formats.round_tf32, "fp32": lambda x: x}
        means = rounding[numerics.mean_format](means * encode)
    return Values(codes, means, descale)
