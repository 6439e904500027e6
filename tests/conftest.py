"""What all tests share: strict jax settings, the two real models, and the goldens."""

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from minfer_jax.lm import LanguageModel
    from minfer_jax.ops.cpu.library import Library

# Nothing above imports jax, which reads these once, when it is imported.
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
os.environ.setdefault("JAX_PLATFORMS", "cpu")


def _unavailable(reason: str) -> NoReturn:
    """Skips; but a CI run that skipped these tests would prove nothing, so there it fails."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def _model(name: str) -> Path:
    from minfer_jax.errors import FetchError
    from minfer_jax.hub import resolve
    from minfer_jax.settings import Settings

    try:
        return resolve(name, models_dir=Settings.from_env().models_dir)
    except FetchError as error:
        _unavailable(str(error))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2 135M Instruct, Q4_1, in the model cache."""
    return _model("smollm2")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3 270M, Q4_K_M, in the model cache."""
    return _model("gemma3-270m")


@pytest.fixture(scope="session")
def conformance_dir() -> Path:
    """The folder of goldens, which lies beside the checkout and not in it."""
    folder = Path(__file__).parents[2] / "shared" / "conformance"
    if not folder.is_dir():
        _unavailable(f"the goldens are not here: no folder {folder}")
    return folder


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes the tiny random model of an architecture, once, and returns its path."""
    from tiny_models import read_spec, write_tiny

    folder = tmp_path_factory.mktemp("tiny")

    @functools.cache
    def path(name: str) -> Path:
        return write_tiny(read_spec(name), folder / f"{name}.gguf")

    return path


@pytest.fixture(scope="session")
def load_tiny(
    tiny_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., "LanguageModel"]:
    """Loads a tiny model; flags of `Settings` (fuse_qkv...) and of `load` (n_ctx...) may follow."""
    from minfer_jax.lm import load
    from minfer_jax.settings import Settings

    home = tmp_path_factory.mktemp("home")

    def lm(name: str, *, n_ctx: int = 64, exact: bool = True, **options: Any) -> "LanguageModel":
        flags = {k: options.pop(k) for k in list(options) if k in Settings.__dataclass_fields__}
        settings = Settings(home=home, **flags)
        return load(tiny_path(name), n_ctx=n_ctx, exact=exact, settings=settings, **options)

    return lm


@pytest.fixture(scope="session")
def native_library() -> "Library":
    """The native kernels."""
    from minfer_jax.ops.cpu.library import library

    found = library()
    if found is None:
        _unavailable("the native kernels were not built")
    return found


@pytest.fixture(params=["avx512", "avx2", "portable"])
def kernels(request: pytest.FixtureRequest, native_library: "Library") -> "Iterator[Library]":
    """The native kernels, in one variant after the other; afterwards in the best one again."""
    if request.param not in native_library.variants:
        pytest.skip(f"{request.param} kernels do not run here")
    native_library.use(request.param)
    yield native_library
    native_library.use(native_library.variants[0])
