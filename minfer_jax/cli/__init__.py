"""The command line: flags in, text out, one line for every error.

`app` declares the commands and imports nothing heavy; each command's module does its work by
calling other rooms. Exit codes: 0 done, 1 the work failed, 2 bad usage, 130 interrupted.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from typing import NoReturn

from minfer_jax.errors import MinferError, UsageError

INTERRUPTED = 130


def main(argv: list[str] | None = None) -> NoReturn:
    """Run one command and exit."""
    _prepare_streams()
    try:
        from minfer_jax.cli import app

        code = app.run(argv)
        sys.stdout.flush()
    except UsageError as error:
        code = _fail(str(error), 2)
    except MinferError as error:
        code = _fail(str(error), 1)
    except BrokenPipeError:
        # Whoever reads has had enough.
        _discard_stdout()
        code = 0
    except OSError as error:
        if error.filename is None:
            _discard_stdout()
        code = _fail(_os_message(error), 1)
    except KeyboardInterrupt:
        code = _fail("interrupted", INTERRUPTED)
    except MemoryError:
        code = _fail("out of memory: lower -c/--n-ctx, or use a smaller model", 1)
    sys.exit(code)


def _prepare_streams() -> None:
    """Stand in for streams that whoever started us has closed, and make stdout UTF-8."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What UTF-8 cannot hold (a path's stray bytes) is escaped, which JSON reads back.
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")


def _discard_stdout() -> None:
    """Send to nowhere what stdout still holds: Python would fail once more when it closes it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, code: int) -> int:
    from minfer_jax.cli import flags

    if flags.debug:
        traceback.print_exc()
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _os_message(error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        where = f" for {error.filename}" if error.filename else ""
        return f"no space left on the disk{where}: free some and try again"
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)
