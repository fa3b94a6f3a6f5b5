"""The operators torch.ops.vcattn.attention and .group, and calls through them.

Eager calls skip the dispatcher (_call.py); tracing, fake tensors and torch.compile come here. The operators return new
tensors, change none, and have the strides that the real calls give. The functions below have those of _call.py, so that
vcattn.attention and State work alike on both ways.
"""

from __future__ import annotations

import operator
from types import ModuleType
from typing import Any, NamedTuple

import torch

from . import _abi, _call, _torch_arrays
from . import recipe as recipe_module
from .errors import InvalidArgumentError
from .rope import Rope, RopePair

# recipe: spec. scale: 0 is the default. grid: empty or [first_token, frames, height, width]. lse: empty unless wanted.
# rope_q, rope_k: the tables of a Rope.
_SCHEMAS = (
    "attention(Tensor q, Tensor k, Tensor v, *, str recipe, bool bhsd, float scale=0.0, Tensor? key_padding_mask=None,"
    " Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_kv=None, Tensor? permutation=None, Tensor[]? rope_q=None,"
    " bool rope_q_interleaved=True, Tensor[]? rope_k=None, bool rope_k_interleaved=True, SymInt[] grid=[],"
    ' int flags=0, str backend="auto", bool return_lse=False) -> (Tensor, Tensor)',
    "group(Tensor v, *, str recipe, bool bhsd, Tensor? key_padding_mask=None, Tensor? cu_seqlens_q=None,"
    " Tensor? cu_seqlens_kv=None, Tensor? centroids=None, SymInt[] grid=[], int flags=0,"
    ' str backend="auto", int clusters) -> (Tensor, Tensor)',
)
# Outputs do not alias inputs and there is no backward pass; the tags say what torch may assume beyond the schema.
_NAMESPACE = "vcattn"
_library = torch.library.Library(_NAMESPACE, "DEF")
for _schema in _SCHEMAS:
    _library.define(_schema, tags=(torch.Tag.needs_fixed_stride_order,))


class Segments(NamedTuple):
    """cu_seqlens as tensors in host memory."""

    q: torch.Tensor
    kv: torch.Tensor

    @property
    def num_segments(self) -> int:
        """Number of segments."""
        return self.q.shape[0] - 1

    @property
    def identity(self) -> object:
        """What must agree for an order of the values to be reused, as far as tracing can tell."""
        return self.num_segments


def _options(spec: str, bhsd: bool, scale: float, grid: list[int], flags: int, backend: str) -> _call.Options:
    return _call.Options(spec, bhsd, scale, _call.grid_of(grid) if grid else None, flags, backend)


def _segments(q: torch.Tensor | None, kv: torch.Tensor | None) -> _call.Segments | None:
    if q is None and kv is None:
        return None
    if q is None or kv is None:
        raise InvalidArgumentError("cu_seqlens_q and cu_seqlens_kv go together")
    return _call.Segments.of((q, kv))


# What vcattn.attention checks before it calls, for those who call the operators themselves.
def _check_inputs(q: torch.Tensor, **others: torch.Tensor | None) -> None:
    for name, x in others.items():
        if x is not None:
            _torch_arrays.check_same_place(name, x, q)


def _sizes(x: torch.Tensor, name: str, bhsd: bool) -> tuple[int, int, int, int]:
    """(batch, seqlen, num_heads, head_dim)"""
    if x.dim() != 4:
        raise InvalidArgumentError(f"{name}: four axes, as its layout has; found shape {tuple(x.shape)}")
    a, b, c, d = x.shape
    return (a, c, b, d) if bhsd else (a, b, c, d)


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    recipe: str,
    bhsd: bool,
    scale: float = 0.0,
    key_padding_mask: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    permutation: torch.Tensor | None = None,
    rope_q: list[torch.Tensor] | None = None,
    rope_q_interleaved: bool = True,
    rope_k: list[torch.Tensor] | None = None,
    rope_k_interleaved: bool = True,
    grid: list[int] = [],  # noqa: B006  (torch's default for int[])
    flags: int = 0,
    backend: str = "auto",
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_inputs(q, k=k, v=v)
    if permutation is not None:
        batch, seqlen_kv, num_heads_kv, _ = _sizes(v, "v", bhsd)
        shape = (batch, num_heads_kv, seqlen_kv)
        _torch_arrays.check_dense("permutation", permutation, torch.int32, shape, v)
        permutation = permutation.contiguous()
    out, lse = _call.attention(
        _torch_arrays,
        q,
        k,
        v,
        _options(recipe, bhsd, scale, grid, flags, backend),
        mask=key_padding_mask,
        segments=_segments(cu_seqlens_q, cu_seqlens_kv),
        permutation=permutation,
        rope=(Rope.of_tables(rope_q, rope_q_interleaved), Rope.of_tables(rope_k, rope_k_interleaved)),
        want_lse=return_lse,
    )
    return out, q.new_empty(0, dtype=torch.float32) if lse is None else lse


def _attention_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    bhsd = options["bhsd"]
    batch, seqlen, num_heads, head_dim = (q.shape[axis] for axis in ((0, 2, 1, 3) if bhsd else (0, 1, 2, 3)))
    out = q.new_empty((batch, seqlen, num_heads, head_dim))
    lse_shape = (0,)
    if options.get("return_lse", False):
        lse_shape = (batch, num_heads, seqlen) if bhsd else (batch, seqlen, num_heads)
    return out.transpose(1, 2) if bhsd else out, q.new_empty(lse_shape, dtype=torch.float32)


def _group(
    v: torch.Tensor,
    *,
    recipe: str,
    bhsd: bool,
    key_padding_mask: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    centroids: torch.Tensor | None = None,
    grid: list[int] = [],  # noqa: B006
    flags: int = 0,
    backend: str = "auto",
    clusters: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, _, num_heads, head_dim = _sizes(v, "v", bhsd)
    expected = recipe_module.facts(recipe).clusters
    if clusters != expected:
        raise InvalidArgumentError(f"clusters: {expected}, as the recipe has; found {clusters}")
    segments = _segments(cu_seqlens_q, cu_seqlens_kv)
    if centroids is not None:
        shape = (batch if segments is None else segments.num_segments, num_heads, clusters, head_dim)
        _torch_arrays.check_dense("centroids", centroids, torch.float32, shape, v)
    return _call.group(
        _torch_arrays,
        v,
        _options(recipe, bhsd, 0.0, grid, flags, backend),
        mask=key_padding_mask,
        segments=segments,
        centroids=centroids,
    )


def _group_fake(v: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    batch, seqlen, num_heads, head_dim = (v.shape[axis] for axis in ((0, 2, 1, 3) if options["bhsd"] else (0, 1, 2, 3)))
    cu_seqlens = options.get("cu_seqlens_kv")
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    permutation = v.new_empty((batch, num_heads, seqlen), dtype=torch.int32)
    return permutation, v.new_empty((sequences, num_heads, options["clusters"], head_dim), dtype=torch.float32)


for _device in ("CPU", "CUDA"):
    _library.impl("attention", _attention, _device)
    _library.impl("group", _group, _device)
torch.library.register_fake(f"{_NAMESPACE}::attention", _attention_fake, lib=_library)
torch.library.register_fake(f"{_NAMESPACE}::group", _group_fake, lib=_library)


# ---- the functions of _call.py, through the operators ---------------------------------------------------------------


@torch.compiler.assume_constant_result
def recipe_facts(spec: str) -> recipe_module.Facts:
    """As _call.recipe_facts; a constant to torch.compile, which cannot see into the library."""
    return recipe_module.facts(spec)


def traced_refusal(
    recipe: str | recipe_module.Recipe, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None
) -> str | None:
    """Why the library would refuse a call with layout BHSD on such tensors of rank 4, whatever their lengths; None if
    it would not. For code under torch.compile, which cannot catch what an operator raises later."""
    if q.numel() == 0 or k.numel() == 0 or v.numel() == 0:
        return "q, k or v is empty"
    if not (q.shape[0] == k.shape[0] == v.shape[0] and k.shape[2] == v.shape[2]):
        return "k and v have the batch of q, and one length"
    if scale is not None and not 0 < scale <= _abi.MAX_SOFTMAX_SCALE:  # which may be a symbol, unlike what follows
        return "scale is positive and at most 2^64"
    # Flat arguments: constants cannot hold tuples. Sizes lose their symbols: the graph holds for these heads alone.
    return _refusal_of(
        recipe_module.spec_of(recipe),
        q.device.type,
        q.dtype,
        k.dtype,
        v.dtype,
        operator.index(q.shape[1]),
        operator.index(k.shape[1]),
        operator.index(v.shape[1]),
        operator.index(q.shape[3]),
        operator.index(k.shape[3]),
        operator.index(v.shape[3]),
    )


@torch.compiler.assume_constant_result
def _refusal_of(
    spec: str,
    device: str,
    q_dtype: torch.dtype,
    k_dtype: torch.dtype,
    v_dtype: torch.dtype,
    num_heads: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    head_dim_k: int,
    head_dim_v: int,
) -> str | None:
    q, k, v = (
        torch.empty((1, heads, _call.PROBE_SEQLEN, dim), dtype=dtype, device="meta")
        for dtype, heads, dim in (
            (q_dtype, num_heads, head_dim),
            (k_dtype, num_heads_k, head_dim_k),
            (v_dtype, num_heads_v, head_dim_v),
        )
    )
    return _call.refusal(_torch_arrays, q, k, v, _call.Options(spec, bhsd=True), cuda=device == "cuda")


def mask_identity(mask: torch.Tensor) -> tuple[int, ...]:
    """As _call.mask_identity, as far as tracing can tell."""
    return tuple(mask.shape)


def segments_of(cu_seqlens: Any) -> Segments:
    """cu_seqlens as the other functions here take them: tensors in host memory, or lists of whole numbers."""
    q, kv = cu_seqlens if _call.is_pair(cu_seqlens) else (cu_seqlens, cu_seqlens)
    found = []
    for values in (q, kv):
        tensor = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=torch.int64)
        if tensor.device.type != "cpu":
            raise InvalidArgumentError(
                f"cu_seqlens: in host memory, so that no call waits for a device; found {tensor.device}"
            )
        found.append(tensor)
    return Segments(*found)


def _shared_arguments(options: _call.Options, mask: torch.Tensor | None, segments: Segments | None) -> dict[str, Any]:
    """What both operators take."""
    return {
        "recipe": options.recipe,
        "bhsd": options.bhsd,
        "key_padding_mask": mask,
        "cu_seqlens_q": None if segments is None else segments.q,
        "cu_seqlens_kv": None if segments is None else segments.kv,
        "grid": list(options.grid or ()),
        "flags": options.flags,
        "backend": options.backend,
    }


def attention(
    arrays: ModuleType,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: _call.Options,
    *,
    mask: torch.Tensor | None = None,
    segments: Segments | None = None,
    permutation: torch.Tensor | None = None,
    rope: RopePair | None = None,
    want_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As _call.attention."""
    rope_q, rope_k = rope or (None, None)
    for one in (rope_q, rope_k):
        if one is not None:
            _torch_arrays.check_not_batched("rope", one.tables)
    out, lse = torch.ops.vcattn.attention(
        q,
        k,
        v,
        scale=options.scale,
        permutation=permutation,
        rope_q=None if rope_q is None else rope_q.tables,
        rope_q_interleaved=rope_q is None or rope_q.interleaved,
        rope_k=None if rope_k is None else rope_k.tables,
        rope_k_interleaved=rope_k is None or rope_k.interleaved,
        return_lse=want_lse,
        **_shared_arguments(options, mask, segments),
    )
    return out, lse if want_lse else None


def group(
    arrays: ModuleType,
    v: torch.Tensor,
    options: _call.Options,
    *,
    mask: torch.Tensor | None = None,
    segments: Segments | None = None,
    centroids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As _call.group."""
    return torch.ops.vcattn.group(
        v,
        centroids=centroids,
        clusters=recipe_facts(options.recipe).clusters,
        **_shared_arguments(options, mask, segments),
    )
