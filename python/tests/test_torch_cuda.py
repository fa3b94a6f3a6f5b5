"""CUDA tensors: stream, device, graphs, no waiting, compilation, and the same results as the CPU back end. The cases of
test_cases.py run on them too."""

from __future__ import annotations

import pytest

from reference import BOUND, normal

torch = pytest.importorskip("torch", reason="needs torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import torch.nn.functional as F  # noqa: E402

import vcattn  # noqa: E402
import vcattn.torch_op  # noqa: E402

BACKEND = next((backend.name for backend in vcattn.backends() if backend.available and backend.name != "cpu"), None)
if BACKEND is None:
    pytest.skip(
        "needs a back end for this device: " + "; ".join(f"{b.name}: {b.reason}" for b in vcattn.backends()),
        allow_module_level=True,
    )


def tensors(*shape: int) -> list[torch.Tensor]:
    return [torch.from_numpy(normal(i, *shape)).bfloat16().cuda() for i in range(3)]


def exact_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Of [batch, seqlen, num_heads, head_dim], in FP64, head by head: K and V may be long."""
    heads = []
    for h in range(q.shape[2]):
        scores = q[:, rows, h].double() @ k[:, :, h].double().mT / q.shape[3] ** 0.5
        heads.append(scores.softmax(-1) @ v[:, :, h].double())
    return torch.stack(heads, 2)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    found, expected = found.float(), expected.float()
    return float((found - expected).norm() / expected.norm()) < BOUND


def test_equals_the_cpu_back_end():
    q, k, v = tensors(1, 1000, 3, 128)
    out, lse = vcattn.attention(q, k, v, return_lse=True)
    expected, expected_lse = vcattn.attention(q.cpu(), k.cpu(), v.cpu(), return_lse=True)
    assert close(out.cpu(), expected)
    torch.testing.assert_close(lse.cpu(), expected_lse, atol=0.02, rtol=0)


def test_current_stream():
    """On a side stream: sleep, fill the inputs, attend, read; 20 times."""
    sources = tensors(1, 2000, 4, 128)
    expected = vcattn.attention(*sources)
    stream = torch.cuda.Stream()
    for _ in range(20):
        inputs = [torch.zeros_like(x) for x in sources]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            for x, source in zip(inputs, sources):
                x.copy_(source)
            out = vcattn.attention(*inputs)
            read = out.clone()
        stream.synchronize()
        assert torch.equal(read, expected)


def test_every_path_is_forced():
    q, k, v = tensors(1, 300, 2, 128)
    assert torch.equal(vcattn.attention(q, k, v, backend=BACKEND), vcattn.attention(q, k, v))
    with pytest.raises(vcattn.Error, match="cpu"):
        vcattn.attention(q, k, v, backend="cpu")


def test_huge_temporary():
    """B1 H56 S73,774: strides and offsets past 2^31 bytes, and little memory beside the tensors."""
    q, k, v = (torch.randn(1, 73774, 56, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    vcattn.attention(q[:, :200], k[:, :200], v[:, :200])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = vcattn.attention(q, k, v)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before - out.nbytes
    assert extra <= 0.65 * 3 * q.nbytes, f"{extra / (3 * q.nbytes):.3f} of the bytes of q, k and v"
    rows = [0, 40_000, 73_773]
    assert close(out[:, rows], exact_rows(q, k, v, rows))


def test_overflow_past_299520_keys():
    """Sq 256, Sk 299,521, H 56."""
    q = torch.randn(1, 256, 56, 128, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(1, 299521, 56, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    v += 1
    rows = [0, 255]
    torch.testing.assert_close(
        vcattn.attention(q, k, v)[:, rows].double(), exact_rows(q, k, v, rows), atol=5e-3, rtol=2**-8
    )


def test_never_waits():
    q, k, v = tensors(1, 2000, 4, 128)
    state = vcattn.State(vcattn.Schedule(8, "every_step"))
    mask = torch.ones(1, 2000, dtype=torch.bool, device="cuda")
    swapped = [x.transpose(1, 2) for x in (q, k, v)]
    vcattn.attention(q, k, v)
    with vcattn.patch_sdpa(min_seqlen=0) as report:
        torch.cuda.set_sync_debug_mode("error")
        try:
            for step in range(4):
                vcattn.attention(q, k, v, state=state, step=step, key_padding_mask=mask, return_lse=True)
                F.scaled_dot_product_attention(*swapped, attn_mask=mask[:, None, None])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert report.served == 4


def test_states_give_what_calls_of_their_own_give():
    q, k, v = tensors(2, 1500, 4, 128)
    state = vcattn.State(vcattn.Schedule(8, "every_step"))
    for step in range(8):
        v += 0.05 * torch.randn_like(v)
        expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
        assert close(vcattn.attention(q, k, v, state=state, step=step), expected), f"step {step}"


@pytest.mark.filterwarnings("ignore:vcattn")
@pytest.mark.parametrize("shape", ["BS", "B11S", "B1SS", "SS", "float B11S"])
def test_masks_are_honoured_or_left_to_torch(shape: str):
    """What cannot be seen without waiting, or differs between queries, is torch's."""
    q, k, v = (x.transpose(1, 2) for x in tensors(2, 300, 2, 128))
    keys = torch.arange(300, device="cuda") < torch.tensor([[90], [300]], device="cuda")
    mask = {
        "BS": keys[:1],
        "B11S": keys[:, None, None],
        "B1SS": keys[:, None, None].expand(2, 1, 300, 300).contiguous(),
        "SS": torch.ones(300, 300, dtype=torch.bool, device="cuda").tril(),
        "float B11S": torch.zeros(2, 1, 1, 300, device="cuda", dtype=q.dtype).masked_fill(
            ~keys[:, None, None], float("-inf")
        ),
    }[shape]
    expected = F.scaled_dot_product_attention(q, k, v, mask)
    with vcattn.patch_sdpa(min_seqlen=0) as report:
        assert close(F.scaled_dot_product_attention(q, k, v, mask), expected)
    assert report.served == (shape in ("BS", "B11S")) and sum(report.fallbacks.values()) == 1 - report.served


@pytest.mark.filterwarnings("ignore:vcattn")
def test_head_dims_that_the_back_end_lacks_are_refused_or_left_to_torch():
    q, k, v = (x.transpose(1, 2) for x in tensors(1, 300, 2, 192))
    with pytest.raises(vcattn.UnsupportedError, match="head_dim"):
        vcattn.sdpa(q, k, v)
    expected = F.scaled_dot_product_attention(q, k, v)
    with vcattn.patch_sdpa(min_seqlen=0) as report:
        assert torch.equal(F.scaled_dot_product_attention(q, k, v), expected)
    assert report.served == 0 and sum(report.fallbacks.values()) == 1


def test_opcheck():
    mask = torch.arange(300, device="cuda")[None] < 200
    options = dict(recipe="accurate", bhsd=False, key_padding_mask=mask, return_lse=True)
    torch.library.opcheck(torch.ops.vcattn.attention.default, tuple(tensors(1, 300, 2, 128)), options)


def test_compiled_equals_eager():
    """By Inductor, without a graph break, of permuted inputs of any length: the same bits and strides."""
    torch._dynamo.reset()

    def attend(q, k, v):
        return vcattn.attention(q * 1.5, k, v, layout="BHSD")

    compiled = torch.compile(attend, fullgraph=True, dynamic=True)
    for seqlen in (300, 777):
        qkv = [x.transpose(1, 2) for x in tensors(1, seqlen, 2, 128)]
        found, expected = compiled(*qkv), attend(*qkv)
        assert torch.equal(found, expected) and found.stride() == expected.stride()


def test_replayed_in_a_graph():
    q, k, v = tensors(1, 2000, 4, 128)
    vcattn.attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = vcattn.attention(q, k, v)
    q.copy_(q.flip(1))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, vcattn.attention(q, k, v))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_on_the_device_of_its_inputs():
    sources = tensors(1, 1000, 3, 128)
    expected = vcattn.attention(*sources)
    out = vcattn.attention(*(x.to("cuda:1") for x in sources))
    assert out.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
    assert torch.equal(out.cpu(), expected.cpu())


def test_memory_on_another_device_is_refused():
    q, k, v = tensors(1, 100, 3, 128)
    with pytest.raises(vcattn.InvalidArgumentError, match="k: on cuda:0 like q; found cpu"):
        vcattn.attention(q, k.cpu(), v)
    with pytest.raises(vcattn.InvalidArgumentError, match="in host memory"):
        vcattn.attention(q, k, v, cu_seqlens=torch.tensor([0, 100], device="cuda"))
