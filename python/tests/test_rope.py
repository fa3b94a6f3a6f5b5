"""rope= of vcattn.attention, on numpy arrays: the bits of a call on rows that were rotated before it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import vcattn
from reference import normal

BATCH, QUERIES, KEYS, HEADS, HEADS_KV, DIM = 2, 130, 200, 4, 2, 64
PAIRS = DIM // 2
GRID = (3, 4, 5, 6)  # 120 tokens, some before and behind


def qkv() -> list[np.ndarray]:
    shapes = ((QUERIES, HEADS), (KEYS, HEADS_KV), (KEYS, HEADS_KV))
    return [normal(i, BATCH, length, heads, DIM) for i, (length, heads) in enumerate(shapes)]


def table(seed: int, *shape: int) -> np.ndarray:
    """Neither cosines nor sines: nothing may assume that a rotation keeps lengths."""
    return normal(seed, *shape)


def rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> np.ndarray:
    """x [batch, seqlen, heads, dim] by tables that broadcast to [batch, seqlen, heads, pairs]."""
    out = np.empty_like(x)
    first, second = (np.s_[..., ::2], np.s_[..., 1::2]) if interleaved else (np.s_[..., :PAIRS], np.s_[..., PAIRS:])
    out[first] = x[first] * cos - x[second] * sin
    out[second] = x[first] * sin + x[second] * cos
    return out


def by_axes(length: int, tables: tuple[np.ndarray, ...], outside: float) -> np.ndarray:
    """[length, 1, pairs] of tables of three axes; `outside` where a token is not in GRID."""
    first, *extents = GRID
    full = np.full((length, PAIRS), outside, np.float32)
    for token, place in enumerate(np.ndindex(*extents), start=first):
        full[token] = np.concatenate([one[at] for one, at in zip(tables, place)])
    return full[:, None]


def expect_same(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("recipe", ["accurate", "bf16", "fp32"])
@pytest.mark.parametrize("interleaved", [True, False])
def test_tables_of_tokens(interleaved: bool, recipe: str):
    q, k, v = qkv()
    of_q, of_k = [table(i, QUERIES, PAIRS) for i in (10, 11)], [table(i, KEYS, PAIRS) for i in (12, 13)]
    options = dict(recipe=recipe, enable_gqa=True, return_lse=True)
    found = vcattn.attention(
        q, k, v, rope=(vcattn.Rope(*of_q, interleaved), vcattn.Rope(*of_k, interleaved)), **options
    )
    q, k = (rotated(x, *(t[:, None] for t in of), interleaved) for x, of in ((q, of_q), (k, of_k)))
    expect_same(found, vcattn.attention(q, k, v, **options))


@pytest.mark.parametrize("bhsd", [False, True])
def test_tables_of_batches_and_heads(bhsd: bool):
    q, k, v = qkv()
    cos, sin = (table(i, BATCH, QUERIES, HEADS, 2 * PAIRS)[..., ::2] for i in (10, 11))
    options = dict(enable_gqa=True, return_lse=True, layout="BHSD" if bhsd else "BSHD")
    order = (0, 2, 1, 3) if bhsd else (0, 1, 2, 3)
    found = vcattn.attention(
        *(x.transpose(order) for x in (q, k, v)),
        rope=(vcattn.Rope(cos.transpose(order), sin.transpose(order)), None),
        **options,
    )
    expected = vcattn.attention(*(x.transpose(order) for x in (rotated(q, cos, sin, True), k, v)), **options)
    expect_same(found, expected)


@pytest.mark.parametrize("shape", [(1, KEYS, PAIRS), (BATCH, KEYS, PAIRS), (1, KEYS, 1, PAIRS)])
def test_shared_batches_and_heads(shape: tuple[int, ...]):
    q, k, v = qkv()
    cos, sin = table(10, *shape), table(11, *shape)
    found = vcattn.attention(q, k, v, rope=(None, vcattn.Rope(cos, sin, False)), enable_gqa=True)
    if len(shape) == 3:
        cos, sin = cos[:, :, None], sin[:, :, None]
    expect_same([found], [vcattn.attention(q, rotated(k, cos, sin, False), v, enable_gqa=True)])


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("pairs", [(8, 12, 12), (0, 20, 12)])
def test_tables_of_axes(pairs: tuple[int, int, int], interleaved: bool):
    q, k, v = qkv()
    cos, sin = (tuple(table(i + axis, GRID[1 + axis], pairs[axis]) for axis in range(3)) for i in (10, 20))
    found = vcattn.attention(q, k, v, rope=vcattn.Rope(cos, sin, interleaved), grid=GRID, enable_gqa=True)
    q, k = (rotated(x, by_axes(x.shape[1], cos, 1), by_axes(x.shape[1], sin, 0), interleaved) for x in (q, k))
    expect_same([found], [vcattn.attention(q, k, v, grid=GRID, enable_gqa=True)])


def test_packed_tokens():
    q, k, v = (x[0] for x in qkv())
    cu = ([0, 40, 130], [0, 90, 200])
    of_q, of_k = [table(i, QUERIES, PAIRS) for i in (10, 11)], [table(i, KEYS, PAIRS) for i in (12, 13)]
    options = dict(cu_seqlens=cu, enable_gqa=True)
    found = vcattn.attention(q, k, v, rope=(vcattn.Rope(*of_q), vcattn.Rope(*of_k)), **options)
    q, k = (rotated(x[None], *(t[:, None] for t in of), True)[0] for x, of in ((q, of_q), (k, of_k)))
    expect_same([found], [vcattn.attention(q, k, v, **options)])


def refused(rope: Any, line: str, **options: Any) -> None:
    with pytest.raises(vcattn.InvalidArgumentError, match=line):
        vcattn.attention(*qkv(), rope=rope, enable_gqa=True, **options)


def test_refusals():
    cos, sin = table(1, KEYS, PAIRS), table(2, KEYS, PAIRS)
    three = tuple(table(i, extent, 8) for i, extent in enumerate(GRID[1:]))
    refused((cos, sin), "rope: a vcattn.Rope, or a pair of them for q and k; found tuple")
    refused(vcattn.Rope(three, sin), r"cos and sin are both one table or both three; found 3 and one")
    refused(vcattn.Rope(three[:2], three[:2]), "found 2 and 2")
    refused(vcattn.Rope((), ()), "found 0 and 0")
    refused((None, vcattn.Rope(cos, sin, "half")), "rope: interleaved is True or False; found 'half'")
    refused((None, vcattn.Rope(cos.tolist(), sin)), "both one table or both three; found 200 and one")
    refused((None, vcattn.Rope(cos.astype(np.float64), sin)), "rope_k: cos: a float32 array like q; found float64")
    refused((None, vcattn.Rope(cos, sin[::2])), "rope_k: sin is laid out as cos")
    refused((vcattn.Rope(cos, sin), None), r"rope_q: tables .* \(2, 130, 4, 32\), or 1 .*; found \(1, 200, 1, 32\)")
    refused((None, vcattn.Rope(cos[:, :5], sin[:, :5])), r"found \(1, 200, 1, 5\)")
    refused((None, vcattn.Rope(cos[0], sin[0])), r"rope_k: tables \[seqlen, head_dim / 2\]")
    refused((None, vcattn.Rope(cos[::-1], sin[::-1])), "rope_k: stride of token is not negative; found -32")
    refused(vcattn.Rope(three, three), r"rope_q: tables of axes need grid=\(first_token, frames, height, width\)")
    refused(vcattn.Rope(three, three), "rope_q: pairs add up to head_dim / 2 = 32; found", grid=GRID)
    refused(vcattn.Rope(three, three), r"rope_q, height: tables \[6, pairs\], as grid has it", grid=(0, 4, 6, 5))
    wide = tuple(table(i, extent, 16)[:, ::2] for i, extent in enumerate(GRID[1:]))
    refused(vcattn.Rope(wide, wide), "rope_q, frames: dense tables", grid=GRID)
