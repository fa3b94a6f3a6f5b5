"""The Python layer on CUDA tensors with a stand-in for the library, which records its parameters and computes nothing:
stream, device, memory, waiting, graphs and overhead. What the library makes of them is in test_torch_cuda.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import vcattn  # noqa: E402
from vcattn import _abi, _library  # noqa: E402
from vcattn.overhead import declined_samples, layer_seconds  # noqa: E402

WORKSPACE = 1000


class Recorder:
    """Stands in for the library: every call's parameters, workspace and the device that was current."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def size(self, params: int, size: int, message: int) -> int:
        _library.ctypes.c_size_t.from_address(size).value = WORKSPACE
        return _abi.OK

    def attention(self, params: int, workspace: int, size: int, message: int) -> int:
        return self._record(params, workspace, size)

    def group(self, params: int, warm: int, centroids: int, permutation: int, workspace: int, size: int, reply: int):
        return self._record(params, workspace, size, warm=warm, centroids=centroids, permutation=permutation)

    def _record(self, params: int, workspace: int, size: int, **more: int) -> int:
        copy = _abi.AttentionParams.from_buffer_copy(_abi.AttentionParams.from_address(params))
        device = torch.cuda.current_device()
        self.calls.append(SimpleNamespace(params=copy, workspace=workspace, size=size, device=device, **more))
        return _abi.OK


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    vcattn.State(vcattn.Schedule(8)), vcattn.Recipe("auto"), _library.get()
    from vcattn.recipe import as_recipe, facts

    as_recipe("auto"), facts("auto")
    recorder, real = Recorder(), _library.get()
    fake = SimpleNamespace(
        vcattn_attention=recorder.attention,
        vcattn_attention_workspace_size=recorder.size,
        vcattn_group=recorder.group,
        vcattn_group_workspace_size=recorder.size,
        vcattn_schedule_at=real.vcattn_schedule_at,
    )
    monkeypatch.setattr(_library, "_library", fake)
    return recorder


def tensors(device: str = "cuda:0") -> list[torch.Tensor]:
    return [torch.randn(1, 2, 300, 64, device=device).bfloat16().transpose(1, 2) for _ in range(3)]


def test_parameters(recorder: Recorder):
    q, k, v = tensors()
    mask = torch.ones(1, 300, dtype=torch.bool, device="cuda:0")
    out, lse = vcattn.attention(q, k, v, key_padding_mask=mask, return_lse=True)
    (call,) = recorder.calls
    params = call.params
    assert params.memory == _abi.MEMORY_CUDA and params.backend == _abi.BACKEND_AUTO
    assert [params.q.data, params.k.data, params.v.data, params.out.data] == [x.data_ptr() for x in (q, k, v, out)]
    assert list(params.k.stride) == list(k.stride()) and list(params.out.stride) == list(out.stride())
    assert (params.key_mask, params.lse) == (mask.data_ptr(), lse.data_ptr())
    assert call.size == WORKSPACE and call.workspace % _abi.WORKSPACE_ALIGNMENT == 0
    assert out.device == lse.device == q.device


def test_the_current_stream(recorder: Recorder):
    q, k, v = tensors()
    stream = torch.cuda.Stream()
    vcattn.attention(q, k, v)
    with torch.cuda.stream(stream):
        vcattn.attention(q, k, v)
    assert [call.params.stream or 0 for call in recorder.calls] == [0, stream.cuda_stream]
    assert stream.cuda_stream != 0


def test_nothing_waits(recorder: Recorder):
    q, k, v = tensors()
    state = vcattn.State(vcattn.Schedule(8, "every_step", reuse=2))
    mask = torch.ones(1, 300, dtype=torch.bool, device="cuda:0")
    with vcattn.patch_sdpa(min_seqlen=0) as report:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for step in range(4):
                vcattn.attention(q, k, v, state=state, step=step, key_padding_mask=mask, return_lse=True)
            swapped = [x.transpose(1, 2) for x in (q, k, v)]
            torch.nn.functional.scaled_dot_product_attention(*swapped, attn_mask=mask[:, None, None])
            vcattn.attention(q[0], k[0], v[0], cu_seqlens=[0, 100, 300])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert report.served == 1 and len(recorder.calls) == 4 + 2 + 2
    groups = [call for call in recorder.calls if hasattr(call, "warm")]
    assert [call.warm for call in groups] == [0, 1]
    attends = [call for call in recorder.calls if not hasattr(call, "warm")][:4]
    assert [call.params.permutation for call in attends] == [g.permutation for g in groups for _ in range(2)]


def test_a_graph_captures_the_layer(recorder: Recorder):
    q, k, v = tensors()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = vcattn.attention(q, k, v)
        out.fill_(3)
    graph.replay()
    assert recorder.calls[0].params.stream not in (None, 0) and bool((out == 3).all())


def test_float_masks_are_refused_rather_than_read(recorder: Recorder):
    q, k, v = (x.transpose(1, 2) for x in tensors())
    with pytest.raises(vcattn.UnsupportedError, match="only a bool mask"):
        vcattn.sdpa(q, k, v, attn_mask=torch.zeros(1, 1, 1, 300, device="cuda:0"))


def test_offsets_in_cuda_memory_are_refused_rather_than_read(recorder: Recorder):
    q, k, v = tensors()
    with pytest.raises(vcattn.InvalidArgumentError, match="in host memory"):
        vcattn.attention(q, k, v, cu_seqlens=torch.tensor([0, 300], device="cuda:0"))


def test_places_must_agree(recorder: Recorder):
    q, k, v = tensors()
    with pytest.raises(vcattn.InvalidArgumentError, match="k: on cuda:0 like q; found cpu"):
        vcattn.attention(q, k.cpu(), v)
    with pytest.raises(vcattn.InvalidArgumentError, match="key_padding_mask: on cuda:0"):
        vcattn.attention(q, k, v, key_padding_mask=torch.ones(1, 300, dtype=torch.bool))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_device_of_the_inputs_is_current(recorder: Recorder):
    out = vcattn.attention(*tensors("cuda:1"))
    assert out.device.index == 1 and recorder.calls[0].device == 1 and torch.cuda.current_device() == 0


def test_dlpack_in_cuda_memory(recorder: Recorder):
    class Foreign:
        def __init__(self, x: torch.Tensor) -> None:
            self.__dlpack__, self.__dlpack_device__ = x.__dlpack__, x.__dlpack_device__

    q, k, v = tensors()
    out = vcattn.attention(*map(Foreign, (q, k, v)))
    assert out.device == q.device and recorder.calls[0].params.q.data == q.data_ptr()


def test_overhead():
    assert layer_seconds(*tensors()) < 30e-6


@pytest.mark.parametrize("tokens", [77, 512, 1024, 2048, 4096])
def test_short_calls_are_not_slower_through_the_patch(tokens: int):
    """Within 5 % of torch or 2 us of the host's time, by leaving them to torch: Python looks at each call. The least of
    many, as what else runs only adds."""
    q, k, v = (torch.randn(1, 24, tokens, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    plain, patched = map(min, declined_samples(q, k, v, calls=200 if tokens < 2048 else 40))
    print(f"{tokens} tokens: {1e6 * plain:.2f} us, patched {1e6 * patched:.2f} us")
    assert patched <= max(1.05 * plain, plain + 2e-6), f"{1e6 * plain:.2f} us, patched {1e6 * patched:.2f} us"
