"""Sizes of clips."""

from __future__ import annotations

from dataclasses import dataclass

Extent = tuple[int, int, int]  # frames, height, width


@dataclass(frozen=True)
class VideoShape:
    name: str
    frames: int
    height: int
    width: int

    def latents(self, stride: Extent) -> Extent:
        """Of a VAE that turns `stride` frames and pixels into one, but for the first frame, which stays by itself."""
        frames, height, width = stride
        return (self.frames - 1) // frames + 1, self.height // height, self.width // width
