"""softmax(scale q k^T) v of whole tensors in a recipe's numerics, head by head and in chunks of queries."""

from __future__ import annotations

import math
import warnings
from functools import lru_cache

import torch
from torch import Tensor

from .formats import rotate
from .numerics import SCALE_ROWS, TILE_KEYS, Numerics
from .operands import Keys, Queries, Values, prepare_keys, prepare_queries, prepare_values
from .softmax import probabilities

# Scores held at a time, as float32 a few times over. On a card all of a head with 16,448 tokens: few launches, and one
# compiled program.
_CHUNK_SCORES = {"cpu": 1 << 26, "cuda": 5 << 26}


def attention(
    q: Tensor, k: Tensor, v: Tensor, numerics: Numerics, order: Tensor | None = None, *, compiled: bool = False
) -> Tensor:
    """q, k, v: [batch, heads, tokens, dim] of one dtype; dim a power of two where the recipe rotates. Returns the same.

    order: int64 [batch, heads, tokens of k], the token at each place; None is the sequence.
    compiled: fuses the softmax by torch.compile (CUDA: several times faster; a code may differ at a tie).
    """
    scale = 1.0 / math.sqrt(q.shape[-1])
    out = torch.empty_like(q)
    with torch.autocast(q.device.type, enabled=False), torch.no_grad(), _exact_float32():
        for b in range(q.shape[0]):
            for h in range(q.shape[1]):
                head_order = None if order is None else order[b, h]
                keys = prepare_keys(k[b, h].float(), head_order, numerics)
                queries = prepare_queries(q[b, h].float(), keys, numerics, scale)
                values = prepare_values(v[b, h].float(), head_order, numerics)
                result = _attend(queries, keys, values, k.shape[2], numerics, compiled)
                out[b, h] = rotate(result) if numerics.v_hadamard else result
    return out


class _exact_float32:  # noqa: N801  (used as a context, like torch's own)
    """No TF32 and no BF16 sums in matrix products: codes times codes must stay exact."""

    _FLAGS = ("allow_tf32", "allow_bf16_reduced_precision_reduction")

    def __enter__(self) -> None:
        options = torch.backends.cuda.matmul
        self._before = {flag: getattr(options, flag) for flag in self._FLAGS}
        for flag in self._FLAGS:
            setattr(options, flag, False)

    def __exit__(self, *exception: object) -> None:
        for flag, value in self._before.items():
            setattr(torch.backends.cuda.matmul, flag, value)


@lru_cache(maxsize=8)
def _has_wide_product(device: torch.device) -> bool:
    """Whether BF16 operands can be multiplied into float32 here (torch 2.8 and later, CUDA)."""
    if device.type != "cuda":
        return False
    ones = torch.ones(128, 128, device=device, dtype=torch.bfloat16)
    try:
        product = torch.mm(ones, ones + 1, out_dtype=torch.float32)
    except (TypeError, RuntimeError):
        return False
    return bool((product == 256).all())


def _multiply(a: Tensor, b: Tensor, *, exact_in_bf16: bool) -> Tensor:
    """a b in float32; on tensor cores where that loses nothing."""
    if exact_in_bf16 and _has_wide_product(a.device):
        return torch.mm(a.bfloat16(), b.bfloat16(), out_dtype=torch.float32)
    return a.float() @ b.float()


def _split(p: Tensor) -> tuple[Tensor, ...]:
    """BF16 parts that add up to float32 p to within 2^-16 of it: far below what any format of p rounds."""
    high = (p.view(torch.int32) & -0x10000).view(torch.float32)  # a compiler leaves out a cast to BF16 and back
    return high.bfloat16(), (p - high).bfloat16()


def _multiply_parts(parts: tuple[Tensor, ...], v: Tensor, *, exact_in_bf16: bool) -> Tensor:
    """The sum of the parts times v."""
    products = [_multiply(part, v, exact_in_bf16=exact_in_bf16) for part in parts]
    return products[0] if len(products) == 1 else products[0] + products[1]


def _raw_scores(queries: Tensor, keys: Tensor, numerics: Numerics) -> Tensor:
    codes = numerics.qk_format in ("int8", "e4m3", "nvfp4", "bf16")
    if numerics.qk_accumulate != "hopper_f16":
        return _multiply(queries, keys.T, exact_in_bf16=codes)
    scores = torch.zeros((), device=queries.device)
    for begin in range(0, queries.shape[1], 32):  # channels of one instruction, after which the sum is rounded
        channels = slice(begin, begin + 32)
        part = _multiply(queries[:, channels], keys[:, channels].T, exact_in_bf16=codes)
        scores = (part + scores).half().float()
    return scores


def _softmax(
    raw: Tensor, factor: Tensor, descale: Tensor, mean_scores: Tensor | None, count: int, numerics: Numerics
) -> tuple[Tensor, ...]:
    """Raw scores [rows, padded keys] to (sums, the parts that p of softmax.probabilities is the sum of). In BF16: one
    part where p is exact in it, else two, so that the second product runs on tensor cores.

    mean_scores: [rows / SCALE_ROWS, padded keys], of the means that were subtracted from blocks of queries.
    """
    codes = raw * (factor[:, None] * descale)
    if mean_scores is not None:
        codes = codes + mean_scores[torch.arange(codes.shape[0], device=codes.device) // SCALE_ROWS]
    codes = torch.where(torch.arange(codes.shape[1], device=codes.device) < count, codes, -torch.inf)
    p, sums = probabilities(codes.unflatten(1, (-1, numerics.step_keys)), numerics)
    if numerics.v_format == "fp32":
        return sums, p
    return (sums, p.bfloat16()) if numerics.p_exact_in_bf16 else (sums, *_split(p))


class _CompiledSoftmax:
    """_softmax by torch.compile, checked against the plain one at the first call of each recipe and shape."""

    # Of torch.compile: one for each recipe, with and without means, and shape.
    _PROGRAMS = 128
    # Relative, of outputs together. A fused multiply-add may move a code that lies at a tie.
    _TOLERANCE = 1e-3

    def __init__(self) -> None:
        import torch._dynamo

        torch._dynamo.config.cache_size_limit = self._PROGRAMS
        self._compiled = torch.compile(_softmax, dynamic=False)
        self._checked: dict[object, bool] = {}  # whether the compiled one is right

    def __call__(self, raw: Tensor, *args: object) -> tuple[Tensor, ...]:
        key = (args[-1], raw.shape)
        if key not in self._checked:
            return self._first(key, raw, *args)
        return (self._compiled if self._checked[key] else _softmax)(raw, *args)

    def _first(self, key: object, raw: Tensor, *args: object) -> tuple[Tensor, ...]:
        expected = _softmax(raw, *args)
        try:
            found = self._compiled(raw, *args)
            whole = [(sums, sum(part.float() for part in p)) for sums, *p in (found, expected)]
            apart = max(float((a - b).norm() / b.norm()) for a, b in zip(*whole))
            problem = f"its results are off by {apart:.1e}" if apart > self._TOLERANCE else ""
        except Exception as error:  # of the compiler, of whatever kind: the plain one serves as well
            problem = f"{type(error).__name__}: {error}"
        if problem:
            warnings.warn(f"emulation runs without torch.compile: {problem}", stacklevel=2)
        self._checked[key] = not problem
        return expected


@lru_cache(maxsize=1)
def _compiled_softmax() -> _CompiledSoftmax:
    return _CompiledSoftmax()


def _chunk_rows(rows: int, keys: int, device: torch.device) -> int:
    """Queries at a time, whole blocks of SCALE_ROWS: chunks of about one length."""
    blocks = math.ceil(rows / SCALE_ROWS)
    chunks = min(blocks, max(1, math.ceil(rows * keys / _CHUNK_SCORES[device.type])))
    return math.ceil(blocks / chunks) * SCALE_ROWS


def _attend(queries: Queries, keys: Keys, values: Values, count: int, numerics: Numerics, compiled: bool) -> Tensor:
    rows = queries.codes.shape[0]
    size = _chunk_rows(rows, keys.codes.shape[0], queries.codes.device)
    softmax = _compiled_softmax() if compiled else _softmax
    descale = keys.descale.repeat_interleave(TILE_KEYS)
    outputs = []
    for begin in range(0, rows, size):
        chunk = slice(begin, begin + size)
        raw = _raw_scores(queries.codes[chunk], keys.codes, numerics)
        blocks = slice(begin // SCALE_ROWS, math.ceil((begin + size) / SCALE_ROWS))
        mean_scores = None if keys.exact is None else queries.means[blocks] @ keys.exact.T
        sums, *p = softmax(raw, queries.factor[chunk], descale, mean_scores, count, numerics)
        del raw
        out = _multiply_parts(tuple(p), values.codes, exact_in_bf16=numerics.v_format != "fp32")
        if values.means is not None:
            out += sums @ values.means
        outputs.append(out / sums.sum(1, keepdim=True) * values.descale)
    return torch.cat(outputs)
