"""Denoisers of diffusers with random weights, and random inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_STD = 0.02


def build(model_class: type, config: dict[str, Any], device: torch.device) -> Any:
    """Made on `device`: nothing of it passes through host memory. In BF16 but for the modules that diffusers keeps in
    FP32; buffers (tables of RoPE) are not filled in."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = model_class(**config)
    finally:
        torch.set_default_dtype(before)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    kept = set(model._keep_in_fp32_modules or ())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if kept & set(name.split(".")):
                parameter.data = parameter.data.float()
            if "norm" in name and name.endswith("weight") and parameter.ndim == 1:
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.normal_(std=_STD, generator=generator)
    return model.eval().requires_grad_(False)


def normal_inputs(device: torch.device) -> Callable[..., torch.Tensor]:
    """Makes BF16 tensors of the sizes that it is called with, the same each time."""
    generator = torch.Generator(device).manual_seed(1)
    return lambda *size: torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)
