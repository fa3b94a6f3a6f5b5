"""The denoiser of Wan2.2-T2V-A14B as diffusers publishes it, with random weights."""

from __future__ import annotations

from typing import Any

import torch

from . import random_weights
from .shapes import VideoShape

# transformer/config.json of Wan-AI/Wan2.2-T2V-A14B-Diffusers. Its two experts are alike, and one runs at each step.
CONFIG: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 40,
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "freq_dim": 256,
    "ffn_dim": 13824,
    "num_layers": 40,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "eps": 1e-6,
    "image_dim": None,
    "added_kv_proj_dim": None,
    "rope_max_seq_len": 1024,
    "pos_embed_seq_len": None,
}
LAYERS = "blocks"
TEXT_TOKENS = 512
VAE_STRIDE = (4, 8, 8)  # frames, height and width of a latent, the first frame by itself


def tokens(shape: VideoShape) -> int:
    """Of self-attention."""
    t, h, w = (extent // patch for extent, patch in zip(shape.latents(VAE_STRIDE), CONFIG["patch_size"]))
    return t * h * w


SHAPES = {shape.name: shape for shape in (VideoShape("480p", 81, 480, 832), VideoShape("720p", 81, 720, 1280))}


def build(config: dict[str, Any], device: torch.device) -> Any:
    from diffusers import WanTransformer3DModel

    model = random_weights.build(WanTransformer3DModel, config, device)
    rope = type(model.rope)(config["attention_head_dim"], config["patch_size"], config["rope_max_seq_len"])
    model.rope = rope.to(device)  # tables, not weights
    return model


def inputs(config: dict[str, Any], shape: VideoShape, device: torch.device) -> dict[str, torch.Tensor]:
    """Of one forward: random latents and text, batch 1."""
    normal = random_weights.normal_inputs(device)
    return {
        "hidden_states": normal(1, config["in_channels"], *shape.latents(VAE_STRIDE)),
        "timestep": torch.tensor([500], device=device),
        "encoder_hidden_states": normal(1, TEXT_TOKENS, config["text_dim"]),
    }
