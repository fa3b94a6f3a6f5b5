"""xDiT, LightX2V and SGLang diffusion: the registration functions against stand-ins for what they register with, which
have the members that the hosts' sources have. The hosts themselves need a GPU to be imported."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import torch.nn.functional as F  # noqa: E402

import vcattn  # noqa: E402
from vcattn.integrations import lightx2v, sglang, xdit  # noqa: E402

BOUND = 0.06
EVERYWHERE = vcattn.Policy(min_seqlen=0)


def tensors(*shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for _ in range(3)]


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """[batch, seqlen, num_heads, head_dim]"""
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), scale=scale).transpose(1, 2)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    return float((found - expected).norm() / expected.norm())


# ---- xDiT -----------------------------------------------------------------------------------------------------------


class AttentionBackendType(enum.Enum):
    SDPA_FLASH = "SDPA with FLASH backend"


def xdit_backends() -> Any:
    registry: dict[Any, Any] = {}
    backends = SimpleNamespace(AttentionBackendType=AttentionBackendType, ATTENTION_FUNCTION_REGISTRY=registry)
    backends.register_attention_function = lambda kind: lambda function: registry.setdefault(kind, function)

    @backends.register_attention_function(AttentionBackendType.SDPA_FLASH)
    def flash(query, key, value, dropout_p, is_causal):
        return F.scaled_dot_product_attention(query, key, value), "lse"

    return backends


def test_xdit():
    backends = xdit_backends()
    member, report = xdit.register(policy=EVERYWHERE, backends=backends)
    assert AttentionBackendType["VCATTN"] is member and list(AttentionBackendType)[-1] is member
    q, k, v = (x.transpose(1, 2) for x in tensors(1, 150, 2, 64))
    out, lse = backends.ATTENTION_FUNCTION_REGISTRY[member](q, k, v, dropout_p=0.0, is_causal=False)
    assert difference(out, F.scaled_dot_product_attention(q, k, v)) < BOUND and report.served == 1
    torch.testing.assert_close(lse, (q @ k.mT / 8).logsumexp(-1), atol=0.02, rtol=0)


def test_xdit_refuses_what_it_would_ignore():
    backends = xdit_backends()
    member, report = xdit.register(backends=backends)
    function, (q, k, v) = backends.ATTENTION_FUNCTION_REGISTRY[member], tensors(1, 2, 150, 64)
    for arguments in ({"is_causal": True}, {"dropout_p": 0.1}, {"window": 3}):
        with pytest.raises(vcattn.UnsupportedError):
            function(q, k, v, **{"dropout_p": 0.0, "is_causal": False, **arguments})
    with pytest.raises(vcattn.UnsupportedError, match="layer nor step"):
        xdit.register(policy=vcattn.Policy(native_first=1), backends=backends)
    assert function(q, k, v, 0.0, False)[1] == "lse" and sum(report.fallbacks.values()) == 1


# ---- LightX2V -------------------------------------------------------------------------------------------------------


class Register(dict):
    """LightX2V's: called with a name, it decorates a class."""

    def __call__(self, name: str) -> Any:
        return lambda target: self.setdefault(name, target)


class TorchSDPA:
    def apply(self, q, k, v, drop_rate=0, attn_mask=None, causal=False, **others):
        q, k, v = (x if x.dim() == 4 else x[None] for x in (q, k, v))
        return exact(q, k, v).flatten(2).squeeze(0)


@pytest.fixture
def registry() -> Register:
    return Register(torch_sdpa=TorchSDPA)


@pytest.mark.parametrize("batched", [False, True])
def test_lightx2v(registry: Register, batched: bool):
    session = lightx2v.register(policy=EVERYWHERE, schedule="every_step", registry=registry, base=object)
    shape = (2, 150, 2, 64) if batched else (150, 2, 64)
    q, k, v = tensors(*shape)
    layer = registry["vcattn"]()
    expected = exact(*(x if batched else x[None] for x in (q, k, v))).reshape(-1, 128)
    cu = torch.arange(len(q) + 1) * 150 if batched else torch.tensor([0, 150])
    scheduler = SimpleNamespace(step_index=0, infer_steps=4, infer_condition=True)
    for step in range(4):
        scheduler.step_index = step
        found = layer.apply(
            q,
            k,
            v,
            cu_seqlens_q=cu,
            cu_seqlens_kv=cu,
            max_seqlen_q=150,
            max_seqlen_kv=150,
            block_idx=3,
            scheduler=scheduler,
        )
        assert difference(found, expected) < BOUND and session.step == step
    assert session.report.served == 4


def test_lightx2v_leaves_packed_segments_to_its_host(registry: Register):
    session = lightx2v.register(policy=EVERYWHERE, registry=registry, base=object)
    q, k, v = tensors(150, 2, 64)
    layer = registry["vcattn"]()
    with pytest.warns(UserWarning, match="several packed segments"):
        for bounds in ([0, 50, 150], [0, 100]):  # the second: one segment and padding behind it
            cu = torch.tensor(bounds)
            layer.apply(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=100, max_seqlen_kv=100)
    assert session.report.served == 0 and sum(session.report.fallbacks.values()) == 2 and session.step is None


def test_lightx2v_native_calls_have_the_same_shape(registry: Register):
    lightx2v.register(policy="native", registry=registry, base=object)
    q, k, v = tensors(150, 2, 64)
    assert registry["vcattn"]().apply(q, k, v).shape == (150, 128)


# ---- SGLang ---------------------------------------------------------------------------------------------------------


class SGLangEnum(enum.Enum):
    FA = enum.auto()
    TORCH_SDPA = enum.auto()


class Platform:
    def get_attn_backend_cls_str(self, selected_backend: Any, head_size: int, dtype: Any) -> str:
        return f"of {selected_backend}"


@pytest.fixture
def platforms(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """SGLang's modules, as far as the backend imports them."""
    root = "sglang.multimodal_gen.runtime"
    names = ["sglang", "sglang.multimodal_gen", root, f"{root}.platforms", f"{root}.layers", f"{root}.layers.attention"]
    names += [f"{root}.layers.attention.backends", f"{root}.layers.attention.backends.attention_backend"]
    modules = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    base = modules[names[-1]]
    base.AttentionBackend, base.AttentionImpl = type("AttentionBackend", (), {}), type("AttentionImpl", (), {})
    found = modules[f"{root}.platforms"]
    found.AttentionBackendEnum, found.current_platform = SGLangEnum, Platform()
    monkeypatch.delitem(sys.modules, "vcattn.integrations.sglang_backend", raising=False)
    yield found
    sys.modules.pop("vcattn.integrations.sglang_backend", None)


def test_sglang_selects_the_backend(platforms: Any):
    sglang.register(policy=EVERYWHERE)
    sglang.register(policy=EVERYWHERE)
    platform, member = platforms.current_platform, SGLangEnum["VCATTN"]
    name = platform.get_attn_backend_cls_str(member, 128, torch.bfloat16)
    assert name == "vcattn.integrations.sglang_backend.VCAttnBackend"
    assert platform.get_attn_backend_cls_str(SGLangEnum.FA, 128, torch.bfloat16) == "of SGLangEnum.FA"
    from vcattn.integrations.sglang_backend import VCAttnBackend

    assert VCAttnBackend.get_enum() is member and 128 in VCAttnBackend.get_supported_head_sizes()


def test_sglang_dense_varlen_and_ring(platforms: Any):
    session = sglang.register(policy=EVERYWHERE, num_steps=4, schedule="every_step")
    from vcattn.integrations.sglang_backend import VCAttnBackend

    layer = VCAttnBackend.get_impl_cls()(2, 64, softmax_scale=0.2, prefix="blocks.3.attn1")
    q, k, v = tensors(1, 150, 2, 64)
    expected = exact(q, k, v, scale=0.2)
    for step in (0, 0, 1, 1):
        assert difference(layer.forward(q, k, v, SimpleNamespace(current_timestep=step)), expected) < BOUND
    assert session.report.served == 4 and session.step == 1
    out, lse = layer.forward(q, k, v, None, return_softmax_lse=True)
    assert difference(out, expected) < BOUND and lse.shape == (1, 2, 150)
    out, lse = layer.forward_ring_kv_chunk(q[0], k[0], v[0])
    assert difference(out, expected[0]) < BOUND and lse.shape == (2, 150)
    cu = torch.tensor([0, 50, 150])
    for host in (None, (0, 50, 150)):
        out = layer.forward_varlen(q[0], k[0], v[0], cu_seqlens=cu, max_seqlen=100, cu_seqlens_host=host)
        assert difference(out[50:], exact(q[:, 50:], k[:, 50:], v[:, 50:], scale=0.2)[0]) < BOUND


def test_sglang_policy_and_refusals(platforms: Any):
    session = sglang.register(policy=vcattn.Policy(layers={"blocks.0.*": "native"}, min_seqlen=0))
    from vcattn.integrations.sglang_backend import VCAttnImpl

    q, k, v = tensors(1, 150, 2, 64)
    assert torch.equal(VCAttnImpl(2, 64, 0.125, prefix="blocks.0.attn1").forward(q, k, v, None), exact(q, k, v))
    assert dict(session.report.fallbacks) == {"policy: layer blocks.0.*": 1}
    with pytest.raises(vcattn.UnsupportedError, match="causal"):
        VCAttnImpl(2, 64, 0.125, causal=True).forward_ring_kv_chunk(q[0], k[0], v[0])
