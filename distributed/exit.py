"""Exit a rank quickly, whatever its threads and exit handlers do."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import sys
import threading
import time
from typing import NoReturn

from . import limits
from .heartbeat import beat


def finish(code: int = 0) -> NoReturn:
    """Join threads, run exit handlers, and exit without tearing down torch, which takes 0.6 s.

    If they take longer than 30 s, it prints a line and exits without waiting for them.
    """
    atexit.unregister(finish)  # finish may itself be an exit handler
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        threading.Thread(target=_exit_late, args=(code,), daemon=True).start()
    except RuntimeError:  # in an exit handler, from Python 3.12 on
        faulthandler.dump_traceback_later(limits.EXIT_S, exit=True)
    threading._shutdown()  # type: ignore[attr-defined]  # then the handlers, as Python does
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _exit_late(code: int) -> None:
    end = time.monotonic() + limits.EXIT_S
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(1.0, left))
        with contextlib.suppress(ValueError):  # an incomplete environment, reported elsewhere
            beat()
    text = f"threads or exit handlers are still running after {limits.EXIT_S:g} s; exiting anyway"
    os.write(2, f"process {os.getpid()}: {text}\n".encode())  # another thread may hold sys.stderr
    os._exit(code)
