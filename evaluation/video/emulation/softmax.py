"""Scores of queries against all keys to the probabilities that the second product reads, by steps of the softmax."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import formats
from .numerics import (
    CODES_PER_OCTAVE,
    EXPCAST_INTERCEPT,
    EXPCAST_PEAK,
    MAX_CODE,
    PHASE_CODES,
    PHASE_FACTOR,
    TILE_KEYS,
    TWO_LINE_INTERCEPT,
    TWO_LINE_PEAK,
    TWO_LINE_PIVOT,
    TWO_LINE_SLOPE,
    Numerics,
)


class Probabilities(NamedTuple):
    """Weighted to one reference per row, so that sums over steps are plain sums."""

    p: Tensor  # [rows, keys]
    sums: Tensor  # [rows, keys / group]: of groups of `mean_rows` keys, else of steps


def probabilities(codes: Tensor, numerics: Numerics) -> Probabilities:
    """codes: [rows, steps, keys of a step], scores in code units (eighths of an octave), -inf at padding.

    Pure, so that torch.compile can fuse it. The online softmax rescales by 2^(reference - later reference) at every
    step; the product of those factors is what a step is weighed with here.
    """
    expcast = numerics.p_format.startswith("expcast")
    unit = 1.0 if expcast else 1.0 / CODES_PER_OCTAVE
    largest = codes.amax(-1) * unit
    if numerics.row_max == "running":
        reference = largest.cummax(1).values
    else:
        octave_codes = largest.round() if numerics.p_format == "expcast" else largest
        reference = torch.ceil(octave_codes / CODES_PER_OCTAVE) if expcast else torch.ceil(largest)
        if numerics.row_max == "running_octave":
            reference = reference.cummax(1).values
        if expcast:
            reference = reference * CODES_PER_OCTAVE
    octaves = (reference - reference.amax(1, keepdim=True)) * (1.0 / CODES_PER_OCTAVE if expcast else 1.0)
    weight = torch.exp2(octaves.clamp(min=-126.0))[..., None]
    shifted = codes * unit - reference[..., None]

    p, terms = _expcast(shifted, numerics) if expcast else _exp2(shifted, numerics)
    group = numerics.mean_rows or numerics.step_keys
    sums = terms.unflatten(-1, (-1, group)).sum(-1) * weight
    return Probabilities((p * weight).flatten(1), sums.flatten(1))


def _expcast(shifted: Tensor, numerics: Numerics) -> tuple[Tensor, Tensor]:
    """(decoded bytes, what row sums add up)."""
    exact_maximum = numerics.row_max == "running"
    if numerics.p_format == "expcast_two_lines":
        line = shifted + (TWO_LINE_INTERCEPT if exact_maximum else TWO_LINE_PEAK)
        second = line * TWO_LINE_SLOPE + (TWO_LINE_PIVOT - TWO_LINE_SLOPE * TWO_LINE_PIVOT)
        p = formats.decode_e4m3(torch.maximum(line, second).round().clamp(0.0, MAX_CODE))
        return p, p
    odd = (torch.arange(shifted.shape[-1], device=shifted.device) % 2 if numerics.two_phases else 0) * 1.0
    if exact_maximum:
        code = (shifted + EXPCAST_INTERCEPT).round().clamp(-PHASE_CODES, EXPCAST_PEAK) + odd * PHASE_CODES
    else:
        code = (shifted + (EXPCAST_PEAK + odd * PHASE_CODES)).round()
    p = formats.decode_e4m3(code.clamp(0.0, MAX_CODE))
    return p, p * (1.0 - odd * (1.0 - PHASE_FACTOR))


def _exp2(shifted: Tensor, numerics: Numerics) -> tuple[Tensor, Tensor]:
    peak = numerics.p_log2_peak if numerics.p_format == "e4m3" else 0.0
    unrounded = torch.exp2(shifted + peak)
    if numerics.p_format == "nvfp4":
        tiles = unrounded.unflatten(-1, (-1, TILE_KEYS))
        encode, descale = formats.scales(tiles.amax(-1, keepdim=True), formats.LARGEST["nvfp4"])
        p = (formats.round_nvfp4(tiles * encode) * descale).flatten(-2)
    else:
        rounding = {"e4m3": formats.round_e4m3, "bf16": formats.round_bf16, "fp32": lambda x: x}
        p = rounding[numerics.p_format](unrounded)
    return p, (unrounded if numerics.row_sum == "unrounded" else p)
