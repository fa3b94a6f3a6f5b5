"""Which denoising steps smooth the values and which of those regroup them, as vcattn_schedule_at says."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from . import _abi, _library
from ._check import whole
from .errors import InvalidArgumentError

_KINDS = {
    "first_quarter": _abi.SCHEDULE_FIRST_QUARTER,
    "uniform_quarter": _abi.SCHEDULE_UNIFORM_QUARTER,
    "every_step": _abi.SCHEDULE_EVERY_STEP,
    "never": _abi.SCHEDULE_NEVER,
}
DEFAULT_KIND = "every_step"

MAX_STEPS = 100_000  # the library is asked of each, which takes two microseconds
_LARGEST = 2**31 - 1  # of int32_t


def check_kind(kind: str) -> None:
    """Raises InvalidArgumentError for what is no kind of schedule."""
    if not isinstance(kind, str) or kind not in _KINDS:
        raise InvalidArgumentError(f"schedule kind is one of {', '.join(_KINDS)}; found {kind!r}")


class Step(NamedTuple):
    """What a step does."""

    smooth: bool  # subtract block means
    regroup: bool  # compute an order of the values
    warm: bool  # start it from the previous centroids
    group_step: int  # the last step, up to this one, that regroups; -1 where there is none


class Schedule:
    """A run of `num_steps` denoising steps. Immutable; equal where all steps do the same.

    num_steps: 1 to 100,000.
    kind: "every_step" (grouping costs so little that it pays; docs/results.md), "first_quarter" (the paper's),
        "uniform_quarter" or "never".
    reuse: adjacent smoothed steps that share one order; 0: the library's choice (4, or 2 in runs of at most 8 steps).
    Raises InvalidArgumentError.
    """

    __slots__ = ("num_steps", "kind", "reuse", "steps")

    steps: tuple[Step, ...]

    def __init__(self, num_steps: int, kind: str = DEFAULT_KIND, reuse: int = 0) -> None:
        num_steps, reuse = whole("num_steps", num_steps), whole("reuse", reuse)
        for name, value in (("num_steps", num_steps), ("reuse", reuse)):
            if abs(value) > _LARGEST:
                raise InvalidArgumentError(f"schedule: {name} is a number of 32 bits; found {value}")
        if num_steps > MAX_STEPS:
            raise InvalidArgumentError(f"schedule: num_steps is at most {MAX_STEPS}; found {num_steps}")
        check_kind(kind)
        fix = super().__setattr__
        fix("num_steps", num_steps)
        fix("kind", kind)
        fix("reuse", reuse)
        library, message, found = _library.get(), _abi.Message(), _abi.ScheduleStep()
        schedule = _abi.Schedule(_KINDS[kind], num_steps, reuse)
        steps, group_step = [], -1
        for step in range(max(num_steps, 1)):  # one call at least, which refuses what is wrong
            code = library.vcattn_schedule_at(
                ctypes.addressof(schedule), step, ctypes.addressof(found), ctypes.addressof(message)
            )
            _library.check(code, message)
            group_step = step if found.regroup else group_step
            steps.append(Step(bool(found.smooth), bool(found.regroup), bool(found.warm), group_step))
        fix("steps", tuple(steps))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a schedule does not change: {name}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self.steps == other.steps

    def __hash__(self) -> int:
        return hash(self.steps)

    def at(self, step: int) -> Step:
        """What step `step` does; raises InvalidArgumentError outside 0 .. num_steps - 1."""
        step = whole("step", step)
        if not 0 <= step < self.num_steps:
            raise InvalidArgumentError(f"step is 0 to num_steps - 1 = {self.num_steps - 1}; found {step}")
        return self.steps[step]

    def __repr__(self) -> str:
        return f'Schedule({self.num_steps}, "{self.kind}", reuse={self.reuse})'
