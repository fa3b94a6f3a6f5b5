"""xDiT, LightX2V and SGLang diffusion: the registration functions against the hosts where they are installed, and
against stand-ins for what they register with, which have the members that the hosts' sources have."""

from __future__ import annotations

import enum
import importlib
import importlib.metadata
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import torch.nn.functional as F  # noqa: E402

import vcattn  # noqa: E402
from vcattn.integrations import lightx2v, sglang, xdit  # noqa: E402
from vcattn.integrations.session import Session  # noqa: E402
from vcattn.policy import DEFAULT_MIN_SEQLEN, GROUPING_MIN_SEQLEN  # noqa: E402

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


STAND_IN = "stand-in"


def host(module: str) -> Any:
    """A module of a host; skips where it is not installed or not to be imported here."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        pytest.skip(f"needs {module.partition('.')[0]}: {error}")


# ---- xDiT -----------------------------------------------------------------------------------------------------------


class AttentionBackendType(enum.Enum):
    SDPA = "SDPA"
    SDPA_FLASH = "SDPA with FLASH backend"


@pytest.fixture(params=[STAND_IN, "xfuser"])
def backends(request: pytest.FixtureRequest) -> Any:
    """xDiT's module of attention backends. Its functions are called with these keywords alone."""
    if request.param != STAND_IN:
        return host("xfuser.core.distributed.attention_backend")
    registry: dict[Any, Any] = {}
    backends = SimpleNamespace(AttentionBackendType=AttentionBackendType, ATTENTION_FUNCTION_REGISTRY=registry)
    backends.register_attention_function = lambda kind: lambda function: registry.setdefault(kind, function)

    @backends.register_attention_function(AttentionBackendType.SDPA)
    def sdpa(query, key, value, dropout_p, is_causal, attention_kwargs=None):
        mask = (attention_kwargs or {}).get("attn_mask")
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask), None

    @backends.register_attention_function(AttentionBackendType.SDPA_FLASH)
    def flash(query, key, value, dropout_p, is_causal, attention_kwargs=None):
        return F.scaled_dot_product_attention(query, key, value), "lse"

    return backends


def call(backends: Any, member: Any, *qkv: torch.Tensor, **options: Any) -> Any:
    """As xDiT's layers call the function of a backend."""
    arguments = {"dropout_p": 0.0, "is_causal": False, "attention_kwargs": None, **options}
    return backends.ATTENTION_FUNCTION_REGISTRY[member](*qkv, **arguments)


def test_xdit(backends: Any):
    member, report = xdit.register(policy=EVERYWHERE, backends=backends)
    kinds = backends.AttentionBackendType
    assert kinds["VCATTN"] is member and list(kinds)[-1] is member
    q, k, v = (x.transpose(1, 2) for x in tensors(1, 150, 2, 64))
    out, lse = call(backends, member, q, k, v)
    assert difference(out, F.scaled_dot_product_attention(q, k, v)) < BOUND and report.served == 1
    torch.testing.assert_close(lse, (q @ k.mT / 8).logsumexp(-1), atol=0.02, rtol=0)


def test_hosts_that_keep_no_orders_leave_longer_calls_alone(backends: Any):
    member, report = xdit.register(policy="accurate", backends=backends)
    q, k, v = (x.transpose(1, 2) for x in tensors(1, GROUPING_MIN_SEQLEN, 1, 8))
    choice = f"at most {GROUPING_MIN_SEQLEN} queries or keys (min_seqlen)"
    call(backends, member, q[:, :, :1], k, v)
    assert dict(report.fallbacks) == {choice: 1}
    for schedule, length in ((None, GROUPING_MIN_SEQLEN), ("every_step", DEFAULT_MIN_SEQLEN)):
        assert Session("x", "y", policy=None, schedule=schedule).policy == vcattn.Policy(min_seqlen=length)


def test_xdit_padding(backends: Any):
    """As LTX-2 tells it, by a mask, and as MiniMax-H3 does, by a length and the indices before it."""
    member, report = xdit.register(policy=EVERYWHERE, backends=backends)
    q, k, v = (x.transpose(1, 2) for x in tensors(1, 150, 2, 64))
    expected = F.scaled_dot_product_attention(q, k[:, :, :100], v[:, :, :100])
    indices = torch.arange(100)
    mask = (torch.arange(150) < 100)[None, None, None]
    for options in ({"attn_mask": mask, "indices_k": indices}, {"valid_kv_len": 100, "indices_k": indices}):
        out, lse = call(backends, member, q, k, v, attention_kwargs=options)
        assert difference(out, expected) < BOUND and lse.shape == (1, 2, 150)
    # Where the keys are not padded every one counts, and what is None or of other backends changes nothing.
    out, _ = call(backends, member, q, k, v, attention_kwargs={"indices_k": None, "thw": (1, 10, 15)})
    assert difference(out, F.scaled_dot_product_attention(q, k, v)) < BOUND and report.served == 3
    with pytest.raises(vcattn.UnsupportedError, match="indices_k needs"):
        call(backends, member, q, k, v, attention_kwargs={"indices_k": indices})
    for length in (0, -50, 151):
        with pytest.raises(vcattn.InvalidArgumentError, match=f"valid_kv_len is 1 to 150, the keys; found {length}"):
            call(backends, member, q, k, v, attention_kwargs={"valid_kv_len": length, "indices_k": indices})
    with pytest.raises(vcattn.UnsupportedError, match="differs between queries"):
        causal = torch.ones(150, 150, dtype=torch.bool).tril()
        call(backends, member, q, k, v, attention_kwargs={"attn_mask": causal})


def test_xdit_refuses_what_it_would_ignore(backends: Any):
    member, report = xdit.register(backends=backends)
    q, k, v = tensors(1, 2, 150, 64)
    for arguments in ({"is_causal": True}, {"dropout_p": 0.1}, {"window": 3}):
        with pytest.raises(vcattn.UnsupportedError):
            call(backends, member, q, k, v, **arguments)
    with pytest.raises(vcattn.UnsupportedError, match="layer nor step"):
        xdit.register(policy=vcattn.Policy(native_first=1), backends=backends)
    mask = (torch.arange(150) < 100)[None, None, None]
    out, lse = call(backends, member, q, k, v, attention_kwargs={"attn_mask": mask})
    assert torch.equal(out, F.scaled_dot_product_attention(q, k, v, attn_mask=mask)) and lse is None
    assert sum(report.fallbacks.values()) == 1


def test_xdit_falls_back_to_flash():
    backends = SimpleNamespace(
        AttentionBackendType=AttentionBackendType,
        ATTENTION_FUNCTION_REGISTRY={AttentionBackendType.SDPA_FLASH: lambda *arguments: ("out", "lse")},
    )
    registry = backends.ATTENTION_FUNCTION_REGISTRY
    backends.register_attention_function = lambda kind: lambda function: registry.setdefault(kind, function)
    member, report = xdit.register(backends=backends)
    assert registry[member](*tensors(1, 2, 150, 64), 0.0, False)[1] == "lse" and sum(report.fallbacks.values()) == 1


# ---- LightX2V -------------------------------------------------------------------------------------------------------


class Register(dict):
    """LightX2V's: called with a name, it decorates a class."""

    def __call__(self, name: str) -> Any:
        return lambda target: self.setdefault(name, target)


class Template:
    """LightX2V's AttnWeightTemplate."""


class TorchSDPA:
    def apply(
        self, q, k, v, drop_rate=0, attn_mask=None, causal=False, cu_seqlens_q=None, cu_seqlens_kv=None, **others
    ):
        if cu_seqlens_q is None:
            q, k, v = (x if x.dim() == 4 else x[None] for x in (q, k, v))
            return exact(q, k, v).flatten(2).squeeze(0)
        if any(x.dim() != 3 for x in (q, k, v)):
            raise ValueError("Packed Torch SDPA expects 3D q/k/v")
        bounds = [cu.tolist() for cu in (cu_seqlens_q, cu_seqlens_kv)]
        if [b[-1] for b in bounds] != [len(q), len(k)]:
            raise ValueError("Invalid cu_seqlens_q")
        parts = zip(*([slice(*pair) for pair in pairwise(part)] for part in bounds))
        return torch.cat([exact(q[None, i], k[None, j], v[None, j])[0] for i, j in parts]).flatten(1)


@pytest.fixture(params=[STAND_IN, "lightx2v"])
def registry(request: pytest.FixtureRequest) -> Iterator[Any]:
    """LightX2V's registry of attention classes."""
    if request.param == STAND_IN:
        yield Register(torch_sdpa=TorchSDPA)
        return
    host("lightx2v.common.ops.attn.torch_sdpa")
    registry = host("lightx2v.utils.registry_factory").ATTN_WEIGHT_REGISTER
    yield registry
    del registry["vcattn"]


def register_lightx2v(registry: Any, **options: Any) -> Any:
    """With the base class that goes with the registry."""
    base = Template if isinstance(registry, Register) else None
    return lightx2v.register(registry=registry, base=base, **options)


@pytest.mark.parametrize("batched", [False, True])
def test_lightx2v(registry: Any, batched: bool):
    session = register_lightx2v(registry, policy=EVERYWHERE, schedule="every_step")
    shape = (2, 150, 2, 64) if batched else (150, 2, 64)
    q, k, v = tensors(*shape)
    experts = [registry["vcattn"]() for _ in range(2)]
    expected = exact(*(x if batched else x[None] for x in (q, k, v))).reshape(-1, 128)
    cu = torch.arange(len(q) + 1) * 150 if batched else torch.tensor([0, 150])
    options = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": 150, "max_seqlen_kv": 150}
    scheduler = SimpleNamespace(step_index=0, infer_steps=4, infer_condition=True)
    for step in range(4):
        scheduler.step_index = step
        found = experts[step // 2].apply(q, k, v, block_idx=3, scheduler=scheduler, **options)
        assert difference(found, expected) < BOUND and session.step == step
    assert session.report.served == 4 and len(session._states._children) == 2
    out, lse = experts[0].apply_with_lse(q, k, v)
    assert difference(out, expected) < BOUND and lse.shape == (len(out), 2)


def test_lightx2v_shares_keys_between_heads(registry: Any):
    session = register_lightx2v(registry, policy=EVERYWHERE)
    q, k, v = tensors(150, 4, 64)
    found = registry["vcattn"]().apply(q, k[:, :2], v[:, :2])
    repeated = (x[None, :, :2].repeat_interleave(2, 2) for x in (k, v))
    assert difference(found, exact(q[None], *repeated).reshape(150, -1)) < BOUND and session.report.served == 1


def test_lightx2v_without_steps(registry: Any):
    session = register_lightx2v(registry, policy=EVERYWHERE)
    q, k, v = tensors(150, 2, 64)
    scheduler = SimpleNamespace(step_index=0, infer_steps=0, infer_condition=True)
    found = registry["vcattn"]().apply(q, k, v, block_idx=3, scheduler=scheduler)
    assert difference(found, exact(q[None], k[None], v[None]).reshape(150, -1)) < BOUND
    assert session.report.served == 1 and session.step is None


def test_lightx2v_refuses_schedules_that_there_are_not(registry: Any):
    with pytest.raises(vcattn.InvalidArgumentError, match="schedule kind"):
        register_lightx2v(registry, schedule="sometimes")
    assert "vcattn" not in registry
    register_lightx2v(registry)


@pytest.mark.parametrize("batched", [False, True])
def test_lightx2v_leaves_packed_segments_to_its_host(registry: Any, batched: bool):
    session = register_lightx2v(registry, policy=EVERYWHERE)
    q, k, v = tensors(1, 150, 2, 64)
    expected = torch.cat([exact(q[:, a:b], k[:, a:b], v[:, a:b])[0] for a, b in ((0, 50), (50, 150))]).flatten(1)
    cu = torch.tensor([0, 50, 150])
    options = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": 100, "max_seqlen_kv": 100}
    with pytest.warns(UserWarning, match="several packed segments"):
        found = registry["vcattn"]().apply(*((q, k, v) if batched else (q[0], k[0], v[0])), **options)
    torch.testing.assert_close(found, expected)
    assert session.report.served == 0 and sum(session.report.fallbacks.values()) == 1 and session.step is None


def test_lightx2v_padding_behind_the_last_segment_is_not_attended_to(registry: Any):
    """LightX2V's own class refuses it."""
    register_lightx2v(registry, policy=EVERYWHERE)
    q, k, v = tensors(150, 2, 64)
    cu = torch.tensor([0, 100])
    with pytest.raises(ValueError, match="Invalid cu_seqlens_q"), pytest.warns(UserWarning, match="several packed"):
        options = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": 100, "max_seqlen_kv": 100}
        registry["vcattn"]().apply(q, k, v, **options)


@pytest.mark.parametrize("batched", [False, True])
def test_lightx2v_native_calls_have_the_same_shape(registry: Any, batched: bool):
    register_lightx2v(registry, policy="native")
    q, k, v = tensors(1, 150, 2, 64)
    cu = torch.tensor([0, 150])
    options = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": 150, "max_seqlen_kv": 150}
    found = registry["vcattn"]().apply(*((q, k, v) if batched else (q[0], k[0], v[0])), **options)
    torch.testing.assert_close(found, exact(q, k, v).reshape(150, 128))


# ---- SGLang ---------------------------------------------------------------------------------------------------------


class SGLangEnum(enum.Enum):
    FA = enum.auto()
    TORCH_SDPA = enum.auto()


class Platform:
    def get_attn_backend_cls_str(self, selected_backend: Any, head_size: int, dtype: Any) -> str:
        return f"of {selected_backend}"


class Request:
    """SGLang's Req, as far as the adapter looks at it."""

    num_inference_steps = 4


class SDPAImpl:
    """SGLang's own: causal masks end at the last query and the last key."""

    def __init__(self, num_heads, head_size, causal, softmax_scale, num_kv_heads=None, **others):
        self.causal, self.scale = causal, softmax_scale

    def forward(self, query, key, value, attn_metadata):
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        mask = mask if self.causal else None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale).transpose(1, 2)

    def forward_varlen(self, query, key, value, *, cu_seqlens, max_seqlen, cu_seqlens_host=None):
        bounds = cu_seqlens.tolist()
        parts = [slice(*pair) for pair in pairwise(bounds)]
        return torch.cat([self.forward(query[None, s], key[None, s], value[None, s], None)[0] for s in parts])


ROOT = "sglang.multimodal_gen.runtime"


def stand_in_for_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's modules, as far as the backend imports them."""
    names = ["sglang", "sglang.multimodal_gen", ROOT, f"{ROOT}.platforms", f"{ROOT}.layers", f"{ROOT}.layers.attention"]
    names += [f"{ROOT}.layers.attention.backends", f"{ROOT}.layers.attention.backends.attention_backend"]
    names += [f"{ROOT}.layers.attention.backends.sdpa", f"{ROOT}.managers", f"{ROOT}.managers.forward_context"]
    modules = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    base = modules[f"{ROOT}.layers.attention.backends.attention_backend"]
    base.AttentionBackend, base.AttentionImpl = type("AttentionBackend", (), {}), type("AttentionImpl", (), {})
    modules[f"{ROOT}.layers.attention.backends.sdpa"].SDPAImpl = SDPAImpl
    platforms = modules[f"{ROOT}.platforms"]
    platforms.AttentionBackendEnum, platforms.current_platform = SGLangEnum, Platform()
    current: list[Any] = []

    @contextmanager
    def set_forward_context(current_timestep: Any, attn_metadata: Any, forward_batch: Any = None) -> Iterator[None]:
        current.append(SimpleNamespace(current_timestep=current_timestep, forward_batch=forward_batch))
        yield
        current.pop()

    forward_context = modules[f"{ROOT}.managers.forward_context"]
    forward_context.set_forward_context, forward_context.get_forward_context = set_forward_context, lambda: current[-1]


@pytest.fixture(params=[STAND_IN, "sglang"])
def platforms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """SGLang's module of platforms."""
    monkeypatch.setattr(sglang, "session", None)
    if request.param == STAND_IN:
        stand_in_for_sglang(monkeypatch)
        yield sys.modules[f"{ROOT}.platforms"]
    else:
        if not torch.cuda.is_available():
            monkeypatch.setenv("SGLANG_DIFFUSION_PLATFORM_OVERRIDE", "cpu")
        host(f"{ROOT}.layers.attention.selector")
        found = host(f"{ROOT}.platforms")
        yield found
        vars(found.current_platform).pop("get_attn_backend_cls_str", None)
    # The next one is made from the classes of another SGLang.
    if sys.modules.pop("vcattn.integrations.sglang_backend", None) is not None:
        del vcattn.integrations.sglang_backend


def at_step(step: int | None = 0, request: Any = None) -> Any:
    """A context in which layers are called as SGLang's denoising stage calls them."""
    return sys.modules[f"{ROOT}.managers.forward_context"].set_forward_context(step, None, request)


def forward(layer: Any, q: Any, k: Any, v: Any, step: int | None = 0, request: Any = None) -> torch.Tensor:
    with at_step(step, request):
        return layer.forward(q, k, v, None)


def test_sglang_selects_the_backend(platforms: Any):
    sglang.register(policy=EVERYWHERE)
    sglang.register(policy=EVERYWHERE)
    platform, member = platforms.current_platform, platforms.AttentionBackendEnum["VCATTN"]
    name = platform.get_attn_backend_cls_str(member, 128, torch.bfloat16)
    assert name == "vcattn.integrations.sglang_backend.VCAttnBackend"
    others = platforms.AttentionBackendEnum.TORCH_SDPA
    assert platform.get_attn_backend_cls_str(others, 128, torch.bfloat16) != name
    from vcattn.integrations.sglang_backend import VCAttnBackend

    assert VCAttnBackend.get_enum() is member and 128 in VCAttnBackend.get_supported_head_sizes()


def test_sglang_plugin_takes_its_policy_from_the_environment(platforms: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(sglang.POLICY_VARIABLE, "fast")
    sglang.plugin()
    session = sglang.session
    assert session.policy == vcattn.Policy("fast")
    sglang.plugin()
    assert sglang.session is session


def test_sglang_is_told_of_the_plugin():
    """SGLang finds the entry point of an installed package; of a checkout there is none."""
    entries = importlib.metadata.entry_points(group="sglang.multimodal_gen.plugins", name="vcattn")
    if not entries:
        pytest.skip("needs the package to be installed")
    assert next(iter(entries)).load() is sglang.plugin


def test_sglang_steps_branches_and_experts(platforms: Any):
    session = sglang.register(policy=EVERYWHERE, schedule="every_step")
    from vcattn.integrations.sglang_backend import VCAttnBackend

    experts = [VCAttnBackend.get_impl_cls()(2, 64, softmax_scale=0.2, prefix="blocks.3.attn1.impl") for _ in range(2)]
    assert experts[0].layer == "blocks.3.attn1"
    q, k, v = tensors(1, 150, 2, 64)
    expected, request = exact(q, k, v, scale=0.2), Request()
    for step in range(4):
        for _branch in range(2):
            assert difference(forward(experts[step // 2], q, k, v, step, request), expected) < BOUND
        assert session.step == step and session.num_steps == 4
    assert session.report.served == 8 and len(session._states._children) == 4
    forward(experts[0], q, k, v, 0, Request())
    assert len(session._states._children) == 1
    forward(experts[0], q, k, v, 0)  # a text encoder's, say
    assert session.step is None and session.report.served == 10


def test_sglang_without_steps(platforms: Any):
    session = sglang.register(policy=EVERYWHERE)
    from vcattn.integrations.sglang_backend import VCAttnImpl

    q, k, v = tensors(1, 150, 2, 64)
    request = Request()
    request.num_inference_steps = 0
    found = forward(VCAttnImpl(2, 64, softmax_scale=0.2, prefix="blocks.3.attn1.impl"), q, k, v, 0, request)
    assert difference(found, exact(q, k, v, scale=0.2)) < BOUND
    assert session.report.served == 1 and session.step is None


def test_sglang_refuses_schedules_that_there_are_not(platforms: Any):
    with pytest.raises(vcattn.InvalidArgumentError, match="schedule kind"):
        sglang.register(schedule="sometimes", platforms=platforms)
    assert sglang.session is None
    assert not hasattr(platforms.current_platform.get_attn_backend_cls_str, "vcattn_original")


def test_sglang_varlen_and_ring(platforms: Any):
    session = sglang.register(policy=EVERYWHERE)
    from vcattn.integrations.sglang_backend import VCAttnImpl

    layer = VCAttnImpl(2, 64, softmax_scale=0.2, prefix="blocks.3.attn1.impl")
    q, k, v = tensors(1, 150, 2, 64)
    expected = exact(q, k, v, scale=0.2)
    out, lse = layer.forward(q, k, v, None, return_softmax_lse=True)
    assert difference(out, expected) < BOUND and lse.shape == (1, 2, 150)
    out, lse = layer.forward_ring_kv_chunk(q[0], k[0], v[0])
    assert difference(out, expected[0]) < BOUND and lse.shape == (2, 150)
    cu = torch.tensor([0, 50, 150], dtype=torch.int32)
    expected = torch.cat([exact(q[:, s], k[:, s], v[:, s], scale=0.2)[0] for s in (slice(50), slice(50, 150))])
    for bounds in (None, (0, 50, 150)):
        with at_step():
            out = layer.forward_varlen(q[0], k[0], v[0], cu_seqlens=cu, max_seqlen=100, cu_seqlens_host=bounds)
        assert 0 < difference(out, expected) < BOUND
    assert session.report.served == 2
    session = sglang.register(policy=vcattn.Policy(native_first=1, min_seqlen=0))
    request = Request()
    for step in range(2):
        with at_step(step, request):
            out = layer.forward_varlen(q[0], k[0], v[0], cu_seqlens=cu, max_seqlen=100)
        assert torch.allclose(out, expected, atol=1e-5) == (step == 0)
    assert session.report.served == 1 and dict(session.report.fallbacks) == {"policy: first 1 steps": 1}


@pytest.mark.filterwarnings("ignore:vcattn in SGLang")
def test_sglang_policy_and_refusals(platforms: Any):
    session = sglang.register(policy=vcattn.Policy(layers={"blocks.0.*": "native"}, min_seqlen=0))
    from vcattn.integrations.sglang_backend import VCAttnImpl

    q, k, v = tensors(1, 150, 2, 64)
    assert torch.equal(forward(VCAttnImpl(2, 64, 0.125, prefix="blocks.0.attn1.impl"), q, k, v), exact(q, k, v))
    assert dict(session.report.fallbacks) == {"policy: layer blocks.0.*": 1}
    causal = VCAttnImpl(2, 64, 0.125, causal=True, prefix="blocks.1")
    found = forward(causal, q[:, 140:], k, v)  # the last query sees every key
    torch.testing.assert_close(found[:, -1], exact(q, k, v)[:, -1])
    with pytest.raises(vcattn.UnsupportedError, match="causal"):
        causal.forward_ring_kv_chunk(q[0], k[0], v[0])


@pytest.mark.parametrize("platforms", ["sglang"], indirect=True)
def test_sglang_layers_of_its_own(platforms: Any):
    """A layer as SGLang's models make it, which asks SGLang's selector for the backend."""
    layers = host(f"{ROOT}.layers.attention.layer")
    session = sglang.register(policy=EVERYWHERE)
    member = platforms.AttentionBackendEnum["VCATTN"]
    layer = layers.LocalAttention(2, 64, required_attention_backend=member, prefix="blocks.3.attn1.impl")
    assert layer.backend is member and layer.attn_impl.layer == "blocks.3.attn1"
    q, k, v = tensors(1, 150, 2, 64)
    with at_step(0, Request()):
        assert difference(layer(q, k, v), exact(q, k, v)) < BOUND and session.report.served == 1
