"""`python -m vcattn bench`: whole calls of vcattn beside torch's scaled_dot_product_attention, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ._check import whole
from .attention import attention


class Shape(NamedTuple):
    """Of one attention call."""

    batch: int
    seqlen: int
    num_heads: int
    head_dim: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """From "1,32760,40,128" or a name of SHAPES; raises ValueError."""
        if text in SHAPES:
            return SHAPES[text]
        try:
            shape = cls(*map(int, text.split(",")))
        except (TypeError, ValueError) as error:
            names = ", ".join(SHAPES)
            raise ValueError(f"a shape is batch,seqlen,num_heads,head_dim or one of {names}; found {text!r}") from error
        if min(shape) < 1:
            raise ValueError(f"a shape has extents of at least 1; found {text!r}")
        return shape


# Self-attention of one layer at the resolutions these models run at.
SHAPES = {
    "wan2.2-480p": Shape(1, 32760, 40, 128),
    "wan2.2-720p": Shape(1, 75600, 40, 128),
    "hunyuanvideo1.5-480p": Shape(1, 49290, 16, 128),
    "cogvideox-5b": Shape(1, 17776, 48, 64),
    "ltx2-6k": Shape(1, 6144, 32, 128),
    "flux": Shape(1, 4608, 24, 128),
}
SDPA = "sdpa"  # the name of torch's own in results


class Result(NamedTuple):
    """Seconds of whole calls, one sample each, in the order they were taken."""

    shape: Shape
    name: str  # a recipe or "sdpa"
    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def bench(
    shape: Shape, recipes: Sequence[str], *, device: str, dtype: torch.dtype = torch.bfloat16, repeats: int = 20
) -> list[Result]:
    """Torch's SDPA and each recipe on the same random tensors, one after the other in every round.

    Random data says nothing of accuracy; the time does not depend on it.
    """
    repeats = whole("repeats", repeats, least=1)
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(3))
    swapped = [x.transpose(1, 2) for x in (q, k, v)]
    calls: dict[str, Callable[[], Any]] = {SDPA: lambda: F.scaled_dot_product_attention(*swapped)}
    for recipe in recipes:
        calls[recipe] = lambda recipe=recipe: attention(q, k, v, recipe=recipe)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()  # warm
    for _ in range(repeats):
        for name, call in calls.items():
            seconds[name].append(_time(call, device))
    return [Result(shape, name, samples) for name, samples in seconds.items()]


def _time(call: Callable[[], Any], device: str) -> float:
    if not device.startswith("cuda"):
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def table(results: Sequence[Result]) -> str:
    """One line a result: median, spread, TFLOP/s as 4 B S^2 H D, and speed relative to SDPA."""
    lines = [f"{'shape':24}{'recipe':>20}{'median ms':>12}{'min ms':>10}{'max ms':>10}{'TFLOP/s':>10}{'x sdpa':>8}"]
    sdpa = {r.shape: r.median for r in results if r.name == SDPA}
    for r in results:
        batch, seqlen, heads, dim = r.shape
        rate = 4.0 * batch * seqlen * seqlen * heads * dim / r.median / 1e12
        text = ",".join(map(str, r.shape))
        lines.append(
            f"{text:24}{r.name:>20}{1e3 * r.median:12.3f}{1e3 * min(r.seconds):10.3f}{1e3 * max(r.seconds):10.3f}"
            f"{rate:10.3g}{sdpa[r.shape] / r.median:8.2f}"
        )
    return "\n".join(lines)
