"""Policy and sensitivity: who runs with what."""

from __future__ import annotations

from ctypes import addressof, c_int64
from pathlib import Path

import numpy as np
import pytest

import vcattn
from reference import normal
from vcattn import _abi, _library
from vcattn.captures import Capture
from vcattn.policy import DEFAULT_MIN_SEQLEN, GROUPING_MIN_SEQLEN, as_policy
from vcattn.recipe import split_specs
from vcattn.sensitivity import Measurement, Sensitivity

LONG = {"seqlen_q": 10_000, "seqlen_kv": 10_000}


@pytest.mark.parametrize("grouping, expected", [(False, DEFAULT_MIN_SEQLEN), (True, GROUPING_MIN_SEQLEN)])
def test_the_default_lengths_are_the_librarys(grouping: bool, expected: int):
    sm90a = next(backend for backend in vcattn.backends() if backend.name == "sm90a")
    if not sm90a.available:
        pytest.skip(f"needs the back end sm90a: {sm90a.reason}")
    library, params, message = _library.get(), _abi.AttentionParams(), _abi.Message()
    library.vcattn_attention_params_init(addressof(params))
    for i, name in enumerate(("q", "k", "v", "out"), start=1):  # addresses that nothing follows
        strides = (300 * 2 * 128, 2 * 128, 128, 1)
        setattr(params, name, _abi.Tensor(i << 30, _abi.BF16, 0, (1, 300, 2, 128), strides))
    params.permutation, params.memory = 0 if grouping else 5 << 30, _abi.MEMORY_CUDA
    seqlen = c_int64()
    _library.check(library.vcattn_break_even_seqlen(addressof(params), addressof(seqlen), addressof(message)), message)
    assert seqlen.value == expected


def test_first_and_last_steps_and_named_layers_are_native():
    policy = vcattn.Policy("fast", {"blocks.0.*": "native", "*.attn2": "accurate"}, native_first=2, native_last=1)

    def recipe(layer: str, step: int) -> str | None:
        return policy.choose(layer=layer, step=step, num_steps=10, **LONG).recipe

    assert [recipe("blocks.5.attn1", step) for step in range(10)] == [None] * 2 + ["fast"] * 7 + [None]
    assert recipe("blocks.0.attn1", 5) is None and recipe("blocks.3.attn2", 5) == "accurate"
    assert recipe("blocks.10.attn1", 5) == "fast"


def test_unknown_steps_and_layers_stay_native_where_they_matter():
    assert vcattn.Policy(layers={"x": "fast"}).choose(layer=None, step=1, num_steps=2, **LONG).recipe is None
    assert vcattn.Policy(native_first=1).choose(layer="x", step=None, num_steps=None, **LONG).recipe is None
    assert vcattn.Policy(native_last=1).choose(layer="x", step=3, num_steps=None, **LONG).recipe is None
    assert vcattn.Policy().choose(layer=None, step=None, num_steps=None, **LONG).recipe == "auto"


@pytest.mark.parametrize(
    "lengths, native", [((DEFAULT_MIN_SEQLEN, 9999), True), ((9999, 77), True), ((DEFAULT_MIN_SEQLEN + 1,) * 2, False)]
)
def test_short_calls_are_native(lengths: tuple[int, int], native: bool):
    choice = vcattn.Policy().choose(layer="x", step=0, num_steps=1, seqlen_q=lengths[0], seqlen_kv=lengths[1])
    assert (choice.recipe is None) == native


def test_refusals():
    with pytest.raises(vcattn.InvalidArgumentError, match="no recipe"):
        vcattn.Policy("nothing")
    with pytest.raises(vcattn.InvalidArgumentError, match="no recipe"):
        vcattn.Policy(layers={"x": "nothing"})
    with pytest.raises(vcattn.InvalidArgumentError, match="native_first is at least 0"):
        vcattn.Policy(native_first=-1)


def test_as_json(tmp_path: Path):
    policy = vcattn.Policy("fast", {"a": "native"}, native_first=3)
    policy.save(tmp_path / "p.json")
    assert as_policy(tmp_path / "p.json") == as_policy(policy) == policy
    assert as_policy("exact") == vcattn.Policy("exact") and as_policy(None) == vcattn.Policy()
    (tmp_path / "wrong.json").write_text('{"recipes": 1}')
    with pytest.raises(vcattn.InvalidArgumentError, match="not a policy"):
        as_policy(tmp_path / "wrong.json")


@pytest.mark.parametrize(
    "text", ['{"layers": null}', '{"layers": {"x": 3}}', '{"native_first": 1.5}', '{"min_seqlen": "4"}', "[]", "{"]
)
def test_files_that_are_no_policies(tmp_path: Path, text: str):
    (tmp_path / "wrong.json").write_text(text)
    with pytest.raises(vcattn.InvalidArgumentError):
        vcattn.Policy.load(tmp_path / "wrong.json")


def test_recipes_are_kept_by_their_specs(tmp_path: Path):
    recipe = vcattn.Recipe("fast", mean_rows=0)
    policy = vcattn.Policy(recipe, {"x": recipe})
    policy.save(tmp_path / "p.json")
    assert vcattn.Policy.load(tmp_path / "p.json") == policy == vcattn.Policy(recipe.spec, {"x": recipe.spec})


def test_lists_of_specs():
    assert split_specs("fast,mean_rows=0,v_order=sequence,exact") == ["fast,mean_rows=0,v_order=sequence", "exact"]
    assert split_specs("fast") == ["fast"]


def capture(layer: str, step: int, loud: float) -> Capture:
    """A call whose keys have one channel `loud` times the others, which INT8 and E4M3 of whole rows dislike."""
    q, k, v = (normal(10 * step + i, 1, 700, 2, 64) for i in range(3))
    k[..., 3] *= loud
    q[..., 3] *= loud
    return Capture(q, k, v, layer, step, num_steps=10)


def test_sensitivity_proposes_a_policy():
    calls = [capture("quiet", 5, 1), capture("loud", 5, 30), capture("quiet", 8, 1), capture("loud", 8, 30)]
    found = vcattn.sensitivity(calls, recipes=["fast", "accurate"], rows=256)
    layers = found.layers()
    assert layers["loud"]["fast"] > layers["quiet"]["fast"] > layers["quiet"]["accurate"] > 0
    between = (layers["loud"]["fast"] + layers["quiet"]["fast"]) / 2
    above = max(layers["loud"].values()) * 1.01
    assert found.policy(above) == vcattn.Policy("fast")
    proposed = found.policy(between)
    assert proposed.recipe == "fast" and set(proposed.layers) == {"loud"}
    assert found.policy(1e-9) == vcattn.Policy("native")
    assert "quiet" in str(found) and "accurate" in str(found)


def test_sensitivity_finds_native_steps():
    def measured(layer: str, step: int, error: float) -> Measurement:
        return Measurement(layer, step, 10, {"fast": 3 * error, "accurate": error})

    found = Sensitivity(
        (*(measured(layer, step, 0.03) for layer in "abc" for step in (0, 1, 8, 9)), measured("a", 5, 0.03))
        + tuple(measured(layer, 5, 0.01) for layer in "bc"),
        ("fast", "accurate"),
    )
    policy = found.policy(0.02)
    assert (policy.native_first, policy.native_last) == (2, 2)
    assert policy.recipe == "accurate" and policy.layers == {"a": "native"}
    assert found.policy(0.04).native_first == 0 and found.policy(0.005) == vcattn.Policy("native")


def test_sensitivity_rows_are_those_of_the_whole_call():
    """Fewer rows change the sample, not what is computed."""
    calls = [capture("a", 0, 1)]
    few, all_rows = (vcattn.sensitivity(calls, recipes=["sage2"], rows=rows) for rows in (256, 10_000))
    assert np.isclose(few.measurements[0].errors["sage2"], all_rows.measurements[0].errors["sage2"], rtol=0.2)


def test_errors_of_nan_are_shown_and_never_within_the_tolerance():
    nan = float("nan")
    for errors in ((nan, 0.01), (0.01, nan)):
        calls = tuple(Measurement("a", step, 10, {"fast": e}) for step, e in enumerate(errors))
        found = Sensitivity(calls, ("fast",))
        assert np.isnan(found.layers()["a"]["fast"]) and "nan" in str(found)
    lost = Sensitivity(tuple(Measurement("a", s, 4, {"fast": nan if s == 0 else 0.01}) for s in range(4)), ("fast",))
    assert lost.policy(0.02) == vcattn.Policy("fast", native_first=1)


def test_values_of_zero_have_no_error():
    call = capture("a", 0, 1)
    call = call._replace(v=np.zeros_like(call.v))
    found = vcattn.sensitivity([call], recipes=["fast"])
    assert found.layers() == {"a": {"fast": 0.0}} and found.policy(0.02) == vcattn.Policy("fast")


def test_sensitivity_refusals(tmp_path: Path):
    with pytest.raises(vcattn.InvalidArgumentError, match="no captures"):
        vcattn.sensitivity([])
    for rows in (0, -5, 1.5):
        with pytest.raises(vcattn.InvalidArgumentError, match="rows is"):
            vcattn.sensitivity([capture("a", 0, 1)], rows=rows)
    for tolerance in (float("nan"), -1.0, float("inf")):
        with pytest.raises(vcattn.InvalidArgumentError, match="tolerance is finite"):
            Sensitivity((), ("fast",)).policy(tolerance)
