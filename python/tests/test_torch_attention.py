"""vcattn.attention over torch tensors in host memory."""

from __future__ import annotations

import numpy as np
import pytest

from reference import BOUND, error, exact, normal

torch = pytest.importorskip("torch", reason="needs torch")

import vcattn  # noqa: E402


def tensors(*shape: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.from_numpy(normal(i, *shape)).to(dtype) for i in range(3)]


def to_numpy(*xs: torch.Tensor) -> list[np.ndarray]:
    return [x.float().numpy() for x in xs]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_and_layouts(dtype: torch.dtype):
    q, k, v = tensors(2, 150, 3, 64, dtype=dtype)
    out, lse = vcattn.attention(q, k, v, return_lse=True)
    assert out.dtype == dtype and lse.dtype == torch.float32 and out.is_contiguous()
    assert error(out.float().numpy(), exact(*to_numpy(q, k, v))[0]) < BOUND
    swapped, swapped_lse = vcattn.attention(*(x.transpose(1, 2) for x in (q, k, v)), layout="BHSD", return_lse=True)
    assert torch.equal(swapped.transpose(1, 2), out) and torch.equal(swapped_lse.transpose(1, 2), lse)
    assert swapped.transpose(1, 2).reshape(2, 150, 192).data_ptr() == swapped.data_ptr()


def test_equals_numpy():
    q, k, v = tensors(1, 150, 3, 64, dtype=torch.float32)
    out = vcattn.attention(q, k, v)
    assert np.array_equal(out.numpy(), vcattn.attention(q.numpy(), k.numpy(), v.numpy()))


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16", "float16"), ("bfloat16", "float32", "bfloat16")])
def test_mixed_dtypes(dtypes: tuple[str, ...]):
    q, k, v = (x.to(getattr(torch, dtype)) for x, dtype in zip(tensors(1, 90, 1, 64), dtypes))
    out = vcattn.attention(q, k, v)
    assert out.dtype == q.dtype
    assert error(out.float().numpy(), exact(*to_numpy(q, k, v))[0]) < BOUND


def test_views_of_a_fused_projection():
    qkv = torch.from_numpy(normal(0, 2, 150, 3, 4, 64)).bfloat16()
    q, k, v = qkv.unbind(2)
    out = vcattn.attention(q, k, v)
    assert torch.equal(out, vcattn.attention(q.contiguous(), k.contiguous(), v.contiguous()))


def test_a_mask_of_another_library_is_refused():
    q, k, v = tensors(1, 150, 2, 64)
    mask = torch.arange(150)[None] < 100
    with pytest.raises(vcattn.InvalidArgumentError, match="key_padding_mask: a torch tensor like q; found ndarray"):
        vcattn.attention(q, k, v, key_padding_mask=mask.numpy())
    with pytest.raises(vcattn.InvalidArgumentError, match="key_padding_mask: a numpy array like q; found Tensor"):
        vcattn.attention(*to_numpy(q, k, v), key_padding_mask=mask)


def test_mask_and_segments():
    q, k, v = tensors(1, 150, 2, 64, dtype=torch.float32)
    mask = torch.arange(150)[None] < 100
    out = vcattn.attention(q, k, v, key_padding_mask=mask)
    assert error(out.numpy(), exact(*to_numpy(q, k, v), mask=mask.numpy())[0]) < BOUND
    cu = torch.tensor([0, 50, 150], dtype=torch.int32)
    out = vcattn.attention(q[0], k[0], v[0], cu_seqlens=cu)
    assert error(out[50:].numpy(), exact(*to_numpy(*(x[:, 50:] for x in (q, k, v))))[0][0]) < BOUND


def test_refusals():
    q, k, v = tensors(1, 20, 1, 64)
    with pytest.raises(vcattn.InvalidArgumentError, match="found float64"):
        vcattn.attention(q.double(), k, v)
    with pytest.raises(vcattn.InvalidArgumentError, match="k: a torch tensor like q; found ndarray"):
        vcattn.attention(q, k.float().numpy(), v)
    with pytest.raises(vcattn.InvalidArgumentError, match="k: on cpu like q; found meta"):
        vcattn.attention(q, k.to("meta"), v)
    with pytest.raises(vcattn.UnsupportedError, match="no backward pass"):
        vcattn.attention(q.requires_grad_(), k, v)
    with torch.no_grad():
        vcattn.attention(q, k, v)


def test_dlpack_of_a_dtype_that_numpy_lacks():
    class Foreign:
        def __init__(self, x: torch.Tensor) -> None:
            self.__dlpack__, self.__dlpack_device__ = x.__dlpack__, x.__dlpack_device__

    q, k, v = tensors(1, 20, 1, 64)
    out = vcattn.attention(*map(Foreign, (q, k, v)))
    assert isinstance(out, torch.Tensor) and torch.equal(out, vcattn.attention(q, k, v))


def test_dlpack_of_dtypes_of_which_numpy_lacks_one():
    class Foreign:
        def __init__(self, x: torch.Tensor) -> None:
            self.__dlpack__, self.__dlpack_device__ = x.__dlpack__, x.__dlpack_device__

    q, k, v = tensors(1, 20, 1, 64)
    k, v = k.float(), v.float()
    expected = vcattn.attention(q, k, v)
    for inputs in ((Foreign(q), Foreign(k), Foreign(v)), (q, Foreign(k), v), (Foreign(q), k, Foreign(v))):
        assert torch.equal(vcattn.attention(*inputs), expected)
    mask = torch.arange(20)[None] < 10
    masked = vcattn.attention(q, k, v, key_padding_mask=Foreign(mask.to(torch.uint8)))
    assert torch.equal(masked, vcattn.attention(q, k, v, key_padding_mask=mask))
