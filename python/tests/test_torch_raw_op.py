"""torch.ops.vcattn.*: what callers of the operators themselves may get wrong is refused, never read as memory."""

from __future__ import annotations

import pytest

from reference import normal

torch = pytest.importorskip("torch", reason="needs torch")

import vcattn  # noqa: E402
import vcattn.torch_op  # noqa: E402

Q, K, V = (torch.from_numpy(normal(i, 2, 200, 2, 32)) for i in range(3))
PLACE = {"recipe": "accurate", "bhsd": False}
GROUP = dict(PLACE, clusters=64)


def attend(**options: object) -> torch.Tensor:
    return torch.ops.vcattn.attention(Q, K, V, **dict(PLACE, **options))[0]


@pytest.mark.parametrize(
    "centroids",
    [
        torch.zeros(1),
        torch.zeros(2, 2, 64, 32, dtype=torch.float64),
        torch.zeros(1, 2, 64, 32),
    ],
)
def test_centroids_are_checked(centroids: torch.Tensor):
    with pytest.raises(vcattn.InvalidArgumentError, match="centroids: "):
        torch.ops.vcattn.group(V, **GROUP, centroids=centroids)


@pytest.mark.parametrize(
    "permutation",
    [
        torch.zeros(1, dtype=torch.int32),
        torch.arange(200).expand(2, 2, 200),
        torch.arange(200, dtype=torch.int32),
        torch.arange(200, dtype=torch.int32).expand(1, 2, 200),
    ],
)
def test_permutations_are_checked(permutation: torch.Tensor):
    with pytest.raises(vcattn.InvalidArgumentError, match="permutation: "):
        attend(permutation=permutation)


def test_strides_of_orders_and_centroids_are_honoured():
    expanded = torch.arange(200, dtype=torch.int32).expand(2, 2, 200)
    assert torch.equal(attend(permutation=expanded), attend(permutation=expanded.contiguous()))
    _, centroids = torch.ops.vcattn.group(V, **GROUP)
    permuted = centroids.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    given = permuted.clone()
    found, expected = (torch.ops.vcattn.group(V, **GROUP, centroids=c) for c in (permuted, centroids))
    assert all(torch.equal(a, b) for a, b in zip(found, expected)) and torch.equal(permuted, given)


def test_clusters_are_the_recipes():
    with pytest.raises(vcattn.InvalidArgumentError, match="clusters: 64"):
        torch.ops.vcattn.group(V, **dict(GROUP, clusters=3))


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_kv"])
def test_segments_of_one_side_are_refused(name: str):
    with pytest.raises(vcattn.InvalidArgumentError, match="go together"):
        attend(**{name: torch.tensor([0, 100, 200])})
    with pytest.raises(vcattn.InvalidArgumentError, match="go together"):
        torch.ops.vcattn.group(V, **GROUP, **{name: torch.tensor([0, 100, 200])})


def test_short_grids_and_ranks_are_refused():
    with pytest.raises(vcattn.InvalidArgumentError, match="grid"):
        attend(recipe="accurate,v_order=cube", grid=[0, 1])
    with pytest.raises(vcattn.InvalidArgumentError, match="v: four axes"):
        torch.ops.vcattn.group(V[0], **GROUP)
    with pytest.raises(vcattn.InvalidArgumentError, match="v: four axes"):
        torch.ops.vcattn.attention(Q, K, V[0], **PLACE, permutation=torch.zeros(1, dtype=torch.int32))
