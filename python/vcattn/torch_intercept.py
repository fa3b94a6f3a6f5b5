"""Replaces torch's scaled_dot_product_attention for the thread inside a block, and puts it back."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from .report import Report


class Interceptor(Protocol):
    """What stands in for torch.nn.functional.scaled_dot_product_attention."""

    min_seqlen: int  # calls of at most this many queries or keys go to torch and are counted in report.short_calls
    report: Report

    def call(self, original: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """One call of scaled_dot_product_attention with whatever arguments it came with; `original` is torch's."""


class _Active(threading.local):
    """The interceptors of this thread, innermost last."""

    def __init__(self) -> None:
        self.stack: list[Interceptor] = []


class _Hook:
    """The replacement of F.scaled_dot_product_attention, in place while any thread is inside a block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._original: Callable[..., torch.Tensor] | None = None
        self._replacement: Callable[..., torch.Tensor] | None = None

    def acquire(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._original = F.scaled_dot_product_attention
                self._replacement = _replacement_of(self._original)
                F.scaled_dot_product_attention = self._replacement

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            # Where somebody else has patched over this one, theirs stays; the replacement then only passes calls on.
            if self._users == 0 and F.scaled_dot_product_attention is self._replacement:
                F.scaled_dot_product_attention = self._original


def _replacement_of(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    is_compiling = torch.compiler.is_compiling

    # torch's own signature, and as little as possible on the way of short calls, which take torch ten microseconds.
    @functools.wraps(original)
    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        stack = _active.stack
        if stack:
            interceptor = stack[-1]
            try:
                short = query.shape[-2] <= interceptor.min_seqlen or key.shape[-2] <= interceptor.min_seqlen
            except (AttributeError, IndexError, RuntimeError):  # nested tensors, and what torch refuses
                short = False
            if not short or is_compiling():
                return interceptor.call(
                    original, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
                )
            interceptor.report.short_calls += 1
        if attn_mask is None and scale is None and not (dropout_p or is_causal or enable_gqa):
            return original(query, key, value)  # torch takes half a microsecond to parse the others
        return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    return scaled_dot_product_attention


_active = _Active()
_hook = _Hook()


def push(interceptor: Interceptor) -> None:
    """Sends this thread's calls to `interceptor` until `pop`."""
    _active.stack.append(interceptor)
    _hook.acquire()


def pop() -> None:
    """Undoes the last `push` of this thread."""
    _hook.release()
    _active.stack.pop()


def innermost() -> Interceptor:
    """The interceptor that this thread's calls go to."""
    return _active.stack[-1]
