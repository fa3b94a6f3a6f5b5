"""xDiT: an attention function for its registry, so that its Ulysses and ring layers call vcattn."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from .._check import whole
from ..attention import attention
from ..errors import InvalidArgumentError, UnsupportedError
from ..policy import GROUPING_MIN_SEQLEN, Policy, as_policy
from ..report import Report
from ..torch_sdpa import key_mask, mask_refusal
from .enums import add_member

BACKEND = "VCATTN"


def register(*, policy: Policy | str | Path | None = None, backends: Any = None) -> tuple[Any, Report]:
    """Adds VCATTN to xDiT's AttentionBackendType and its function to the registry; returns the member and the report.

    xDiT tells its functions neither layer nor step: of the policy the recipe and min_seqlen count, and a policy that
    speaks of layers or steps is refused. Ring attention merges by lse, so both ways return it: fallbacks go to xDiT's
    SDPA_FLASH, which does, and with a mask of keys to its SDPA, which ring attention cannot use. Unlike elsewhere, what
    vcattn refuses for another reason raises.
    backends: xfuser.core.distributed.attention_backend, imported if not given.
    Raises UnsupportedError for such policies.
    """
    backends = backends or importlib.import_module("xfuser.core.distributed.attention_backend")
    policy = as_policy(policy, min_seqlen=GROUPING_MIN_SEQLEN)
    if policy.layers or policy.native_first or policy.native_last:
        raise UnsupportedError("xDiT tells neither layer nor step: a policy has recipe and min_seqlen alone")
    report = Report("vcattn in xDiT", "SDPA_FLASH")
    member = add_member(backends.AttentionBackendType, BACKEND, "vcattn")

    @backends.register_attention_function(member)
    def vcattn_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout_p: float,
        is_causal: bool,
        attention_kwargs: dict[str, Any] | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[batch, num_heads, seqlen, head_dim] -> (out, lse [batch, num_heads, seqlen], natural logarithm)."""
        if others:
            raise UnsupportedError(f"arguments of this version of xDiT that vcattn does not know: {', '.join(others)}")
        if dropout_p != 0.0 or is_causal:
            raise UnsupportedError("neither dropout nor a causal mask is supported")
        key, value, mask = _admitted(attention_kwargs or {}, query, key, value)
        choice = policy.choose(layer=None, step=None, num_steps=None, seqlen_q=query.shape[2], seqlen_kv=key.shape[2])
        if choice.recipe is None:
            if not torch.compiler.is_compiling():
                report.count_fallback(choice.reason, quiet=True)
            # SDPA_FLASH takes no mask, and what takes one returns no lse that one could merge.
            name = "SDPA_FLASH" if mask is None else "SDPA"
            native = backends.ATTENTION_FUNCTION_REGISTRY[backends.AttentionBackendType[name]]
            extra = {} if attention_kwargs is None else {"attention_kwargs": attention_kwargs}  # newer than the others
            return native(query, key, value, dropout_p, is_causal, **extra)
        out = attention(
            query,
            key,
            value,
            layout="BHSD",
            recipe=choice.recipe,
            key_padding_mask=mask,
            enable_gqa=query.shape[1] != key.shape[1],
            return_lse=True,
            allow_nonfinite=True,
        )
        if not torch.compiler.is_compiling():
            report.served += 1
        return out

    return member, report


def _admitted(
    options: dict[str, Any], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(key, value, mask of keys [batch or 1, seqlen_kv]) by xDiT's attention_kwargs. These give padding as a mask, or
    as the length before it beside the indices of the keys in it; what else they hold is for sparse backends."""
    mask, length = options.get("attn_mask"), options.get("valid_kv_len")
    if mask is not None:
        found = mask_refusal(mask, (query.shape[0], query.shape[1], query.shape[2], key.shape[2]))
        if found is not None:
            raise found.error(found.reason)
        return key, value, key_mask(mask, key.shape[2])
    if options.get("indices_k") is None:  # if there was padding, xDiT has cut it off
        return key, value, None
    if length is None:
        raise UnsupportedError("attention_kwargs: indices_k needs attn_mask or valid_kv_len beside it")
    if not isinstance(length, int):  # numbers of traced code are, and stay what they are
        length = whole("attention_kwargs: valid_kv_len", length)
    if not 1 <= length <= key.shape[2]:
        raise InvalidArgumentError(f"attention_kwargs: valid_kv_len is 1 to {key.shape[2]}, the keys; found {length}")
    return key[:, :, :length], value[:, :, :length], None
