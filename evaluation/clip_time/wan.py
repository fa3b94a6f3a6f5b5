"""The denoiser of Wan2.2-T2V-A14B as diffusers publishes it, with random weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

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
TEXT_TOKENS = 512
_VAE_STRIDE = (4, 8, 8)  # frames, height and width of a latent, the first frame by itself
_WEIGHT_STD = 0.02


@dataclass(frozen=True)
class VideoShape:
    name: str
    frames: int
    height: int
    width: int

    @property
    def latents(self) -> tuple[int, int, int]:
        return (
            (self.frames - 1) // _VAE_STRIDE[0] + 1,
            self.height // _VAE_STRIDE[1],
            self.width // _VAE_STRIDE[2],
        )

    @property
    def tokens(self) -> int:
        """Of self-attention."""
        t, h, w = (extent // patch for extent, patch in zip(self.latents, CONFIG["patch_size"]))
        return t * h * w


SHAPES = {shape.name: shape for shape in (VideoShape("480p", 81, 480, 832), VideoShape("720p", 81, 720, 1280))}


def build(config: dict[str, Any], device: torch.device) -> Any:
    """A WanTransformer3DModel with random weights, made on `device`: nothing of it passes through host memory. In BF16
    but for the modules that diffusers keeps in FP32."""
    from diffusers import WanTransformer3DModel

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = WanTransformer3DModel(**config)
    finally:
        torch.set_default_dtype(before)
    model.rope = type(model.rope)(config["attention_head_dim"], config["patch_size"], config["rope_max_seq_len"])
    rope = model.rope.to(device)
    model.rope = None  # tables, not weights: to_empty would lose them
    model.to_empty(device=device)
    model.rope = rope
    generator = torch.Generator(device).manual_seed(0)
    kept = set(model._keep_in_fp32_modules)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if kept & set(name.split(".")):
                parameter.data = parameter.data.float()
            if "norm" in name and name.endswith("weight"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.normal_(std=_WEIGHT_STD, generator=generator)
    return model.eval().requires_grad_(False)


def inputs(config: dict[str, Any], shape: VideoShape, device: torch.device) -> dict[str, torch.Tensor]:
    """Of one forward: random latents and text, batch 1."""
    generator = torch.Generator(device).manual_seed(1)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)

    return {
        "hidden_states": normal(1, config["in_channels"], *shape.latents),
        "timestep": torch.tensor([500], device=device),
        "encoder_hidden_states": normal(1, TEXT_TOKENS, config["text_dim"]),
    }
