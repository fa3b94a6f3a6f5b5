"""vcattn.patch_sdpa: torch's scaled_dot_product_attention served by vcattn inside a `with` block."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from . import _library, torch_intercept
from ._check import whole
from ._torch_arrays import NO_BACKWARD, PLAIN, in_transform, needs_gradient
from .errors import InvalidArgumentError, ScoreOverflowError, UnsupportedError
from .policy import GROUPING_MIN_SEQLEN
from .recipe import AUTO, Recipe, as_recipe
from .report import Report
from .torch_op import traced_refusal
from .torch_sdpa import broadcast, refusal, sdpa


class patch_sdpa:  # noqa: N801  (reads as a function: `with patch_sdpa(): ...`)
    """Context manager: torch.nn.functional.scaled_dot_product_attention answers through vcattn where it can.

    >>> with vcattn.patch_sdpa() as report:
    ...     frames = pipeline(prompt)
    >>> print(report)

    It holds for the thread that entered it or, under asyncio, for the task and what it starts; it nests, and is undone
    on the way out whatever happens. Code that bound the function at import time is not reached. Calls that vcattn
    refuses go to torch, are counted by reason in the report, and warn once.

    recipe: as in vcattn.attention.
    min_seqlen: calls with at most this many queries or keys go to torch, counted but without a warning. The default is
        longer than a Policy's, as every call here makes its own order of the values.
    Raises LibraryError on entering where the library does not load, InvalidArgumentError for an unknown recipe.
    """

    report: Report

    def __init__(self, recipe: str | Recipe = AUTO, *, min_seqlen: int = GROUPING_MIN_SEQLEN) -> None:
        self.recipe, self.min_seqlen = recipe, whole("min_seqlen", min_seqlen)
        self._short = f"at most {min_seqlen} queries or keys (min_seqlen)"

    def __enter__(self) -> Report:
        _library.get()
        as_recipe(self.recipe)
        block = copy.copy(self)  # an instance may be entered again inside itself: each block has its own report
        block.report = Report("vcattn.patch_sdpa", "torch", short_reason=self._short)
        torch_intercept.push(block, self)
        return block.report

    def __exit__(self, *exception: Any) -> None:
        torch_intercept.pop(self)

    def call(
        self,
        original: Callable[..., torch.Tensor],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        dropout_p: float,
        is_causal: bool,
        *,
        scale: float | None,
        enable_gqa: bool,
    ) -> torch.Tensor:
        """A call of some length, or one in compiled code; short ones do not come here otherwise."""
        others = (attn_mask, dropout_p, is_causal, scale, enable_gqa)
        reason = self._refusal(query, key, value, *others)
        if reason is None:
            try:
                out = sdpa(query, key, value, *others, recipe=self.recipe)
            except (UnsupportedError, InvalidArgumentError, ScoreOverflowError) as error:
                reason = str(error)
            else:
                _note_served()
                return out
        _note_fallback(reason, reason in (self._short, _NESTED))
        return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    def _refusal(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
    ) -> str | None:
        """Why a call goes to torch without a try; None where it may be tried."""
        compiling = torch.compiler.is_compiling()
        if not (isinstance(query, torch.Tensor) and isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor)):
            return "query, key and value are tensors"
        if query.is_nested or key.is_nested or value.is_nested:
            return _NESTED
        if compiling and min(query.shape[-2], key.shape[-2]) <= self.min_seqlen:
            return self._short
        kind = query.device.type
        if kind not in ("cpu", "cuda"):
            return f"tensors lie on cpu or cuda; found {kind}"
        if not compiling and in_transform():
            return "inside torch.vmap or another transform of functions"
        if torch.is_autocast_enabled(kind) and query.dtype != torch.get_autocast_dtype(kind):
            return f"autocast would cast {query.dtype}"
        if needs_gradient(query, key, value):
            return NO_BACKWARD
        found = refusal(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if found is not None:
            return found.reason
        if compiling:  # the library is asked now: when the graph runs it is too late to fall back
            q, k, v = broadcast(query, key, value, enable_gqa)
            return traced_refusal(self.recipe, q, k, v, scale)
        for x in (query, key, value):
            if type(x) not in PLAIN:
                return f"tensors of the subclass {type(x).__name__}"
        return None


_NESTED = "nested tensors"


# To torch.compile the two are constants: they run while it traces and leave no guard on the counters.
@torch.compiler.assume_constant_result
def _note_served() -> None:
    _innermost_report().served += 1


@torch.compiler.assume_constant_result
def _note_fallback(reason: str, quiet: bool) -> None:
    _innermost_report().count_fallback(reason, quiet=quiet, stacklevel=5)


def _innermost_report() -> Report:
    return torch_intercept.innermost().report
