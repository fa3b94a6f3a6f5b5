"""Euler steps of the rectified flow, from a real clip with noise on it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from .model import Attention, Extent, ModelSize, VideoTransformer, rope_angles

START_TIME = 0.6  # 0.6 of noise, 0.4 of the clip; from pure noise this model makes no coherent video


# Of the last call: the runs of a clip follow each other, and the host takes longer to make these than a card to render
# a step.
@lru_cache(maxsize=1)
def _noise(shape: torch.Size, seed: int, device: torch.device) -> Tensor:
    """Drawn on the CPU: the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


@lru_cache(maxsize=1)
def _angles(grid: Extent, size: ModelSize, device: torch.device) -> Tensor:
    return rope_angles(grid, size.text_tokens, size.head_dim).to(device)


def render(
    model: VideoTransformer,
    clip: Tensor,
    label: int,
    grid: Extent,
    seed: int,
    num_steps: int,
    attention: Callable[[int], Attention],
    on_step: Callable[[int, Tensor], None] = lambda step, prediction: None,
) -> Tensor:
    """The clip that `num_steps` steps make of `clip` [1, tokens, channels] and the noise of `seed`; float32.

    attention: of a step, by its index. on_step: called with the clean clip that each step predicts; the last is the
        result.
    """
    device = clip.device
    noise = _noise(clip.shape, seed, device)
    times = torch.linspace(START_TIME, 0.0, num_steps + 1, device=device)
    angles = _angles(grid, model.size, device)
    labels = torch.tensor([label], device=device)
    x = (1 - START_TIME) * clip + START_TIME * noise
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        for step in range(num_steps):
            prediction = model(x, times[step : step + 1], labels, angles, attention(step)).float()
            on_step(step, prediction)
            x = x + (times[step + 1] - times[step]) * (x - prediction) / times[step]
    return x
