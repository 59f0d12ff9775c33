"""The commands: doctor, support, version, demo."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sparse_attn import doctor, registry, support
from sparse_attn.__main__ import main

ROOT = Path(__file__).parents[1]
REPORT = tuple(doctor.PROBES)


def run(*command: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A copy of the package without its native modules."""
    ignore = shutil.ignore_patterns("*.so", "build_info.json", "__pycache__")
    shutil.copytree(ROOT / "sparse_attn", tmp_path / "sparse_attn", symlinks=True, ignore=ignore)
    shutil.copytree(ROOT / "backends", tmp_path / "backends", ignore=ignore)
    return tmp_path


def native_file(checkout: Path) -> Path:
    return checkout / "sparse_attn" / f"_cpu_native{importlib.machinery.EXTENSION_SUFFIXES[0]}"


def doctor_json(checkout: Path, **environment: str) -> tuple[int, dict]:
    done = run("sparse_attn/doctor.py", "--json", cwd=checkout, **environment)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_doctor_agrees_with_the_registry():
    done = run("-m", "sparse_attn", "doctor", "--json")
    report = json.loads(done.stdout)
    assert list(report) == [*REPORT, "usable", "advice"]
    assert [name for name in REPORT if isinstance(report[name], dict) and "error" in report[name]] == []
    expected = {
        op: {
            label: registry.availability(impl) or "available"
            for impl in registry.implementations(op)
            for label in support.labels([impl])
        }
        for op in report["backends"]["ops"]
    }
    assert report["backends"]["ops"] == expected
    kernels = [s for states in expected.values() for b, s in states.items() if b != "reference"]
    assert report["usable"] == ("available" in kernels)
    assert done.returncode == (0 if report["usable"] else 1)


def test_doctor_without_native_module(checkout):
    code, report = doctor_json(checkout)
    assert report["native"] == "none in the package directory"
    assert any("C++17 compiler" in sentence for sentence in report["advice"])
    assert report["backends"]["ops"]["attend"]["reference"] == "available"
    assert code == (0 if report["usable"] else 1)


def test_doctor_survives_a_truncated_native_module(checkout):
    """Loading half a shared library ends the process by a signal, not by an exception."""
    library = Path(importlib.util.find_spec("_json").origin).read_bytes()
    native_file(checkout).write_bytes(library[:5000])
    code, report = doctor_json(checkout)
    assert report["native"] == {"error": "the process died of SIGBUS"}
    assert code == (0 if report["usable"] else 1)
    assert any(native_file(checkout).name in sentence and "SIGBUS" in sentence for sentence in report["advice"])


def test_doctor_says_why_a_native_module_does_not_load(checkout):
    native_file(checkout).write_text("this is no library")
    other = checkout / "sparse_attn" / "_cpu_native.cpython-27-none.so"
    other.write_text("")
    _, report = doctor_json(checkout)
    assert "ImportError" in report["native"][native_file(checkout).name]
    assert "built for another Python" in report["native"][other.name]


def test_doctor_without_torch_or_with_a_broken_package(checkout):
    stub = checkout / "stub"
    stub.mkdir()
    (stub / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
    (checkout / "sparse_attn" / "registry.py").write_text("x =")
    code, report = doctor_json(checkout, PYTHONPATH=str(stub))
    assert code == 1
    assert not report["usable"]
    assert any("pip install" in sentence for sentence in report["advice"])
    assert "error" in report["backends"]
    assert report["python"]["executable"] == sys.executable


@pytest.mark.parametrize("command", ["support", "demo"])
def test_without_torch_a_command_that_needs_it_is_one_sentence(command):
    code = (
        f"import sys; sys.modules['torch'] = None; from sparse_attn.__main__ import main; sys.exit(main(['{command}']))"
    )
    done = run("-c", code)
    assert done.returncode == 2
    assert done.stderr == f"{command} needs torch 2.9 or newer, which is not installed: pip install torch\n"


def test_doctor_reports_variables_that_have_no_effect(monkeypatch):
    monkeypatch.setenv("SPARSE_ATTN_CHEKS", "debug")
    monkeypatch.setenv("SPARSE_ATTN_LOG", "everything")
    registry.reset()
    try:
        complaints = doctor.variable_errors()
    finally:
        registry.reset()
    assert [sentence.split(":")[0] for sentence in complaints] == [
        "SPARSE_ATTN_CHEKS",
        "SPARSE_ATTN_LOG",
    ]


HEALTHY = {
    "torch": {"version": "2.9.0+cpu"},
    "native": {"_a.so": "loads"},
    "openmp": ["libgomp.so.1"],
    "triton": {"triton": "3.5.0"},
    "variable_errors": [],
    "backends": {"ops": {"attend": {"a": "available", "reference": "available"}}, "broken": {}},
}


def test_a_healthy_report_needs_no_advice():
    assert doctor.judge(HEALTHY) == (True, [])


@pytest.mark.parametrize(
    ("change", "usable", "advice"),
    [
        ({"torch": {"version": "2.8.1"}}, True, "torch is 2.8.1, at least 2.9 is needed"),
        ({"torch": {"version": "2.10.0"}}, True, None),
        ({"openmp": ["libgomp.so.1", "libiomp5.so"]}, True, "several OpenMP runtimes"),
        ({"triton": {"triton": "3.5", "triton-ascend": "3.2"}}, True, "overwrite each other"),
        ({"native": {"_a.so": "does not load: X"}}, True, "_a.so does not load: X"),
        ({"backends": {"error": "it broke"}}, False, "could not be asked: it broke"),
        ({"backends": {"ops": {}, "broken": {"b": "no c"}}}, False, "backend b: no c"),
        (
            {"backends": {"ops": {"attend": {"a": "no", "reference": "available"}}, "broken": {}}},
            False,
            "only the slow reference",
        ),
    ],
)
def test_advice(change, usable, advice):
    judged, sentences = doctor.judge({**HEALTHY, **change})
    assert judged == usable
    assert (advice is None and sentences == []) or any(advice in s for s in sentences)


def test_a_probe_that_ends_or_hangs_is_a_value(checkout):
    """The probes after it still answer."""
    path = checkout / "sparse_attn" / "doctor.py"
    source = path.read_text().replace("PROBE_SECONDS = 120", "PROBE_SECONDS = 3")
    body = "    os._exit(7) if os.environ['END'] == 'exit' else __import__('time').sleep(60)\n"
    path.write_text(source.replace("def system() -> Any:\n", f"def system() -> Any:\n{body}"))
    probe = "import json; from doctor import collect;print(json.dumps(collect(['python', 'system', 'cpu'])))"
    ends = {"exit": "the process ended with exit code 7", "hang": "no answer within 3 s"}
    for end, reason in ends.items():
        done = run("-c", probe, cwd=checkout / "sparse_attn", END=end)
        report = json.loads(done.stdout)
        assert report["system"] == {"error": reason}
        assert "version" in report["python"]
        assert "cores" in report["cpu"]


def test_support_lists_every_kernel(capsys):
    assert main(["support", "--json"]) == 0
    ops = json.loads(capsys.readouterr().out)["ops"]
    listed = [(op, entry["backend"], entry["priority"]) for op, entries in ops.items() for entry in entries]
    assert sorted(listed) == sorted((i.op, i.backend, i.priority) for i in registry.implementations())


def test_support_of_one_op_as_text():
    done = run("-m", "sparse_attn", "support", "attend")
    assert done.returncode == 0, done.stderr
    assert "reference, on this machine: available" in done.stdout
    assert "\nstore" not in done.stdout


def test_support_refuses_an_unknown_op(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["support", "no_such_op"])
    assert "choose from" in capsys.readouterr().err


def test_support_table_says_each_limit():
    limits = {
        "dtype": registry.OneOf(("float32", "bfloat16")),
        "q_heads": registry.Between(1, 128),
        "qk_dim": registry.Between(16, 512, 16),
        "sinks": registry.OneOf((False,)),
        "v_format": registry.OneOf(("",)),
    }
    wide = registry.Impl("attend", "a", {}, print, tolerance={"float32": (1e-5, 1e-6)})
    narrow = registry.Impl("attend", "b", limits, print, priority=3)
    assert support.table([wide, narrow]) == [
        ["", "a", "b"],
        ["dtype", "any", "float32, bfloat16"],
        ["q_heads", "any", "1 to 128"],
        ["qk_dim", "any", "16 to 512 in steps of 16"],
        ["sinks", "any", "no"],
        ["v_format", "any", "none"],
        ["error in float32", "1e-05 + 1e-06 of the value", ""],
    ]
    assert support.labels([narrow, registry.Impl("attend", "b", {}, print)]) == ["b (3)", "b (0)"]


def test_support_page_is_current(capsys):
    """Else: python -m sparse_attn support --markdown > docs/support.md."""
    assert main(["support", "--markdown"]) == 0
    assert capsys.readouterr().out == (ROOT / "docs" / "support.md").read_text()


def test_a_reader_that_stops_gets_no_traceback():
    command = f"{sys.executable} -m sparse_attn metrics --dashboard"
    done = subprocess.run(
        f"{command} | true", shell=True, capture_output=True, text=True, cwd=Path(__file__).parents[1]
    )
    assert done.stderr == ""


def test_version(capsys):
    assert main(["version"]) == 0
    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert capsys.readouterr().out.strip() in (declared.group(1), "not installed")


def test_demo_gets_its_own_arguments(monkeypatch):
    seen = []
    monkeypatch.setattr("sparse_attn.demo.main", lambda argv: seen.append(argv) or 3)
    assert main(["demo", "--quick", "-x"]) == 3
    assert seen == [["--quick", "-x"]]
