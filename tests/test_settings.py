"""What the environment asks for."""

from pathlib import Path

import platformdirs
import pytest

from minfer_jax.settings import DEMO_MODEL, Settings, client_threads, libtpu_flags

FLAGS = {
    "MINFER_TIMING": ("timing", True),
    "MINFER_REBUILD_TRACE": ("rebuild_trace", True),
    "MINFER_VERIFY_GRAPH": ("verify_graph", True),
    "MINFER_GRAPH_REUSE_DISABLE": ("reuse_disabled", True),
    "MINFER_NO_FUSE_QKV": ("fuse_qkv", False),
    "MINFER_NO_FUSE_FFN": ("fuse_ffn", False),
}


def test_nothing_asked():
    settings = Settings.from_env({})
    assert settings == Settings(home=Path(platformdirs.user_cache_dir("minfer_jax")))
    assert settings.model == DEMO_MODEL == "smollm2"
    assert settings.fuse_qkv and settings.fuse_ffn
    assert not (settings.timing or settings.rebuild_trace or settings.verify_graph)


@pytest.mark.parametrize("name", FLAGS)
def test_each_variable_changes_its_field_alone(name):
    field, value = FLAGS[name]
    plain = Settings.from_env({})
    assert getattr(plain, field) is not value
    for off in ("", "0"):
        assert Settings.from_env({name: off}) == plain
    on = Settings.from_env({name: "1"})
    assert vars(on) == {**vars(plain), field: value}


def test_model():
    assert Settings.from_env({"MINFER_MODEL": "x.gguf"}).model == "x.gguf"
    assert Settings.from_env({"MINFER_MODEL": ""}).model == DEMO_MODEL


def test_home():
    settings = Settings.from_env({"MINFER_HOME": "/data/minfer"})
    assert settings.home == Path("/data/minfer")
    assert settings.models_dir == Path("/data/minfer/models")
    assert settings.xla_dir == Path("/data/minfer/xla")
    assert Settings.from_env({"MINFER_HOME": "~/m"}).home == Path.home() / "m"
    assert Settings.from_env({"MINFER_HOME": ""}).home == Settings.from_env({}).home


def test_the_process_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("MINFER_HOME", "/data/minfer")
    assert Settings.from_env().home == Path("/data/minfer")


def test_settings_do_not_change():
    with pytest.raises(AttributeError):
        Settings.from_env({}).timing = True  # pyright: ignore[reportAttributeAccessIssue]


def test_kernels():
    assert (
        Settings.from_env({}).kernels == "auto" == Settings.from_env({"MINFER_KERNELS": ""}).kernels
    )
    assert Settings.from_env({"MINFER_KERNELS": "avx2"}).kernels == "avx2"


@pytest.mark.parametrize(
    ("env", "n"),
    [
        ({}, None),
        ({"PJRT_NPROC": "3", "NPROC": "5"}, 3),
        ({"PJRT_NPROC": " +3 "}, 3),
        ({"PJRT_NPROC": "three", "NPROC": "5"}, 5),
        ({"PJRT_NPROC": "-2"}, 1),
        ({"PJRT_NPROC": "0", "NPROC": "5"}, 1),
        ({"PJRT_NPROC": "1_0"}, None),
        ({"PJRT_NPROC": "2147483647"}, 2147483647),
        ({"PJRT_NPROC": "2147483648"}, None),
        ({"PJRT_NPROC": "9" * 5000}, None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_threads_of_jaxs_client_are_read_as_xla_reads_them(env, n):
    assert client_threads(env) == n


def test_flags_of_the_tpu_compiler():
    assert libtpu_flags({}) == ""
    assert libtpu_flags({"LIBTPU_INIT_ARGS": "--x=1"}) == "--x=1"
