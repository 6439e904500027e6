"""Finding a model's file and loading it, and the words that are said meanwhile."""

import subprocess
import sys

import pytest

from minfer_jax.cli import session
from minfer_jax.cli.session import Stages, load_model, local_file, note, waiting
from minfer_jax.settings import Settings


@pytest.fixture
def resolved(monkeypatch):
    """Names that were looked up; nothing is fetched."""
    names = []
    monkeypatch.setattr(session, "resolve", lambda name, *, models_dir: names.append(name))
    return names


@pytest.mark.parametrize(
    ("model", "environment", "name"),
    [
        ("x.gguf", "y.gguf", "x.gguf"),
        (None, "y.gguf", "y.gguf"),
        (None, "smollm2", "smollm2"),
        ("", "y.gguf", ""),
    ],
)
def test_a_flag_wins_over_the_environment(model, environment, name, resolved, tmp_path):
    local_file(model, Settings(home=tmp_path, model=environment))
    assert resolved == [name]


def test_a_fetch_is_announced_with_its_licence(resolved, tmp_path, capfd):
    local_file("SmolLM2", Settings(home=tmp_path))
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("note: fetching smollm2, licence: Apache-2.0.")


def test_what_is_here_already_is_not_announced(smollm2_path, resolved, tmp_path, capfd):
    settings = Settings(home=tmp_path)
    settings.models_dir.mkdir()
    (settings.models_dir / smollm2_path.name).symlink_to(smollm2_path)
    local_file("smollm2", settings)
    local_file(str(smollm2_path), settings)
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def tiny(tiny_path, tmp_path):
    """Loads the tiny llama, which was trained for 256 tokens."""

    def load(*, interrupted=lambda: False, n_ctx=64):
        settings = Settings(home=tmp_path)
        path = tiny_path("llama-dense")
        return load_model(path, settings, interrupted=interrupted, n_ctx=n_ctx, device="cpu")

    return load


def test_loading_says_nothing_in_a_pipe(tiny, capfd):
    assert tiny().n_ctx == 64
    assert capfd.readouterr() == ("", "")


def test_n_ctx_0_is_what_the_model_was_trained_for(tiny, capfd):
    assert tiny(n_ctx=0).n_ctx == 256
    assert capfd.readouterr().err == ""


def test_more_than_the_model_was_trained_for_is_said_aloud(tiny, capfd):
    assert tiny(n_ctx=300).n_ctx == 300
    assert capfd.readouterr().err == (
        "note: n_ctx 300 is more than the 256 the model was trained for\n"
    )


def test_loading_can_be_interrupted(tiny):
    asked = []

    def interrupted():
        asked.append(len(asked))
        return len(asked) == 3

    with pytest.raises(KeyboardInterrupt):
        tiny(interrupted=interrupted)
    assert asked == [0, 1, 2]


def test_waiting_says_nothing_in_a_pipe(capfd):
    with waiting("Reading"):
        pass
    assert capfd.readouterr() == ("", "")


def test_on_a_terminal_there_is_something_to_see(tiny, capfd, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with waiting("Reading"):
        pass
    tiny()
    out, err = capfd.readouterr()
    assert out == "" and "Reading" in err and "Loading" in err


def test_note(capfd):
    note("this")
    assert capfd.readouterr() == ("", "note: this\n")


@pytest.fixture
def clock(monkeypatch):
    """Set to what `perf_counter` says."""
    now = [100.0]
    monkeypatch.setattr(session.time, "perf_counter", lambda: now[0])
    return now


def test_stages_add_up(clock, monkeypatch):
    monkeypatch.setattr(session, "_process_age", lambda: 0.25)
    stages = Stages()
    for seconds, name in ((1.0, "open"), (2.0, "import"), (4.0, "open")):
        clock[0] += seconds
        stages.end(name)
    stages.split("open", "pack", 3.5)
    assert list(stages.seconds.items()) == [
        ("start", 0.25),
        ("open", 1.5),
        ("import", 2.0),
        ("pack", 3.5),
    ]


def test_a_start_that_is_unknown_is_left_out(monkeypatch):
    monkeypatch.setattr(sys, "platform", "other")
    assert Stages().seconds == {}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_s_own_start_is_counted():
    """A process that slept for a second before it looked is at least as old, to a tick."""
    code = "import time; time.sleep(1); from minfer_jax.cli import session as s; "
    code += "print(s.Stages().seconds['start'])"
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 0.98 < float(found.stdout) < 60
