"""Renders every clip under every run that has no result yet, beside the BF16 clip of the same seed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import vcattn

from . import clips, metrics, results, sampler
from .experiments import BF16, REFERENCE, Run
from .model import Extent, VideoTransformer
from .results import Clip, Result, Store
from .routing import Probe, TorchEngine, engine_of, finished

_METRIC_THREADS = 4  # SSIM runs on the CPU while the next clip renders


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
    ) -> None:
        self._model, self._settings, self._data, self._store = model, settings, data, store
        self._lpips, self._say = lpips, say
        self._device = next(model.parameters()).device
        self._versions = versions(self._device)
        self._grid = (model.size.text_tokens, *settings.grid)
        self._reference = TorchEngine(BF16, self._device)

    def run(
        self, work: dict[Clip, list[Run]], windows: dict[str, clips.Window], seconds: float = math.inf
    ) -> tuple[int, int]:
        """Renders what is missing of `work`, in its order, and begins no clip after so many seconds.

        Returns how many were rendered, without references, and how many are still missing.
        """
        rendered, left, end = 0, 0, time.perf_counter() + seconds
        with ThreadPoolExecutor(_METRIC_THREADS) as pool:
            waiting: list[Future] = []
            for clip, runs in work.items():
                missing = [r for r in runs if self._store.load(r, clip, self._settings.of(r)) is None]
                if missing:
                    done = self._render_clip(clip, windows[clip.window], missing, end, pool)
                    waiting += done
                    rendered += len(done)
                    left += len(missing) - len(done)
            for future in waiting:
                future.result()
        return rendered, left

    def _render_clip(
        self, clip: Clip, window: clips.Window, runs: list[Run], end: float, pool: ThreadPoolExecutor
    ) -> list[Future]:
        """The results that follow, each of a clip that began before the host clock reached `end`."""
        if time.perf_counter() >= end:
            return []
        patch = self._model.size.patch
        frames = clips.read_frames(self._data, window, *(n * size for n, size in zip(self._settings.grid, patch)))
        tokens = clips.to_tokens(frames, patch).to(self._device)
        label = clips.LABELS[window.clip]
        predictions: list[Tensor] = []
        made = self._render(
            tokens, label, clip.seed, self._reference, lambda step, prediction: predictions.append(prediction)
        )
        reference = self._to_frames(made)
        self._save_frame(REFERENCE, clip, reference)
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
                ssim=float("nan"),  # follows on another thread
                lpips=None if self._lpips is None else self._lpips(video, reference),
                psnr_by_step=[metrics.decibels(error.item(), peak=2.0) for error in by_step],
                relative_l2={str(step): errors for step, errors in probe.relative_l2().items()},
                seconds=seconds,
                versions=self._versions,
            )
            self._save_frame(run, clip, video)
            self._say(f"{clip.name}  {run.name}: {result.psnr:.2f} dB, {seconds:.1f} s ({result.engine})")
            waiting.append(pool.submit(self._finish, run, clip, result, video.cpu(), reference.cpu()))
        return waiting

    def _render(self, tokens: Tensor, label: int, seed: int, engine: Any, on_step: Callable) -> Tensor:
        grid, num_steps = self._settings.grid, self._settings.num_steps
        return sampler.render(self._model, tokens, label, grid, seed, num_steps, engine.at, on_step)

    def _to_frames(self, tokens: Tensor) -> Tensor:
        return clips.to_frames(tokens, self._settings.grid, self._model.size.patch)

    def _save_frame(self, run: Run, clip: Clip, video: Tensor) -> None:
        from matplotlib import image

        path = self._store.frame_path(run, clip)
        path.parent.mkdir(parents=True, exist_ok=True)
        image.imsave(path, (video[len(video) // 2] * 255).round().byte().cpu().numpy())

    def _finish(self, run: Run, clip: Clip, result: Result, video: Tensor, reference: Tensor) -> None:
        result.ssim = metrics.ssim(video.numpy(), reference.numpy())
        self._store.save(run, clip, result)


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
