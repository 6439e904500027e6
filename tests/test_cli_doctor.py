"""`doctor`: what it says of versions, devices and caches, and when something is wrong."""

import json
from importlib.metadata import version

import pytest
from test_cli_main import run_cli, run_process

from minfer_jax.cli import doctor


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("MINFER_HOME", str(tmp_path))
    return tmp_path


def test_json(home, capfd):
    result = run_cli(capfd, "doctor", "--json")
    assert (result.code, result.err) == (0, "")
    report = json.loads(result.out)
    assert list(report) == ["versions", "devices", "native code", "caches"]
    assert report["versions"]["jax"] == version("jax")
    assert report["versions"]["minfer-jax"] == version("minfer-jax")
    assert report["devices"] == {"found": "cpu:0 cpu", "in use": "cpu:0 cpu"}
    assert report["caches"]["smollm2"] == "not fetched yet"


def test_text_for_people(capfd):
    lines = run_cli(capfd, "doctor").out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        "versions",
        "devices",
        "native code",
        "caches",
    ]
    assert "  in use        cpu:0 cpu" in lines


def test_caches_are_counted(home, capfd):
    (home / "models").mkdir()
    (home / "models" / "x.gguf").write_bytes(bytes(3 << 20))
    report = json.loads(run_cli(capfd, "doctor", "--json").out)
    assert report["caches"]["models"] == f"{home / 'models'} (1 files, 3.0 MiB)"


def test_a_device_that_is_not_there_is_said_after_the_report(capfd):
    result = run_cli(capfd, "doctor", "--device", "gpu", "--json")
    assert result.code == 2 and "--device gpu: jax finds no such device" in result.error
    report = json.loads(result.out)
    assert report["devices"]["error"] == result.error and "in use" not in report["devices"]


@pytest.mark.parametrize("platform", ["nonsense", "cuda"])
def test_a_jax_that_cannot_start_still_gives_a_report(platform):
    result = run_process("doctor", "--json", env={"JAX_PLATFORMS": platform})
    assert result.code == 2
    assert result.error.startswith(f"jax finds no device for JAX_PLATFORMS={platform}")
    assert json.loads(result.out)["devices"]["found"] == "none"


def test_apples_own_plugin_is_warned_of(monkeypatch, capfd):
    installed = {"jax-metal": "0.1.1"}
    monkeypatch.setattr(doctor, "version", lambda name: installed.get(name, "1.0"))
    report = json.loads(run_cli(capfd, "doctor", "--json").out)
    assert "install jax-mps" in report["devices"]["jax-metal"]
