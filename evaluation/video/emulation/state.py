"""The order that denoising steps share, as vcattn.State keeps it, for emulated recipes."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch
from torch import Tensor

import vcattn

from . import grouping
from .numerics import Numerics


class EmulatedState:
    """One layer of one CFG branch. `prepare` is called once for each step, in order."""

    def __init__(self, numerics: Numerics, schedule: vcattn.Schedule, grid: grouping.Grid) -> None:
        self._numerics, self._schedule, self._grid = numerics, schedule, grid
        self._order: Tensor | None = None
        self._centroids: list[Tensor | None] | None = None

    def prepare(self, v: Tensor, step: int) -> tuple[Numerics, Tensor | None]:
        """(numerics, order) for v [batch, heads, tokens, dim] at this step; without means where it does not smooth."""
        todo, numerics = self._schedule.at(step), self._numerics
        if grouping.needs_clusters(numerics.v_order):
            if todo.regroup:
                self._regroup(v)
        elif numerics.v_order == "cube":
            order = grouping.cube_order(self._grid, v.shape[2]).to(v.device)
            self._order = order.expand(*v.shape[:2], -1)
        return (numerics if todo.smooth else replace(numerics, mean_rows=0)), self._order

    def _regroup(self, v: Tensor) -> None:
        first, *extent = self._grid
        heads = v[:, :, first : first + prod(extent)].float().flatten(0, 1)
        before = self._centroids or [None] * len(heads)
        with torch.no_grad(), torch.autocast(v.device.type, enabled=False):
            results = [grouping.order_values(head, self._numerics, old) for head, old in zip(heads, before)]
        video = first + torch.stack([order for order, _ in results]).unflatten(0, v.shape[:2])
        outside = grouping.outside_grid(self._grid, v.shape[2]).to(v.device).expand(*v.shape[:2], -1)
        self._order = torch.cat([video, outside], -1)
        self._centroids = [centroids for _, centroids in results]
