"""Windows of the real clips, as the model's tokens, and tokens as frames."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .model import Extent
from .weights import require

PIXEL_SCALE = 0.5  # pixels in [-1, 1] are divided by this: about unit variance


@dataclass(frozen=True)
class Window:
    """Frames of one clip from `start` on, cropped around the middle."""

    clip: str
    start: int

    @property
    def name(self) -> str:
        return f"{self.clip}-{self.start}"


# Rows of the model's label embedding.
LABELS = {"flower": 15, "foreman": 17, "gesture": 35, "bottles": 38, "cars": 39, "person": 40, "bigbuckbunny": 41}

# Sixteen windows of 64 frames that do not overlap, the clips in turn, so that the first few differ most. The clip
# "generated" has 39 frames, too few for one.
WINDOWS = (
    Window("cars", 0),
    Window("bigbuckbunny", 0),
    Window("person", 0),
    Window("flower", 0),
    Window("foreman", 0),
    Window("bottles", 0),
    Window("gesture", 0),
    Window("cars", 150),
    Window("bigbuckbunny", 64),
    Window("person", 536),
    Window("flower", 118),
    Window("foreman", 236),
    Window("bottles", 268),
    Window("cars", 313),
    Window("flower", 236),
    Window("bottles", 536),
)


def read_frames(folder: Path, window: Window, frames: int, height: int, width: int) -> np.ndarray:
    """uint8 [frames, height, width, 3], by cv2 or PyAV. Raises MissingDataError; ValueError if too short or small."""
    path = require(folder / "clips" / f"{window.clip}.mp4", "a clip")
    images = _decode(path, window.start + frames)[window.start :]
    if len(images) < frames:
        raise ValueError(f"{path} ends before frame {window.start + frames}")
    clip = np.stack(images)
    top, left = (clip.shape[1] - height) // 2, (clip.shape[2] - width) // 2
    if top < 0 or left < 0:
        raise ValueError(f"{path} is smaller than {width} x {height}")
    return clip[:, top : top + height, left : left + width]


def _decode(path: Path, count: int) -> list[np.ndarray]:
    """The first `count` frames, or as many as there are."""
    try:
        import cv2
    except ImportError:
        import av

        with av.open(str(path)) as container:
            return [frame.to_ndarray(format="rgb24") for frame, _ in zip(container.decode(video=0), range(count))]
    capture = cv2.VideoCapture(str(path))
    images: list[np.ndarray] = []
    while len(images) < count:
        found, image = capture.read()
        if not found:
            break
        images.append(image[:, :, ::-1])
    return images


def to_tokens(frames: np.ndarray, patch: Extent) -> Tensor:
    """uint8 [frames, height, width, 3] to float32 [1, tokens, patch channels]."""
    t, h, w = patch
    pixels = torch.from_numpy(np.ascontiguousarray(frames)).float() / 127.5 - 1
    grid = pixels.unflatten(2, (-1, w)).unflatten(1, (-1, h)).unflatten(0, (-1, t))  # T t H h W w 3
    return grid.permute(0, 2, 4, 1, 3, 5, 6).flatten(3).flatten(0, 2)[None] / PIXEL_SCALE


def to_frames(tokens: Tensor, grid: Extent, patch: Extent) -> Tensor:
    """float32 [1, tokens, patch channels] to [frames, height, width, 3] in [0, 1]."""
    pixels = (tokens[0] * PIXEL_SCALE).clamp(-1, 1) / 2 + 0.5
    pixels = pixels.unflatten(0, grid).unflatten(-1, (*patch, 3))  # T H W t h w 3
    frames, height, width = (extent * size for extent, size in zip(grid, patch))
    return pixels.permute(0, 3, 1, 4, 2, 5, 6).reshape(frames, height, width, 3)
