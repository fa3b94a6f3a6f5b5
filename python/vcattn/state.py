"""The order of the values that denoising steps share, kept between calls."""

from __future__ import annotations

from collections.abc import Hashable
from types import ModuleType
from typing import Any

from . import _call
from .errors import InvalidArgumentError
from .schedule import Schedule

_NO_GRID = (-1,) * 4


class State:
    """The value order of one stream of calls: one layer of one request, CFG branch, expert and rank.

    A state decides at each step, by its schedule, whether the values are smoothed, and makes or reuses their order.
    An order serves only calls of the shapes, device, grouping, grid, segments and mask that it was made for; others,
    and a step before the last one (a new request), start anew. A regrouping step that was left out, because a policy
    ran it in BF16, is made up for.

    >>> states = State(Schedule(40))
    >>> out = attention(q, k, v, state=states.of("blocks.3", "cond"), step=0)

    Not to be shared between streams or threads: sharing costs fidelity, and threads would race. In CUDA memory and in
    compiled code the key-padding mask of a stream stays the same from the step that made an order to the steps that
    reuse it, as it cannot be compared without waiting; in compiled code the bounds of segments too.
    schedule: None smooths every step with an order of its own.
    """

    __slots__ = ("schedule", "_permutation", "_centroids", "_made_for", "_made_at", "_last_step", "_children")

    def __init__(self, schedule: Schedule | None = None) -> None:
        if schedule is not None and not isinstance(schedule, Schedule):
            raise InvalidArgumentError(f"schedule is a vcattn.Schedule or None; found {type(schedule).__name__}")
        self.schedule = schedule
        self._children: dict[Hashable, State] = {}
        self.reset()

    def of(self, *key: Hashable) -> State:
        """The state of a stream by its key (layer, CFG branch, expert, rank ...), made at its first use."""
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = State(self.schedule)
        return child

    def reset(self) -> None:
        """Forgets every order, of the streams too: for a new request."""
        self._permutation = self._centroids = self._made_for = None
        self._made_at = self._last_step = -1
        self._children.clear()

    def prepare(
        self,
        calls: ModuleType,
        arrays: ModuleType,
        v: Any,
        options: _call.Options,
        step: int | None,
        mask: Any,
        segments: Any,
    ) -> tuple[_call.Options, Any]:
        """(options, permutation) for the attention call of this step; groups `v` where the schedule says so.

        calls: _call, or torch_op under tracing. Without a step index or a schedule nothing is reused: the call makes
        its own order.
        """
        if step is None or self.schedule is None:
            return options, None
        todo = self.schedule.at(step)
        facts = calls.recipe_facts(options.recipe)
        if facts.order is None:
            return (options if todo.smooth else options.with_recipe(facts.plain)), None
        # Flat: torch.compile of torch 2.11 cannot compare tuples of tuples.
        made_for = (
            *v.shape,
            options.bhsd,
            *arrays.identity(v),
            *facts.order,
            *(options.grid or _NO_GRID),
            mask is not None,
            *(() if mask is None else calls.mask_identity(mask)),
            *(() if segments is None else (segments.identity,)),
        )
        if made_for != self._made_for or step < self._last_step:
            self._permutation = self._centroids = None
            self._made_at = -1
            self._made_for = made_for
        self._last_step = step
        if todo.smooth and (todo.regroup or self._made_at < todo.group_step):
            self._permutation, self._centroids = calls.group(
                arrays, v, options, mask=mask, segments=segments, centroids=self._centroids
            )
            self._made_at = step
        if not todo.smooth:
            plain = facts.plain_unordered if self._permutation is None else facts.plain
            options = options.with_recipe(plain)
        return options, self._permutation
