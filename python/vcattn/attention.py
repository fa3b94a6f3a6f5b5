"""vcattn.attention: one call, over torch tensors, numpy arrays or anything that speaks DLPack."""

from __future__ import annotations

from typing import Any

from . import _abi, _arrays, _call
from .errors import InvalidArgumentError
from .recipe import AUTO, Recipe, spec_of
from .rope import Rope, pair_of
from .state import State

_LAYOUTS = ("BSHD", "BHSD")


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    recipe: str | Recipe = AUTO,
    layout: str = "BSHD",
    scale: float | None = None,
    key_padding_mask: Any = None,
    cu_seqlens: Any = None,
    enable_gqa: bool = False,
    rope: Rope | tuple[Rope | None, Rope | None] | None = None,
    return_lse: bool = False,
    state: State | None = None,
    step: int | None = None,
    grid: _call.Grid | None = None,
    allow_nonfinite: bool = False,
    backend: str = "auto",
) -> Any:
    """softmax(scale q k^T) v for each head, without a causal mask, in the numerics of a recipe.

    q: [batch, seqlen_q, num_heads, head_dim] or, with layout "BHSD", [batch, num_heads, seqlen_q, head_dim];
        bfloat16, float16 or float32 (each of q, k and v may have its own); any strides that are not negative, so that
        views, slices and expanded tensors are not copied; head_dim up to 256. With `cu_seqlens` also [tokens,
        num_heads, head_dim].
    k, v: the same with seqlen_kv and num_heads_kv, on the device of q.
    recipe: a name of `recipe_names()`, a spec such as "accurate,mean_rows=0", a Recipe, or "auto": "accurate".
    scale: of the scores, positive; None: 1 / sqrt(head_dim).
    key_padding_mask: bool [batch, seqlen_kv], True admits the key.
    cu_seqlens: packed sequences (batch 1): offsets [segments + 1] in host memory for queries and keys, or a pair of
        them. Segment s attends from its queries to its keys. Not together with key_padding_mask.
    enable_gqa: allows num_heads to be a multiple of num_heads_kv; else they must agree.
    rope: rotates q and k in the call: a Rope for both, or a pair, where None leaves one as it is.
    return_lse: also the natural logarithm of each row's sum of exponentials, of the keys as given, or as `rope` rotates
        them.
    state, step: the order of the values kept between denoising steps, and the index of this one. Without a step index
        each call makes its own order.
    grid: (first_token, frames, height, width): where the video tokens are, between others (text). Recipes with v_order
        "cube" need it, and so does a Rope of three axes. Recipes that cluster then order its tokens alone, and leave
        the others behind them; (first_token, 1, 1, count) will do for them. Not together with cu_seqlens.
    allow_nonfinite: NaN and infinities make the rows that they touch NaN; without it host arrays that hold them are
        refused. CUDA tensors are never looked at from the host and act as with it.
    backend: "auto", "cpu" for host memory or "sm90a" for CUDA memory: forces one of `backends()` or raises.

    Returns out of q's shape and dtype, or (out, lse) with lse float32 [batch, seqlen_q, num_heads], with "BHSD"
    [batch, num_heads, seqlen_q]. In memory out is always [batch, seqlen, num_heads, head_dim]: the reshape to
    [batch, seqlen, num_heads * head_dim] that follows in most models copies nothing. It is a torch tensor for torch
    tensors, else a numpy array (a torch tensor where DLPack memory had to be taken over by torch).

    CUDA tensors: launches on torch's current stream of their device and returns; nothing waits or is copied.
    Raises InvalidArgumentError, UnsupportedError, NonfiniteInputError or ScoreOverflowError with the library's line;
    UnsupportedError where a gradient would be needed.
    """
    if layout not in _LAYOUTS:
        raise InvalidArgumentError(f'layout is "BSHD" or "BHSD"; found {layout!r}')
    if step is not None and state is None:
        raise InvalidArgumentError("step needs the state that orders are kept in")
    if state is not None and not isinstance(state, State):
        raise InvalidArgumentError(f"state is a vcattn.State; found {type(state).__name__}")
    arrays = _arrays.library_of(q)
    if arrays is None or type(k) is not type(q) or type(v) is not type(q):
        q, k, v = _arrays.adopt(q=q, k=k, v=v)
        arrays = _arrays.library_of(q)
    if key_padding_mask is not None:
        if _arrays.library_of(key_padding_mask) is None:
            _, key_padding_mask = _arrays.adopt(q=q, key_padding_mask=key_padding_mask)
        arrays.check_same_place("key_padding_mask", key_padding_mask, q)
    for name, x in (("k", k), ("v", v)):
        arrays.check_same_place(name, x, q)
    arrays.check_differentiable(q, k, v)
    ropes = None if rope is None else pair_of(rope)
    if ropes is not None:
        tables = [table for one in ropes if one is not None for table in one.tables]
        for table in tables:
            arrays.check_same_place("rope", table, q)
        arrays.check_differentiable(*tables)
    packed = cu_seqlens is not None and len(q.shape) == 3
    if packed:
        if layout != "BSHD":
            raise InvalidArgumentError("[tokens, num_heads, head_dim] is of layout BSHD")
        q, k, v = (_call.with_batch(x) for x in (q, k, v))
    bhsd = layout == "BHSD"
    heads_axis = 1 if bhsd else 2
    if not enable_gqa and len(q.shape) == len(k.shape) == 4 and q.shape[heads_axis] != k.shape[heads_axis]:
        raise InvalidArgumentError(
            f"q has {q.shape[heads_axis]} heads and k {k.shape[heads_axis]}: enable_gqa=True shares keys between heads"
        )
    flags = _abi.ALLOW_NONFINITE if allow_nonfinite else 0
    if grid is not None:
        grid = _call.grid_of(grid)
    options = _call.Options(spec_of(recipe), bhsd, _call.check_scale(scale), grid, flags, backend)
    calls = arrays.calls(q, k, v, key_padding_mask)
    segments = None if cu_seqlens is None else calls.segments_of(cu_seqlens)
    permutation = None
    if state is not None:
        options, permutation = state.prepare(calls, arrays, v, options, step, key_padding_mask, segments)
    out, lse = calls.attention(
        arrays,
        q,
        k,
        v,
        options,
        mask=key_padding_mask,
        segments=segments,
        permutation=permutation,
        rope=ropes,
        want_lse=return_lse,
    )
    if packed:
        out, lse = out[0], None if lse is None else lse[0]
    return (out, lse) if return_lse else out
