"""Renders every clip under every run that has no result yet, beside the BF16 clip of the same seed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import vcattn

from . import clips, metrics, results, sampler
from .experiments import BF16, FIRST, REFERENCE, Run
from .model import Extent, VideoTransformer
from .results import Clip, Result, Store
from .routing import Probe, TorchEngine, engine_of, finished


@dataclass(frozen=True)
class Settings:
    """What the numbers of all runs depend on."""

    num_steps: int
    grid: Extent  # of tokens: frames, height, width
    weights_sha256: str
    device: str
    emulate: bool  # even what a back end serves

    def of(self, run: Run) -> dict[str, Any]:
        """Those of one run, as its result records them."""
        return {
            "recipe": run.recipe,
            "schedule": run.schedule,
            "reuse": run.reuse,
            "num_steps": self.num_steps,
            "start_time": sampler.START_TIME,
            "grid": list(self.grid),
            "weights_sha256": self.weights_sha256,
            "device": self.device,
            "emulate": self.emulate,
        }

    @property
    def probed_steps(self) -> set[int]:
        """Steps at which the layers' errors are measured: the first, and after each quarter."""
        return {self.num_steps * quarter // 4 for quarter in range(4)}


def versions(device: torch.device) -> dict[str, str]:
    found = {"vcattn": vcattn.__version__, "torch": torch.__version__, "device": device.type}
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["cuda"], found["cudnn"] = str(torch.version.cuda), str(torch.backends.cudnn.version())
    return found


class Runner:
    def __init__(
        self,
        model: VideoTransformer,
        settings: Settings,
        data: Path,
        store: Store,
        lpips: Callable[[Tensor, Tensor], float] | None = None,
        say: Callable[[str], None] = print,
        processes: int = 0,
    ) -> None:
        """processes: that measure SSIM while the next clip renders, since a thread would hold up its launches; 0: a
        thread."""
        self._model, self._settings, self._data, self._store = model, settings, data, store
        self._lpips, self._say, self._processes = lpips, say, processes
        self._device = next(model.parameters()).device
        self._versions = versions(self._device)
        self._grid = (model.size.text_tokens, *settings.grid)
        self._reference = TorchEngine(BF16, self._device)

    def run(
        self, work: dict[Clip, list[Run]], windows: dict[str, clips.Window], seconds: float = math.inf
    ) -> tuple[int, int]:
        """Renders what is missing of `work`, in its order but FIRST first, and begins no clip after so many seconds.

        Returns how many were rendered, without references, and how many are still missing.
        """
        rendered, left, end = 0, 0, time.perf_counter() + seconds
        missing = [
            (clip, [run for run in runs if self._store.load(run, clip, self._settings.of(run)) is None])
            for clip, runs in work.items()
        ]
        stages = [
            (clip, stage)
            for first in (True, False)
            for clip, runs in missing
            if (stage := [run for run in runs if (run.name in FIRST) == first])
        ]
        size = [n * extent for n, extent in zip(self._settings.grid, self._model.size.patch)]
        with ThreadPoolExecutor(1) as reader, _executor(self._processes) as pool:
            frames = {
                name: reader.submit(clips.read_frames, self._data, windows[name], *size)
                for name in dict.fromkeys(clip.window for clip, _ in stages)
            }
            waiting: list[Future] = []
            for clip, runs in stages:
                label = clips.LABELS[windows[clip.window].clip]
                done = self._render_clip(clip, label, frames[clip.window], runs, end, pool)
                waiting += done
                rendered += len(done)
                left += len(runs) - len(done)
            for future in waiting:
                future.result()
        return rendered, left

    def _render_clip(
        self, clip: Clip, label: int, frames: Future[np.ndarray], runs: list[Run], end: float, pool: Executor
    ) -> list[Future]:
        """The results that follow, each of a clip that began before the host clock reached `end`."""
        if time.perf_counter() >= end:
            return []
        tokens = clips.to_tokens(frames.result(), self._model.size.patch).to(self._device)
        predictions: list[Tensor] = []
        made = self._render(
            tokens, label, clip.seed, self._reference, lambda step, prediction: predictions.append(prediction)
        )
        reference = self._to_frames(made)
        _save_frame(self._store.frame_path(REFERENCE, clip), _middle(reference))
        reference_sample = _sample(reference)
        waiting = []
        for run in runs:
            if time.perf_counter() >= end:
                break
            engine = engine_of(
                run,
                self._settings.num_steps,
                self._grid,
                self._device,
                self._model.size.head_dim,
                emulate=self._settings.emulate,
            )
            probe = Probe(engine, self._settings.probed_steps, self._reference)
            by_step: list[Tensor] = []  # stays on the device until the clip is done

            def compare(step: int, prediction: Tensor, errors: list[Tensor] = by_step) -> None:
                errors.append(metrics.squared_error(prediction, predictions[step]) * clips.PIXEL_SCALE**2)

            begin = finished(self._device)
            made = self._render(tokens, label, clip.seed, probe, compare)
            seconds = finished(self._device) - begin - probe.seconds
            video = self._to_frames(made)
            result = Result(
                settings=self._settings.of(run),
                engine=engine.engine,
                psnr=metrics.psnr(video, reference),
                ssim=float("nan"),  # follows in another process
                lpips=None if self._lpips is None else self._lpips(video, reference),
                psnr_by_step=[metrics.decibels(error, peak=2.0) for error in torch.stack(by_step).tolist()],
                relative_l2={str(step): errors for step, errors in probe.relative_l2().items()},
                seconds=seconds,
                versions=self._versions,
            )
            self._say(f"{clip.name}  {run.name}: {result.psnr:.2f} dB, {seconds:.1f} s ({result.engine})")
            images = (_sample(video), reference_sample, _middle(video))
            waiting.append(pool.submit(_finish, self._store, run, clip, result, *images))
        return waiting

    def _render(self, tokens: Tensor, label: int, seed: int, engine: Any, on_step: Callable) -> Tensor:
        grid, num_steps = self._settings.grid, self._settings.num_steps
        return sampler.render(self._model, tokens, label, grid, seed, num_steps, engine.at, on_step)

    def _to_frames(self, tokens: Tensor) -> Tensor:
        return clips.to_frames(tokens, self._settings.grid, self._model.size.patch)


def _executor(processes: int) -> Executor:
    # A process that has used a card must not fork.
    return ProcessPoolExecutor(processes, get_context("spawn")) if processes else ThreadPoolExecutor(1)


def _sample(video: Tensor) -> np.ndarray:
    """The frames that SSIM is measured on."""
    return video[:: metrics.SSIM_FRAME_STRIDE].cpu().numpy()


def _middle(video: Tensor) -> np.ndarray:
    return (video[len(video) // 2] * 255).round().byte().cpu().numpy()


def _save_frame(path: Path, frame: np.ndarray) -> None:
    from matplotlib import image

    path.parent.mkdir(parents=True, exist_ok=True)
    image.imsave(path, frame)


def _finish(
    store: Store, run: Run, clip: Clip, result: Result, sample: np.ndarray, reference: np.ndarray, middle: np.ndarray
) -> None:
    """What needs no card: SSIM, the middle frame, and the result's file, which is there last."""
    result.ssim = metrics.ssim(sample, reference)
    _save_frame(store.frame_path(run, clip), middle)
    store.save(run, clip, result)


def plan(
    groups: dict[str, tuple[Run, ...]], counts: dict[str, tuple[int, int]], windows: list[clips.Window]
) -> dict[results.Clip, list[Run]]:
    """The runs of each clip. counts: of each group, how many of the windows and how many seeds."""
    work: dict[Clip, dict[Run, None]] = {}
    for group, runs in groups.items():
        num_windows, num_seeds = counts[group]
        for window in windows[:num_windows]:
            for seed in range(num_seeds):
                work.setdefault(Clip(window.name, seed), {}).update(dict.fromkeys(runs))
    return {clip: list(runs) for clip, runs in work.items()}
