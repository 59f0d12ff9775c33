"""What this machine has, which kernels can run on it, and what to do if none can.

Only the standard library is imported here, so this also runs as a plain file when the package is
broken: ``python sparse_attn/doctor.py``. The probes run in a child process, because a damaged
native module can kill the process that loads it. A probe that fails, dies or hangs becomes a value.
"""

from __future__ import annotations

import argparse
import glob
import importlib
import importlib.machinery
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent
PROBE_SECONDS = 120
REBUILD = "delete the file and install the package again"
INSTRUCTION_SETS = (
    *("avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni"),
    *("avx512_bf16", "avx512_fp16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "asimdhp", "bf16", "i8mm", "sve", "svebf16", "sve2"),
)


def python() -> Any:
    return {"version": platform.python_version(), "executable": sys.executable}


def system() -> Any:
    libc = " ".join(platform.libc_ver()).strip()
    return {"platform": platform.platform(), "machine": platform.machine(), "libc": libc}


def cpu() -> Any:
    text = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^(?:model name|CPU part)\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    present = set(flags.group(1).split()) if flags else set()
    return {
        "model": model.group(1) if model else "unknown",
        "cores": os.cpu_count(),
        "cores usable by this process": len(os.sched_getaffinity(0)),
        "instruction sets": [name for name in INSTRUCTION_SETS if name in present],
    }


def variables() -> Any:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")
    chosen = (*names, "ASCEND_RT_VISIBLE_DEVICES")
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith("SPARSE_ATTN_") or k in chosen}


def package() -> Any:
    return {"version": _version("sparse-attn") or "not installed", "path": str(PACKAGE)}


def build_info() -> Any:
    path = PACKAGE / "build_info.json"
    return json.loads(path.read_text()) if path.exists() else "no native module was built"


def torch() -> Any:
    import torch

    return {
        "version": torch.__version__,
        "path": str(Path(torch.__file__).parent),
        "threads": torch.get_num_threads(),
        "interop threads": torch.get_num_interop_threads(),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "built for CUDA": torch.version.cuda or "no",
    }


def native() -> Any:
    """Each native module file: loaded, or the reason why not."""
    found: dict[str, str] = {}
    for path in _native_files():
        module, suffix = path.name.split(".", 1)
        if f".{suffix}" not in importlib.machinery.EXTENSION_SUFFIXES:
            found[path.name] = f"built for another Python than {platform.python_version()}"
            continue
        try:
            importlib.import_module(f"sparse_attn.{module}")
            found[path.name] = "loads"
        except Exception as error:
            found[path.name] = f"does not load: {type(error).__name__}: {error}"
    return found or "none in the package directory"


def openmp() -> Any:
    """OpenMP runtimes loaded in this process, after torch and the native modules."""
    maps = Path("/proc/self/maps").read_text()
    return sorted(set(re.findall(r"\S*/lib(?:gomp|iomp5|omp)[^/\s]*\.so\S*", maps)))


def triton() -> Any:
    names = ("triton", "triton-ascend")
    return {name: version for name in names if (version := _version(name))} or "not installed"


def cuda() -> Any:
    driver = Path("/proc/driver/nvidia/version")
    if not driver.exists() and shutil.which("nvidia-smi") is None:
        return "no NVIDIA driver"
    import torch

    found: dict[str, Any] = {}
    if driver.exists():
        found["driver"] = driver.read_text().splitlines()[0]
    devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    for i in devices:
        major, minor = torch.cuda.get_device_capability(i)
        found[f"device {i}"] = f"{torch.cuda.get_device_name(i)}, compute capability {major}.{minor}"
    return found if devices else {**found, "devices": "none that torch can use"}


def ascend() -> Any:
    installed = ("/usr/local/Ascend/cann", "/usr/local/Ascend/ascend-toolkit/latest")
    roots = (os.environ.get("ASCEND_HOME_PATH"), *installed)
    home = next((root for root in roots if root and Path(root).exists()), None)
    devices = sorted(glob.glob("/dev/davinci[0-9]*"))
    torch_npu = _version("torch-npu")
    if not (home or devices or torch_npu):
        return "no CANN, no torch_npu, no device"
    return {
        "CANN": f"{_cann_version(Path(home))} in {home}" if home else "not found",
        "torch_npu": torch_npu or "not installed",
        "devices": devices or "none",
    }


def backends() -> Any:
    """For each op, each kernel that has it: "available", or the reason why it cannot run here."""
    from sparse_attn import registry, support

    ops: dict[str, dict[str, str]] = {}
    for op in sorted({impl.op for impl in registry.implementations()}):
        impls = registry.implementations(op)
        states = [registry.availability(impl) or "available" for impl in impls]
        ops[op] = dict(zip(support.labels(impls), states, strict=True))
    return {"ops": ops, "broken": registry.broken_backends()}


def variable_errors() -> Any:
    """Complaints about SPARSE_ATTN_* variables: unknown names, values that are not allowed."""
    from sparse_attn import env

    known = {variable.name: variable for variable in env.VARIABLES}
    complaints = []
    for name in sorted(os.environ):
        if name in known:
            try:
                known[name].get()
            except ValueError as error:
                complaints.append(str(error))
        elif name.startswith("SPARSE_ATTN_") and name != "SPARSE_ATTN_NO_NATIVE":
            complaints.append(f"{name}: no such variable; known: {', '.join(known)}")
    return complaints


# In this order in one process: openmp reports what torch and the native modules have loaded.
PROBES: dict[str, Callable[[], Any]] = {
    probe.__name__: probe for probe in (package, python, system, cpu, variables, build_info, torch, native, openmp)
} | {probe.__name__: probe for probe in (triton, cuda, ascend, variable_errors, backends)}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cann_version(home: Path) -> str:
    info = home / f"{platform.machine()}-linux" / "ascend_toolkit_install.info"
    found = re.search(r"^version=(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return found.group(1) if found else "unknown version"


def _native_files() -> list[Path]:
    return sorted([*PACKAGE.glob("_*.so"), *PACKAGE.glob("_*.pyd")])


def _answer(names: list[str]) -> None:
    """The child: one JSON line per probe, on a stream that no library can write to."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # The folder of a plain file comes first, where the package's modules pass for top-level ones.
    sys.path[:] = [
        str(PACKAGE.parent),
        *(p for p in sys.path if Path(p or ".").resolve() != PACKAGE),
    ]
    for name in names:
        try:
            value = PROBES[name]()
        except Exception as error:
            value = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps([name, value]), file=answers, flush=True)


def collect(names: Sequence[str] = tuple(PROBES)) -> dict[str, Any]:
    """Run the named probes. Never raises for what a probe runs into."""
    report: dict[str, Any] = {}
    waiting = list(names)
    while waiting:
        command = [sys.executable, str(PACKAGE / "doctor.py"), "--probe", *waiting]
        try:
            child = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=PROBE_SECONDS)
            output, end = child.stdout, _ending(child.returncode)
        except subprocess.TimeoutExpired as error:
            output, end = error.stdout or b"", f"no answer within {PROBE_SECONDS} s"
        for line in output.decode(errors="replace").split("\n")[:-1]:
            name, value = json.loads(line)
            report[name] = value
        waiting = [name for name in waiting if name not in report]
        if waiting:
            report[waiting.pop(0)] = {"error": end}
    return {name: report[name] for name in names}


def _ending(code: int) -> str:
    if code < 0:
        return f"the process died of {signal.Signals(-code).name}"
    return f"the process ended with exit code {code}"


def judge(report: dict[str, Any]) -> tuple[bool, list[str]]:
    """Whether a kernel can run an op here (the reference does not count), and what to do."""
    advice = []
    torch_error = _error(report["torch"])
    if torch_error:
        advice.append(f'torch cannot be used ({torch_error}): pip install "torch>=2.9"')
    elif tuple(int(x) for x in re.findall(r"\d+", report["torch"]["version"])[:2]) < (2, 9):
        advice.append(f"torch is {report['torch']['version']}, at least 2.9 is needed: upgrade it")
    native = report["native"]
    if isinstance(native, str):
        advice.append(f"native modules: {native}: install the package again, with a C++17 compiler")
    elif _error(native):
        names = " or ".join(path.name for path in _native_files())
        advice.append(f"loading {names} failed ({_error(native)}): {REBUILD}")
    elif not torch_error:
        faults = [f"{name} {state}" for name, state in native.items() if state != "loads"]
        advice += [f"{fault}: {REBUILD}" for fault in faults]
    if isinstance(report["openmp"], list) and len(report["openmp"]) > 1:
        advice.append("several OpenMP runtimes in one process compete for the cores: " + ", ".join(report["openmp"]))
    if isinstance(report["triton"], dict) and len(report["triton"]) > 1:
        advice.append(
            "triton and triton-ascend overwrite each other: uninstall both, then install the one of your device"
        )
    advice += report["variable_errors"] if isinstance(report["variable_errors"], list) else []
    backends = report["backends"]
    if _error(backends):
        if not torch_error:
            advice.append(f"the backends could not be asked: {_error(backends)}")
        return False, advice
    advice += [f"backend {name}: {reason}" for name, reason in backends["broken"].items()]
    usable = any(
        state == "available" and backend != "reference"
        for entries in backends["ops"].values()
        for backend, state in entries.items()
    )
    if not usable:
        advice.append("no kernel can run here, only the slow reference: see the reasons under backends")
    return usable, advice


def _error(value: Any) -> str | None:
    return value.get("error") if isinstance(value, dict) else None


def _lines(value: Any, indent: str) -> list[str]:
    if isinstance(value, dict):
        lines = []
        for key, inner in value.items():
            if isinstance(inner, dict) and inner:
                lines += [f"{indent}{key}", *_lines(inner, indent + "  ")]
            else:
                lines.append(f"{indent}{key}: {_lines(inner, '')[0]}")
        return lines or [f"{indent}none"]
    if isinstance(value, list):
        return [indent + (", ".join(map(str, value)) or "none")]
    return [f"{indent}{value}"]


def main(argv: list[str] | None = None) -> int:
    """Print the report. Returns 0 if a kernel can run an op here, else 1; of a service as ``service.main``."""
    parser = argparse.ArgumentParser(prog="python -m sparse_attn doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    service = parser.add_argument_group("a service, instead of this machine: see docs/doctor.md")
    service.add_argument("--model", metavar="NAME", help="a preset, as in plan")
    service.add_argument("--engine", metavar="NAME", help="which is to run it: vllm, sglang, vllm-ascend, transformers")
    service.add_argument("--device", metavar="NAME", help="on which, as in plan")
    service.add_argument("--devices", metavar="FILE", help="devices of your own, as in plan")
    service.add_argument("--format", metavar="FORMATS", help="of the planes, as in plan; else the engine's own")
    service.add_argument(
        "--metrics", nargs="+", metavar="SOURCE", help="URL or file of its metrics; or an older one too"
    )
    service.add_argument("--max-num-seqs", type=int, metavar="N", help="of the engine's options")
    parser.add_argument("--probe", nargs="+", choices=PROBES, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.probe:
        _answer(options.probe)
        return 0
    if any(value is not None for name, value in vars(options).items() if name not in ("json", "probe")):
        from sparse_attn.service import main as of_service

        return of_service(parser, options)
    report = collect()
    usable, advice = judge(report)
    if options.json:
        print(json.dumps({**report, "usable": usable, "advice": advice}, indent=2))
    else:
        for name, value in report.items():
            print("\n".join([name, *_lines(value, "  ")]))
        verdict = "at least one kernel can run here" if usable else "no kernel can run here"
        print("\n".join(["verdict", f"  {verdict}", *(f"  to do: {sentence}" for sentence in advice)]))
    return 0 if usable else 1


if __name__ == "__main__":
    sys.exit(main())
