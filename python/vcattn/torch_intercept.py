"""Replaces torch's scaled_dot_product_attention for what runs inside a block, and puts it back."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from .errors import InvalidArgumentError
from .report import Report


class Interceptor(Protocol):
    """What stands in for torch.nn.functional.scaled_dot_product_attention."""

    min_seqlen: int  # calls of at most this many queries or keys go to torch and are counted in report.short_calls
    report: Report

    def call(self, original: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """One call of scaled_dot_product_attention with whatever arguments it came with; `original` is torch's."""


class _Block:
    """One `push`. Contexts that were copied inside a block keep it after its end, and other contexts may end it: so
    whether it is open is a matter of its own."""

    __slots__ = ("interceptor", "owner", "open", "min_seqlen", "report")

    def __init__(self, interceptor: Interceptor, owner: object) -> None:
        self.interceptor, self.owner, self.open = interceptor, owner, True
        self.min_seqlen, self.report = interceptor.min_seqlen, interceptor.report


# The blocks of this thread or, under asyncio, of this task, innermost last.
_blocks: ContextVar[tuple[_Block, ...]] = ContextVar("vcattn_blocks", default=())


class _Thread(threading.local):
    """The same by thread, tasks or not: for code under torch.compile where it cannot trace a ContextVar."""

    def __init__(self) -> None:
        self.blocks: tuple[_Block, ...] = ()


_thread = _Thread()
_TRACES_CONTEXT_VARS = torch.__version__ >= (2, 15)


class _Hook:
    """The replacement of F.scaled_dot_product_attention, in place while any block is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[_Block] = []
        self._original: Callable[..., torch.Tensor] | None = None
        self._replacement: Callable[..., torch.Tensor] | None = None

    def add(self, block: _Block) -> None:
        with self._lock:
            if not self._open:
                self._original = F.scaled_dot_product_attention
                self._replacement = _replacement_of(self._original)
                F.scaled_dot_product_attention = self._replacement
            self._open.append(block)

    def remove(self, owner: object) -> None:
        """Ends the owner's innermost block, of this context where it has one here."""
        with self._lock:
            found = [block for block in (*self._open, *_blocks.get()) if block.owner is owner and block.open]
            if not found:
                raise InvalidArgumentError(f"{type(owner).__name__}: a block ends that was not entered")
            block = found[-1]
            block.open = False
            self._open.remove(block)
            # Where somebody else has patched over this one, theirs stays; the replacement then only passes calls on.
            if not self._open and F.scaled_dot_product_attention is self._replacement:
                F.scaled_dot_product_attention = self._original


def _replacement_of(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    # Short calls take torch five to ten microseconds, of which theirs is to be a twentieth: no call that can be spared,
    # and nothing in front of the look at the shape that is not needed to know which one to compare with.
    blocks_here, is_tracing = _blocks.get, torch.compiler.is_dynamo_compiling

    @functools.wraps(original)  # torch's own signature
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
        if is_tracing():
            block, short = _innermost(), False
        else:
            blocks, block, short = blocks_here(), None, True
            if blocks:
                block = blocks[-1]
                if not block.open:
                    block = _innermost()
                if block is not None:
                    try:
                        short = query.shape[-2] <= block.min_seqlen or key.shape[-2] <= block.min_seqlen
                    except (AttributeError, IndexError, RuntimeError):  # nested tensors, and what torch refuses
                        short = False
                    if short:
                        block.report.short_calls += 1
        if short or block is None:
            if attn_mask is None and scale is None and not (dropout_p or is_causal or enable_gqa):
                return original(query, key, value)  # torch takes half a microsecond to parse the others
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return block.interceptor.call(
            original, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    return scaled_dot_product_attention


_hook = _Hook()


def _innermost() -> _Block | None:
    by_context = _TRACES_CONTEXT_VARS or not torch.compiler.is_compiling()
    blocks = _blocks.get() if by_context else _thread.blocks
    for block in blocks[::-1]:
        if block.open:
            return block
    return None


def push(interceptor: Interceptor, owner: object) -> None:
    """Sends the calls of this thread or, under asyncio, of this task to `interceptor` until pop(owner)."""
    block = _Block(interceptor, owner)
    _hook.add(block)
    _blocks.set((*(b for b in _blocks.get() if b.open), block))
    _thread.blocks = (*(b for b in _thread.blocks if b.open), block)


def pop(owner: object) -> None:
    """Undoes the last `push` of this owner, wherever it was. Raises InvalidArgumentError where there is none."""
    _hook.remove(owner)
    _blocks.set(tuple(block for block in _blocks.get() if block.open))
    _thread.blocks = tuple(block for block in _thread.blocks if block.open)


def innermost() -> Interceptor:
    """The interceptor that calls of this thread or task go to; to be asked inside a block alone."""
    found = _innermost()
    assert found is not None
    return found.interceptor
