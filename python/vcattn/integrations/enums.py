"""New members for the closed enumerations in which hosts list their attention backends."""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeVar

E = TypeVar("E", bound=Enum)


def add_member(kind: type[E], name: str, value: Any) -> E:
    """The member of `kind` with this value, added if it is not there: what Enum's construction does for each member."""
    if value in kind._value2member_map_:
        return kind(value)
    member = str.__new__(kind, value) if issubclass(kind, str) else object.__new__(kind)
    member._name_, member._value_ = name, value
    member._sort_order_ = len(kind._member_names_)
    kind._member_map_[name] = member
    kind._member_names_.append(name)
    kind._value2member_map_[value] = member
    return member
