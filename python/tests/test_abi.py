"""_abi.py mirrors include/vcattn/vcattn.h: every struct, enumerator, constant and function, read from the header."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from reference import normal
from vcattn import _abi, _call, _library, _numpy_arrays

ROOT = Path(__file__).resolve().parents[2]
HEADER = re.sub(r"/\*.*?\*/", "", (ROOT / "include/vcattn/vcattn.h").read_text(), flags=re.S)

C_TYPES = {
    "char": ctypes.c_char,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "size_t": ctypes.c_size_t,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "void": None,
}
STRUCTS = {
    "vcattn_message": _abi.Message,
    "vcattn_tensor": _abi.Tensor,
    "vcattn_grouping": _abi.Grouping,
    "vcattn_recipe": _abi.Recipe,
    "vcattn_video_grid": _abi.VideoGrid,
    "vcattn_rope": _abi.Rope,
    "vcattn_attention_params": _abi.AttentionParams,
    "vcattn_schedule": _abi.Schedule,
    "vcattn_schedule_step": _abi.ScheduleStep,
}


def test_every_struct_of_the_header_is_mirrored():
    assert set(re.findall(r"typedef struct (\w+) \{", HEADER)) == set(STRUCTS)


@pytest.mark.parametrize("name", STRUCTS)
def test_struct(name: str):
    body = re.search(rf"typedef struct {name} \{{(.*?)\}} {name};", HEADER, re.S).group(1)
    expected = []
    for declaration in filter(None, (part.strip() for part in body.split(";"))):
        kind, names = re.fullmatch(r"(?:const )?(\w+\s*\*?)\s*(.*)", declaration, re.S).groups()
        for field in names.split(","):
            field, extent = re.fullmatch(r"(\w+)(?:\[(\d+)\])?", field.strip()).groups()
            element = ctypes.c_void_p if "*" in kind else C_TYPES.get(kind.strip()) or STRUCTS[kind.strip()]
            expected.append((field, element * int(extent) if extent else element))
    assert STRUCTS[name]._fields_ == expected


def enumerators() -> dict[str, int]:
    found: dict[str, int] = {}
    for body in re.findall(r"enum(?: \w+)? \{(.*?)\}", HEADER, re.S):
        found |= {name: int(value) for name, value in re.findall(r"VCATTN_(\w+) = (\d+)", body)}
    found |= {name: int(value) for name, value in re.findall(r"#define VCATTN_(\w+) (\d+)$", HEADER, re.M)}
    return found


def test_constants():
    header = enumerators()
    assert {"OK", "BF16", "MEMORY_CUDA", "WORKSPACE_ALIGNMENT"} <= set(header)
    mirrored = {name: value for name, value in vars(_abi).items() if name.isupper() and isinstance(value, int)}
    assert {name: header.get(name) for name in mirrored} == mirrored


def test_every_code_is_an_exception():
    from vcattn import errors

    codes = re.search(r"typedef enum vcattn_code \{(.*?)\}", HEADER, re.S).group(1)
    values = {int(value) for value in re.findall(r"= (\d+)", codes)} - {_abi.OK}
    assert {errors.from_code(value, "line").code for value in values} == values
    assert str(errors.from_code(2, "line")) == "line"


def test_every_back_end_has_its_name():
    body = re.search(r"typedef enum vcattn_backend \{(.*?)\}", HEADER, re.S).group(1)
    names = re.findall(r"VCATTN_BACKEND_(\w+) = (\d+)", body)
    assert _abi.BACKENDS == {name.lower(): int(value) for name, value in names}


def test_functions():
    declared = re.findall(r"VCATTN_API\s+([\w\s]+?[\s*]+)(vcattn_\w+)\((.*?)\);", HEADER, re.S)
    assert {name for _, name, _ in declared} == set(_abi.FUNCTIONS)
    for result, name, arguments in declared:
        kinds = [] if arguments.strip() == "void" else [ctype_of(part) for part in arguments.split(",")]
        found_result, found = _abi.FUNCTIONS[name]
        assert [pointer_as_address(kind) for kind in found] == kinds, name
        assert pointer_as_address(found_result) is ctype_of(result + " result"), name


def pointer_as_address(kind: object) -> object:
    return ctypes.c_void_p if kind is ctypes.c_char_p else kind


def ctype_of(declaration: str) -> object:
    if "*" in declaration:
        return ctypes.c_void_p
    kind = declaration.replace("const ", "").split()[0]
    return ctypes.c_int32 if kind == "vcattn_code" else C_TYPES[kind]


def test_versions_agree():
    parts = [enumerators()[f"VERSION_{part}"] for part in ("MAJOR", "MINOR", "PATCH")]
    assert _abi.VERSION == ".".join(map(str, parts)) == _library.version()
    cmake = (ROOT / "CMakeLists.txt").read_text()
    assert f"project(vcattn VERSION {_abi.VERSION}" in cmake


def test_library_of_another_layout_is_refused(monkeypatch: pytest.MonkeyPatch):
    class Smaller(ctypes.Structure):
        _fields_ = _abi.AttentionParams._fields_[:-3]

    monkeypatch.setattr(_abi, "AttentionParams", Smaller)
    with pytest.raises(ImportError, match="takes attention parameters of"):
        _library.load(_library.path())


def test_the_largest_scale_is_the_librarys():
    x = normal(0, 1, 8, 2, 64)
    for scale, served in ((_abi.MAX_SOFTMAX_SCALE, True), (_abi.MAX_SOFTMAX_SCALE * 1.001, False)):
        options = _call.Options("accurate", False, scale)
        assert (_call.refusal(_numpy_arrays, x, x, x, options, cuda=False) is None) == served
