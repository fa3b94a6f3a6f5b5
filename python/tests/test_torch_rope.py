"""rope= on torch tensors: the operator, code under torch.compile, and what hosts compute."""

from __future__ import annotations

import numpy as np
import pytest

from reference import normal

torch = pytest.importorskip("torch", reason="needs torch")

import vcattn  # noqa: E402
import vcattn.torch_op  # noqa: E402

SEQLEN, HEADS, DIM = 120, 2, 64
GRID = (0, 4, 5, 6)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def qkv() -> list[torch.Tensor]:
    return [torch.from_numpy(normal(i, 1, SEQLEN, HEADS, DIM)).bfloat16() for i in range(3)]


def angles(*shape: int) -> torch.Tensor:
    return torch.from_numpy(normal(7, *shape))


def tables(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return angles(*shape).cos(), angles(*shape).sin()


def of_axes(interleaved: bool = True) -> vcattn.Rope:
    return vcattn.Rope(*zip(*(tables(n, pairs) for n, pairs in zip(GRID[1:], (8, 12, 12)))), interleaved)


def test_complex_frequencies_as_models_hold_them():
    """Wan and HunyuanVideo multiply neighbouring channels by complex numbers: their table is used as it lies."""
    q, k, v = qkv()
    freqs = torch.polar(torch.ones(SEQLEN, DIM // 2), angles(SEQLEN, DIM // 2))
    parts = torch.view_as_real(freqs)
    found = vcattn.attention(q, k, v, rope=vcattn.Rope(parts[..., 0], parts[..., 1]), recipe="fp32")

    def rotate(x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * freqs[:, None]).flatten(-2)

    expected = vcattn.attention(rotate(q), rotate(k), v.float(), recipe="fp32")
    torch.testing.assert_close(found.float(), expected, atol=8e-3, rtol=8e-3)


def test_repeated_tables_as_diffusers_holds_them():
    """Cosines and sines of each channel: every other entry is a view."""
    q, k, v = qkv()
    cos, sin = (t.repeat_interleave(2, -1) for t in tables(SEQLEN, DIM // 2))
    found = vcattn.attention(q, k, v, rope=vcattn.Rope(cos[:, ::2], sin[:, ::2]))
    expected = vcattn.attention(q, k, v, rope=vcattn.Rope(*tables(SEQLEN, DIM // 2)))
    assert torch.equal(found, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("interleaved", [True, False])
def test_cuda_has_the_bits_of_rows_rotated_before(interleaved: bool):
    if not any(backend.available for backend in vcattn.backends() if backend.name != "cpu"):
        pytest.skip("no back end for this device")
    q, k, v = (x.cuda() for x in qkv())
    cos, sin = tables(SEQLEN, DIM // 2)
    found = vcattn.attention(q, k, v, rope=vcattn.Rope(cos.cuda(), sin.cuda(), interleaved), return_lse=True)

    def rotate(x: torch.Tensor) -> torch.Tensor:  # in host memory, where nothing is fused
        c, s, x = cos[:, None], sin[:, None], x.float().cpu()
        first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        parts = (first * c - second * s, first * s + second * c)
        return (torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)).cuda()

    expected = vcattn.attention(rotate(q), rotate(k), v, return_lse=True)
    assert torch.equal(found[0], expected[0].bfloat16()) and torch.equal(found[1], expected[1])


ROPES = {
    "tokens": dict(rope_q=list(tables(SEQLEN, DIM // 2)), rope_k=list(tables(SEQLEN, DIM // 2))),
    "keys alone": dict(rope_k=list(tables(SEQLEN, DIM // 2)), rope_k_interleaved=False),
    "axes": dict(rope_q=of_axes().tables, rope_k=of_axes().tables, grid=list(GRID)),
}


@pytest.mark.parametrize("ropes", ROPES)
def test_opcheck(ropes: str):
    options = dict(recipe="accurate", bhsd=False, return_lse=True, **ROPES[ropes])
    torch.library.opcheck(torch.ops.vcattn.attention.default, tuple(qkv()), options)


@pytest.mark.parametrize("axes", [False, True])
def test_compiled_equals_eager(axes: bool):
    q, k, v = qkv()

    def rotated(q, k, v, cos, sin):
        return vcattn.attention(q, k, v, rope=vcattn.Rope(cos, sin, False), grid=GRID)

    rope = of_axes() if axes else vcattn.Rope(*tables(SEQLEN, DIM // 2))
    compiled = torch.compile(rotated, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v, rope.cos, rope.sin), rotated(q, k, v, rope.cos, rope.sin))


def test_grouping_state_with_rope():
    q, k, v = qkv()
    rope = vcattn.Rope(*tables(SEQLEN, DIM // 2))
    state = vcattn.State(vcattn.Schedule(4))
    found = vcattn.attention(q, k, v, rope=rope, state=state, step=0)
    assert torch.equal(found, vcattn.attention(q, k, v, rope=rope))


def test_vmap():
    """Over anything but the tables."""
    q, k, v = qkv()
    cos, sin = tables(SEQLEN, DIM // 2)
    several = torch.stack([q, k])
    found = torch.vmap(lambda q: vcattn.attention(q, k, v, rope=vcattn.Rope(cos, sin)))(several)
    for one, x in zip(found, several):
        assert torch.equal(one, vcattn.attention(x, k, v, rope=vcattn.Rope(cos, sin)))
    with pytest.raises(vcattn.UnsupportedError, match=r"batched rope tables inside torch\.vmap"):
        torch.vmap(lambda sin: vcattn.attention(q, k, v, rope=vcattn.Rope(cos, sin)))(sin.expand(2, -1, -1))


def test_refusals():
    q, k, v = qkv()
    cos, sin = tables(SEQLEN, DIM // 2)
    with pytest.raises(vcattn.UnsupportedError, match="no backward pass"):
        vcattn.attention(q, k, v, rope=vcattn.Rope(cos.requires_grad_(), sin))
    cos = cos.detach()
    with pytest.raises(vcattn.InvalidArgumentError, match="rope: a torch tensor like q; found ndarray"):
        vcattn.attention(q, k, v, rope=vcattn.Rope(np.asarray(cos), sin))
    with pytest.raises(vcattn.InvalidArgumentError, match="rope_q: cos: a float32 tensor; found"):
        vcattn.attention(q, k, v, rope=vcattn.Rope(cos.bfloat16(), sin))
    with pytest.raises(vcattn.InvalidArgumentError, match="resolve_neg"):
        vcattn.attention(q, k, v, rope=vcattn.Rope(cos, torch._neg_view(sin)))
    with pytest.raises(vcattn.InvalidArgumentError, match="2 tables, or 6 of three axes; found 1"):
        torch.ops.vcattn.attention(q, k, v, recipe="accurate", bhsd=False, rope_q=[cos])
