"""vcattn.capturing: hooks that save q, k, v of chosen layers and steps while a model runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from . import captures, torch_intercept
from .policy import DEFAULT_MIN_SEQLEN
from .report import Report

# Parameters of a denoiser's forward that tell the step; models without one (text encoders, VAEs) are passed over.
_TIMESTEP_NAMES = ("timestep", "timesteps", "t", "sigma")


class capturing:  # noqa: N801  (reads as a function: `with capturing(...): ...`)
    """Context manager: saves the inputs of attention calls that go through torch's scaled_dot_product_attention.

    >>> with capturing("captures", layers=["blocks.0.attn1", "blocks.3?.attn1"], steps=[0, 20]) as files:
    ...     pipeline(prompt)

    A layer is named by its path inside the denoiser, the outermost module whose forward takes a timestep. Steps count
    the values that the timestep has taken since it last grew, which starts a new run; runs, and calls within a step
    (CFG branches), are numbered. Reading timesteps and saving tensors waits for the device: this is for analysis, not
    for production. Calls with a mask, causal or with dropout are left out, with a warning: `report` counts them.

    folder: made if it is not there.
    layers: patterns as in file names; all layers by default.
    steps: step indices; all by default.
    min_seqlen: calls of at most this many queries or keys are left out.
    limit: files at most, after which nothing is saved.
    num_steps: written into the files, where known.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        layers: Sequence[str] = ("*",),
        steps: Container[int] | None = None,
        min_seqlen: int = DEFAULT_MIN_SEQLEN,
        limit: int = 200,
        num_steps: int | None = None,
    ) -> None:
        self.folder, self.layers, self.steps = Path(folder), layers, steps
        self.min_seqlen, self.limit, self.num_steps = min_seqlen, limit, num_steps
        self.files: list[Path] = []
        self.report = Report("vcattn.capturing", "torch", short_reason="short")
        self._running: list[torch.nn.Module] = []  # modules whose forward is on the way, outermost first
        # Of the modules inside a denoiser by id: an id means something as long as the denoiser lives.
        self._names: WeakKeyDictionary[torch.nn.Module, dict[int, str]] = WeakKeyDictionary()
        self._timestep: float | None = None
        self._step, self._branch, self._run = -1, 0, 0

    def __enter__(self) -> list[Path]:
        self.folder.mkdir(parents=True, exist_ok=True)
        # Modules' own hooks do not see keyword arguments unless registered one by one.
        self._module_call = torch.nn.Module.__call__
        torch.nn.Module.__call__ = self._wrapped_call()
        torch_intercept.push(self, self)
        return self.files

    def __exit__(self, *exception: Any) -> None:
        torch_intercept.pop(self)
        torch.nn.Module.__call__ = self._module_call

    def call(self, original: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """One call of scaled_dot_product_attention: saved if it is wanted, and answered by torch."""
        layer = self._layer()
        if layer is not None and len(self.files) < self.limit:
            self._save(layer, *args, **kwargs)
        return original(*args, **kwargs)

    def _save(
        self,
        layer: str,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        dropout_p: float,
        is_causal: bool,
        *,
        scale: float | None,
        enable_gqa: bool,
    ) -> None:
        if not any(fnmatchcase(layer, pattern) for pattern in self.layers):
            return
        if self.steps is not None and self._step not in self.steps:
            return
        # Files hold q, k, v alone: without the rest such a call would be measured as another.
        for reason, found in (
            ("a call with attn_mask is not captured", attn_mask is not None),
            ("a call with is_causal is not captured", is_causal),
            ("a call with dropout is not captured", dropout_p != 0.0),
            ("a call without a batch axis is not captured", query.is_nested or query.dim() != 4),
        ):
            if found:
                self.report.count_fallback(reason, quiet=False, stacklevel=5)
                return
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        step = self._step if self._step >= 0 else None
        capture = captures.Capture(q, k, v, layer, step, self.num_steps, scale, self._branch, self._run)
        self.files.append(captures.save(capture, self.folder))

    def _layer(self) -> str | None:
        """Path of the innermost running module inside the denoiser; None outside of one."""
        root = next((module for module in self._running if _timestep_name(type(module)) is not None), None)
        if root is None:
            return None
        names = self._names.get(root)
        if names is None:
            names = self._names[root] = {id(module): name for name, module in root.named_modules()}
        return names.get(id(self._running[-1]))

    def _wrapped_call(self) -> Callable[..., Any]:
        original = self._module_call

        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = _timestep_name(type(module))
            if name is not None and all(_timestep_name(type(running)) is None for running in self._running):
                self._note_timestep(inspect.signature(module.forward).bind(*args, **kwargs).arguments.get(name))
            self._running.append(module)
            try:
                return original(module, *args, **kwargs)
            finally:
                self._running.pop()

        return call

    def _note_timestep(self, timestep: Any) -> None:
        value = float(timestep.flatten()[0]) if isinstance(timestep, torch.Tensor) else timestep
        if value == self._timestep:
            self._branch += 1
            return
        if self._timestep is not None and value is not None and value > self._timestep:
            self._step = -1  # timesteps fall within a run
            self._run += 1
        self._timestep, self._branch = value, 0
        self._step += 1


@cache
def _timestep_name(kind: type[torch.nn.Module]) -> str | None:
    """The parameter of a denoiser's forward that tells the step; None for other modules.

    Blocks and embeddings take timesteps too, but run inside a denoiser, and the outermost counts.
    """
    parameters = inspect.signature(kind.forward).parameters
    return next((name for name in _TIMESTEP_NAMES if name in parameters), None)
