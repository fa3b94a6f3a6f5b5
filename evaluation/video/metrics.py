"""Distances between clips, and means with bootstrap intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

SSIM_FRAME_STRIDE = 4  # neighbouring frames say the same: every fourth is measured
_RESAMPLES = 4000
_CONFIDENCE = 0.95
# Of a mean squared error, so that equal clips have a finite PSNR: 120 dB.
_LEAST_ERROR = 1e-12


def squared_error(a: Tensor, b: Tensor) -> Tensor:
    """The mean over all values."""
    return (a.float() - b.float()).square().mean()


def decibels(error: float, peak: float = 1.0) -> float:
    """PSNR of a mean squared error of values that span `peak`."""
    return 10 * math.log10(peak * peak / max(error, _LEAST_ERROR))


def psnr(a: Tensor, b: Tensor) -> float:
    """In dB, of values from 0 to 1."""
    return decibels(squared_error(a, b).item())


def ssim(a: np.ndarray, b: np.ndarray) -> float:
    """scikit-image's similarity, mean over the frames of [frames, height, width, 3]."""
    from skimage.metrics import structural_similarity

    return float(np.mean([structural_similarity(x, y, channel_axis=-1, data_range=1.0) for x, y in zip(a, b)]))


def load_lpips(device: torch.device) -> tuple[Callable[[Tensor, Tensor], float] | None, str]:
    """(LPIPS with AlexNet between clips [frames, height, width, 3] in 0 to 1, "") or (None, why there is none)."""
    try:
        from lpips import LPIPS

        network = LPIPS(net="alex", verbose=False).eval().to(device)
    except Exception as error:  # the package, or the weights that it would download
        return None, f"not measured: {type(error).__name__}: {error}"

    def distance(a: Tensor, b: Tensor) -> float:
        with torch.no_grad():
            pairs = (x.float().permute(0, 3, 1, 2) * 2 - 1 for x in (a, b))
            return float(network(*pairs).mean())

    return distance, ""


class Estimate(NamedTuple):
    mean: float
    low: float  # of the 95 % interval
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


def estimate(values: Sequence[float], clusters: Sequence[str]) -> Estimate:
    """Mean of `values` with a percentile bootstrap interval. Whole clusters (the seeds of one window) are drawn
    together: they are not independent of each other."""
    names = sorted(set(clusters))
    groups = [[v for v, cluster in zip(values, clusters) if cluster == name] for name in names]
    sums, sizes = np.array([sum(g) for g in groups]), np.array([len(g) for g in groups])
    drawn = np.random.default_rng(0).integers(len(names), size=(_RESAMPLES, len(names)))
    means = sums[drawn].sum(1) / sizes[drawn].sum(1)
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Estimate(float(np.mean(values)), float(low), float(high))
