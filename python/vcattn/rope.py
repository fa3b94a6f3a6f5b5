"""Rotary position embedding inside the call."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

from . import _abi
from .errors import InvalidArgumentError

_AXES = ("frames", "height", "width")


class Rope(NamedTuple):
    """Tables that rotate q or k: channels (x0, x1) of a pair become (x0 cos - x1 sin, x0 sin + x1 cos) in float32, and
    are not rounded to the tensor's dtype afterwards.

    cos, sin: float32, where q lies, one entry for each pair of channels; views with any strides that are not negative,
        both the same. Either of tokens: [seqlen, head_dim / 2], [batch, seqlen, head_dim / 2], or with four axes as q
        has them in its layout, where batch and heads of 1 are shared. Or a tuple of three, for frames, height and
        width: dense [extent, pairs] by the call's `grid`, where the first pairs of a row take the frame; together
        head_dim / 2 pairs. Tokens outside the grid are not rotated.
    interleaved: pairs are channels 2i and 2i + 1; else i and i + head_dim / 2.
    """

    cos: Any
    sin: Any
    interleaved: bool = True

    @property
    def tables(self) -> list[Any]:
        """All tables: the cosines, then as many sines."""
        parts: list[Any] = []
        for part in (self.cos, self.sin):
            parts.extend(part if isinstance(part, (tuple, list)) else (part,))
        return parts

    @classmethod
    def of_tables(cls, tables: list[Any] | None, interleaved: bool) -> Rope | None:
        """From `tables`; None from None."""
        if tables is None:
            return None
        if len(tables) == 2:
            return cls(tables[0], tables[1], interleaved)
        if len(tables) == 2 * len(_AXES):
            return cls(tuple(tables[: len(_AXES)]), tuple(tables[len(_AXES) :]), interleaved)
        raise InvalidArgumentError(f"rope: 2 tables, or 6 of three axes; found {len(tables)}")


RopePair = tuple["Rope | None", "Rope | None"]


def pair_of(rope: Any) -> RopePair:
    """Those of q and k, from one for both or a pair; raises InvalidArgumentError for anything else."""
    pair = (rope, rope) if isinstance(rope, Rope) else rope
    if not isinstance(pair, tuple) or len(pair) != 2 or not all(r is None or isinstance(r, Rope) for r in pair):
        raise InvalidArgumentError(f"rope: a vcattn.Rope, or a pair of them for q and k; found {type(rope).__name__}")
    for r in pair:
        if r is None:
            continue
        if not isinstance(r.interleaved, bool):
            raise InvalidArgumentError(f"rope: interleaved is True or False; found {r.interleaved!r}")
        counts = [len(part) if isinstance(part, (tuple, list)) else "one" for part in (r.cos, r.sin)]
        if counts[0] != counts[1] or counts[0] not in ("one", len(_AXES)):
            raise InvalidArgumentError(
                f"rope: cos and sin are both one table or both three; found {counts[0]} and {counts[1]}"
            )
    return pair


def set_rope(params: _abi.AttentionParams, which: str, rope: Rope, arrays: ModuleType, bhsd: bool, like: Any) -> None:
    """Describes `rope` in params.rope_q or params.rope_k, by `which`, "q" or "k", whose tensor is set."""
    name, x = f"rope_{which}", getattr(params, which)
    found = getattr(params, name)
    found.pairing = _abi.ROPE_INTERLEAVED if rope.interleaved else _abi.ROPE_HALF_SPLIT
    if isinstance(rope.cos, (tuple, list)):
        found.tables = _abi.ROPE_PER_AXIS
        grid = params.grid
        if not (grid.frames or grid.height or grid.width):
            raise InvalidArgumentError(f"{name}: tables of axes need grid=(first_token, frames, height, width)")
        for axis, extent in enumerate((grid.frames, grid.height, grid.width)):
            of_axis = f"{name}, {_AXES[axis]}"
            shape, stride = _describe(found, axis, of_axis, rope.cos[axis], rope.sin[axis], arrays, like)
            if len(shape) != 2 or shape[0] != extent:
                raise InvalidArgumentError(f"{of_axis}: tables [{extent}, pairs], as grid has it; found {shape}")
            steps = zip(shape, stride, (shape[1], 1))
            if 0 not in shape and any(n > 1 and step != dense for n, step, dense in steps):
                raise InvalidArgumentError(f"{of_axis}: dense tables; found strides {stride}")
            found.pairs[axis] = shape[1]
        return
    found.tables = _abi.ROPE_PER_TOKEN
    shape, stride = _describe(found, 0, name, rope.cos, rope.sin, arrays, like)
    batch, seqlen, num_heads, head_dim = x.shape
    if not 2 <= len(shape) <= 4:
        raise InvalidArgumentError(f"{name}: tables [seqlen, head_dim / 2], or with batch and heads; found {shape}")
    if len(shape) == 4 and bhsd:
        shape, stride = ((t[0], t[2], t[1], t[3]) for t in (shape, stride))
    elif len(shape) < 4:  # no heads
        shape, stride = (*shape[:-1], 1, shape[-1]), (*stride[:-1], 0, stride[-1])
        if len(shape) == 3:
            shape, stride = (1, *shape), (0, *stride)
    expected = (batch, seqlen, num_heads, head_dim // 2)
    for axis, (extent, wanted) in enumerate(zip(shape, expected)):
        if extent != wanted and not (axis in (0, 2) and extent == 1):
            raise InvalidArgumentError(
                f"{name}: tables of batch, seqlen, heads and pairs {expected}, or 1 for batch and heads; found {shape}"
            )
    found.stride[:] = tuple(0 if extent == 1 else step for extent, step in zip(shape, stride))


def _describe(
    found: _abi.Rope, axis: int, name: str, cos: Any, sin: Any, arrays: ModuleType, like: Any
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, strides) of both tables, whose addresses are set."""
    address_cos, shape, stride = arrays.describe_table(f"{name}: cos", cos, like)
    address_sin, *of_sin = arrays.describe_table(f"{name}: sin", sin, like)
    if of_sin != [shape, stride]:
        raise InvalidArgumentError(f"{name}: sin is laid out as cos, {shape} by {stride}; found {tuple(of_sin)}")
    found.cos[axis], found.sin[axis] = address_cos, address_sin
    return shape, stride
