"""Checks of plain arguments that several modules share."""

from __future__ import annotations

import operator
from typing import Any

from .errors import InvalidArgumentError


def whole(name: str, value: Any, *, least: int | None = None) -> int:
    """`value` as an int. Raises InvalidArgumentError for what is no whole number, and below `least`."""
    try:
        number = operator.index(value)
    except TypeError as error:
        raise InvalidArgumentError(f"{name} is a whole number; found {value!r}") from error
    if least is not None and number < least:
        raise InvalidArgumentError(f"{name} is at least {least}; found {number}")
    return number
