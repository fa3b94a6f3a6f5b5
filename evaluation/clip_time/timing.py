"""Times of forwards and of the attention inside them, by CUDA events; a host clock where there is no CUDA (tests)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch


class Forward(NamedTuple):
    """Seconds of one forward, and of the self- and cross-attention in it (projections not counted)."""

    total: float
    self_attention: float
    cross_attention: float


class _Mark:
    """A point on the device's time line."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()
        self._host = time.perf_counter()

    def seconds_until(self, later: _Mark) -> float:
        if self._event is None:
            return later._host - self._host
        return self._event.elapsed_time(later._event) * 1e-3


class AttentionTimer:
    """Marks around every attention call of a transformer of diffusers."""

    def __init__(self, device: torch.device, model: torch.nn.Module) -> None:
        self._device, self._module = device, sys.modules[type(model).__module__]
        self._spans: list[tuple[bool, _Mark, _Mark]] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        """diffusers' processors look the function up in their module: it is wrapped there until the block ends."""
        original = self._module.dispatch_attention_fn

        def timed(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            begin = _Mark(self._device)
            out = original(query, key, *args, **kwargs)
            self._spans.append((query.shape[1] == key.shape[1], begin, _Mark(self._device)))
            return out

        self._module.dispatch_attention_fn = timed
        try:
            yield
        finally:
            self._module.dispatch_attention_fn = original

    def time(self, forward: Callable[[], Any]) -> Forward:
        """Runs `forward` once and waits for it."""
        self._spans.clear()
        begin = _Mark(self._device)
        forward()
        end = _Mark(self._device)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = {True: 0.0, False: 0.0}
        for is_self, first, last in self._spans:
            seconds[is_self] += first.seconds_until(last)
        return Forward(begin.seconds_until(end), seconds[True], seconds[False])
