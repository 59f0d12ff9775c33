"""The list of packages, and the native modules of csrc/ by CMake. Metadata is in pyproject.toml."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).parent
PACKAGE = "sparse_attn"
WITHOUT = "set SPARSE_ATTN_NO_NATIVE=1 to install without native modules"


def native_modules() -> list[Extension]:
    """One extension `sparse_attn._<folder>` for each folder of csrc/ that has a CMakeLists.txt."""
    if os.environ.get("SPARSE_ATTN_NO_NATIVE", "0") == "1":
        return []
    folders = sorted(path.parent.name for path in ROOT.glob("csrc/*/CMakeLists.txt"))
    return [Extension(f"{PACKAGE}._{folder}", sources=[]) for folder in folders]


def find_tool(*names: str) -> str | None:
    """The first of `names` beside the running Python or on PATH."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return next((found for name in names if (found := shutil.which(name, path=path))), None)


class CMakeBuild(build_ext):
    """Build every enabled module by one CMake project, into the package directory of this build."""

    def run(self) -> None:
        if not self.extensions:
            return
        package = Path(self.get_ext_fullpath(self.extensions[0].name)).resolve().parent
        # Not self.build_temp: an editable install deletes it, and every install would compile anew.
        build = (ROOT / "build" / f"cmake-{sys.implementation.cache_tag}").resolve()
        build.mkdir(parents=True, exist_ok=True)
        cmake, arguments = self.configuration(package)
        record = build / "arguments.txt"
        fresh = not record.exists() or record.read_text() != "\n".join(arguments)
        try:
            # CMake's cache would keep an option that is no longer given.
            subprocess.run(
                [cmake, "-S", ROOT, "-B", build, *arguments, *(["--fresh"] if fresh else [])],
                check=True,
            )
            record.write_text("\n".join(arguments))
            jobs = self.parallel or os.cpu_count() or 1
            subprocess.run([cmake, "--build", build, "--parallel", str(jobs)], check=True)
        except subprocess.CalledProcessError as error:
            raise CompileError(f"a native module did not build, see the messages above; {WITHOUT}") from error

    def configuration(self, package: Path) -> tuple[str, list[str]]:
        """The cmake command and its arguments. Raises one sentence about everything missing."""
        cmake = find_tool("cmake")
        compiler = find_tool(*filter(None, [os.environ.get("CXX")]), "c++", "g++", "clang++")
        try:
            from pybind11 import get_cmake_dir

            pybind11_dir = get_cmake_dir()
        except ImportError:
            pybind11_dir = None
        needs = {"cmake": cmake, "a C++17 compiler": compiler, "pybind11": pybind11_dir}
        missing = [need for need, found in needs.items() if not found]
        if missing:
            raise CompileError(
                f"native modules need {', '.join(needs)}; not found: {', '.join(missing)}; install them or {WITHOUT}"
            )
        ninja = find_tool("ninja")
        return str(cmake), [
            f"-DSPARSE_ATTN_OUTPUT_DIR={package}",
            f"-DSPARSE_ATTN_VERSION={self.distribution.get_version()}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11_dir}",
            *(["-GNinja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []),
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]

    def get_outputs(self) -> list[str]:
        """What was built. A module left out for want of a vendor's toolchain is not an error."""
        return [path for path in super().get_outputs() if Path(path).exists()]


BACKENDS = [
    f"{PACKAGE}.backends",
    *(f"{PACKAGE}.backends.{name}" for name in find_packages("backends")),
]

setup(
    # Listed by hand: automatic discovery does not see a package that is mapped to another folder.
    packages=find_packages(include=[PACKAGE, f"{PACKAGE}.*"], exclude=[f"{PACKAGE}.backends*"]) + BACKENDS,
    package_dir={f"{PACKAGE}.backends": "backends"},
    package_data={PACKAGE: ["py.typed", "integrations/*/*.yaml"]},
    ext_modules=native_modules(),
    cmdclass={"build_ext": CMakeBuild},
)
