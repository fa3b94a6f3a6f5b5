"""vcattn.sdpa: the signature of torch.nn.functional.scaled_dot_product_attention, each argument honoured or refused."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ._torch_arrays import NO_BACKWARD, needs_gradient
from .attention import attention
from .errors import Error, InvalidArgumentError, UnsupportedError
from .recipe import AUTO, Recipe
from .state import State

_RANKS = (3, 4)


class Refusal(NamedTuple):
    """Why a call is refused."""

    error: type[Error]
    reason: str


class _Inputs(NamedTuple):
    """Of vcattn.attention with layout BHSD."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    key_padding_mask: torch.Tensor | None
    added_batch: bool  # to be taken off the output


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    recipe: str | Recipe = AUTO,
    state: State | None = None,
    step: int | None = None,
) -> torch.Tensor:
    """Attention as torch computes it, in the numerics of a recipe.

    query: [batch, num_heads, seqlen_q, head_dim] or [num_heads, seqlen_q, head_dim]; key and value accordingly. Batch
        and head axes of 1 are broadcast, without a copy.
    attn_mask: honoured where it only admits keys, the same for every query and head: bool, [seqlen_kv] or any shape
        that broadcasts to [batch, num_heads, seqlen_q, seqlen_kv] with extents (or strides, of expanded masks) of 1
        (0) at heads and queries. Masks of numbers are honoured in host memory, where they hold 0 and -inf alone; in
        CUDA memory that could not be seen without waiting.
    dropout_p, is_causal: refused unless 0 and False.
    scale, enable_gqa: as in torch.
    recipe, state, step: as in vcattn.attention.

    Returns [.., seqlen_q, head_dim] of query's dtype, in memory [batch, seqlen_q, num_heads, head_dim].
    NaN and infinities make the rows that they touch NaN, as in torch. Raises UnsupportedError for what is refused and
    InvalidArgumentError for what contradicts itself.
    """
    found = refusal(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if found is not None:
        raise found.error(found.reason)
    inputs = _inputs(query, key, value, attn_mask, enable_gqa)
    out = attention(
        inputs.q,
        inputs.k,
        inputs.v,
        recipe=recipe,
        layout="BHSD",
        scale=scale,
        key_padding_mask=inputs.key_padding_mask,
        enable_gqa=enable_gqa,
        state=state,
        step=step,
        allow_nonfinite=True,
    )
    return out[0] if inputs.added_batch else out


def refusal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Refusal | None:
    """Why vcattn.sdpa refuses these arguments, short of what the library refuses; None where it does not.

    A value rather than an exception: code under torch.compile cannot catch exceptions of our own in every version.
    """
    if dropout_p != 0.0:
        return Refusal(UnsupportedError, "dropout_p is 0: there is no dropout")
    if is_causal:
        return Refusal(UnsupportedError, "is_causal is False: there is no causal mask")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            return Refusal(InvalidArgumentError, f"{name}: a torch tensor; found {type(x).__name__}")
        if x.is_nested:
            return Refusal(UnsupportedError, f"{name}: nested tensors; use cu_seqlens of vcattn.attention")
        if x.dim() not in _RANKS or x.dim() != query.dim():
            return Refusal(UnsupportedError, f"{name}: 3 or 4 axes, as many as the others have; found {x.dim()}")
    heads, heads_kv = query.shape[-3], key.shape[-3]
    if not enable_gqa and heads != heads_kv and 1 not in (heads, heads_kv):
        return Refusal(InvalidArgumentError, f"query has {heads} heads and key {heads_kv} without enable_gqa")
    if attn_mask is None:
        return None
    batch = 1 if query.dim() == 3 else max(query.shape[0], key.shape[0], value.shape[0])
    return mask_refusal(attn_mask, (batch, max(heads, heads_kv), query.shape[-2], key.shape[-2]))


def mask_refusal(mask: torch.Tensor, sizes: tuple[int, int, int, int]) -> Refusal | None:
    """Why `mask` cannot be honoured as a mask of keys; None where it can.

    sizes: batch, num_heads, seqlen_q, seqlen_kv, to which the mask is to broadcast."""
    if not isinstance(mask, torch.Tensor):
        return Refusal(InvalidArgumentError, f"attn_mask: a torch tensor; found {type(mask).__name__}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        return Refusal(InvalidArgumentError, f"attn_mask: bool or floating-point, as in torch; found {mask.dtype}")
    if needs_gradient(mask):
        return Refusal(UnsupportedError, f"attn_mask: {NO_BACKWARD}")
    if mask.dim() > 4:
        return Refusal(InvalidArgumentError, f"attn_mask: at most 4 axes; found {mask.dim()}")
    full = _with_four_axes(mask)
    for axis, extent in enumerate(sizes):
        if full.shape[axis] != 1 and full.shape[axis] != extent:
            return Refusal(InvalidArgumentError, f"attn_mask: broadcasts to {sizes}; found {tuple(mask.shape)}")
    for axis, name in ((1, "heads"), (2, "queries")):
        if full.shape[axis] != 1 and full.stride(axis) != 0:
            return Refusal(UnsupportedError, f"attn_mask differs between {name}: only a mask of keys is supported")
    if mask.dtype == torch.bool:
        return None
    if mask.device.type != "cpu" or torch.compiler.is_compiling():
        reason = "attn_mask of numbers: in CUDA memory and compiled code only a bool mask can be taken over"
        return Refusal(UnsupportedError, reason)
    keys = full[:, 0, 0]
    if not bool(((keys == 0) | (keys == float("-inf"))).all()):
        return Refusal(UnsupportedError, "attn_mask holds more than 0 and -inf: biases are not supported")
    return None


def key_mask(mask: torch.Tensor, seqlen_kv: int) -> torch.Tensor:
    """The bool [batch or 1, seqlen_kv] that a mask amounts to which mask_refusal lets through."""
    keys = _with_four_axes(mask)[:, 0, 0].expand(-1, seqlen_kv)
    return keys if keys.dtype == torch.bool else keys == 0


def _with_four_axes(mask: torch.Tensor) -> torch.Tensor:
    for _ in range(4 - mask.dim()):
        mask = mask[None]
    return mask


def _inputs(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None, enable_gqa: bool
) -> _Inputs:
    """Of arguments that are not refused."""
    q, k, v = broadcast(query, key, value, enable_gqa)
    mask = None if attn_mask is None else key_mask(attn_mask, k.shape[2])
    return _Inputs(q, k, v, mask, query.dim() == 3)


def broadcast(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[batch, num_heads, seqlen, head_dim] of inputs that are not refused, with single batches and heads repeated."""
    if query.dim() == 3:
        query, key, value = query[None], key[None], value[None]
    batch = max(query.shape[0], key.shape[0], value.shape[0])
    # Under grouped queries a single key head serves all as it is.
    heads = 0 if enable_gqa else max(query.shape[1], key.shape[1], value.shape[1])
    return _broadcast(query, batch, heads), _broadcast(key, batch, heads), _broadcast(value, batch, heads)


def _broadcast(x: torch.Tensor, batch: int, heads: int) -> torch.Tensor:
    """Single batches and heads repeated, by strides of 0; other extents stay, for the library to refuse."""
    wanted = (batch if x.shape[0] == 1 else x.shape[0], heads if x.shape[1] == 1 and heads else x.shape[1])
    return x if wanted == x.shape[:2] else x.expand(*wanted, -1, -1)
