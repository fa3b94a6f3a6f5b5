"""ComfyUI: a node that sends a model's attention to vcattn through `optimized_attention_override`.

Nothing of ComfyUI is imported: the node uses what every ModelPatcher has, clone() and model_options. To install it,
copy python/examples/comfyui_vcattn into ComfyUI's custom_nodes and `pip install .` into ComfyUI's environment.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import torch

from ..policy import NATIVE, Policy
from ..recipe import AUTO, recipe_names
from ..schedule import DEFAULT_KIND
from .session import Session

_OVERRIDE = "optimized_attention_override"
# Arguments of attention functions beside q, k, v, heads and mask. Others could change the result in a way that is not
# known here; calls that have them go to ComfyUI's own attention.
_HANDLED = {
    "attn_precision",  # of ComfyUI's own score matrices
    "skip_reshape",
    "skip_output_reshape",
    "transformer_options",
    "low_precision_attention",
    "enable_gqa",
    "scale",
    "_inside_attn_wrapper",
}


def attach(model: Any, *, policy: Policy | str | Path | None = None, schedule: str | None = DEFAULT_KIND) -> Any:
    """A clone of the ModelPatcher `model` whose attention goes to vcattn. Wan2.2's two models are attached one by one.

    policy, schedule: as in vcattn.integrations.session.Session. An override that the model has already stays in place
    for the calls that vcattn leaves to the host.
    """
    model = model.clone()
    options = model.model_options.setdefault("transformer_options", {})
    options[_OVERRIDE] = Override(
        Session("vcattn in ComfyUI", "ComfyUI", policy=policy, schedule=schedule), options.get(_OVERRIDE)
    )
    return model


class Override:
    """What ComfyUI calls in place of an attention function, with that function first."""

    def __init__(self, session: Session, previous: Callable[..., torch.Tensor] | None) -> None:
        self.session = session
        self._previous = previous
        self._sample_sigmas: torch.Tensor | None = None  # of the request; held, so that its identity means something
        self._schedule: list[float] = []  # the same on the host
        self._sigmas: torch.Tensor | None = None  # of the step

    def __call__(self, func: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """The call `func(q, k, v, heads, mask=None, ...)`; q, k, v: [batch, seqlen, heads * head_dim] or, with
        skip_reshape, [batch, heads, seqlen, head_dim]."""

        def native() -> torch.Tensor:
            if self._previous is not None:
                return self._previous(func, *args, **kwargs)
            return func(*args, **kwargs)

        return self._attend(native, *args, **kwargs)

    def _attend(
        self,
        native: Callable[[], torch.Tensor],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: int,
        mask: torch.Tensor | None = None,
        *others: Any,
        **options: Any,
    ) -> torch.Tensor:
        unknown = sorted(set(options) - _HANDLED) + (["a sixth positional argument"] if others else [])
        if unknown or options.get("low_precision_attention", True) is False:
            reason = f"unknown: {', '.join(unknown)}" if unknown else "the model asks for full precision here"
            self.session.report.count_fallback(reason, quiet=not unknown)
            return native()
        skip_reshape = options.get("skip_reshape", False)
        if not skip_reshape:
            head_dim = q.shape[-1] // heads
            q, k, v = (x.unflatten(-1, (-1, head_dim)).transpose(1, 2) for x in (q, k, v))
        if mask is not None:  # as in ComfyUI: [tokens, tokens], [batch, tokens, tokens] or with heads
            if mask.ndim == 2:
                mask = mask[None]
            if mask.ndim == 3:
                mask = mask[:, None]
        transformer_options = options.get("transformer_options") or {}
        self._note_step(transformer_options)
        answered_by_host = False

        def host() -> torch.Tensor:
            nonlocal answered_by_host
            answered_by_host = True
            return native()

        layer = layer_name(transformer_options)
        out = self.session.attend(
            q,
            k,
            v,
            host,
            layout="BHSD",
            layer=layer,
            stream=None if layer is None else (layer, _branch(transformer_options), q.shape[2], k.shape[2]),
            video=_video(transformer_options, q.shape[2], k.shape[2]),
            attn_mask=mask,
            scale=options.get("scale"),
            enable_gqa=options.get("enable_gqa", False),
        )
        if answered_by_host or options.get("skip_output_reshape", False):
            return out
        return out.transpose(1, 2).flatten(2)

    def _note_step(self, options: dict[str, Any]) -> None:
        """Tells the session the request and step by the noise levels. Each is read once: once a request and once a
        step, where samplers look at them too, the host waits for the device."""
        sigmas, sample_sigmas = options.get("sigmas"), options.get("sample_sigmas")
        if not _has_levels(sigmas, 1) or not _has_levels(sample_sigmas, 2) or sample_sigmas.dim() != 1:
            self.session.end()
            return
        if sigmas is self._sigmas and sample_sigmas is self._sample_sigmas:
            return
        new_request = sample_sigmas is not self._sample_sigmas
        if new_request:
            self._sample_sigmas, self._schedule = sample_sigmas, sample_sigmas.tolist()
        self._sigmas = sigmas
        sigma = float(sigmas.flatten()[0])
        num_steps = len(self._schedule) - 1
        step = min(range(num_steps), key=lambda i: abs(self._schedule[i] - sigma))
        if new_request or self.session.step is None or step < self.session.step:
            self.session.begin(num_steps)
        self.session.set_step(step)


def _has_levels(sigmas: Any, least: int) -> bool:
    """Whether these are noise levels, so many at least."""
    return isinstance(sigmas, torch.Tensor) and sigmas.numel() >= least


def layer_name(options: dict[str, Any]) -> str | None:
    """ "double_blocks.3", "blocks.3" or, in U-Nets, "input.4.0"; None where ComfyUI does not tell the block."""
    index = options.get("block_index")
    if index is None:
        return None
    block = options.get("block")
    if block is not None:
        return ".".join(map(str, (*block, index)))
    kind = options.get("block_type")
    return f"{kind}_blocks.{index}" if kind else f"blocks.{index}"


def _video(options: dict[str, Any], num_queries: int, num_keys: int) -> tuple[int, int] | None:
    """The image or video of self-attention, as Session.attend takes it, in models that tell the slice (img_slice)."""
    found = options.get("img_slice")
    if not isinstance(found, (list, tuple)) or len(found) != 2 or not all(isinstance(x, int) for x in found):
        return None
    first, end = found
    return (first, end - first) if num_queries == num_keys and 0 <= first < end <= num_keys else None


def _branch(options: dict[str, Any]) -> Hashable:
    """Conditional or not, and which prompts: those batched in this call, in their order."""
    return tuple(options.get("cond_or_uncond") or ()), tuple(map(str, options.get("uuids") or ()))


class VCAttention:
    """The node: MODEL in, MODEL out."""

    CATEGORY = "model_patches/attention"
    FUNCTION = "apply"
    RETURN_TYPES = ("MODEL",)
    DESCRIPTION = "Runs the attention of a video model in 8 bits (vcattn)."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  (ComfyUI's name)
        steps = {"default": 0, "min": 0, "max": 1000}
        return {
            "required": {
                "model": ("MODEL",),
                "recipe": ([AUTO, *recipe_names()],),
                "native_first": ("INT", steps),
                "native_last": ("INT", steps),
                "native_layers": ("STRING", {"default": "", "multiline": False}),
                "min_tokens": ("INT", {"default": Policy().min_seqlen, "min": 0, "max": 1 << 30}),
                "schedule": (["every_step", "first_quarter", "uniform_quarter", "never"],),
            }
        }

    def apply(
        self,
        model: Any,
        recipe: str,
        native_first: int,
        native_last: int,
        native_layers: str,
        min_tokens: int,
        schedule: str,
    ) -> tuple[Any]:
        """native_layers: patterns separated by commas, such as "blocks.0, blocks.39"."""
        layers = {name.strip(): NATIVE for name in native_layers.split(",") if name.strip()}
        policy = Policy(recipe, layers, native_first, native_last, min_tokens)
        return (attach(model, policy=policy, schedule=schedule),)


NODE_CLASS_MAPPINGS = {"VCAttention": VCAttention}
NODE_DISPLAY_NAME_MAPPINGS = {"VCAttention": "VC-Attention (8-bit)"}
