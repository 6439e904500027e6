"""Builds the native CPU kernels; everything else is in pyproject.toml.

The extension is optional: without a C++17 compiler the package installs and runs through XLA. It
is a plain shared library that ctypes loads, with XLA's FFI headers from jaxlib and no Python in
it. Which instruction sets it is compiled for is said in its sources, one file a variant.
"""

import sys
from pathlib import Path

from setuptools import Extension, setup

KERNELS = Path("minfer_jax/ops/cpu")
SOURCES = ["module", "team", "pack", "kernels_avx512", "kernels_avx2", "kernels_portable"]


def extensions() -> list[Extension]:
    if sys.platform == "win32":  # the sources are written for GCC and Clang
        return []
    import jaxlib

    include = Path(jaxlib.__file__).parent / "include"
    return [
        Extension(
            "minfer_jax.ops.cpu._kernels",
            [str(KERNELS / f"{name}.cpp") for name in SOURCES],
            include_dirs=[str(include)],
            depends=[str(path) for path in sorted(KERNELS.glob("*.[hi]*"))],
            extra_compile_args=["-std=c++17", "-O3", "-g0", "-w"],
            language="c++",
            optional=True,
        )
    ]


setup(ext_modules=extensions())
