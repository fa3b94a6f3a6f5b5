"""The backend class that SGLang diffusion imports by name; sglang.py registers it."""

from __future__ import annotations

from typing import Any

import torch
from sglang.multimodal_gen.runtime.layers.attention.backends.attention_backend import AttentionBackend, AttentionImpl
from sglang.multimodal_gen.runtime.layers.attention.backends.sdpa import SDPAImpl
from sglang.multimodal_gen.runtime.managers.forward_context import get_forward_context
from sglang.multimodal_gen.runtime.platforms import AttentionBackendEnum

from .._abi import MAX_HEAD_DIM
from ..attention import attention
from ..errors import InvalidArgumentError, LibraryError, ScoreOverflowError, UnsupportedError
from ..policy import NATIVE
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
    """One layer's attention. Its name is the prefix that SGLang gives its layer, "blocks.3.attn1"."""

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
            raise LibraryError("vcattn.integrations.sglang.register() comes before SGLang's layers are made")
        self.causal, self.softmax_scale = causal, softmax_scale
        self.layer = prefix.removesuffix(".impl") or None  # SGLang's layers add it
        self.dropout = others.get("dropout_p", 0.0)
        self._native = SDPAImpl(
            num_heads, head_size, causal=causal, softmax_scale=softmax_scale, num_kv_heads=num_kv_heads, **others
        )
        self._step: int | None = None
        self._branch = 0  # number of the layer's call within the step: the CFG branch

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: Any = None,
        *,
        return_softmax_lse: bool = False,
    ) -> Any:
        """[batch, seqlen, num_heads, head_dim]; with return_softmax_lse also lse [batch, num_heads, seqlen]."""
        if return_softmax_lse:
            return self._with_lse(query, key, value)
        return sglang.session.attend(
            query,
            key,
            value,
            lambda: self._native.forward(query, key, value, attn_metadata),
            layer=self.layer,
            stream=self._stream(query, key),
            dropout_p=self.dropout,
            is_causal=self.causal,
            scale=self.softmax_scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )

    def _stream(self, query: torch.Tensor, key: torch.Tensor) -> tuple[Any, ...] | None:
        """Key of the call's state, after telling the session its step. The layer itself is part of it rather than its
        name: those of Wan2.2's two experts have the same names."""
        if torch.compiler.is_compiling():
            return None
        step = _note_step()
        self._branch = self._branch + 1 if step == self._step else 0
        self._step = step
        return id(self), self._branch, query.shape, key.shape

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
        bounds = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, "cu_seqlens_host": cu_seqlens_host}
        if cu_seqlens_k is not None:  # versions after 0.5.23
            bounds |= {"cu_seqlens_k": cu_seqlens_k, "max_seqlen_k": max_seqlen_k}
        session, compiling = sglang.session, torch.compiler.is_compiling()
        choice = session.policy.choose(
            layer=self.layer,
            step=None if compiling else _note_step(),
            num_steps=session.num_steps,
            seqlen_q=max_seqlen,
            seqlen_kv=max_seqlen if max_seqlen_k is None else max_seqlen_k,
        )
        reason, quiet = choice.reason, True
        if choice.recipe is not None:
            try:
                self._check()
                q_bounds = list(cu_seqlens_host) if cu_seqlens_host is not None else cu_seqlens.tolist()
                k_bounds = q_bounds if cu_seqlens_k is None else cu_seqlens_k.tolist()
                out = attention(
                    query,
                    key,
                    value,
                    recipe=choice.recipe,
                    scale=self.softmax_scale,
                    cu_seqlens=(q_bounds, k_bounds),
                    enable_gqa=query.shape[1] != key.shape[1],
                    allow_nonfinite=True,
                )
                if not compiling:  # nothing is counted in compiled code
                    session.report.served += 1
                return out
            except (InvalidArgumentError, ScoreOverflowError, UnsupportedError) as error:
                reason, quiet = str(error), False
        if not compiling:
            session.report.count_fallback(reason, quiet=quiet)
        return self._native.forward_varlen(query, key, value, **bounds)

    def forward_ring_kv_chunk(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens, num_heads, head_dim] -> (out, lse [num_heads, tokens])."""
        out, lse = self._with_lse(query[None], key[None], value[None])
        return out[0], lse[0]

    def _with_lse(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For ring attention, which has no fallback: SGLang's SDPA returns no lse."""
        self._check()
        if sglang.session.policy.recipe == NATIVE:
            raise UnsupportedError("ring attention has no native fallback: the policy's recipe is native")
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


def _note_step() -> int | None:
    """Tells the session the step that SGLang's forward context has, and returns it."""
    context = get_forward_context()
    sglang.note_step(context.forward_batch, context.current_timestep)
    return sglang.session.step
