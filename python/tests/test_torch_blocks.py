"""Where a patch_sdpa block holds: its thread or task, until it ends, wherever that is."""

from __future__ import annotations

import asyncio
import threading

import pytest

from reference import normal

torch = pytest.importorskip("torch", reason="needs torch")

import torch.nn.functional as F  # noqa: E402

import vcattn  # noqa: E402

TORCH_SDPA = F.scaled_dot_product_attention


def call() -> torch.Tensor:
    q, k, v = (torch.from_numpy(normal(i, 1, 1, 140, 64)) for i in range(3))
    return F.scaled_dot_product_attention(q, k, v)


def serves() -> bool:
    with vcattn.patch_sdpa(min_seqlen=0) as report:
        call()
    return report.served == 1 and F.scaled_dot_product_attention is TORCH_SDPA


def in_thread(function) -> object:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_an_end_without_a_start_changes_nothing():
    for block in (vcattn.patch_sdpa(), vcattn.patch_sdpa(min_seqlen=0)):
        with pytest.raises(vcattn.InvalidArgumentError, match="not entered"):
            block.__exit__(None, None, None)
        assert serves()
    block.__enter__()
    block.__exit__(None, None, None)
    with pytest.raises(vcattn.InvalidArgumentError, match="not entered"):
        block.__exit__(None, None, None)
    assert serves()


def test_a_block_ends_in_another_thread():
    block = vcattn.patch_sdpa(min_seqlen=0)
    report = in_thread(block.__enter__)
    block.__exit__(None, None, None)
    assert F.scaled_dot_product_attention is TORCH_SDPA and serves() and report.served == 0
    block.__enter__()
    in_thread(lambda: block.__exit__(None, None, None))
    with vcattn.patch_sdpa(min_seqlen=10**6) as other:
        pass
    assert F.scaled_dot_product_attention is TORCH_SDPA and other.served == 0 and serves()


def test_an_ended_block_serves_nobody():
    """The block of this thread is ended by another while a third party keeps the function replaced."""
    block = vcattn.patch_sdpa(min_seqlen=0)
    report = block.__enter__()
    with vcattn.patch_sdpa(min_seqlen=0) as inner:
        in_thread(lambda: block.__exit__(None, None, None))
        call()
    call()
    assert (report.served, inner.served) == (0, 1) and F.scaled_dot_product_attention is TORCH_SDPA


def test_one_instance_in_itself_and_in_two_threads():
    block = vcattn.patch_sdpa(min_seqlen=0)
    with block as outer:
        with block as inner:
            call()

        def other() -> int:
            with block as report:
                call()
            return report.served

        assert in_thread(other) == 1
        call()
    assert (outer.served, inner.served) == (1, 1) and F.scaled_dot_product_attention is TORCH_SDPA


def test_tasks_have_blocks_of_their_own():
    async def serve(entered: list[asyncio.Event], index: int, recipe: str, calls: int) -> vcattn.Report:
        with vcattn.patch_sdpa(recipe, min_seqlen=0) as report:
            entered[index].set()
            await entered[1 - index].wait()
            for _ in range(calls):
                call()
                await asyncio.sleep(0)
        return report

    async def run() -> list[vcattn.Report]:
        entered = [asyncio.Event(), asyncio.Event()]
        tasks = [serve(entered, 0, "fast", 3), serve(entered, 1, "bf16", 1)]
        found = await asyncio.gather(*tasks)
        assert not torch.equal(call(), call() + 1)  # outside of every block
        return found

    assert [report.served for report in asyncio.run(run())] == [3, 1]
    assert F.scaled_dot_product_attention is TORCH_SDPA


def test_a_task_that_outlives_the_block():
    async def run() -> int:
        ended = asyncio.Event()

        async def late() -> None:
            await ended.wait()
            with vcattn.patch_sdpa(min_seqlen=10**6):  # keeps the function replaced
                pass
            call()

        with vcattn.patch_sdpa(min_seqlen=0) as report:
            task = asyncio.ensure_future(late())
            await asyncio.sleep(0)
        ended.set()
        with vcattn.patch_sdpa(min_seqlen=10**6):
            await task
        return report.served

    assert asyncio.run(run()) == 0
