"""Attention in FP64, the oracle of these tests, and their inputs. Layout [batch, seqlen, num_heads, head_dim]."""

from __future__ import annotations

import numpy as np

# Relative errors that `accurate` may have on random tensors.
BOUND = 0.06


def normal(seed: int, *shape: int, dtype: type = np.float32, offset: float = 0.0) -> np.ndarray:
    """Standard normal numbers plus `offset`."""
    x = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32) + np.float32(offset)
    return x.astype(dtype)


def exact(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float | None = None,
    mask: np.ndarray | None = None,
    rows: object = slice(None),
) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) for the query rows `rows`; mask: bool [batch, seqlen_kv]; rows without a key are 0 and -inf."""
    q, k, v = (np.asarray(x, np.float64) for x in (q[:, rows], k, v))
    repeat = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, repeat, axis=2) for x in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = np.where(mask[:, None, None, :], scores, -np.inf)
    peak = scores.max(-1, keepdims=True)
    peak = np.where(np.isfinite(peak), peak, 0.0)
    p = np.exp(scores - peak)
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + peak)[..., 0].transpose(0, 2, 1)
    out = np.einsum("bhqk,bkhd->bqhd", p / np.where(total == 0, 1, total), v)
    return out, lse


def error(found: np.ndarray, expected: np.ndarray) -> float:
    """Relative L2."""
    found = np.asarray(found, np.float64)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
