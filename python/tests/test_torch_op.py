"""The torch operators: schema, fake kernels, and code under torch.compile with fullgraph=True."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import numpy as np
import pytest

from reference import normal

torch = pytest.importorskip("torch", reason="needs torch")

import torch.nn.functional as F  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

import vcattn  # noqa: E402
import vcattn.torch_op  # noqa: E402

# aot_eager runs everything but code generation: Dynamo, fake tensors, functionalisation. Inductor is in the last test.
compiled = torch.compile(fullgraph=True, backend="aot_eager")
dynamic = torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def tensors(*shape: int) -> list[torch.Tensor]:
    return [torch.from_numpy(normal(i, *shape)).bfloat16() for i in range(3)]


INPUTS = {
    "BSHD": ([x for x in tensors(2, 150, 3, 64)], False),
    "BHSD": ([x for x in tensors(2, 3, 150, 64)], True),
    "permuted": ([x.permute(0, 2, 1, 3) for x in tensors(2, 150, 3, 64)], True),
    "expanded": ([x.expand(2, -1, 3, -1) for x in tensors(1, 150, 1, 64)], False),
}
OPTIONS = {
    "plain": {},
    "lse": {"return_lse": True},
    "mask": {"key_padding_mask": torch.arange(150)[None] < 100, "scale": 0.2},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("inputs", INPUTS)
def test_opcheck_attention(inputs: str, options: str):
    qkv, bhsd = INPUTS[inputs]
    torch.library.opcheck(
        torch.ops.vcattn.attention.default, tuple(qkv), dict(OPTIONS[options], recipe="accurate", bhsd=bhsd)
    )


def test_opcheck_segments():
    q, k, v = tensors(1, 150, 3, 64)
    cu = torch.tensor([0, 20, 150])
    torch.library.opcheck(
        torch.ops.vcattn.attention.default,
        (q, k, v),
        dict(recipe="accurate", bhsd=False, cu_seqlens_q=cu, cu_seqlens_kv=cu, return_lse=True),
    )


@pytest.mark.parametrize("inputs", ["BSHD", "permuted"])
def test_opcheck_group(inputs: str):
    (_, _, v), bhsd = INPUTS[inputs]
    options = dict(recipe="accurate", bhsd=bhsd, clusters=64)
    torch.library.opcheck(torch.ops.vcattn.group.default, (v,), options)
    _, centroids = torch.ops.vcattn.group(v, **options)
    torch.library.opcheck(torch.ops.vcattn.group.default, (v,), dict(options, centroids=centroids))


@pytest.mark.parametrize("inputs", INPUTS)
def test_compiled_equals_eager(inputs: str):
    qkv, bhsd = INPUTS[inputs]
    layout = "BHSD" if bhsd else "BSHD"

    def attend(q, k, v):
        return vcattn.attention(q, k, v, layout=layout, return_lse=True)

    for found, expected in zip(compiled(attend)(*qkv), attend(*qkv)):
        assert torch.equal(found, expected) and found.stride() == expected.stride()


def test_dynamic_lengths():
    vcattn.attention(*tensors(1, 77, 2, 64))  # a process's first call loads the library, which costs a recompilation
    counter = CompileCounterWithBackend("aot_eager")
    attend = torch.compile(vcattn.attention, fullgraph=True, backend=counter, dynamic=True)
    for seqlen in (100, 150, 333):
        qkv = tensors(1, seqlen, 2, 64)
        assert torch.equal(attend(*qkv), vcattn.attention(*qkv))
    assert counter.frame_count == 1


def test_dynamic_scales():
    qkv = tensors(1, 2, 150, 64)
    attend = dynamic(lambda q, k, v, scale: F.scaled_dot_product_attention(q, k, v, scale=scale))
    with vcattn.patch_sdpa(min_seqlen=0) as report:
        for scale in (0.1, 0.2, 0.3, 0.4):
            assert torch.equal(attend(*qkv, scale), vcattn.sdpa(*qkv, scale=scale))
    assert report.served >= 1 and not report.fallbacks


def test_a_first_call_that_is_compiled():
    """In a process of its own, where nothing of the package that needs torch is imported yet."""
    code = (
        "import torch, vcattn\n"
        "x, p = torch.ones(1, 8, 2, 64), torch.nn.Parameter(torch.ones(1, 8, 2, 64), requires_grad=False)\n"
        "attend = torch.compile(vcattn.attention, fullgraph=True, backend='aot_eager')\n"
        "assert all(torch.equal(attend(x, p, x), vcattn.attention(x, p, x)) for _ in range(2))\n"
    )
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_compiled_mask_segments_and_recipe():
    q, k, v = tensors(1, 150, 2, 64)
    mask = torch.arange(150)[None] < 100
    cu = torch.tensor([0, 20, 150])
    recipe = vcattn.Recipe("fast", mean_rows=32)
    for options in ({"key_padding_mask": mask}, {"cu_seqlens": cu}, {"cu_seqlens": (cu, cu)}, {"recipe": recipe}):

        def attend(q, k, v):
            return vcattn.attention(q, k, v, **options)

        assert torch.equal(compiled(attend)(q, k, v), attend(q, k, v))


def test_two_offsets_are_one_segment():
    q, k, v = tensors(1, 150, 2, 64)
    expected = vcattn.attention(q, k, v, cu_seqlens=[0, 150])
    for cu in ((0, 150), (np.int64(0), np.int64(150)), (torch.tensor(0), torch.tensor(150))):
        assert torch.equal(vcattn.attention(q, k, v, cu_seqlens=cu), expected)
    assert torch.equal(compiled(lambda q, k, v: vcattn.attention(q, k, v, cu_seqlens=(0, 150)))(q, k, v), expected)


def test_compiled_options():
    q, k, v = tensors(1, 320, 2, 64)

    def attend(q, k, v):
        return vcattn.attention(
            q, k, v, recipe="accurate,v_order=cube", scale=0.3, grid=(0, 5, 8, 8), backend="cpu", allow_nonfinite=True
        )

    assert torch.equal(compiled(attend)(q, k, v), attend(q, k, v))
    q[0, 3, 1, 2] = float("nan")
    assert torch.equal(compiled(attend)(q, k, v).isnan(), q.isnan().any(-1, keepdim=True).expand_as(q))


def test_compiled_grids_of_orders_that_cluster():
    q, k, v = tensors(1, 400, 2, 64)
    v[:, 320:] += 9
    traced = vcattn.State(vcattn.Schedule(8))

    @compiled
    def attend(q, k, v, step):
        return vcattn.attention(q, k, v, grid=(0, 1, 1, 320), state=traced.of("layer"), step=step)

    expected = vcattn.attention(q, k, v, grid=(0, 1, 1, 320))
    assert torch.equal(attend(q, k, v, 0), expected)
    assert not torch.equal(expected, vcattn.attention(q, k, v))


def test_compiled_steps_with_state():
    eager, traced = (vcattn.State(vcattn.Schedule(8)) for _ in range(2))

    @compiled
    def attend(q, k, v, step):
        return vcattn.attention(q, k, v, state=traced.of("layer"), step=step)

    for step in range(8):
        q, k, v = (x + step for x in tensors(1, 400, 2, 64))
        assert torch.equal(attend(q, k, v, step), vcattn.attention(q, k, v, state=eager.of("layer"), step=step))


def test_compiled_states_let_nonfinite_values_through():
    q, k, v = tensors(1, 2, 400, 64)
    v[0, 1, 7, 3] = float("nan")

    schedule = vcattn.Schedule(8)

    def attend(q, k, v):
        return vcattn.sdpa(q, k, v, state=vcattn.State(schedule), step=0)

    expected = attend(q, k, v)
    found = compiled(attend)(q, k, v)
    assert expected.isnan().any() and torch.equal(found.isnan(), expected.isnan())


EXPECT_TORCH = {  # inputs that torch answers and the library refuses
    "no batch": lambda q, k, v: ((q[:0], k[:0], v[:0]), {}),
    "one key head and two of the values": lambda q, k, v: ((q, k[:, :1], v), {"enable_gqa": True}),
    "fewer values than keys": lambda q, k, v: ((q, k, v[:, :, :149]), {}),
    "a scale beyond 2^64": lambda q, k, v: ((q, k, v), {"scale": 1e30}),
}


@pytest.mark.parametrize("case", EXPECT_TORCH)
@pytest.mark.filterwarnings("ignore:vcattn")
def test_compiled_patch_leaves_to_torch_what_the_library_refuses(case: str):
    q, k, v = (x.float() for x in tensors(2, 2, 150, 64))
    inputs, options = EXPECT_TORCH[case](q, k, v)
    expected = F.scaled_dot_product_attention(*inputs, **options)
    attend = lambda *x: F.scaled_dot_product_attention(*x, **options)  # noqa: E731
    for run in (attend, compiled(attend)):
        torch._dynamo.reset()
        with vcattn.patch_sdpa(min_seqlen=0) as report:
            torch.testing.assert_close(run(*inputs), expected)
        assert report.served == 0 and sum(report.fallbacks.values()) >= 1


def test_compiled_patch_broadcasts_heads():
    q, k, v = tensors(1, 2, 150, 64)
    with vcattn.patch_sdpa(min_seqlen=0) as report:
        out = compiled(lambda q, k, v: F.scaled_dot_product_attention(q, k, v))(q, k[:, :1], v)
    assert torch.equal(out, vcattn.sdpa(q, k[:, :1], v)) and report.served == 1


def test_compiled_patch_serves():
    qkv = tensors(1, 2, 150, 64)
    with vcattn.patch_sdpa(min_seqlen=0) as report:
        out = compiled(lambda q, k, v: F.scaled_dot_product_attention(q, k, v))(*qkv)
    assert torch.equal(out, vcattn.sdpa(*qkv)) and report.served == 1


@pytest.mark.parametrize("dim, causal, gradient", [(64, True, False), (300, False, False), (64, False, True)])
def test_compiled_patch_falls_back_and_warns_once(dim: int, causal: bool, gradient: bool):
    """Refusals by this layer (a causal call, one with gradients) and by the library (a head dimension of 300)."""
    q, k, v = tensors(1, 2, 150, dim)
    q.requires_grad_(gradient)
    function = dynamic(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal))
    with warnings.catch_warnings(record=True) as caught, vcattn.patch_sdpa(min_seqlen=0) as report:
        warnings.simplefilter("always")
        out = function(q, k, v)
        function(q, k, v)
    assert torch.equal(out, F.scaled_dot_product_attention(q, k, v, is_causal=causal))
    assert len([w for w in caught if "vcattn" in str(w.message)]) == 1
    assert report.served == 0 and sum(report.fallbacks.values()) >= 1


def test_compiled_short_calls_are_torchs_own_and_compile_once():
    qkv = tensors(1, 2, 150, 64)
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), fullgraph=True, backend=counter)
    with vcattn.patch_sdpa() as report:
        for _ in range(5):
            assert torch.equal(function(*qkv), F.scaled_dot_product_attention(*qkv))
    assert counter.frame_count == 1 and report.served == 0


def test_fake_and_meta_tensors():
    q, k, v = (x.to("meta") for x in tensors(2, 3, 150, 64))
    out, lse = vcattn.attention(q, k, v, layout="BHSD", return_lse=True)
    assert out.device.type == "meta" and out.shape == (2, 3, 150, 64) and out.stride() == (28800, 64, 192, 1)
    assert lse.shape == (2, 3, 150) and lse.dtype == torch.float32


def test_inductor():
    q, k, v = tensors(1, 2, 150, 64)
    attend = torch.compile(lambda q, k, v: vcattn.attention(q * 2, k + 1, v, layout="BHSD") * 0.5, fullgraph=True)
    assert torch.equal(attend(q, k, v), vcattn.attention(q * 2, k + 1, v, layout="BHSD") * 0.5)
