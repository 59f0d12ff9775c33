"""How backends are found, and that a broken one becomes a reason."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from sparse_attn import backends, registry

GOOD = """
from sparse_attn.registry import Impl
IMPLS = [Impl("attend", "{name}", limits={{}}, run=lambda *a: None, priority={priority})]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An additional, empty folder of backends."""
    monkeypatch.setattr(backends, "__path__", [str(tmp_path)])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("sparse_attn.backends."):
            del sys.modules[name]
            delattr(backends, name.rpartition(".")[2])
    registry.reset()


def add(folder: Path, name: str, source: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(source)


def test_a_folder_is_found_and_ordered_by_priority_then_name(folder):
    for name, priority in (("found_b", 5), ("found_a", 5), ("found_c", 9)):
        add(folder, name, GOOD.format(name=name, priority=priority))
    impls, broken = backends.discover()
    assert [impl.backend for impl in impls] == ["found_c", "found_a", "found_b"]
    assert broken == {}


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("raise OSError('driver missing')", "OSError: driver missing"),
        ("x =", "SyntaxError"),
        ("", "has no attribute 'IMPLS'"),
        ("IMPLS = ['attend']", "IMPLS: expected sparse_attn.registry.Impl, got str"),
        (
            GOOD.format(name="other", priority=0),
            "expected backend 'broken', the name of its folder",
        ),
    ],
)
def test_a_broken_backend_becomes_a_sentence(folder, source, reason):
    add(folder, "broken", source)
    add(folder, "healthy", GOOD.format(name="healthy", priority=0))
    impls, broken = backends.discover()
    assert [impl.backend for impl in impls] == ["healthy"]
    assert set(broken) == {"broken"}
    assert reason in broken["broken"]


def test_the_reason_reaches_the_refusal_of_a_call(folder):
    add(folder, "broken", "import no_such_library")
    registry.reset()
    with pytest.raises(registry.NoBackend, match="broken: .*No module named 'no_such_library'"):
        registry.choose(registry.Call("attend", "meta", ()), backend="broken")


def test_entry_points_are_found_and_cannot_take_a_name(folder, tmp_path, monkeypatch):
    add(folder, "inside", GOOD.format(name="inside", priority=0))
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    (outside / "their_backend.py").write_text(GOOD.format(name="outside", priority=1))
    monkeypatch.syspath_prepend(outside)
    group = backends.ENTRY_POINT_GROUP
    points = [
        EntryPoint("outside", "their_backend", group),
        EntryPoint("inside", "their_backend", group),
        EntryPoint("absent", "no_such_module", group),
    ]
    monkeypatch.setattr(backends, "entry_points", lambda group: points)
    impls, broken = backends.discover()
    assert [impl.backend for impl in impls] == ["outside", "inside"]
    assert "already taken" in broken["inside (entry point their_backend)"]
    assert "No module named 'no_such_module'" in broken["absent"]
