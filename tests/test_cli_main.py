"""The edge of the process: exit codes, one line for every error, streams, what is imported."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from gguf_builder import write_gguf

from minfer_jax.cli import app, generate, main
from minfer_jax.cli.request import Request
from minfer_jax.errors import ContextFullError, GGUFError, MinferError, UsageError


class Result(NamedTuple):
    """What a command did."""

    code: int | str | None
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that stderr holds, without its prefix."""
        assert self.err.startswith("error: ") and self.err.count("\n") == 1, self.err
        return self.err.removeprefix("error: ").strip()


def run_cli(capfd: pytest.CaptureFixture[str], *argv: str) -> Result:
    """Run a command in this process."""
    with pytest.raises(SystemExit) as exit_:
        main(list(argv))
    return Result(exit_.value.code, *capfd.readouterr())


def run_process(
    *argv: str, redirect: str = "", env: dict[str, str] | None = None, stdout: int | None = None
) -> Result:
    """Run a command in a process of its own, with the shell's `redirect`ions of its streams."""
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirect}', "sh", sys.executable, "-m", "minfer_jax", *argv],
        stdout=stdout or subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Empty means off: what Python buffers is what may be lost at exit.
        env={**os.environ, "PYTHONUNBUFFERED": "", **(env or {})},
        timeout=120,
    )
    return Result(done.returncode, (done.stdout or b"").decode(), done.stderr.decode())


def request_parser(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[Request, str]]:
    """From the arguments of `generate` to the `Request` and the prompt; nothing runs."""
    seen = []

    def run_generate(request: Request, prompt: str) -> int:
        seen.append((request, prompt))
        return 0

    monkeypatch.setattr(generate, "run_generate", run_generate)

    def parse(*argv: str) -> tuple[Request, str]:
        assert run_cli(capfd, "generate", *argv) == (0, "", "")
        return seen.pop()

    return parse


@pytest.fixture
def small_file(tmp_path: Path) -> str:
    return str(write_gguf(tmp_path / "small.gguf", {"general.name": "Füchslein 🦊"}))


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UsageError("no\n  such flag"), 2, "no such flag"),
        (GGUFError("a.gguf: damaged"), 1, "a.gguf: damaged"),
        (ContextFullError("too long"), 1, "too long"),
        (MinferError("it failed"), 1, "it failed"),
        (OSError(errno.EACCES, "Permission denied", "f"), 1, "f: Permission denied"),
        (
            OSError(errno.ENOSPC, "No space left", "f"),
            1,
            "no space left on the disk for f: free some and try again",
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 1, "out of memory: lower -c/--n-ctx, or use a smaller model"),
    ],
)
def test_every_error_is_one_line(error, code, line, monkeypatch, capfd):
    def fail(argv: Sequence[str] | None) -> int:
        raise error

    monkeypatch.setattr(app, "run", fail)
    result = run_cli(capfd)
    assert (result.code, result.out, result.error) == (code, "", line)


def test_other_errors_are_bugs_and_show(monkeypatch):
    def fail(argv: Sequence[str] | None) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(app, "run", fail)
    with pytest.raises(ZeroDivisionError):
        main([])


def test_the_commands_exit_code_is_the_process(monkeypatch, capfd):
    monkeypatch.setattr(app, "run", lambda argv: 7)
    assert run_cli(capfd).code == 7


def test_debug_shows_the_traceback_first_and_only_when_asked(capfd):
    result = run_cli(capfd, "info", "-m", "/none.gguf", "--debug")
    assert result.err.startswith("Traceback (most recent call last):")
    assert result.err.endswith("\nerror: no such file: /none.gguf\n") and result.code == 1
    assert run_cli(capfd, "info", "-m", "/none.gguf").error == "no such file: /none.gguf"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("argv", [["--version"], ["info", "-m"]])
def test_a_full_disk_behind_stdout(argv, small_file):
    argv = [*argv, small_file] if argv[-1] == "-m" else argv
    result = run_process(*argv, redirect=">/dev/full")
    assert result.code == 1
    assert result.error == "no space left on the disk: free some and try again"


def test_a_closed_pipe_ends_it_quietly(small_file):
    read, write = os.pipe()
    os.close(read)
    result = run_process("info", "-m", small_file, stdout=write)
    os.close(write)
    assert (result.code, result.err) == (0, "")


@pytest.mark.parametrize("redirect", [">&-", "<&- >&-", "<&-"])
def test_streams_that_were_closed_by_the_parent(redirect, small_file):
    result = run_process("info", "-m", small_file, redirect=redirect)
    assert (result.code, result.err) == (0, "")


def test_stdout_is_utf8_whatever_the_locale_says(small_file):
    result = run_process("info", "-m", small_file, "--json", env={"PYTHONIOENCODING": "ascii"})
    assert json.loads(result.out)["metadata"]["general.name"] == "Füchslein 🦊"


@pytest.mark.skipif(sys.platform != "linux", reason="needs file names of any bytes")
def test_a_path_that_is_no_utf8_is_printed_escaped(small_file):
    odd = os.fsdecode(os.fsencode(small_file).replace(b"small", b"sm\xffll"))
    os.rename(small_file, odd)
    result = run_process("info", "-m", odd, "--json")
    assert result.code == 0 and json.loads(result.out)["path"] == odd


_IMPORTED = """
import sys
from minfer_jax.cli import main
try:
    main(sys.argv[1:])
except SystemExit as done:
    print(done.code, "jax" in sys.modules, file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["generate", "--help"], 0),
        (["info", "-m", "MODEL"], 0),
        (["tokenize", "-m", "MODEL", "hi"], 0),
        (["generate", "-n", "-2", "hi"], 2),
        (["generate", "-m", "/none.gguf", "hi"], 1),
        (["doctor"], 0),
    ],
)
def test_jax_is_imported_only_where_it_is_needed(argv, code, smollm2_path):
    argv = [str(smollm2_path) if arg == "MODEL" else arg for arg in argv]
    command = [sys.executable, "-c", _IMPORTED, *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    # What `info` says of memory is what the family's module reads from the file.
    assert done.stderr.splitlines()[-1] == f"{code} {argv[0] in ('doctor', 'info')}"
