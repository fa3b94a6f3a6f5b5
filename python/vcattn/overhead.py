"""How long the Python layer takes, without the library, and what patch_sdpa adds to calls that it leaves to torch: for
`python -m vcattn bench --overhead` and the tests."""

from __future__ import annotations

import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

from . import _library
from .attention import attention
from .recipe import AUTO, as_recipe


def layer_seconds(q: Any, k: Any, v: Any, *, calls: int = 200, repeats: int = 25, **options: Any) -> float:
    """Seconds of one vcattn.attention call on these arrays with the library's two functions replaced by ones that
    return at once: the least of `repeats` means over `calls` calls, as what else runs only adds."""
    as_recipe(options.get("recipe", AUTO))  # what a first call looks up
    nothing = lambda *arguments: 0  # noqa: E731
    idle = SimpleNamespace(vcattn_attention=nothing, vcattn_attention_workspace_size=nothing)
    best = float("inf")
    with mock.patch.object(_library, "_library", idle):
        for _ in range(repeats):
            start = time.perf_counter()
            for _ in range(calls):
                attention(q, k, v, **options)
            best = min(best, (time.perf_counter() - start) / calls)
    return best


def declined_samples(q: Any, k: Any, v: Any, *, calls: int = 200, rounds: int = 30) -> tuple[list[float], list[float]]:
    """Seconds of one scaled_dot_product_attention call on these short tensors, without and inside patch_sdpa: the mean
    over `calls` calls in each of `rounds` rounds, in which the two take turns. The least says most, as what else runs
    only adds. CUDA calls are launched one after the other and waited for at the end of each sample."""
    import torch
    import torch.nn.functional as F

    from .torch_patch import patch_sdpa

    wait = torch.cuda.synchronize if q.is_cuda else (lambda: None)
    samples: tuple[list[float], list[float]] = ([], [])
    for round_ in range(rounds):
        for patched in (round_ % 2, 1 - round_ % 2):
            with patch_sdpa() if patched else nullcontext():
                wait()
                start = time.perf_counter()
                for _ in range(calls):
                    F.scaled_dot_product_attention(q, k, v)
                wait()
                samples[patched].append((time.perf_counter() - start) / calls)
    return samples
