"""Schedule and State: which steps smooth, what is reused, and for whom."""

from __future__ import annotations

import numpy as np
import pytest

import vcattn
from reference import BOUND, error, exact, normal


def inputs(seed: int, seqlen: int = 600) -> list[np.ndarray]:
    return [normal(10 * seed + i, 1, seqlen, 2, 64, offset=0.5) for i in range(3)]


def test_schedule_is_the_librarys():
    schedule = vcattn.Schedule(40, "first_quarter")
    assert [i for i in range(40) if schedule.at(i).smooth] == list(range(10))
    assert [i for i in range(40) if schedule.at(i).regroup] == [0, 4, 8]
    assert [schedule.at(i).group_step for i in (0, 3, 4, 9, 39)] == [0, 0, 4, 8, 8]
    assert not any(step.smooth for step in vcattn.Schedule(5, "never").steps)
    assert all(step.smooth for step in vcattn.Schedule(5).steps)


@pytest.mark.parametrize("arguments", [(0,), (4, "sometimes"), (4, ["a"]), (4, "never", -1)])
def test_schedule_refusals(arguments: tuple):
    with pytest.raises(vcattn.InvalidArgumentError):
        vcattn.Schedule(*arguments)
    with pytest.raises(vcattn.InvalidArgumentError, match="found 4"):
        vcattn.Schedule(4).at(4)


def test_schedules_are_values():
    schedule = vcattn.Schedule(8)
    with pytest.raises(AttributeError):
        schedule.num_steps = 9
    assert schedule == vcattn.Schedule(np.int64(8)) != vcattn.Schedule(9)
    assert len({schedule, vcattn.Schedule(8), vcattn.Schedule(8, "never")}) == 2


@pytest.mark.parametrize(
    "arguments, match",
    [((2**31,), "found 2147483648"), ((100_001,), "at most 100000; found 100001"), ((1.5,), "whole number; found 1.5")],
)
def test_schedules_of_other_numbers_are_refused(arguments: tuple, match: str):
    with pytest.raises(vcattn.InvalidArgumentError, match=match):
        vcattn.Schedule(*arguments)


def test_what_is_no_schedule_or_step_is_refused():
    with pytest.raises(vcattn.InvalidArgumentError, match="schedule is a"):
        vcattn.State(5)
    with pytest.raises(vcattn.InvalidArgumentError, match="step is a whole number"):
        vcattn.attention(*inputs(0), state=vcattn.State(vcattn.Schedule(4)), step=1.5)


def test_an_order_serves_the_mask_that_it_was_made_for(groupings: list[bool]):
    state = vcattn.State(vcattn.Schedule(8, "every_step", reuse=8))
    q, k, v = inputs(0)
    for step, admitted in enumerate((450, 450, 300)):
        mask = (np.arange(600) < admitted)[None]
        out = vcattn.attention(q, k, v, state=state, step=step, key_padding_mask=mask)
        assert error(out, exact(q, k, v, mask=mask)[0]) < BOUND
    assert groupings == [False, False]


def test_an_order_serves_the_grid_that_it_was_made_for(groupings: list[bool]):
    state = vcattn.State(vcattn.Schedule(8, "every_step", reuse=8))
    q, k, v = inputs(0)
    for step, grid in enumerate((None, (0, 1, 1, 500), (0, 1, 1, 500), (100, 1, 1, 500))):
        out = vcattn.attention(q, k, v, state=state, step=step, grid=grid)
        assert np.array_equal(out, vcattn.attention(q, k, v, grid=grid)), f"step {step}"
    assert groupings == [False, False, False]


def test_grids_may_be_any_sequences(groupings: list[bool]):
    state = vcattn.State(vcattn.Schedule(8, "every_step", reuse=8))
    q, k, v = inputs(0)
    for step, grid in enumerate((np.array([0, 1, 1, 500]), [0, 1, 1, np.int32(500)])):
        out = vcattn.attention(q, k, v, state=state, step=step, grid=grid)
        assert np.array_equal(out, vcattn.attention(q, k, v, grid=(0, 1, 1, 500))), f"step {step}"
    assert groupings == [False]


def test_a_run_follows_the_schedule(groupings: list[bool]):
    state = vcattn.State(vcattn.Schedule(16, "first_quarter"))
    for step in range(16):
        q, k, v = inputs(step)
        out = vcattn.attention(q, k, v, state=state, step=step)
        assert error(out, exact(q, k, v)[0]) < BOUND
    assert groupings == [False]


def test_the_order_is_reused():
    state = vcattn.State(vcattn.Schedule(8, "every_step", reuse=8))
    (q, k, first), (_, _, second) = inputs(0), inputs(1)
    fresh = vcattn.attention(q, k, first, state=state, step=0)
    assert np.array_equal(fresh, vcattn.attention(q, k, first))
    reused = vcattn.attention(q, k, second, state=state, step=1)
    assert not np.array_equal(reused, vcattn.attention(q, k, second))  # which makes an order of its own
    assert error(reused, exact(q, k, second)[0]) < BOUND


def test_warm_regrouping_and_a_new_request(groupings: list[bool]):
    state = vcattn.State(vcattn.Schedule(8, "every_step", reuse=2))
    for step in (0, 1, 2, 3, 0):
        vcattn.attention(*inputs(step), state=state, step=step)
    assert groupings == [False, True, False]


def test_a_left_out_regrouping_is_made_up_for(groupings: list[bool]):
    state = vcattn.State(vcattn.Schedule(8, "every_step", reuse=4))
    for step in (2, 3, 6):
        vcattn.attention(*inputs(step), state=state, step=step)
    assert groupings == [False, True]


def test_streams_and_shapes_are_kept_apart(groupings: list[bool]):
    states = vcattn.State(vcattn.Schedule(8, "every_step", reuse=8))
    for step in (0, 1):
        for branch in ("cond", "uncond"):
            vcattn.attention(*inputs(step), state=states.of("blocks.0", branch), step=step)
    assert len(groupings) == 2
    stream = states.of("blocks.0", "cond")
    vcattn.attention(*inputs(2, seqlen=500), state=stream, step=2)
    vcattn.attention(*inputs(3, seqlen=500), state=stream, step=3, recipe="vsmooth8")
    assert groupings == [False] * 4
    states.reset()
    assert states.of("blocks.0", "cond") is not stream


def test_without_a_step_nothing_is_reused(groupings: list[bool]):
    state = vcattn.State(vcattn.Schedule(8, "every_step", reuse=8))
    vcattn.attention(*inputs(0), state=state, step=0)
    q, k, v = inputs(1)
    assert np.array_equal(vcattn.attention(q, k, v, state=state), vcattn.attention(q, k, v))
    assert len(groupings) == 1


def test_steps_that_do_not_smooth():
    state = vcattn.State(vcattn.Schedule(8, "never"))
    q, k, v = inputs(0)
    plain = vcattn.attention(q, k, v, recipe="accurate,mean_rows=0,v_order=sequence")
    assert np.array_equal(vcattn.attention(q, k, v, state=state, step=0), plain)
    # Recipes whose order is made without grouping know no order to keep, but steps all the same.
    sage = vcattn.attention(q, k, v, recipe="sage2")
    assert np.array_equal(vcattn.attention(q, k, v, recipe="sage2", state=state, step=1), sage)


def test_grouping_with_segments_and_mask(groupings: list[bool]):
    state = vcattn.State(vcattn.Schedule(4, "every_step"))
    q, k, v = inputs(0)
    out = vcattn.attention(q, k, v, state=state, step=0, cu_seqlens=[0, 100, 600])
    assert error(out[:, :100], exact(q[:, :100], k[:, :100], v[:, :100])[0]) < BOUND
    mask = (np.arange(600) < 450)[None]
    out = vcattn.attention(q, k, v, state=state, step=1, key_padding_mask=mask)
    assert error(out, exact(q, k, v, mask=mask)[0]) < BOUND
    assert groupings == [False, False]
    state = vcattn.State(vcattn.Schedule(8, "every_step", reuse=8))
    for step, bounds in enumerate(([0, 100, 600], [0, 100, 600], [0, 200, 600])):
        vcattn.attention(q, k, v, state=state, step=step, cu_seqlens=bounds)
    assert groupings == [False] * 4
