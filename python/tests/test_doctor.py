"""python -m vcattn doctor: what it names, and when it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import vcattn
from vcattn import _abi, _library
from vcattn.__main__ import main
from vcattn.doctor import doctor


def test_a_sound_installation():
    lines: list[str] = []
    assert doctor(lines.append) == 0
    text = "\n".join(lines)
    assert f"version {_library.version()}, as this package was made for" in text
    assert "back end cpu: runs here with" in text and "cpu self-test: ok" in text
    assert "BROKEN" not in text


def run(library: Path | str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, VCATTN_LIBRARY=str(library), PYTHONPATH=os.pathsep.join(sys.path))
    command = [sys.executable, "-m", "vcattn", "doctor"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_missing_library(tmp_path: Path):
    found = run(tmp_path / "libvcattn.so")
    assert found.returncode == 1 and "no library at" in found.stdout


def test_something_that_is_no_library(tmp_path: Path):
    (tmp_path / "libvcattn.so").write_text("nothing")
    found = run(tmp_path / "libvcattn.so")
    assert found.returncode == 1 and "does not load" in found.stdout


def test_undefined_symbol_after_an_upgrade(monkeypatch: pytest.MonkeyPatch):
    """A library without a function that this package calls, and one of another version: both are named."""
    monkeypatch.setitem(_abi.FUNCTIONS, "vcattn_of_tomorrow", (None, []))
    lines: list[str] = []
    assert doctor(lines.append) == 1
    assert any("has no function vcattn_of_tomorrow" in line and _abi.VERSION in line for line in lines)
    monkeypatch.delitem(_abi.FUNCTIONS, "vcattn_of_tomorrow")
    monkeypatch.setattr(_abi, "VERSION", "9.9.9")
    lines.clear()
    assert doctor(lines.append) == 1
    assert any(f"is version {_library.version()}; this package was made for 9.9.9" in line for line in lines)


def test_wrong_results_are_broken(monkeypatch: pytest.MonkeyPatch):
    import vcattn.doctor as module

    attention = module.attention
    monkeypatch.setattr(module, "attention", lambda q, k, v, **options: attention(q, k, v, **options) * len(options))
    lines: list[str] = []
    assert doctor(lines.append) == 1 and any("BROKEN cpu self-test" in line for line in lines)


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "x.json").write_text("{}")
    assert main(["plot", str(tmp_path / "x.json"), "x.png"]) == 1
    assert capsys.readouterr().err.startswith("vcattn: ")
    assert isinstance(vcattn.LibraryError("x"), ImportError)
