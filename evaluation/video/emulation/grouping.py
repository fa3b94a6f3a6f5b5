"""Orders of the value tokens of one head, as docs/algorithm.md section 5 makes them, in torch."""

from __future__ import annotations

from functools import lru_cache
from math import prod

import numpy as np
import torch
from torch import Tensor

from .numerics import TILE_KEYS, Numerics

Grid = tuple[int, int, int, int]  # (first token, frames, height, width) of the video tokens

_CUBE = (2, 8, 8)  # frames, height, width: one tile of keys
_BLOCK_ROUNDS, _HALVES_ROUNDS, _LEAST_ROWS = 4, 3, 32


def needs_clusters(v_order: str) -> bool:
    return v_order in ("kmeans", "balanced", "chain")


def order_values(v: Tensor, numerics: Numerics, centroids: Tensor | None) -> tuple[Tensor, Tensor]:
    """(order, centroids) of v [tokens, dim] float32: int64 token at each place, and what a later call starts from."""
    warm = centroids is not None
    labels, centroids = _kmeans(v, numerics, centroids, numerics.warm_iterations if warm else numerics.iterations)
    if numerics.v_order == "kmeans":
        return torch.argsort(labels, stable=True), centroids
    order = _along_chain(v, labels, centroids)
    if numerics.v_order == "balanced":
        order = _exchange_all_sets(v, order, numerics.clusters)
    return _exchange_neighbours(v, order), centroids


# ---- k-means ----


def _assign(v: Tensor, centroids: Tensor) -> Tensor:
    return (centroids.square().sum(1) - 2.0 * (v @ centroids.T)).argmin(1)


def _kmeans(v: Tensor, numerics: Numerics, centroids: Tensor | None, iterations: int) -> tuple[Tensor, Tensor]:
    count, clusters = len(v), min(numerics.clusters, len(v))
    if centroids is None:
        spaced = [j * (count - 1) // max(clusters - 1, 1) for j in range(clusters)]
        centroids = v[torch.tensor(spaced, device=v.device)]
    for _ in range(iterations):
        labels = _fill_empty(v, _assign(v, centroids), centroids)
        members = torch.nn.functional.one_hot(labels, clusters).double()
        sizes = members.sum(0)[:, None]
        means = (members.T @ v.double() / sizes.clamp(min=1)).float()
        centroids = torch.where(sizes > 0, means, centroids)
    return _assign(v, centroids), centroids


def _fill_empty(v: Tensor, labels: Tensor, centroids: Tensor) -> Tensor:
    """Each empty cluster takes the token farthest from its own centroid."""
    sizes = torch.bincount(labels, minlength=len(centroids))
    if bool((sizes > 0).all()):
        return labels
    labels, distances = labels.clone(), (v - centroids[labels]).square().sum(1)
    for cluster in (sizes == 0).nonzero().flatten().tolist():
        candidates = torch.where(sizes[labels] > 1, distances, -1.0)
        farthest = int(candidates.argmax())
        if candidates[farthest] <= 0:
            break
        sizes[labels[farthest]] -= 1
        sizes[cluster] += 1
        labels[farthest] = cluster
    return labels


# ---- chain ----


def _path(centroids: np.ndarray, used: np.ndarray) -> list[int]:
    """A short path through the used centroids: the farthest from the path next, where it lengthens the path least."""
    distance = np.square(centroids[:, None] - centroids[None]).sum(-1)
    nearest = np.where(used, np.finfo(np.float32).max, -1.0)
    path: list[int] = []
    while (nearest > -1.0).any():
        new = int(nearest.argmax())
        if path:
            ends = distance[new, path]
            detours = ends[:-1] + ends[1:] - distance[path[:-1], path[1:]]
            place = int(np.argmin([ends[0], *detours, ends[-1]]))
        else:
            place = 0
        path.insert(place, new)
        nearest = np.minimum(nearest, distance[new])
        nearest[path] = -1.0
        nearest[~used] = -1.0
    return path


def _along_chain(v: Tensor, labels: Tensor, centroids: Tensor) -> Tensor:
    used = torch.bincount(labels, minlength=len(centroids)) > 0
    path = _path(centroids.cpu().numpy(), used.cpu().numpy())
    place = torch.zeros(len(centroids), dtype=torch.long)
    place[path] = torch.arange(len(path))
    along = centroids[torch.tensor(path, device=v.device)]
    ends = torch.cat([along[:1], along, along[-1:]])
    place = place.to(v.device)[labels]
    projection = (v * (ends[2:] - ends[:-2])[place]).sum(1)
    order = torch.argsort(projection, stable=True)
    return order[torch.argsort(place[order], stable=True)]


# ---- exchange ----


def _exchange(v: Tensor, pairs: Tensor, size: int) -> Tensor:
    """pairs: [n, tokens of two sets], `size` of them in the first: split anew by x.(mean_b - mean_a)."""
    rows = v[pairs]
    direction = rows[:, size:].mean(1, keepdim=True) - rows[:, :size].mean(1, keepdim=True)
    by_projection = torch.argsort((rows * direction).sum(-1), dim=1, stable=True)
    second = torch.ones_like(pairs, dtype=torch.uint8).scatter_(1, by_projection[:, :size], 0)
    return pairs.gather(1, torch.argsort(second, dim=1, stable=True))


def _exchange_round(v: Tensor, order: Tensor, rows: int, first: int) -> Tensor:
    count = len(order)
    pairs = (-(-count // rows) - first) // 2
    begin, end = first * rows, min((first + 2 * pairs) * rows, count)
    whole = (end - begin) // (2 * rows)
    middle = begin + whole * 2 * rows
    order = order.clone()
    if whole:
        order[begin:middle] = _exchange(v, order[begin:middle].view(whole, 2 * rows), rows).flatten()
    if end > middle + rows:
        order[middle:end] = _exchange(v, order[None, middle:end], rows)[0]
    return order


def _exchange_neighbours(v: Tensor, order: Tensor) -> Tensor:
    for i in range(_BLOCK_ROUNDS):
        order = _exchange_round(v, order, TILE_KEYS, i % 2)
    rows = TILE_KEYS // 2
    while rows >= _LEAST_ROWS:
        for _ in range(_HALVES_ROUNDS):
            order = _exchange_round(v, order, rows, 0)
        rows //= 2
    return order


def _exchange_all_sets(v: Tensor, order: Tensor, clusters: int) -> Tensor:
    """Every two of equal sets of whole blocks exchange once, in the rounds of a tournament."""
    blocks = -(-len(order) // TILE_KEYS)
    sets = min(clusters, blocks)
    begins = [j * blocks // sets * TILE_KEYS for j in range(sets)] + [len(order)]
    players = sets + sets % 2
    order = order.clone()
    for meeting in range(max(players - 1, 0)):
        by_sizes: dict[tuple[int, int], list[tuple[int, int]]] = {}  # where both sets begin; equal sizes go together
        for pair in range(players // 2):
            a = (meeting + pair) % (players - 1)
            b = players - 1 if pair == 0 else (meeting - pair) % (players - 1)
            a, b = min(a, b), max(a, b)
            if b == sets:
                continue
            sizes = begins[a + 1] - begins[a], begins[b + 1] - begins[b]
            by_sizes.setdefault(sizes, []).append((begins[a], begins[b]))
        for sizes, pairs in by_sizes.items():
            starts = torch.tensor(pairs, device=order.device)
            ranges = [start[:, None] + torch.arange(n, device=order.device) for start, n in zip(starts.T, sizes)]
            places = torch.cat(ranges, 1)
            order[places] = _exchange(v, order[places], sizes[0])
    return order


# ---- cubes ----


@lru_cache(maxsize=4)
def cube_order(grid: Grid, count: int) -> Tensor:
    """Whole 2 x 8 x 8 cubes of the video grid, then ragged ones, then the tokens outside the grid."""
    first, *extent = grid
    tokens = first + np.arange(np.prod(extent)).reshape(extent)
    whole, ragged = [], []
    for t in range(0, extent[0], _CUBE[0]):
        for y in range(0, extent[1], _CUBE[1]):
            for x in range(0, extent[2], _CUBE[2]):
                cube = tokens[t : t + _CUBE[0], y : y + _CUBE[1], x : x + _CUBE[2]].ravel()
                (whole if cube.size == TILE_KEYS else ragged).append(cube)
    inside = torch.from_numpy(np.concatenate([*whole, *ragged]).astype(np.int64))
    return torch.cat([inside, outside_grid(grid, count)])


def outside_grid(grid: Grid, count: int) -> Tensor:
    """The tokens before and behind the grid."""
    first, *extent = grid
    return torch.cat([torch.arange(first), torch.arange(first + prod(extent), count)])
