"""A small video diffusion transformer in pixel space: rectified flow, predicts the clean clip.

One joint sequence of text tokens and video patches; attention is a function that the caller gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

TEXT_CHANNELS = 64  # of a text token before its projection
TIME_CHANNELS = 256  # of the time's Fourier features
MODULATIONS = 6  # shift, scale and gate of attention, then of the MLP
ROPE_BASE = 10000.0

# (layer, q, k, v) -> out, each [batch, heads, tokens, head_dim]
Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Extent = tuple[int, int, int]  # frames, height, width


@dataclass(frozen=True)
class ModelSize:
    width: int
    heads: int
    depth: int
    patch: Extent  # frames and pixels under one token
    text_tokens: int
    labels: int  # clips that the model knows; each has learned text

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def patch_channels(self) -> int:
        return 3 * math.prod(self.patch)


def rope_angles(grid: Extent, text_tokens: int, head_dim: int) -> Tensor:
    """[tokens, head_dim / 2]: a sixth of the channels for height and width each, the rest for time. Text stays at 0."""
    spatial = head_dim // 6
    places = torch.cartesian_prod(*(torch.arange(extent).float() for extent in grid)).view(-1, 3)
    angles = []
    for axis, pairs in enumerate((head_dim // 2 - 2 * spatial, spatial, spatial)):
        frequencies = ROPE_BASE ** (-torch.arange(pairs).float() / pairs)
        angles.append(places[:, axis, None] * frequencies)
    return torch.cat([torch.zeros(text_tokens, head_dim // 2), torch.cat(angles, 1)])


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Pairs of neighbouring channels of x [..., tokens, head_dim], in float32, back to x's dtype."""
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2).to(x.dtype)


class _RmsNorm(nn.Module):
    """Over all heads together."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * self.weight).to(x.dtype)


def _mlp(channels: int, hidden: int, activation: nn.Module, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(channels, hidden), activation, nn.Linear(hidden, width))


class _Block(nn.Module):
    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.query_norm, self.key_norm = _RmsNorm(width), _RmsNorm(width)
        self.mlp = _mlp(width, 4 * width, nn.GELU("tanh"), width)
        self.own_modulation = nn.Parameter(torch.randn(MODULATIONS, width) / math.sqrt(width))

    def forward(self, x: Tensor, modulation: Tensor, angles: Tensor, layer: int, attention: Attention) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = (modulation + self.own_modulation)[:, :, None].unbind(1)
        hidden = self.norm(x) * (1 + scale1) + shift1
        q, k, v = self.qkv(hidden.to(x.dtype)).chunk(3, -1)
        q, k = self.query_norm(q), self.key_norm(k)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        out = attention(layer, _rotate(q, angles), _rotate(k, angles), v)
        x = x + gate1 * self.projection(out.transpose(1, 2).flatten(2))
        hidden = self.norm(x) * (1 + scale2) + shift2
        return x + gate2 * self.mlp(hidden.to(x.dtype))


class VideoTransformer(nn.Module):
    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        width = size.width
        self.size = size
        self.patches = nn.Linear(size.patch_channels, width)
        self.label_text = nn.Embedding(size.labels, size.text_tokens * TEXT_CHANNELS)
        self.text = nn.Linear(TEXT_CHANNELS, width)
        self.time = _mlp(TIME_CHANNELS, width, nn.SiLU(), width)
        self.modulation = nn.Linear(width, MODULATIONS * width)
        self.blocks = nn.ModuleList(_Block(size) for _ in range(size.depth))
        self.final_norm = nn.LayerNorm(width, elementwise_affine=False)
        self.final_modulation = nn.Linear(width, 2 * width)
        self.pixels = nn.Linear(width, size.patch_channels)

    def forward(self, x: Tensor, time: Tensor, label: Tensor, angles: Tensor, attention: Attention) -> Tensor:
        """The clean clip that x is a noisy one of.

        x: [batch, video tokens, patch channels], unit variance. time: [batch], 0 clean to 1 noise.
        label: int64 [batch]. angles: rope_angles of the grid.
        """
        half = TIME_CHANNELS // 2
        frequencies = torch.exp(-math.log(1e4) * torch.arange(half, device=x.device) / half)
        phase = frequencies * time[:, None] * 1000
        embedded = nn.functional.silu(self.time(torch.cat([phase.cos(), phase.sin()], -1)))
        modulation = self.modulation(embedded).unflatten(-1, (MODULATIONS, -1))
        text = self.text(self.label_text(label).unflatten(-1, (-1, TEXT_CHANNELS)))
        hidden = torch.cat([text, self.patches(x)], 1)
        for layer, block in enumerate(self.blocks):
            hidden = block(hidden, modulation, angles, layer, attention)
        scale, shift = self.final_modulation(embedded)[:, None].chunk(2, -1)
        video = self.final_norm(hidden[:, self.size.text_tokens :])
        return self.pixels((video * (1 + scale) + shift).to(hidden.dtype))
