"""The command line: flags in, text out, one line for every error.

`app` declares the commands and imports nothing heavy; each command's module does its work by
calling other rooms. Exit codes: 0 done, 1 the work failed, 2 bad usage, 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from typing import NoReturn

from minfer_jax.errors import MinferError, UsageError

INTERRUPTED = 130


def main(argv: list[str] | None = None) -> NoReturn:
    """Run one command and exit."""
    from minfer_jax.cli import app, flags

    try:
        code = app.run(argv)
        sys.stdout.flush()
    except UsageError as error:
        code = _fail(str(error), 2, debug=flags.debug)
    except MinferError as error:
        code = _fail(str(error), 1, debug=flags.debug)
    except BrokenPipeError:
        # Whoever reads has had enough. Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        code = _fail(_os_message(error), 1, debug=flags.debug)
    except KeyboardInterrupt:
        code = _fail("interrupted", INTERRUPTED, debug=flags.debug)
    except MemoryError:
        code = _fail("out of memory: try a smaller -c/--n-ctx", 1, debug=flags.debug)
    sys.exit(code)


def _fail(message: str, code: int, *, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _os_message(error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return f"no space left on the disk{f' for {error.filename}' if error.filename else ''}"
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)
