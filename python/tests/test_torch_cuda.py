"""CUDA tensors: stream, device, graphs, no waiting, and the same results as the CPU back end."""

from __future__ import annotations

import pytest

from reference import BOUND, normal

torch = pytest.importorskip("torch", reason="needs torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import vcattn  # noqa: E402

if not any(backend.available for backend in vcattn.backends() if backend.name != "cpu"):
    pytest.skip(
        "needs a back end for this device: " + "; ".join(f"{b.name}: {b.reason}" for b in vcattn.backends()),
        allow_module_level=True,
    )


def tensors(*shape: int) -> list[torch.Tensor]:
    return [torch.from_numpy(normal(i, *shape)).bfloat16().cuda() for i in range(3)]


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


def test_never_waits():
    q, k, v = tensors(1, 2000, 4, 128)
    state = vcattn.State(vcattn.Schedule(8, "every_step"))
    mask = torch.ones(1, 2000, dtype=torch.bool, device="cuda")
    vcattn.attention(q, k, v)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(4):
            vcattn.attention(q, k, v, state=state, step=step, key_padding_mask=mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")


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
