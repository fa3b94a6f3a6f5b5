"""vcattn.attention over numpy arrays: results, options and refusals."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import vcattn
from reference import BOUND, error, exact, normal
from vcattn import _call, _numpy_arrays


def qkv(batch: int = 1, seqlen_q: int = 50, seqlen_kv: int = 200, heads: int = 2, heads_kv: int = 2, dim: int = 64):
    return (
        normal(1, batch, seqlen_q, heads, dim),
        normal(2, batch, seqlen_kv, heads_kv, dim),
        normal(3, batch, seqlen_kv, heads_kv, dim),
    )


@pytest.mark.parametrize("recipe", vcattn.recipe_names())
def test_every_recipe(recipe: str):
    q, k, v = qkv()
    bound = {"fp32": 1e-5, "bf16": 1e-2}.get(recipe, 0.4 if recipe in ("sage3", "attn_qat", "vsmooth4") else BOUND)
    assert error(vcattn.attention(q, k, v, recipe=recipe), exact(q, k, v)[0]) < bound


def test_layouts_agree():
    q, k, v = qkv(batch=2)
    out, lse = vcattn.attention(q, k, v, return_lse=True)
    swapped = [x.swapaxes(1, 2) for x in (q, k, v)]
    out_bhsd, lse_bhsd = vcattn.attention(*swapped, layout="BHSD", return_lse=True)
    assert out_bhsd.shape == (2, 2, 50, 64) and lse_bhsd.shape == (2, 2, 50)
    assert np.array_equal(out_bhsd.swapaxes(1, 2), out) and np.array_equal(lse_bhsd.swapaxes(1, 2), lse)
    assert out_bhsd.swapaxes(1, 2).flags.c_contiguous and lse_bhsd.flags.c_contiguous


def test_scale_and_lse():
    q, k, v = qkv()
    out, lse = vcattn.attention(q, k, v, recipe="fp32", scale=0.3, return_lse=True)
    expected, expected_lse = exact(q, k, v, scale=0.3)
    assert error(out, expected) < 1e-5
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_scale_refused(scale: float):
    with pytest.raises(vcattn.InvalidArgumentError, match="scale"):
        vcattn.attention(*qkv(), scale=scale)


def test_key_padding_mask():
    q, k, v = qkv(batch=2)
    mask = np.arange(200)[None] < np.array([[120], [0]])
    out, lse = vcattn.attention(q, k, v, recipe="fp32", key_padding_mask=mask, return_lse=True)
    expected, expected_lse = exact(q, k, v, mask=mask)
    assert error(out, expected) < 1e-5
    assert (out[1] == 0).all() and np.isneginf(lse[1]).all()
    np.testing.assert_allclose(lse[0], expected_lse[0], atol=1e-5)
    shared = vcattn.attention(q, k, v, recipe="fp32", key_padding_mask=mask[0])
    assert error(shared, exact(q, k, v, mask=np.stack([mask[0]] * 2))[0]) < 1e-5


@pytest.mark.parametrize("shape", [(199,), (2, 199), (3, 200), (2, 1, 200), (200, 2)])
def test_mask_of_another_shape_is_refused(shape: tuple[int, ...]):
    with pytest.raises(vcattn.InvalidArgumentError, match="key_padding_mask: shape"):
        vcattn.attention(*qkv(batch=2), key_padding_mask=np.ones(shape, bool))


def test_mask_of_numbers_is_refused():
    with pytest.raises(vcattn.InvalidArgumentError, match="key_padding_mask: a bool array"):
        vcattn.attention(*qkv(), key_padding_mask=np.zeros((1, 200), np.float32))


def test_recipe_overrides():
    q, k, v = qkv(seqlen_kv=1000)
    changed = vcattn.attention(q, k, v, recipe=vcattn.Recipe("accurate", mean_rows=0, v_order="sequence"))
    assert not np.array_equal(changed, vcattn.attention(q, k, v))
    assert np.array_equal(changed, vcattn.attention(q, k, v, recipe="accurate,mean_rows=0,v_order=sequence"))
    assert vcattn.Recipe("accurate").changed(mean_rows=32).fields["mean_rows"] == "32"
    assert vcattn.Recipe("auto") == vcattn.Recipe("accurate") != vcattn.Recipe("fast")
    assert vcattn.Recipe("accurate", qk_hadamard=False).fields["qk_hadamard"] == "0"


@pytest.mark.parametrize(
    "recipe, match",
    [("nothing", "no recipe"), ("fast,mean_rows=33", "mean_rows"), ("fast,rows=1", "no field"), (3, "name or a")],
)
def test_unknown_recipes_are_refused(recipe: object, match: str):
    with pytest.raises(vcattn.InvalidArgumentError, match=match):
        vcattn.attention(*qkv(), recipe=recipe)


def test_refusals():
    q, k, v = qkv()
    refuse = pytest.raises(vcattn.InvalidArgumentError, match="layout")
    with refuse:
        vcattn.attention(q, k, v, layout="SBHD")
    with pytest.raises(vcattn.InvalidArgumentError, match="step needs"):
        vcattn.attention(q, k, v, step=1)
    with pytest.raises(vcattn.InvalidArgumentError, match="q: four axes"):
        vcattn.attention(q[0], k[0], v[0])
    with pytest.raises(vcattn.InvalidArgumentError, match="DLPack; found list"):
        vcattn.attention(q.tolist(), k, v)
    with pytest.raises(vcattn.InvalidArgumentError, match="k: seqlen is 200"):
        vcattn.attention(q, k[:, :7], v)
    with pytest.raises(vcattn.InvalidArgumentError, match="not negative"):
        vcattn.attention(q[:, ::-1], k, v)
    with pytest.raises(vcattn.InvalidArgumentError, match="cpu, sm90a"):
        vcattn.attention(q, k, v, backend="sm999")


def test_nonfinite_inputs_are_refused_or_let_through():
    q, k, v = qkv()
    q[0, 3, 1, 5] = np.nan
    with pytest.raises(vcattn.NonfiniteInputError, match="q"):
        vcattn.attention(q, k, v)
    out = vcattn.attention(q, k, v, allow_nonfinite=True)
    assert np.isnan(out[0, 3, 1]).all() and np.isfinite(np.delete(out, 3, axis=1)).all()


def test_cu_seqlens_as_pairs_and_kinds():
    q, k, v = qkv(seqlen_q=50, seqlen_kv=200)
    cu = ([0, 20, 50], np.array([0, 150, 200], np.int32))
    out = vcattn.attention(q, k, v, recipe="fp32", cu_seqlens=cu)
    for a, b, c, d in ((0, 20, 0, 150), (20, 50, 150, 200)):
        assert error(out[:, a:b], exact(q[:, a:b], k[:, c:d], v[:, c:d])[0]) < 1e-5
    packed, lse = vcattn.attention(q[0], k[0], v[0], recipe="fp32", cu_seqlens=cu, return_lse=True)
    assert np.array_equal(packed, out[0]) and lse.shape == (50, 2)
    for wrong in ([0], [1, 50], [0.5, 50], ([0, 50], [0, 100, 200])):
        with pytest.raises(vcattn.InvalidArgumentError, match="cu_seqlens"):
            vcattn.attention(q, k, v, cu_seqlens=wrong)
    with pytest.raises(vcattn.UnsupportedError, match="do not go together"):
        vcattn.attention(q, k, v, cu_seqlens=cu, key_padding_mask=np.ones((1, 200), bool))


def test_bfloat16_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="needs ml_dtypes")
    q, k, v = (x.astype(ml_dtypes.bfloat16) for x in qkv())
    out = vcattn.attention(q, k, v, recipe="fp32")
    assert out.dtype == q.dtype
    assert error(out.astype(np.float32), exact(*(x.astype(np.float32) for x in (q, k, v)))[0]) < 1e-2


def test_video_grid():
    q, k, v = qkv(seqlen_q=300, seqlen_kv=300)
    cube = "accurate,v_order=cube"
    with pytest.raises(vcattn.InvalidArgumentError, match="video grid"):
        vcattn.attention(q, k, v, recipe=cube)
    assert error(vcattn.attention(q, k, v, recipe=cube, grid=(4, 2, 10, 12)), exact(q, k, v)[0]) < BOUND
    wrongs = (
        ((4, 2, 10, 12, 1), "grid: .first_token"),
        (("4", 2, 10, 12), "grid: first_token is a whole number; found '4'"),
        ((4, 2, 2**64 + 10, 12), "grid: height is a number of 64 bits; found 18446744073709551626"),
        ((-(2**64), 2, 10, 12), "grid: first_token is a number of 64 bits"),
    )
    for wrong, match in wrongs:
        with pytest.raises(vcattn.InvalidArgumentError, match=match):
            vcattn.attention(q, k, v, recipe=cube, grid=wrong)


@pytest.mark.parametrize("text_first", [False, True])
def test_text_stays_out_of_the_videos_order(text_first: bool):
    text, video = 50, 400
    first = text if text_first else 0
    is_video = (np.arange(text + video) >= first) & (np.arange(text + video) < first + video)
    q, k, v = qkv(seqlen_q=130, seqlen_kv=text + video)
    v[:, ~is_video] += 9
    mask = np.arange(text + video)[None] % 4 != 1
    options = _call.Options("accurate", False, grid=(first, 2, 10, 20))
    permutation, _ = _call.group(_numpy_arrays, v, options, mask=mask)
    admitted = mask.sum()
    in_order = is_video[permutation[..., :admitted]]
    assert (permutation[..., admitted:] == -1).all()
    assert (np.diff(in_order.astype(int)) <= 0).all(), "video first"
    assert (permutation[..., (mask & is_video).sum() : admitted] == np.flatnonzero(mask[0] & ~is_video)).all()
    out = vcattn.attention(q, k, v, key_padding_mask=mask, grid=options.grid)
    assert error(out, exact(q, k, v, mask=mask)[0]) < BOUND
    with pytest.raises(vcattn.InvalidArgumentError, match="exceed seqlen 450"):
        vcattn.attention(q, k, v, grid=(first, 2, 10, 23))
    with pytest.raises(vcattn.UnsupportedError, match="grid and cu_seqlens"):
        vcattn.attention(v, k, v, grid=options.grid, cu_seqlens=[0, 450])


class Foreign:
    """An array of some other library: DLPack and nothing else."""

    def __init__(self, x: np.ndarray) -> None:
        self._x = x

    def __dlpack__(self, **options: object) -> object:
        return self._x.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._x.__dlpack_device__()


def test_dlpack():
    q, k, v = qkv()
    mask = np.arange(200) < 100
    expected = vcattn.attention(q, k, v, key_padding_mask=mask)
    found = vcattn.attention(Foreign(q), Foreign(k), Foreign(v), key_padding_mask=Foreign(mask[None]))
    assert isinstance(found, np.ndarray) and np.array_equal(found, expected)


def test_dlpack_beside_numpy():
    q, k, v = qkv()
    mask = np.arange(200)[None] < 100
    expected = vcattn.attention(q, k, v, key_padding_mask=mask)
    for inputs in ((q, Foreign(k), v), (q, k, Foreign(v)), (Foreign(q), k, v)):
        assert np.array_equal(vcattn.attention(*inputs, key_padding_mask=Foreign(mask)), expected)
    assert np.array_equal(vcattn.attention(q, k, v, key_padding_mask=Foreign(mask)), expected)


def test_masked_arrays_are_refused():
    """Their masks would be lost."""
    q, k, v = qkv()
    hidden = np.zeros(k.shape, bool)
    with pytest.raises(vcattn.InvalidArgumentError, match="k: an array without a mask"):
        vcattn.attention(q, np.ma.array(k, mask=hidden), v)
    with pytest.raises(vcattn.InvalidArgumentError, match="key_padding_mask"):
        vcattn.attention(q, k, v, key_padding_mask=np.ma.array(np.ones((1, 200), bool)))


@pytest.mark.parametrize(
    "options, match",
    [
        ({"scale": "x"}, "scale is a number"),
        ({"recipe": "accurate,v_order=cube", "grid": (0, 1)}, "grid: "),
        ({"recipe": "fast\0x"}, "no NUL"),
        ({"state": 5, "step": 0}, "state is a vcattn.State"),
    ],
)
def test_arguments_of_other_kinds_are_refused(options: dict, match: str):
    with pytest.raises(vcattn.InvalidArgumentError, match=match):
        vcattn.attention(*qkv(), **options)


def test_imports_and_runs_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy as np, vcattn\n"
        "x = np.ones((1, 4, 1, 64), np.float32)\n"
        "assert (vcattn.attention(x, x, x, recipe='fp32') == 1).all()\n"
        "try: vcattn.sdpa\n"
        "except AttributeError as error: assert 'needs torch' in str(error)\n"
        "else: raise SystemExit('sdpa without torch')\n"
        "from vcattn import *\n"
        "assert not hasattr(vcattn, 'patch_sdpa') and Policy is vcattn.Policy\n"
    )
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
