"""The child process, and what is made of pip's words."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from minfer_jax.errors import FetchError
from minfer_jax.hub import wheels
from minfer_jax.hub.wheels import download_wheel, pip_failure, run_pip

RETRY = (
    "WARNING: Retrying (Retry(total=0, connect=None, read=None, redirect=None, status=None)) after "
    "connection broken by 'NameResolutionError(\"Failed to resolve 'index' ([Errno -2] Name or "
    "service not known)\")': /simple/tiny/\n"
)
NONE = (
    "ERROR: Could not find a version that satisfies the requirement tiny==1 (from versions: none)\n"
    "ERROR: No matching distribution found for tiny==1\n"
)
SOME = NONE.replace("none", "0.8, 0.9")


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        ("/usr/bin/python: No module named pip\n", "pip is missing from this Python: run python"),
        ("ImportError: No module named pip\n", "pip is missing from this Python: run python"),
        (RETRY + NONE, "cannot reach the package index for tiny==1: connect, or pass -m FILE.gguf"),
        ("pip._vendor.urllib3.exceptions.ReadTimeoutError: x", "cannot reach the package index"),
        ("Could not fetch URL https://x: There was a problem", "cannot reach the package index"),
        (NONE, "the package index has no wheel tiny==1"),
        (SOME, "the package index has no wheel tiny==1"),
        (RETRY + SOME, "the package index has no wheel tiny==1"),
        ("ERROR: Could not install: [Errno 28] No space left on device\n", "disk full while"),
        ("note\nERROR: a\nERROR: b c\nhint\n", "pip could not download tiny==1: b c"),
        ("only this\n", "pip could not download tiny==1: only this"),
        ("", "pip could not download tiny==1: exit status 3"),
    ],
)
def test_pips_words_become_one_line(stderr, message):
    said = pip_failure("tiny==1", 3, stderr)
    assert said.startswith(message)
    assert "\n" not in said


def test_the_command_installs_nothing_and_follows_no_dependency(tmp_path, monkeypatch):
    commands: list[list[str]] = []

    def fake(command, *, log, on_poll):
        commands.append(command)
        dest = command[command.index("--dest") + 1]
        (Path(dest) / "t.whl").write_bytes(b"x" * 10)
        on_poll()
        return 0, ""

    monkeypatch.setattr(wheels, "run_pip", fake)
    seen: list[int] = []
    path = download_wheel("tiny==1", tmp_path, seen.append)
    assert path.read_bytes() == b"x" * 10
    assert seen == [10]
    (command,) = commands
    assert command[0] == sys.executable
    assert {"download", "--no-deps", "--only-binary=:all:", "--no-input"} <= set(command)
    assert command[-1] == "tiny==1"


def test_a_pip_that_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(wheels, "run_pip", lambda *args, **kw: (0, ""))
    with pytest.raises(FetchError, match="pip left 0 wheels for tiny==1"):
        download_wheel("tiny==1", tmp_path, lambda size: None)


def test_pip_works_below_our_folder(tmp_path):
    before_pip = wheels._PIP.partition("runpy.run_module")[0]
    program = f"{before_pip} print(tempfile.gettempdir(), sys.argv[1:], file=sys.stderr)"
    command = [sys.executable, "-c", program, str(tmp_path), "download"]
    code, stderr = run_pip(command, log=tmp_path / "log", on_poll=lambda: None)
    assert (code, stderr.strip()) == (0, f"{tmp_path} ['download']")


def test_a_real_pip_that_may_not_go_anywhere(tmp_path):
    arguments = ["download", "--no-index", "--isolated", "no-such==1"]
    command = [sys.executable, "-c", wheels._PIP, str(tmp_path), *arguments]
    code, stderr = run_pip(command, log=tmp_path / "log", on_poll=lambda: None)
    assert code == 1
    assert pip_failure("no-such==1", code, stderr).startswith("the package index has no wheel")


def test_status_and_stderr_come_back(tmp_path):
    program = "import sys; print('out'); print('words', file=sys.stderr); sys.exit(3)"
    code, stderr = run_pip(
        [sys.executable, "-c", program], log=tmp_path / "log", on_poll=lambda: None
    )
    assert (code, stderr.strip()) == (3, "words")


def test_ctrl_c_kills_the_child(tmp_path, monkeypatch):
    monkeypatch.setattr(wheels, "POLL_S", 0.01)
    children: list[subprocess.Popen] = []
    popen = subprocess.Popen

    def remember(*args, **kwargs):
        children.append(popen(*args, **kwargs))
        return children[0]

    monkeypatch.setattr(wheels.subprocess, "Popen", remember)

    def interrupt():
        raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_pip(
            [sys.executable, "-c", "import time; time.sleep(60)"],
            log=tmp_path / "log",
            on_poll=interrupt,
        )
    assert children[0].returncode not in (None, 0)
    assert time.monotonic() - start < 30


def test_files_in_the_working_directory_stand_in_for_no_module(tmp_path, monkeypatch):
    (tmp_path / "tempfile.py").write_text("raise SystemExit('the wrong tempfile')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FetchError) as caught:
        download_wheel("not-a-distribution==0", tmp_path / "fetch", lambda size: None)
    assert "the wrong tempfile" not in str(caught.value)
