"""LightX2V: an attention class for its ATTN_WEIGHT_REGISTER, chosen by "vcattn" in a model's configuration."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from ..attention import attention
from ..errors import UnsupportedError
from ..policy import NATIVE, Policy
from ..schedule import DEFAULT_KIND
from .session import Session

BACKEND = "vcattn"


def register(
    *,
    policy: Policy | str | Path | None = None,
    schedule: str | None = DEFAULT_KIND,
    registry: Any = None,
    base: Any = None,
) -> Session:
    """Adds the class to the registry and returns the session that all its instances share.

    Calls with more than one packed segment, masks and causal calls go to LightX2V's "torch_sdpa", counted: the bounds
    of the segments lie on the device, and reading them would wait.
    registry: lightx2v.utils.registry_factory.ATTN_WEIGHT_REGISTER, imported if not given; base: AttnWeightTemplate.
    """
    if registry is None:
        registry = importlib.import_module("lightx2v.utils.registry_factory").ATTN_WEIGHT_REGISTER
    if base is None:
        base = importlib.import_module("lightx2v.common.ops.attn.template").AttnWeightTemplate
    session = Session("vcattn in LightX2V", "torch_sdpa", policy=policy, schedule=schedule)
    last_scheduler: list[Any] = [None]

    class VCAttnWeight(base):
        """Attention without weights, as LightX2V's other attention classes."""

        def __init__(self) -> None:
            self.config: dict[str, Any] = {}

        def apply(
            self,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            drop_rate: float = 0,
            attn_mask: torch.Tensor | None = None,
            causal: bool = False,
            cu_seqlens_q: torch.Tensor | None = None,
            cu_seqlens_kv: torch.Tensor | None = None,
            max_seqlen_q: int | None = None,
            max_seqlen_kv: int | None = None,
            **others: Any,
        ) -> torch.Tensor:
            """q [seqlen, num_heads, head_dim] or with a batch -> [batch * seqlen, num_heads * head_dim]."""

            whole = _is_whole(cu_seqlens_q, max_seqlen_q, q) and _is_whole(cu_seqlens_kv, max_seqlen_kv, k)

            def native() -> torch.Tensor:
                # torch_sdpa reads bounds that it is given, and takes them with packed tensors alone.
                packed = [x if whole or x.dim() == 3 else x.flatten(0, 1) for x in (q, k, v)]
                out = registry["torch_sdpa"]().apply(
                    *packed,
                    drop_rate=drop_rate,
                    attn_mask=attn_mask,
                    causal=causal,
                    cu_seqlens_q=None if whole else cu_seqlens_q,
                    cu_seqlens_kv=None if whole else cu_seqlens_kv,
                    max_seqlen_q=max_seqlen_q,
                    max_seqlen_kv=max_seqlen_kv,
                    **others,
                )
                return out.reshape(-1, out.shape[-1])

            if not whole:
                session.report.count_fallback("several packed segments", quiet=False)
                return native()
            block, scheduler = others.get("block_idx"), others.get("scheduler")
            if not torch.compiler.is_compiling():
                _note_step(session, scheduler, last_scheduler)
            branch = getattr(scheduler, "infer_condition", None)
            batched = [x if x.dim() == 4 else x[None] for x in (q, k, v)]
            out = session.attend(
                *batched,
                native,
                layer=None if block is None else f"blocks.{block}",
                # The blocks of Wan2.2's two experts have the same numbers.
                stream=None if block is None else (id(self), block, branch, q.shape, k.shape),
                attn_mask=attn_mask,
                dropout_p=drop_rate,
                is_causal=causal or bool(others.get("is_causal", False)),
                scale=others.get("softmax_scale"),
                enable_gqa=q.shape[-2] != k.shape[-2],
            )
            return out if out.dim() == 2 else out.flatten(2).flatten(0, 1)

        def apply_with_lse(
            self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None = None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            """For ring attention, which has no fallback: as `apply`, and lse [batch * seqlen, num_heads]."""
            if session.policy.recipe == NATIVE:
                raise UnsupportedError("ring attention has no native fallback: the policy's recipe is native")
            batched = [x if x.dim() == 4 else x[None] for x in (q, k, v)]
            options = {"recipe": session.policy.recipe, "scale": softmax_scale, "return_lse": True}
            out, lse = attention(*batched, **options, enable_gqa=q.shape[-2] != k.shape[-2], allow_nonfinite=True)
            return out.flatten(2).flatten(0, 1), lse.flatten(0, 1)

    if BACKEND in registry:
        raise UnsupportedError("vcattn is registered with LightX2V already")
    registry(BACKEND)(VCAttnWeight)
    return session


def _is_whole(cu_seqlens: torch.Tensor | None, longest: int | None, x: torch.Tensor) -> bool:
    """Whether the bounds are those of one segment for each of the batch, all of it, told without reading them."""
    if cu_seqlens is None:
        return True
    batch = x.shape[0] if x.dim() == 4 else 1
    return len(cu_seqlens) == batch + 1 and longest == x.shape[-3]


def _note_step(session: Session, scheduler: Any, last: list[Any]) -> None:
    step, num_steps = getattr(scheduler, "step_index", None), getattr(scheduler, "infer_steps", None)
    if step is None or num_steps is None:
        session.end()
        return
    if scheduler is not last[0] or num_steps != session.num_steps or (session.step or 0) > step:
        last[0] = scheduler
        session.begin(num_steps)
    session.set_step(step)
