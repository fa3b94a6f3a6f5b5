"""The denoiser of HunyuanVideo-1.5 (text to video) as diffusers has it, with random weights."""

from __future__ import annotations

from typing import Any

import torch

from . import random_weights
from .shapes import VideoShape

# The defaults of diffusers' HunyuanVideo15Transformer3DModel are the published configuration.
CONFIG: dict[str, Any] = {
    "in_channels": 65,
    "text_embed_dim": 3584,
    "text_embed_2_dim": 1472,
    "image_embed_dim": 1152,
    "num_layers": 54,
    "task_type": "t2v",
}
LAYERS = "transformer_blocks"
VAE_STRIDE = (4, 16, 16)  # frames, height and width of a latent, the first frame by itself; one token each
_TEXT, _GLYPHS, _IMAGE = 1000, 256, 729  # tokens of the prompt, of text to draw and of an image
_VALID_TEXT = 120
SHAPES = {shape.name: shape for shape in (VideoShape("480p", 121, 480, 848), VideoShape("720p", 121, 720, 1280))}


def build(config: dict[str, Any], device: torch.device) -> Any:
    from diffusers import HunyuanVideo15Transformer3DModel

    return random_weights.build(HunyuanVideo15Transformer3DModel, config, device)


def inputs(config: dict[str, Any], shape: VideoShape, device: torch.device) -> dict[str, torch.Tensor]:
    """Of one forward: random latents and text, batch 1. Text that is not there is masked, as the pipeline does it."""
    normal = random_weights.normal_inputs(device)
    return {
        "hidden_states": normal(1, config["in_channels"], *shape.latents(VAE_STRIDE)),
        "timestep": torch.tensor([500], device=device, dtype=torch.bfloat16),
        "encoder_hidden_states": normal(1, _TEXT, config["text_embed_dim"]),
        "encoder_attention_mask": (torch.arange(_TEXT, device=device) < _VALID_TEXT)[None].long(),
        "encoder_hidden_states_2": torch.zeros_like(normal(1, _GLYPHS, config["text_embed_2_dim"])),
        "encoder_attention_mask_2": torch.zeros(1, _GLYPHS, device=device, dtype=torch.long),
        "image_embeds": torch.zeros_like(normal(1, _IMAGE, config["image_embed_dim"])),
    }
