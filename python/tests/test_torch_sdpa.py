"""vcattn.sdpa and vcattn.patch_sdpa against torch's scaled_dot_product_attention."""

from __future__ import annotations

import inspect
import threading
import warnings

import pytest

from reference import BOUND, normal

torch = pytest.importorskip("torch", reason="needs torch")

import torch.nn.functional as F  # noqa: E402

import vcattn  # noqa: E402
from vcattn.overhead import declined_samples  # noqa: E402
from vcattn.policy import GROUPING_MIN_SEQLEN  # noqa: E402

TORCH_SDPA = F.scaled_dot_product_attention
B, H, S, D = 2, 3, 140, 64


def tensors(*shape: int) -> list[torch.Tensor]:
    return [torch.from_numpy(normal(i, *shape)) for i in range(3)]


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.shape == expected.shape and float((found - expected).norm() / expected.norm()) < BOUND


def test_signature_is_torchs():
    expected = ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    parameters = inspect.signature(vcattn.sdpa).parameters
    assert [name for name, p in parameters.items() if p.kind is not p.KEYWORD_ONLY] == expected
    assert [parameters[name].default for name in expected[3:]] == [None, 0.0, False, None, False]
    for name in expected:
        assert name in TORCH_SDPA.__doc__


@pytest.mark.parametrize("shape", [(B, H, S, D), (H, S, D)])
def test_ranks(shape: tuple[int, ...]):
    q, k, v = tensors(*shape)
    assert close(vcattn.sdpa(q, k, v), TORCH_SDPA(q, k, v))
    assert close(vcattn.sdpa(q, k, v, scale=0.5), TORCH_SDPA(q, k, v, scale=0.5))


def test_broadcasting():
    q, k, v = tensors(B, H, S, D)
    k, v = k[:1], v[:1, :1]
    assert close(vcattn.sdpa(q, k, v), TORCH_SDPA(q, k.expand(B, -1, -1, -1), v.expand(B, H, -1, -1)))
    assert close(vcattn.sdpa(q[:1], v, v.expand(B, 1, S, D)), TORCH_SDPA(q[:1], v, v.expand(B, 1, S, D)))


def test_gqa():
    q, k, v = tensors(B, 8, S, D)
    k, v = k[:, :2], v[:, :2]
    assert close(vcattn.sdpa(q, k, v, enable_gqa=True), TORCH_SDPA(q, k, v, enable_gqa=True))
    with pytest.raises(vcattn.InvalidArgumentError, match="enable_gqa"):
        vcattn.sdpa(q, k, v)


KEYS = torch.arange(S) < torch.tensor([[90], [S]])  # [B, S]
HONOURED = {
    "(1,S)": KEYS[:1],
    "(B,1,1,S)": KEYS[:, None, None],
    "(B,1,S,S) expanded": KEYS[:, None, None].expand(B, 1, S, S),
    "(B,H,S,S) expanded": KEYS[:, None, None].expand(B, H, S, S),
    "(B,1,1,1)": torch.ones(B, 1, 1, 1, dtype=torch.bool),
    "float (B,1,1,S)": torch.zeros(B, 1, 1, S).masked_fill(~KEYS[:, None, None], float("-inf")),
}
REFUSED = {
    "(S,S)": torch.ones(S, S, dtype=torch.bool).tril(),
    "(B,1,S,S)": KEYS[:, None, None].expand(B, 1, S, S).contiguous(),
    "(1,H,1,S)": torch.ones(1, H, 1, S, dtype=torch.bool),
    "float bias (B,1,1,S)": torch.randn(B, 1, 1, S),
    "float (S,S)": torch.zeros(S, S),
    "float lowest": torch.zeros(B, 1, 1, S).masked_fill(~KEYS[:, None, None], torch.finfo(torch.float32).min),
}


@pytest.mark.parametrize("name", HONOURED)
def test_masks_honoured(name: str):
    q, k, v = tensors(B, H, S, D)
    assert close(vcattn.sdpa(q, k, v, HONOURED[name]), TORCH_SDPA(q, k, v, HONOURED[name]))


@pytest.mark.parametrize("name", REFUSED)
def test_masks_refused_never_ignored(name: str):
    q, k, v = tensors(B, H, S, D)
    with pytest.raises(vcattn.UnsupportedError, match="attn_mask"):
        vcattn.sdpa(q, k, v, REFUSED[name])


@pytest.mark.parametrize("shape", [(B, S), (S, S, 1, 1, 1), (7,)])
def test_masks_that_do_not_broadcast(shape: tuple[int, ...]):
    with pytest.raises(vcattn.InvalidArgumentError, match="attn_mask"):
        vcattn.sdpa(*tensors(B, H, S, D), torch.ones(shape, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.complex64])
def test_masks_that_torch_refuses(dtype: torch.dtype):
    q, k, v = tensors(B, H, S, D)
    mask = torch.zeros(B, 1, 1, S, dtype=dtype)
    with pytest.raises(vcattn.InvalidArgumentError, match="attn_mask: bool or floating-point"):
        vcattn.sdpa(q, k, v, mask)
    with vcattn.patch_sdpa(min_seqlen=0), pytest.warns(UserWarning, match="attn_mask"), pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(q, k, v, mask)


@pytest.mark.parametrize("which", range(4))
def test_arrays_that_are_no_tensors_are_refused(which: int):
    inputs = [*tensors(B, H, S, D), torch.ones(1, 1, 1, S, dtype=torch.bool)]
    inputs[which] = inputs[which].numpy()
    with pytest.raises(vcattn.InvalidArgumentError, match="torch tensor; found ndarray"):
        vcattn.sdpa(*inputs)


def test_the_default_min_seqlen_is_that_of_calls_that_group():
    assert vcattn.patch_sdpa().min_seqlen == GROUPING_MIN_SEQLEN


def test_min_seqlen_is_a_number():
    with pytest.raises(vcattn.InvalidArgumentError, match="min_seqlen is a whole number"):
        vcattn.patch_sdpa(min_seqlen=None)


def test_other_arguments_refused():
    q, k, v = tensors(B, H, S, D)
    with pytest.raises(vcattn.UnsupportedError, match="dropout"):
        vcattn.sdpa(q, k, v, dropout_p=0.1)
    with pytest.raises(vcattn.UnsupportedError, match="causal"):
        vcattn.sdpa(q, k, v, is_causal=True)
    with pytest.raises(vcattn.UnsupportedError, match="axes"):
        vcattn.sdpa(q[None], k[None], v[None])
    nested = torch.nested.nested_tensor([q[0], q[1]], layout=torch.jagged)
    with pytest.raises(vcattn.UnsupportedError, match="nested"):
        vcattn.sdpa(nested, nested, nested)


def test_nonfinite_rows_are_nan_as_in_torch():
    q, k, v = tensors(1, 1, S, D)
    q[0, 0, 5, 2] = float("nan")
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # the CPU's flash kernel of 2.5 drops it
        expected = TORCH_SDPA(q, k, v)
    assert torch.equal(vcattn.sdpa(q, k, v).isnan(), expected.isnan()) and expected.isnan().any()


# ---- patch_sdpa -----------------------------------------------------------------------------------------------------


def test_patch_serves_and_is_undone():
    q, k, v = tensors(B, H, S, D)
    with vcattn.patch_sdpa(min_seqlen=0) as report:
        served = F.scaled_dot_product_attention(query=q, key=k, value=v)
    assert torch.equal(served, vcattn.sdpa(q, k, v)) and report.served == 1 and not report.fallbacks
    assert F.scaled_dot_product_attention is TORCH_SDPA


def test_patch_cannot_be_left_on():
    q, k, v = tensors(1, 1, S, D)
    with pytest.raises(ZeroDivisionError), vcattn.patch_sdpa(min_seqlen=0):
        raise ZeroDivisionError
    assert F.scaled_dot_product_attention is TORCH_SDPA
    with vcattn.patch_sdpa(min_seqlen=0) as outer, vcattn.patch_sdpa("bf16", min_seqlen=0) as inner:
        F.scaled_dot_product_attention(q, k, v)
    assert (outer.served, inner.served) == (0, 1)
    assert F.scaled_dot_product_attention is TORCH_SDPA
    with pytest.raises(vcattn.InvalidArgumentError, match="no recipe"), vcattn.patch_sdpa("nothing"):
        pass
    assert F.scaled_dot_product_attention is TORCH_SDPA


def test_patch_under_somebody_elses():
    with vcattn.patch_sdpa(min_seqlen=0):
        ours = F.scaled_dot_product_attention
        theirs = F.scaled_dot_product_attention = lambda *a, **b: ours(*a, **b)
    try:
        assert F.scaled_dot_product_attention is theirs
        q, k, v = tensors(1, 1, S, D)
        assert torch.equal(F.scaled_dot_product_attention(q, k, v), TORCH_SDPA(q, k, v))
    finally:
        F.scaled_dot_product_attention = TORCH_SDPA


def test_patch_holds_for_its_thread_alone():
    q, k, v = tensors(1, 1, S, D)
    inside, outside = threading.Event(), threading.Event()
    results = {}

    def patched() -> None:
        with vcattn.patch_sdpa(min_seqlen=0) as report:
            inside.set()
            outside.wait()
            results["patched"] = F.scaled_dot_product_attention(q, k, v)
        results["report"] = report

    thread = threading.Thread(target=patched)
    thread.start()
    inside.wait()
    plain = F.scaled_dot_product_attention(q, k, v)
    outside.set()
    thread.join()
    assert torch.equal(plain, TORCH_SDPA(q, k, v)) and not torch.equal(plain, results["patched"])
    assert results["report"].served == 1 and F.scaled_dot_product_attention is TORCH_SDPA


def test_log_flood():
    q, k, v = tensors(1, 1, 8, D)
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    with warnings.catch_warnings(record=True) as caught, vcattn.patch_sdpa(min_seqlen=0) as report:
        warnings.simplefilter("always")
        for _ in range(1000):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert torch.equal(out, TORCH_SDPA(q, k, v, attn_mask=mask))
    assert len(caught) == 1 and "attn_mask differs between queries" in str(caught[0].message)
    assert caught[0].filename == __file__
    assert report.served == 0 and list(report.fallbacks.values()) == [1000]


@pytest.mark.parametrize("tokens", [77, 2048, 4096])
def test_short_calls_are_torchs_own(tokens: int):
    q, k, v = tensors(1, 1, tokens, D)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with vcattn.patch_sdpa() as report:
            out = F.scaled_dot_product_attention(q, k, v)
    assert torch.equal(out, TORCH_SDPA(q, k, v))
    assert sum(report.fallbacks.values()) == 1 and report.served == 0


@pytest.mark.parametrize(
    "arguments",
    [{"attn_mask": torch.ones(8, 8).tril().bool()}, {"is_causal": True}, {"scale": 0.3}, {"enable_gqa": True}],
)
def test_short_calls_keep_their_arguments(arguments: dict):
    q, k, v = tensors(1, 4, 8, D)
    if "enable_gqa" in arguments:
        k, v = k[:, :2], v[:, :2]
    expected = TORCH_SDPA(q, k, v, **arguments)
    with vcattn.patch_sdpa():
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, **arguments), expected)


@pytest.mark.filterwarnings("ignore:vcattn")
@pytest.mark.parametrize(
    "change, reason",
    [
        ({"dropout_p": 0.5}, "dropout_p"),
        ({"is_causal": True}, "causal"),
        ({"dtype": torch.float64}, "found float64"),
        ({"requires_grad": True}, "no backward"),
        ({"head_dim": 512}, "found 512"),
        ({"autocast": True}, "autocast"),
        ({"head_dim_v": 32}, "head_dim"),
    ],
)
def test_everything_else_falls_back(change: dict, reason: str):
    dim = change.get("head_dim", D)
    q, k, v = (x.to(change.get("dtype", torch.float32)) for x in tensors(1, 1, S, dim))
    v = v[..., : change.get("head_dim_v", dim)]
    q.requires_grad_(change.get("requires_grad", False))
    arguments = {name: value for name, value in change.items() if name in ("dropout_p", "is_causal")}
    with torch.autocast("cpu", enabled=change.get("autocast", False)):
        torch.manual_seed(0)
        expected = TORCH_SDPA(q, k, v, **arguments)
        with vcattn.patch_sdpa(min_seqlen=0) as report:
            torch.manual_seed(0)
            out = F.scaled_dot_product_attention(q, k, v, **arguments)
    assert torch.equal(out, expected) and out.dtype == expected.dtype
    (found,) = report.fallbacks
    assert reason in found


def test_arguments_that_torch_refuses_raise_as_in_torch():
    q, k, _ = tensors(1, 1, S, D)
    with vcattn.patch_sdpa(min_seqlen=0):
        for call in (lambda: F.scaled_dot_product_attention(q), lambda: F.scaled_dot_product_attention(q, k)):
            with pytest.raises(TypeError):
                call()


def test_short_calls_cost_little():
    """What the patch adds to a call that it leaves to torch: half a microsecond; more on a busy machine. The least of
    many, as what else runs only adds, at one token, where torch's own work is least."""
    plain, patched = map(min, declined_samples(*tensors(1, 1, 1, D)))
    assert patched - plain < 2e-6, f"{1e6 * plain:.2f} us, patched {1e6 * patched:.2f} us"
