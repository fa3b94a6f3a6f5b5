"""Recipes: every choice of the numerics, by name. The library defines them; docs/algorithm.md describes them."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import NamedTuple

from . import _abi, _library
from .errors import InvalidArgumentError

AUTO = "auto"
_AUTO_RECIPE = "accurate"  # the library's default, that of vcattn_attention_params_init


class Recipe:
    """A recipe of the library, with some fields changed. Immutable; equal where all fields are.

    >>> Recipe("accurate", mean_rows=0)
    Recipe("accurate,mean_rows=0")

    name: one of `recipe_names()`, or "auto", which is "accurate". Changes may follow it, "accurate,mean_rows=0": that
        is the form of `spec`, which names a recipe in text (logs, JSON, torch operators).
    changes: fields by the names that `fields` gives, with values as words or numbers.
    Raises InvalidArgumentError, with the known names, for an unknown name, field or value.
    """

    __slots__ = ("spec", "struct")

    spec: str
    struct: _abi.Recipe  # not to be changed

    def __init__(self, name: str = AUTO, **changes: object) -> None:
        if "\0" in name:  # where C would stop reading
            raise InvalidArgumentError(f"recipe: no NUL in a name; found {name!r}")
        base, *parts = name.split(",")
        if base == AUTO:
            base = _AUTO_RECIPE
        pairs = [part.partition("=")[::2] for part in parts]
        pairs += [(field, str(int(value) if isinstance(value, bool) else value)) for field, value in changes.items()]
        library, message = _library.get(), _abi.Message()
        self.struct = _abi.Recipe()
        address, reply = ctypes.addressof(self.struct), ctypes.addressof(message)
        _library.check(library.vcattn_recipe_by_name(base.encode(), address, reply), message)
        for field, value in pairs:
            _library.check(library.vcattn_recipe_set(address, field.encode(), value.encode(), reply), message)
        self.spec = ",".join([base, *(f"{field}={value}" for field, value in pairs)])

    @property
    def name(self) -> str:
        """Name of the recipe that the changes start from."""
        return self.struct.name.decode()

    @property
    def fields(self) -> dict[str, str]:
        """Every field by name, with the value as `changes` takes it."""
        library, address = _library.get(), ctypes.addressof(self.struct)
        line = ctypes.create_string_buffer(library.vcattn_recipe_describe(address, None, 0) + 1)
        library.vcattn_recipe_describe(address, line, len(line))
        return dict(pair.split("=", 1) for pair in line.value.decode().split(" "))

    def changed(self, **changes: object) -> Recipe:
        """This recipe with further fields changed."""
        return Recipe(self.spec, **changes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and bytes(self.struct) == bytes(other.struct)

    def __hash__(self) -> int:
        return hash(bytes(self.struct))

    def __repr__(self) -> str:
        return f'Recipe("{self.spec}")'


@lru_cache(maxsize=256)
def _named(spec: str) -> Recipe:
    return Recipe(spec)


class Facts(NamedTuple):
    """What a state must know of a recipe. Plain values, so that torch.compile can take them as constants."""

    order: tuple[int, ...] | None  # what vcattn_group's result depends on; None where the recipe needs no grouping
    clusters: int
    plain: str  # spec for a step that subtracts no block means
    plain_unordered: str  # the same where no order was made yet: in sequence order


@lru_cache(maxsize=256)
def facts(spec: str) -> Facts:
    """Facts of a recipe by its spec. Cached."""
    recipe = as_recipe(spec)
    order, grouping = recipe.struct.v_order, recipe.struct.grouping
    depends = None
    if order in (_abi.ORDER_KMEANS, _abi.ORDER_BALANCED, _abi.ORDER_CHAIN):
        depends = (order, *(getattr(grouping, field) for field, _ in grouping._fields_))
    plain = recipe.changed(mean_rows=0)
    return Facts(depends, grouping.clusters, plain.spec, plain.changed(v_order="sequence").spec)


def as_recipe(recipe: str | Recipe) -> Recipe:
    """A recipe from its name or spec; recipes are passed through. Cached: a hit costs 0.1 microseconds."""
    return _named(recipe) if type(recipe) is str else recipe if isinstance(recipe, Recipe) else _named(spec_of(recipe))


def split_specs(text: str) -> list[str]:
    """Specs from a list of them with commas: "fast,mean_rows=0,exact" is "fast,mean_rows=0" and "exact"."""
    specs: list[str] = []
    for part in text.split(","):
        if "=" in part and specs:
            specs[-1] += f",{part}"
        else:
            specs.append(part)
    return specs


def recipe_names() -> list[str]:
    """Names of the library's recipes."""
    library = _library.get()
    return [library.vcattn_recipe_name(i).decode() for i in range(library.vcattn_recipe_count())]


def spec_of(recipe: str | Recipe) -> str:
    """The text that names a recipe. Names are not looked up: the call that uses them does."""
    if isinstance(recipe, str):
        return recipe
    if isinstance(recipe, Recipe):
        return recipe.spec
    raise InvalidArgumentError(f"recipe is a name or a vcattn.Recipe; found {type(recipe).__name__}")
