"""Who may import whom, and what importing the package must not bring along."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BACKENDS = sorted(path.parent.name for path in ROOT.glob("backends/*/__init__.py"))
NO_TORCH = (
    *("pages", "metrics", "records", "observer", "dashboard", "admission", "stats"),
    *("planner", "devices", "weights", "traces", "engines", "exposition", "diagnosis"),
    *("prefix", "manager", "waste", "cost", "batching", "calibration", "knee", "crossover", "endpoint", "scheduler"),
    *("breakdown",),
)
LOWEST = {
    "layout": (),
    "models": ("layout",),
    "configs": ("layout", "models"),
    "codecs": ("layout",),
    "planes": ("layout", "codecs"),
}
"""What the files that hold descriptions may import of the package."""
DATA = ("layout", "models", "configs")
"""Those that are data, without torch."""
FOREIGN = ("triton", "torch_npu", "transformers", "vllm", "sglang", "numpy.f2py", "matplotlib")


def module_name(path: Path) -> str:
    """The dotted name of a file of the package, as installed."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "backends":
        parts.insert(0, "sparse_attn")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, source: str | None = None) -> set[str]:
    """Every module that a file imports anywhere at run time, as absolute dotted names.

    ``from a import b`` gives ``a.b``, as b may be a module.
    """
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package.pop()
    found = set()
    nodes: list[ast.AST] = [ast.parse(path.read_text() if source is None else source)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            nodes += node.orelse
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module or "").split(".")] if node.module else base
            found |= {".".join([*base, alias.name]) for alias in node.names}
    return found


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def violations(path: Path, source: str | None = None) -> list[str]:
    """The imports of one file that break a rule."""
    name = module_name(path)
    layer = name.split(".")[1:2]
    ours = {m for m in imports(path, source) if within(m, "sparse_attn")}
    wrong: set[str] = set()
    if layer == ["serving"]:
        wrong = {m for m in ours if not within(m, *_package("serving", "ops", "layout", "models", "registry"))}
        if path.stem in NO_TORCH:
            wrong |= {m for m in imports(path, source) if within(m, "torch")}
    elif layer and layer[0] in LOWEST:
        wrong = {m for m in ours if not within(m, *_package(*LOWEST[layer[0]]))}
        if layer[0] in DATA:
            wrong |= {m for m in imports(path, source) if within(m, "torch")}
    elif layer == ["backends"] and name != "sparse_attn.backends":
        own = ".".join(name.split(".")[:3])
        native = f"sparse_attn._{name.split('.')[2]}"
        allowed = _package("registry", "layout", "checks", "env")
        wrong = {m for m in ours if not within(m, own, native, *allowed)}
    elif layer == ["ops"]:
        allowed = _package("ops", "library", "checks", "registry", "layout", "planes")
        wrong = {m for m in ours if not within(m, *allowed)}
    elif layer and layer[0] in ("checks", "registry", "library", "reading", "env", "reference"):
        higher = _package("serving", "integrations", "demo")
        wrong = {m for m in ours if within(m, *higher)}
    if name != "sparse_attn.library" and layer != ["demo"]:
        wrong |= {m for m in imports(path, source) if within(m, "torch.library")}
    return sorted(f"{name} imports {m}" for m in wrong)


def _package(*names: str) -> list[str]:
    return [f"sparse_attn.{name}" for name in names]


def package_files() -> list[Path]:
    found = [*ROOT.glob("sparse_attn/**/*.py"), *ROOT.glob("backends/**/*.py")]
    return sorted(path for path in found if ROOT / "sparse_attn" / "backends" not in path.parents)


def test_every_file_imports_only_what_its_layer_may():
    files = package_files()
    assert ROOT / "sparse_attn" / "registry.py" in files
    assert ROOT / "backends" / "__init__.py" in files
    assert [line for path in files for line in violations(path)] == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("sparse_attn/serving/cache.py", "from .. import reference"),
        ("sparse_attn/serving/cache.py", "from ..backends import cpu_native"),
        ("sparse_attn/serving/pages.py", "import torch"),
        ("sparse_attn/serving/pages.py", "def f():\n    from torch import Tensor"),
        ("sparse_attn/ops/attend.py", "from ..serving import pages"),
        ("sparse_attn/registry.py", "from .serving import pages"),
        ("sparse_attn/ops/load.py", "from .. import codecs"),
        ("sparse_attn/codecs.py", "from .serving import cache"),
        ("sparse_attn/codecs.py", "from .planes import Plane"),
        ("sparse_attn/planes.py", "from .ops import store"),
        ("sparse_attn/layout.py", "import torch"),
        ("sparse_attn/layout.py", "from .codecs import encode"),
        ("sparse_attn/models.py", "import torch"),
        ("sparse_attn/configs.py", "import torch"),
        ("sparse_attn/models.py", "from .ops import select"),
        ("sparse_attn/checks.py", "import torch.library"),
        ("backends/a/__init__.py", "from sparse_attn.serving import pages"),
        ("backends/a/__init__.py", "from sparse_attn import reference"),
        ("backends/a/__init__.py", "from sparse_attn.ops.attend import Attend"),
        ("backends/a/attend.py", "from ..b import kernel"),
        ("backends/a/attend.py", "import sparse_attn.backends.b"),
        ("backends/a/attend.py", "from sparse_attn import _b"),
    ],
)
def test_the_rules_catch(file, source):
    assert violations(ROOT / file, source)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (
            "sparse_attn/serving/cache.py",
            "import torch\nfrom ..ops import attend\nfrom .. import layout",
        ),
        ("sparse_attn/models.py", "from .layout import FORMATS"),
        ("sparse_attn/planes.py", "import torch\nfrom . import codecs\nfrom .layout import FORMATS"),
        ("backends/a/attend.py", "from . import kernel\nfrom sparse_attn import _a, registry"),
        ("backends/a/__init__.py", "from sparse_attn.checks import expect\nimport triton"),
        ("backends/a/__init__.py", "if TYPE_CHECKING:\n    from sparse_attn.ops.attend import Attend"),
    ],
)
def test_the_rules_admit(file, source):
    assert violations(ROOT / file, source) == []


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_loads_no_backend_and_no_engine():
    loaded = run(
        "import sys, torch; before = set(sys.modules); import sparse_attn;print(*sorted(set(sys.modules) - before))"
    ).split()
    assert "sparse_attn.registry" in loaded
    foreign = [m for m in loaded if within(m, *FOREIGN, "sparse_attn.backends")]
    native = [m for m in loaded if m.startswith("sparse_attn._")]
    assert foreign + native == []


def test_declaring_limits_loads_no_kernel_language():
    """Every backend can be imported, for its limits, on a machine that cannot run it."""
    loaded = run(
        "import sys; from sparse_attn import registry; registry.implementations();print(*sorted(sys.modules))"
    ).split()
    assert [m for m in loaded if within(m, "triton", "torch_npu") or m.startswith("sparse_attn._")] == []


@pytest.mark.parametrize("name", [n for n in NO_TORCH if (ROOT / f"sparse_attn/serving/{n}.py").exists()])
def test_modules_of_rules_run_without_torch(name):
    run(f"import sys; sys.modules['torch'] = None; import sparse_attn.serving.{name}")


def test_without_torch_the_operators_say_what_is_missing():
    said = run(
        "import sys; sys.modules['torch'] = None; import sparse_attn\n"
        "try: sparse_attn.attend\n"
        "except ImportError as error: print(error)\n"
        "print(hasattr(sparse_attn, 'nothing'))"
    )
    assert said.splitlines() == [
        "sparse_attn.attend needs torch 2.9 or newer, which is not installed: pip install torch",
        "False",
    ]


@pytest.mark.parametrize("name", ["configs", "metrics", "plan", "integrations.vllm", "integrations.sglang"])
def test_what_watches_engines_runs_without_torch(name):
    run(f"import sys; sys.modules['torch'] = None; import sparse_attn.{name}")


def test_importing_the_package_is_quick_beside_torch():
    """Goal: 100 ms over torch. The bound here is generous, as machines are shared."""
    code = "import time, torch; start = time.perf_counter(); import sparse_attn;print(time.perf_counter() - start)"
    assert min(float(run(code)) for _ in range(2)) < 0.5
