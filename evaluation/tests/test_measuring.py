"""Metrics against known values; weights; results that are kept; the report."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("matplotlib", reason="needs matplotlib")
pytest.importorskip("skimage", reason="needs scikit-image")

from evaluation.video import clips, metrics, plots, report, runner, weights  # noqa: E402
from evaluation.video.experiments import GROUPS, REFERENCE, Run  # noqa: E402
from evaluation.video.model import ModelSize, VideoTransformer  # noqa: E402
from evaluation.video.results import Clip, Result, Store  # noqa: E402

SIZE = ModelSize(width=64, heads=2, depth=1, patch=(1, 4, 4), text_tokens=4, labels=64)
GRID = (2, 4, 8)
RUNS = tuple(run for run in GROUPS["recipes"] if run.name in ("bf16_other_kernel", "accurate", "vsmooth8"))


# ---- metrics ----


def test_psnr():
    a = torch.zeros(2, 8, 8, 3)
    assert metrics.psnr(a, a + 0.1) == pytest.approx(20.0, abs=1e-4)
    assert metrics.psnr(a, a + 0.01) == pytest.approx(40.0, abs=1e-3)
    assert metrics.psnr(a, a) == pytest.approx(120.0)
    assert metrics.decibels(0.04, peak=2.0) == pytest.approx(20.0)


def test_ssim():
    """Equal clips: 1. A constant against another: the luminance term (2ab + c) / (a^2 + b^2 + c), c = 0.01^2."""
    a = np.full((8, 16, 16, 3), 0.2, np.float32)
    assert metrics.ssim(a, a) == pytest.approx(1.0)
    assert metrics.ssim(a, a + 0.4) == pytest.approx((2 * 0.2 * 0.6 + 1e-4) / (0.04 + 0.36 + 1e-4), rel=1e-4)


def test_intervals():
    constant = metrics.estimate([3.0] * 6, list("aabbcc"))
    assert constant == (3.0, 3.0, 3.0)
    values = np.random.default_rng(1).normal(10, 1, 100)
    found = metrics.estimate(list(values), [str(i) for i in range(100)])
    half = 1.96 * values.std() / 10
    assert found.low == pytest.approx(values.mean() - half, abs=0.05)
    assert found.high == pytest.approx(values.mean() + half, abs=0.05)


def test_intervals_draw_windows_not_clips():
    """Two seeds of a window that say the same are one observation: the interval is as wide as with one seed."""
    values, windows = [1.0, 2.0, 4.0, 8.0], list("abcd")
    assert metrics.estimate(values * 2, windows * 2) == pytest.approx(metrics.estimate(values, windows))


# ---- weights and clips ----


def write_weights(path, size: ModelSize) -> dict[str, torch.Tensor]:
    """A file as weights.load takes it, with one int8 tensor; returns what it holds."""
    torch.manual_seed(0)
    tensors = VideoTransformer(size).state_dict()
    back = {new: old for old, new in weights._PARTS.items()}

    def file_name(name: str) -> str:
        for new in sorted(back, key=len, reverse=True):  # "time.0" before its parts
            name = f".{name}.".replace(f".{new}.", f".{back[new]}.").strip(".")
        return name

    header, data = {}, b""

    def add(name: str, array: np.ndarray, dtype: str) -> None:
        nonlocal data
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + array.nbytes],
        }
        data += array.tobytes()

    for name, tensor in tensors.items():
        array = tensor.numpy()
        if name == "pixels.weight":
            scale = np.abs(array).max(1) / np.float32(127)
            codes = np.round(array / scale[:, None]).astype(np.int8)
            add(f"{file_name(name)}.q", codes, "I8")
            add(f"{file_name(name)}.scale", scale, "F32")
            tensors[name] = torch.from_numpy(codes.astype(np.float32) * scale[:, None])
        else:
            add(file_name(name), array, "F32")
    header["__metadata__"] = {
        "dim": str(size.width),
        "heads": str(size.heads),
        "depth": str(size.depth),
        "patch": ",".join(map(str, size.patch)),
        "text_tokens": str(size.text_tokens),
        "clips": str(size.labels),
    }
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return tensors


def test_weights(tmp_path):
    expected = write_weights(tmp_path / weights.WEIGHTS, SIZE)
    loaded = weights.load(tmp_path)
    assert loaded.size == SIZE
    model = weights.build(loaded, torch.device("cpu"))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_missing_data_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv(weights.DATA_VARIABLE, str(tmp_path))
    assert weights.data_folder() == tmp_path
    assert weights.data_folder("elsewhere").name == "elsewhere"
    with pytest.raises(
        weights.MissingDataError, match=r"the weights of the video model: no file .* --data or VCATTN_EVALUATION_DATA"
    ):
        weights.load(tmp_path)
    with pytest.raises(weights.MissingDataError, match=r"cars\.mp4"):
        clips.read_frames(tmp_path, clips.WINDOWS[0], 4, 8, 8)
    (tmp_path / weights.WEIGHTS).write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match="not a safetensors file"):
        weights.load(tmp_path)


def test_windows_do_not_overlap():
    assert len(clips.WINDOWS) == len({window.name for window in clips.WINDOWS}) >= 16
    for name in clips.LABELS:
        starts = sorted(window.start for window in clips.WINDOWS if window.clip == name)
        assert all(b - a >= 64 for a, b in itertools.pairwise(starts)), name


# ---- runner ----


@pytest.fixture
def evaluation(tmp_path, monkeypatch):
    """(runner, work, windows by name, store, settings) of two windows of made-up frames."""

    def frames(folder, window, count, height, width):
        return np.random.default_rng(window.start).integers(0, 256, (count, height, width, 3), dtype=np.uint8)

    monkeypatch.setattr(clips, "read_frames", frames)
    torch.manual_seed(0)
    model = VideoTransformer(SIZE).eval().requires_grad_(False)
    settings = runner.Settings(num_steps=4, grid=GRID, weights_sha256="", device="cpu", emulate=False)
    store = Store(tmp_path)
    windows = list(clips.WINDOWS[:2])
    work = runner.plan({"recipes": RUNS, "qk": RUNS[1:]}, {"recipes": (2, 1), "qk": (1, 2)}, windows)
    said: list[str] = []
    made = runner.Runner(model, settings, tmp_path, store, say=said.append)
    return made, work, {window.name: window for window in windows}, store, settings


def test_plan_takes_each_run_once(evaluation):
    _, work, windows, _, _ = evaluation
    first, second = windows
    assert work == {Clip(first, 0): list(RUNS), Clip(second, 0): list(RUNS), Clip(first, 1): list(RUNS[1:])}


def test_resumes(evaluation):
    made, work, windows, store, settings = evaluation
    first = next(iter(work))
    assert made.run({first: [RUNS[0]]}, windows) == (1, 0)
    kept = store.load(RUNS[0], first)
    assert made.run(work, windows, seconds=0) == (0, 7)  # 8 in all
    assert made.run(work, windows) == (7, 0)
    assert store.load(RUNS[0], first) == kept
    assert made.run(work, windows) == (0, 0)
    assert store.any_settings()["num_steps"] == 4
    # What was measured under other settings does not count.
    assert store.load(RUNS[1], first, {**settings.of(RUNS[1]), "num_steps": 5}) is None


def test_compared_runs_come_first(evaluation):
    """Of all clips, then the others; and the report shows them on all their clips where the others are not finished."""
    made, work, windows, store, settings = evaluation
    other = next(run for run in GROUPS["recipes"] if run.name == "sage2")
    work = {clip: [other, *runs] for clip, runs in work.items()}
    said: list[str] = []
    made._say = said.append
    made.run(work, windows)
    names = [line.split("  ")[1].split(":")[0] for line in said]
    assert names[8:] == ["sage2"] * 3 and "sage2" not in names[:8]
    store._path(other, next(iter(work))).unlink()
    measured = report.collect(store, work, settings)
    text = report.write(store.folder, ["recipes"], measured, command="", notes={})
    tables = {part.split("\n")[0]: part for part in text.split("### ")[1:]}
    assert "| `bf16_other_kernel` | torch MATH | 2 |" in tables["recipes that were rendered first"]
    assert "| `bf16_other_kernel` | torch MATH | 1 |" in tables["recipes"]


def test_half_written_results_do_not_count(evaluation):
    made, work, windows, store, _ = evaluation
    first = next(iter(work))
    made.run({first: [RUNS[1]]}, windows)
    path = store._path(RUNS[1], first)
    path.rename(path.with_suffix(".part"))
    assert store.load(RUNS[1], first) is None
    assert made.run({first: [RUNS[1]]}, windows) == (1, 0)


def test_processes_measure_the_same(tmp_path):
    run, clip = RUNS[0], Clip("window", 0)
    frames = np.random.default_rng(0).random((2, 4, 16, 16, 3), dtype=np.float32)
    found = Result({}, "engine", 0.0, math.nan, None, [], {}, 0.0, {})
    middle = np.zeros((16, 16, 3), np.uint8)
    with runner._executor(1) as pool:
        pool.submit(runner._finish, Store(tmp_path), run, clip, found, *frames, middle).result()
    assert Store(tmp_path).load(run, clip).ssim == metrics.ssim(*frames)
    assert Store(tmp_path).frame_path(run, clip).exists()


def test_results_and_report(evaluation, tmp_path):
    made, work, windows, store, settings = evaluation
    made.run(work, windows)
    measured = report.collect(store, work, settings)
    assert set(measured) == set(RUNS)
    for run, results in measured.items():
        for clip, result in results.items():
            assert result.settings["recipe"] == run.recipe
            assert result.engine == ("torch MATH" if run.is_torch else "vcattn cpu")
            assert len(result.psnr_by_step) == 4 and set(result.relative_l2) == {"0", "1", "2", "3"}
            assert result.psnr == pytest.approx(result.psnr_by_step[-1], abs=1.0)  # but for pixels that are clamped
            assert 0.5 < result.ssim <= 1.0 and math.isfinite(result.psnr)
            assert store.frame_path(run, clip).exists() and store.frame_path(REFERENCE, clip).exists()
    rows = report.group_rows(GROUPS["recipes"], measured)
    assert [row.run for row in rows] == list(RUNS)
    assert {row.clips for row in rows} == {2}  # those that all three have
    text = report.write(tmp_path, ["recipes"], measured, command="the command", notes={"lpips": "none"})
    assert all(words in text for words in ("the command", "lpips none", f"torch {torch.__version__}", "steps 4"))
    assert "`accurate` above `vsmooth8`" in text
    document = json.loads((tmp_path / "results.json").read_text())
    assert [row["run"] for row in document["groups"]["recipes"]] == [run.name for run in RUNS]
    shared = [clip for clip in measured[RUNS[1]] if clip.seed == 0]
    difference = np.mean([measured[RUNS[1]][clip].psnr - measured[RUNS[2]][clip].psnr for clip in shared])
    assert document["claims"][0]["clips"] == 3 or math.isclose(
        document["claims"][0]["difference_db"]["mean"], difference
    )
    for path in plots.write_all(tmp_path, store, measured):
        assert path.stat().st_size > 1000


def test_emulated_results_say_so(evaluation, tmp_path):
    made, work, windows, store, settings = evaluation
    emulating = runner.Settings(**{**settings.__dict__, "emulate": True})
    first = next(iter(work))
    runner.Runner(made._model, emulating, tmp_path, store, say=lambda line: None).run({first: [RUNS[1]]}, windows)
    measured = report.collect(store, {first: [RUNS[1]]}, emulating)
    assert "emulated in torch" in report.write(tmp_path, ["recipes"], measured, command="", notes={})


def test_a_run_without_results_is_left_out():
    assert report.group_rows((Run("x", "accurate"),), {}) == []
