"""The backend class that SGLang diffusion imports by name; sglang.py registers it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sglang.multimodal_gen.runtime.layers.attention.backends.attention_backend import AttentionBackend, AttentionImpl
from sglang.multimodal_gen.runtime.platforms import AttentionBackendEnum

from .._abi import MAX_HEAD_DIM
from ..attention import attention
from ..errors import LibraryError, UnsupportedError
from . import sglang


class VCAttnBackend(AttentionBackend):
    """Names the implementation."""

    @classmethod
    def supports_ring_rotation(cls) -> bool:
        """Ring attention merges by lse, which every call can return."""
        return True

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        return list(range(8, MAX_HEAD_DIM + 1, 8))

    @staticmethod
    def get_enum() -> Any:
        return AttentionBackendEnum[sglang.BACKEND]

    @staticmethod
    def get_impl_cls() -> type[VCAttnImpl]:
        return VCAttnImpl

    @staticmethod
    def get_metadata_cls() -> Any:
        raise NotImplementedError("vcattn has no metadata of its own")

    @staticmethod
    def get_builder_cls() -> Any:
        return None


class VCAttnImpl(AttentionImpl):
    """One layer's attention. Its name is the prefix that SGLang gives it, "blocks.3.attn1"."""

    @classmethod
    def has_native_varlen_kernel(cls) -> bool:
        """The library takes cu_seqlens itself."""
        return True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        softmax_scale: float,
        causal: bool = False,
        num_kv_heads: int | None = None,
        prefix: str = "",
        **others: Any,
    ) -> None:
        if sglang.session is None:
            raise LibraryError("vcattn.integrations.sglang.register() comes before SGLang's server starts")
        self.causal, self.softmax_scale, self.layer = causal, softmax_scale, prefix or None
        self.dropout = others.get("dropout_p", 0.0)
        self._step: int | None = None
        self._branch = 0  # number of the layer's call within the step: the CFG branch

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: Any,
        *,
        return_softmax_lse: bool = False,
    ) -> Any:
        """[batch, seqlen, num_heads, head_dim]; with return_softmax_lse also lse [batch, num_heads, seqlen]."""
        if return_softmax_lse:
            return self._with_lse(query, key, value)
        step = getattr(attn_metadata, "current_timestep", None)
        sglang.note_step(step)
        self._branch = self._branch + 1 if step == self._step else 0
        self._step = step
        gqa = query.shape[2] != key.shape[2]

        def native() -> torch.Tensor:
            q, k, v = (x.transpose(1, 2) for x in (query, key, value))
            options = {
                "dropout_p": self.dropout,
                "is_causal": self.causal,
                "scale": self.softmax_scale,
                "enable_gqa": gqa,
            }
            return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)

        return sglang.session.attend(
            query,
            key,
            value,
            native,
            layer=self.layer,
            stream=None if self.layer is None else (self.layer, self._branch, query.shape, key.shape),
            dropout_p=self.dropout,
            is_causal=self.causal,
            scale=self.softmax_scale,
            enable_gqa=gqa,
        )

    def forward_varlen(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        cu_seqlens_host: tuple[int, ...] | None = None,
        cu_seqlens_k: torch.Tensor | None = None,
        max_seqlen_k: int | None = None,
    ) -> torch.Tensor:
        """[tokens, num_heads, head_dim], packed. The bounds are needed on the host: where SGLang has them there,
        nothing waits; else they are copied."""
        self._check()
        q_bounds = list(cu_seqlens_host) if cu_seqlens_host is not None else cu_seqlens.tolist()
        k_bounds = q_bounds if cu_seqlens_k is None else cu_seqlens_k.tolist()
        return attention(
            query,
            key,
            value,
            recipe=sglang.session.policy.recipe,
            scale=self.softmax_scale,
            cu_seqlens=(q_bounds, k_bounds),
            enable_gqa=query.shape[1] != key.shape[1],
            allow_nonfinite=True,
        )

    def forward_ring_kv_chunk(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens, num_heads, head_dim] -> (out, lse [num_heads, tokens])."""
        out, lse = self._with_lse(query[None], key[None], value[None])
        return out[0], lse[0]

    def _with_lse(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._check()
        out, lse = attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            layout="BHSD",
            recipe=sglang.session.policy.recipe,
            scale=self.softmax_scale,
            enable_gqa=q.shape[2] != k.shape[2],
            return_lse=True,
            allow_nonfinite=True,
        )
        return out.transpose(1, 2), lse

    def _check(self) -> None:
        if self.causal or self.dropout != 0.0:
            raise UnsupportedError("neither dropout nor a causal mask is supported")
        if sglang.session.policy.recipe == "native":
            raise UnsupportedError("packed and ring attention have no native fallback: the policy's recipe is native")
