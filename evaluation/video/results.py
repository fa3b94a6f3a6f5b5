"""One JSON file for each run and clip, with the settings it was measured under: an interrupted evaluation goes on."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .experiments import Run


@dataclass(frozen=True)
class Clip:
    """What is rendered: a window of a clip, and the noise on it."""

    window: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.window}-s{self.seed}"


@dataclass
class Result:
    settings: dict[str, Any]  # all that the numbers depend on; a file with others does not count
    engine: str  # what ran: "torch ...", "vcattn ...", "emulated in torch"
    psnr: float  # dB against the BF16 clip of the same seed
    ssim: float
    lpips: float | None
    psnr_by_step: list[float]  # of the clean clip that each step predicts
    relative_l2: dict[str, list[float]]  # [step][layer], of the attention's output on equal inputs
    seconds: float  # of rendering, without the measuring
    versions: dict[str, str]


def slug(run: Run) -> str:
    """The run's name as a file name."""
    return re.sub(r"[^A-Za-z0-9.=-]+", "_", run.name)


class Store:
    """The results under a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, run: Run, clip: Clip) -> Path:
        return self.folder / "results" / slug(run) / f"{clip.name}.json"

    def frame_path(self, run: Run, clip: Clip) -> Path:
        return self.folder / "frames" / clip.name / f"{slug(run)}.png"

    def load(self, run: Run, clip: Clip, settings: dict[str, Any] | None = None) -> Result | None:
        """The result, or None where there is none, or one under settings other than those given."""
        path = self._path(run, clip)
        if not path.exists():
            return None
        result = Result(**json.loads(path.read_text()))
        return result if settings is None or result.settings == json.loads(json.dumps(settings)) else None

    def any_settings(self) -> dict[str, Any] | None:
        """Those of one of the results; None where there are none."""
        path = next(self.folder.glob("results/*/*.json"), None)
        return None if path is None else json.loads(path.read_text())["settings"]

    def save(self, run: Run, clip: Clip, result: Result) -> None:
        """Whole or not at all: an interruption leaves no half file under the final name."""
        path = self._path(run, clip)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(result), indent=1) + "\n")
        part.replace(path)
