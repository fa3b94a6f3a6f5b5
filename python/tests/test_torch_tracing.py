"""Who listens to torch's operators, or gives tensors that are not what their memory holds, gets the right answer."""

from __future__ import annotations

import pytest

from reference import normal

torch = pytest.importorskip("torch", reason="needs torch")

import torch.nn.functional as F  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

import vcattn  # noqa: E402

TORCH_SDPA = F.scaled_dot_product_attention
pytestmark = [
    pytest.mark.filterwarnings("ignore:vcattn"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
]


def tensors(*shape: int) -> list[torch.Tensor]:
    return [torch.from_numpy(normal(i, *shape)) for i in range(3)]


def served(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with vcattn.patch_sdpa(min_seqlen=0):
        return F.scaled_dot_product_attention(q, k, v)


CALLS = {
    "attention": lambda q, k, v: vcattn.attention(q, k, v, layout="BHSD"),
    "sdpa": lambda q, k, v: vcattn.sdpa(q, k, v),
    "patch_sdpa": served,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("which", range(3))
def test_negated_views(which: int, call):
    qkv = tensors(1, 2, 200, 32)
    negated = [torch._neg_view(x) if i == which else x for i, x in enumerate(qkv)]
    assert negated[which].is_neg()
    assert torch.equal(call(*negated), call(*(x.resolve_neg() for x in negated)))


def test_negated_values_of_a_state():
    q, k, v = tensors(1, 200, 2, 32)
    first, second = (
        vcattn.attention(q, k, x, state=vcattn.State(vcattn.Schedule(4)), step=0) for x in (torch._neg_view(v), -v)
    )
    assert torch.equal(first, second)


TRACERS = {
    "jit": lambda f, qkv: torch.jit.trace(f, qkv, check_trace=False),
    "make_fx": lambda f, qkv: make_fx(f)(*qkv),
    "make_fx symbolic": lambda f, qkv: make_fx(f, tracing_mode="symbolic")(*qkv),
    "make_fx pre-dispatch": lambda f, qkv: make_fx(f, pre_dispatch=True)(*qkv),
}


@pytest.mark.parametrize("call", ["attention", "sdpa"])
@pytest.mark.parametrize("tracer", TRACERS)
def test_traces_hold_the_call(tracer: str, call: str):
    traced = TRACERS[tracer](CALLS[call], tuple(tensors(1, 2, 200, 32)))
    others = [x + 1 for x in tensors(1, 2, 200, 32)]
    assert torch.equal(traced(*others), CALLS[call](*others))


@pytest.mark.parametrize("tracer", ["jit", "make_fx"])
def test_traces_under_the_patch_hold_attention(tracer: str):
    traced = TRACERS[tracer](served, tuple(tensors(1, 2, 200, 32)))
    others = [x + 1 for x in tensors(1, 2, 200, 32)]
    found, expected = traced(*others), TORCH_SDPA(*others)
    assert float((found - expected).norm() / expected.norm()) < 0.06


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_transforms_under_the_patch_are_torchs_own(transform: str):
    q, k, v = tensors(2, 2, 200, 32)
    run = {
        "vmap": lambda: torch.vmap(F.scaled_dot_product_attention)(q, k, v),
        "grad": lambda: torch.func.grad(lambda q: F.scaled_dot_product_attention(q, k, v).sum())(q),
        "jvp": lambda: torch.func.jvp(
            lambda q: F.scaled_dot_product_attention(q, k, v, torch.zeros(200, 200)), (q,), (k,)
        )[1],
    }[transform]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # which has tangents
        expected = run()
        with vcattn.patch_sdpa(min_seqlen=0) as report:
            assert torch.equal(run(), expected)
    assert report.served == 0 and sum(report.fallbacks.values()) >= 1


def test_vmap_of_a_call():
    q, k, v = tensors(2, 1, 200, 2, 32)
    found = torch.vmap(vcattn.attention)(q, k, v)
    assert torch.equal(found, torch.stack([vcattn.attention(*x) for x in zip(q, k, v)]))


def test_meta_tensors_under_the_patch():
    qkv = [x.to("meta") for x in tensors(1, 2, 200, 32)]
    with vcattn.patch_sdpa(min_seqlen=0) as report:
        out = F.scaled_dot_product_attention(*qkv)
    assert out.is_meta and out.shape == qkv[0].shape and report.served == 0


def test_gradients_of_masks_are_not_lost():
    q, k, v = tensors(1, 2, 200, 32)
    mask = torch.zeros(1, 1, 1, 200, requires_grad=True)
    with pytest.raises(vcattn.UnsupportedError, match="no backward"):
        vcattn.sdpa(q, k, v, mask)
    with vcattn.patch_sdpa(min_seqlen=0):
        assert F.scaled_dot_product_attention(q, k, v, mask).requires_grad
    with torch.no_grad():
        vcattn.sdpa(q, k, v, mask)


@pytest.mark.parametrize("which", range(4))
def test_tangents_are_not_lost(which: int):
    inputs = [*tensors(1, 2, 200, 32), torch.zeros(1, 1, 1, 200)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), forward_ad.dual_level():
        vcattn.sdpa(*inputs)
        inputs[which] = forward_ad.make_dual(inputs[which], torch.ones_like(inputs[which]))
        with pytest.raises(vcattn.UnsupportedError, match="no backward"):
            vcattn.sdpa(*inputs)
        with vcattn.patch_sdpa(min_seqlen=0):
            out = F.scaled_dot_product_attention(*inputs)
        assert forward_ad.unpack_dual(out).tangent is not None


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda q: q.to_sparse(), "q: a dense tensor"),
        (lambda q: torch._efficientzerotensor(q.shape), "q: a tensor with memory"),
        (lambda q: q[:, :0], "seqlen"),
    ],
)
def test_tensors_without_memory(change, match: str):
    q, k, v = tensors(1, 200, 2, 32)
    with pytest.raises(vcattn.InvalidArgumentError, match=match):
        vcattn.attention(change(q), k, v)
