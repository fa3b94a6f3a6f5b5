"""One call of the library: arrays into vcattn_attention_params, memory for the results, a workspace, the C function.

Everything here takes arrays of one library in one place (see _arrays.py), rank 4, and the layout as a flag: `bhsd` says
[batch, num_heads, seqlen, head_dim], else [batch, seqlen, num_heads, head_dim].
"""

from __future__ import annotations

import ctypes
import math
import struct
from array import array
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from . import _abi, _library
from ._check import whole
from .errors import InvalidArgumentError
from .recipe import as_recipe, facts
from .rope import RopePair, set_rope

_PARAMS_SIZE = ctypes.sizeof(_abi.AttentionParams)
# vcattn_tensor: data, dtype, reserved, shape, stride. One pack instead of ten assignments.
_TENSOR = struct.Struct("=Qii4q4q")
_OFFSET = {name: getattr(_abi.AttentionParams, name).offset for name in ("q", "k", "v", "out")}

# Of tensors that stand in for any length where the library is asked whether it serves a call.
PROBE_SEQLEN = 4096

Grid = tuple[int, int, int, int]  # first_token, frames, height, width


class Options(NamedTuple):
    """What a call asks for beside its arrays."""

    recipe: str  # spec
    bhsd: bool
    scale: float = 0.0  # 0: 1 / sqrt(head_dim)
    grid: Grid | None = None
    flags: int = 0
    backend: str = "auto"

    def with_recipe(self, recipe: str) -> Options:
        """The same with another recipe. (Not _replace, which torch.compile of torch 2.5 cannot trace.)"""
        return Options(recipe, self.bhsd, self.scale, self.grid, self.flags, self.backend)


class Segments(NamedTuple):
    """cu_seqlens of packed sequences, in host memory."""

    q: array
    kv: array

    @classmethod
    def of(cls, cu_seqlens: Any) -> Segments:
        """From one sequence of offsets for queries and keys alike, or a pair of them.

        Each is a list, a numpy array or a torch tensor of whole numbers in host memory: offsets in CUDA memory would
        have to be waited for, and raise InvalidArgumentError.
        """
        if is_pair(cu_seqlens):
            q, kv = (_offsets(part) for part in cu_seqlens)
        else:
            q = kv = _offsets(cu_seqlens)
        if len(q) != len(kv):
            raise InvalidArgumentError(
                f"cu_seqlens: as many entries for queries as for keys; found {len(q)}, {len(kv)}"
            )
        if len(q) < 2:
            raise InvalidArgumentError(f"cu_seqlens: at least two entries, 0 and the length; found {len(q)}")
        return cls(q, kv)

    @property
    def num_segments(self) -> int:
        """Number of segments."""
        return len(self.q) - 1

    @property
    def identity(self) -> object:
        """What must agree for an order of the values to be reused."""
        return bytes(self.kv)


def is_pair(cu_seqlens: Any) -> bool:
    """Whether cu_seqlens is one of queries and one of keys, rather than the two offsets of a single segment."""
    if not isinstance(cu_seqlens, tuple) or len(cu_seqlens) != 2:
        return False
    return not any(isinstance(part, int) or getattr(part, "shape", None) == () for part in cu_seqlens)


def _offsets(values: Any) -> array:
    device = getattr(values, "device", None)
    if device is not None and str(device) != "cpu":
        raise InvalidArgumentError(f"cu_seqlens: in host memory, so that no call waits for a device; found {device}")
    try:
        return array("q", values.tolist() if hasattr(values, "tolist") else values)
    except (TypeError, OverflowError) as error:
        raise InvalidArgumentError(f"cu_seqlens: whole numbers; found {values!r}") from error


def _pack_tensor(params: _abi.AttentionParams, arrays: ModuleType, name: str, x: Any, bhsd: bool) -> None:
    try:
        address, code, shape, stride = arrays.describe(name, x)
        _pack_described(params, name, address, code, shape, stride, bhsd)
    except (ValueError, struct.error):
        if len(x.shape) != 4:  # asked only here: every check is a part of a microsecond
            raise InvalidArgumentError(f"{name}: four axes, as its layout has; found shape {tuple(x.shape)}") from None
        raise


def _pack_described(
    params: _abi.AttentionParams,
    name: str,
    address: int,
    code: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    bhsd: bool,
) -> None:
    if bhsd:
        a, b, c, d = shape
        sa, sb, sc, sd = stride
        _TENSOR.pack_into(params, _OFFSET[name], address, code, 0, a, c, b, d, sa, sc, sb, sd)
    else:
        _TENSOR.pack_into(params, _OFFSET[name], address, code, 0, *shape, *stride)


def _backend_code(name: str) -> int:
    code = _abi.BACKENDS.get(name)
    if code is None:
        raise InvalidArgumentError(f'backend is one of {", ".join(_abi.BACKENDS)}; found "{name}"')
    return code


def _new_params(options: Options) -> _abi.AttentionParams:
    params = _abi.AttentionParams()
    params.struct_size = _PARAMS_SIZE
    params.recipe = as_recipe(options.recipe).struct
    params.softmax_scale = options.scale
    params.flags = options.flags
    if options.backend != "auto":
        params.backend = _backend_code(options.backend)
    if options.grid is not None:
        params.grid = _abi.VideoGrid(*options.grid)
    return params


def grid_of(grid: Any) -> Grid:
    """From any sequence of four whole numbers; raises InvalidArgumentError for anything else."""
    try:
        first_token, frames, height, width = grid
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"grid: (first_token, frames, height, width); found {grid!r}") from error
    return (
        _grid_entry("first_token", first_token),
        _grid_entry("frames", frames),
        _grid_entry("height", height),
        _grid_entry("width", width),
    )


def _grid_entry(name: str, value: Any) -> int:
    # Symbols of a trace stay what they are.
    number = value if isinstance(value, int) or type(value).__name__ == "SymInt" else whole(f"grid: {name}", value)
    if not -(2**63) <= number < 2**63:  # ctypes would wrap it
        raise InvalidArgumentError(f"grid: {name} is a number of 64 bits; found {number}")
    return number


def _set_mask(params: _abi.AttentionParams, arrays: ModuleType, mask: Any, v: Any) -> None:
    address, shape, strides = arrays.describe_mask(mask, v)
    expected = (params.v.shape[0], params.v.shape[1])
    # As in broadcasting: a missing or single batch serves all.
    if len(shape) == 1:
        shape, strides = (1, *shape), (0, *strides)
    if len(shape) != 2 or shape[1] != expected[1] or shape[0] not in (1, expected[0]):
        raise InvalidArgumentError(f"key_padding_mask: shape [batch, seqlen_kv] = {expected}; found {tuple(shape)}")
    params.key_mask = address
    params.key_mask_stride[:] = (0 if shape[0] == 1 else strides[0], strides[1])


def _set_segments(params: _abi.AttentionParams, segments: Segments) -> None:
    params.cu_seqlens_q = segments.q.buffer_info()[0]
    params.cu_seqlens_kv = segments.kv.buffer_info()[0]
    params.num_segments = segments.num_segments


recipe_facts = facts  # as torch_op has its own, which torch.compile can trace


def mask_identity(mask: Any) -> tuple[Any, ...]:
    """What must agree for an order of the values to be reused: in host memory the mask itself, elsewhere its shape."""
    if getattr(mask, "is_cuda", False):
        return tuple(mask.shape)
    return *mask.shape, np.asarray(mask).tobytes()


def segments_of(cu_seqlens: Any) -> Segments:
    """cu_seqlens as the other functions here take them."""
    return Segments.of(cu_seqlens)


def attention(
    arrays: ModuleType,
    q: Any,
    k: Any,
    v: Any,
    options: Options,
    *,
    mask: Any = None,
    segments: Segments | None = None,
    permutation: Any = None,
    rope: RopePair | None = None,
    want_lse: bool = False,
) -> tuple[Any, Any]:
    """(out, lse): out of q's shape and dtype, in memory always [batch, seqlen, num_heads, head_dim]; lse float32,
    dense, [batch, seqlen, num_heads] or, if `bhsd`, [batch, num_heads, seqlen]; None unless wanted."""
    library = _library.get()
    bhsd = options.bhsd
    params, message = _new_params(options), _abi.Message()
    for name, x in (("q", q), ("k", k), ("v", v)):
        _pack_tensor(params, arrays, name, x, bhsd)
    if bhsd:
        batch, num_heads, seqlen, head_dim = q.shape
    else:
        batch, seqlen, num_heads, head_dim = q.shape
    out = arrays.empty((batch, seqlen, num_heads, head_dim), q)
    _pack_tensor(params, arrays, "out", out, False)
    lse = None
    if want_lse:
        lse, params.lse = arrays.empty_float32((batch, num_heads, seqlen) if bhsd else (batch, seqlen, num_heads), q)
        lse_stride = (num_heads * seqlen, 1, seqlen) if bhsd else (seqlen * num_heads, num_heads, 1)
        params.lse_stride[:] = lse_stride
    if mask is not None:
        _set_mask(params, arrays, mask, v)
    if segments is not None:
        _set_segments(params, segments)
    if permutation is not None:
        params.permutation = arrays.address(permutation)
    if rope is not None:
        for which, one in zip("qk", rope):
            if one is not None:
                set_rope(params, which, one, arrays, bhsd, q)
    params.memory, params.stream = arrays.place(q)
    with arrays.current_device(q):
        _run(library.vcattn_attention_workspace_size, library.vcattn_attention, params, message, arrays, q)
    return (arrays.swap_heads(out) if bhsd else out), lse


def refusal(arrays: ModuleType, q: Any, k: Any, v: Any, options: Options, *, cuda: bool) -> str | None:
    """Why the library would refuse attention over arrays of these dtypes, shapes and strides; None if it would not.
    Their memory is not looked at, and need not be there."""
    params, message, size = _new_params(options), _abi.Message(), ctypes.c_size_t()
    params.memory = _abi.MEMORY_CUDA if cuda else _abi.MEMORY_HOST
    try:
        for index, (name, x) in enumerate((("q", q), ("k", k), ("v", v), ("out", q))):
            _, *described = arrays.describe(name, x)
            # Made-up addresses, far apart: only overlap and alignment are looked at.
            _pack_described(params, name, (index + 1) << 44, *described, options.bhsd)
    except InvalidArgumentError as error:
        return str(error)
    code = _library.get().vcattn_attention_workspace_size(
        ctypes.addressof(params), ctypes.addressof(size), ctypes.addressof(message)
    )
    return None if code == _abi.OK else message.text.decode(errors="replace")


def _run(size_of: Any, function: Any, params: Any, message: Any, arrays: ModuleType, like: Any, *extra: Any) -> None:
    """Asks for the workspace, allocates it where `like` lies, and runs `function`; raises what either refuses."""
    address, reply = ctypes.addressof(params), ctypes.addressof(message)
    size = ctypes.c_size_t()
    code = size_of(address, ctypes.addressof(size), reply)
    if code == _abi.OK:
        owner, workspace = arrays.workspace(size.value, like)
        code = function(address, *extra, workspace, size.value, reply)
        del owner
    _library.check(code, message)


def group(
    arrays: ModuleType,
    v: Any,
    options: Options,
    *,
    mask: Any = None,
    segments: Segments | None = None,
    centroids: Any = None,
) -> tuple[Any, Any]:
    """(permutation, centroids) of the values, as vcattn_group makes them for the recipe.

    permutation: int32 [batch, num_heads_kv, seqlen_kv]. centroids: float32 [segments or batch, num_heads_kv, clusters,
    head_dim]; those given are what it starts from, and stay as they are.
    """
    library = _library.get()
    params, message = _new_params(options), _abi.Message()
    _pack_tensor(params, arrays, "v", v, options.bhsd)
    batch, seqlen, num_heads, head_dim = params.v.shape
    if mask is not None:
        _set_mask(params, arrays, mask, v)
    if segments is not None:
        _set_segments(params, segments)
    params.memory, params.stream = arrays.place(v)
    permutation, permutation_address = arrays.empty_int32((batch, num_heads, seqlen), v)
    warm = centroids is not None
    if warm:
        centroids, centroid_address = arrays.copy(centroids)
    else:
        sequences = segments.num_segments if segments is not None else batch
        clusters = params.recipe.grouping.clusters
        centroids, centroid_address = arrays.empty_float32((sequences, num_heads, clusters, head_dim), v)
    with arrays.current_device(v):
        _run(
            library.vcattn_group_workspace_size,
            library.vcattn_group,
            params,
            message,
            arrays,
            v,
            int(warm),
            centroid_address,
            permutation_address,
        )
    return permutation, centroids


def check_scale(scale: float | None) -> float:
    """`scale` as the C ABI takes it, where 0 stands for the default; raises InvalidArgumentError."""
    if scale is None:
        return 0.0
    try:
        scale = float(scale)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"scale is a number; found {scale!r}") from error
    if not 0 < scale < math.inf:
        raise InvalidArgumentError(f"scale is positive and finite; found {scale}")
    return scale


def with_batch(x: Any) -> Any:
    """[seqlen, num_heads, head_dim] as a batch of one; rank 4 as it is."""
    return x[None] if len(x.shape) == 3 else x
