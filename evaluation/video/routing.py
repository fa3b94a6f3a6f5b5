"""Which attention answers the model's calls: torch's, the library's, or the emulation of a recipe that the device's
back end does not serve. Outputs always name the one that ran (`engine`)."""

from __future__ import annotations

import time
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import vcattn

from .emulation import EmulatedState, Numerics
from .emulation import attention as emulated_attention
from .emulation.grouping import Grid
from .experiments import BF16, FLOOR, Run
from .model import Attention

EMULATED = "emulated in torch"
BRANCH = "cond"  # the model has one CFG branch
# [device type][spec]: the reference kernel, and another one for the floor.
_TORCH_KERNELS = {
    "cuda": {BF16: SDPBackend.CUDNN_ATTENTION, FLOOR: SDPBackend.FLASH_ATTENTION},
    "cpu": {BF16: SDPBackend.FLASH_ATTENTION, FLOOR: SDPBackend.MATH},
}


class TorchEngine:
    """scaled_dot_product_attention by one of torch's kernels."""

    def __init__(self, recipe: str, device: torch.device) -> None:
        self._kernel = _TORCH_KERNELS[device.type][recipe]
        self.engine = f"torch {self._kernel.name}"

    def at(self, step: int) -> Attention:
        return self._attend

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(self._kernel):
            return functional.scaled_dot_product_attention(q, k, v)


class LibraryEngine:
    """vcattn.attention, with one state for each layer and branch."""

    def __init__(self, run: Run, num_steps: int, grid: Grid, backend: str) -> None:
        self.engine = f"vcattn {backend}"
        self._states = vcattn.State(vcattn.Schedule(num_steps, run.schedule, run.reuse))
        self._options: dict[str, Any] = {"recipe": run.recipe, "layout": "BHSD", "grid": grid, "backend": backend}

    def at(self, step: int) -> Attention:
        return partial(self._attend, step)

    def _attend(self, step: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return vcattn.attention(q, k, v, state=self._states.of(layer, BRANCH), step=step, **self._options)


class EmulatedEngine:
    """The recipe in plain torch, with one state for each layer and branch."""

    engine = EMULATED

    def __init__(self, run: Run, num_steps: int, grid: Grid, *, compiled: bool) -> None:
        self._numerics, self._grid, self._compiled = Numerics.of(run.recipe), grid, compiled
        self._schedule = vcattn.Schedule(num_steps, run.schedule, run.reuse)
        self._states: dict[tuple[int, str], EmulatedState] = {}

    def at(self, step: int) -> Attention:
        return partial(self._attend, step)

    def _attend(self, step: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        key = (layer, BRANCH)
        if key not in self._states:
            self._states[key] = EmulatedState(self._numerics, self._schedule, self._grid)
        numerics, order = self._states[key].prepare(v, step)
        return emulated_attention(q, k, v, numerics, order, compiled=self._compiled)


Engine = TorchEngine | LibraryEngine | EmulatedEngine


@cache
def serving_backend(run: Run, num_steps: int, grid: Grid, device: torch.device, head_dim: int) -> str | None:
    """The back end that serves the run's recipe on `device`, with and without smoothing; None if there is none."""
    backend = next(
        (b.name for b in vcattn.backends() if b.available and (b.name == "cpu") == (device.type == "cpu")), None
    )
    if backend is None:
        return None
    tokens = grid[0] + grid[1] * grid[2] * grid[3]
    q = torch.zeros(1, 1, tokens, head_dim, dtype=torch.bfloat16, device=device)
    engine = LibraryEngine(run, num_steps, grid, backend)
    schedule = vcattn.Schedule(num_steps, run.schedule, run.reuse)
    kinds = {schedule.at(step).smooth: step for step in reversed(range(num_steps))}  # the first step of each kind
    try:
        for step in sorted(kinds.values()):
            engine.at(step)(0, q, q, q)
    except vcattn.UnsupportedError:
        return None
    return backend


def engine_of(
    run: Run, num_steps: int, grid: Grid, device: torch.device, head_dim: int, *, emulate: bool = False
) -> Engine:
    """The engine of a run. emulate: by the emulation even where a back end serves the recipe."""
    if run.is_torch:
        return TorchEngine(run.recipe, device)
    backend = None if emulate else serving_backend(run, num_steps, grid, device, head_dim)
    if backend is None:
        return EmulatedEngine(run, num_steps, grid, compiled=device.type == "cuda")
    return LibraryEngine(run, num_steps, grid, backend)


class Probe:
    """Passes calls on to an engine and, at some steps, measures each layer's error against exact attention's."""

    def __init__(self, engine: Engine, steps: set[int], reference: TorchEngine) -> None:
        self._engine, self._steps, self._reference = engine, steps, reference
        self._errors: dict[int, dict[int, Tensor]] = {}
        self.seconds = 0.0  # spent on measuring

    def at(self, step: int) -> Attention:
        attend = self._engine.at(step)
        return partial(self._measure, step, attend) if step in self._steps else attend

    def relative_l2(self) -> dict[int, list[float]]:
        """[step][layer]: ||out - reference|| / ||reference|| of the attention's output, on equal inputs."""
        return {step: [float(by_layer[i]) for i in sorted(by_layer)] for step, by_layer in self._errors.items()}

    def _measure(self, step: int, attend: Attention, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attend(layer, q, k, v)
        begin = finished(q.device)
        exact = self._reference.at(step)(layer, q, k, v).float()
        self._errors.setdefault(step, {})[layer] = (out.float() - exact).norm() / exact.norm()
        self.seconds += finished(q.device) - begin
        return out


def finished(device: torch.device) -> float:
    """Waits for the device; seconds of a monotonic clock."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
