"""Messages of torch's C++ side that appear at every start and mean nothing."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator

# Torch looks up the name behind each address of its store, and uses it in messages alone. If no
# name server answers, this appears on every start and means nothing. The same holds for what torch
# before 2.8 says of the store that serve_store tries first.
_TEXT = b"[c10d] The "
_LINES = re.compile(
    rb"^(\[rank\d+\]:)?\[(W[^\n]* socket|E[^\n]* TCPStore)\.cpp:\d+\] \[c10d\] The "
    rb"(hostname of the client socket cannot be retrieved|libuv TCPStore backend does not)[^\n]*\n",
    re.MULTILINE,
)
_MAY_BE = re.compile(rb"\[([Wr][^\r\n]*)?\Z")  # of the start of a line
_LONGEST = 1024


def may_begin(line: bytes) -> bool:
    """Whether a line that has not ended may yet be one of them."""
    return len(line) < _LONGEST and _MAY_BE.match(line) is not None


def drop(data: bytes, *, is_debug: bool) -> bytes:
    """Return what a terminal is to show of this; with `is_debug` everything."""
    return data if is_debug or _TEXT not in data else _LINES.sub(b"", data)


@contextlib.contextmanager
def without_noise(fd: int, *, is_debug: bool) -> Iterator[None]:
    """Hold back what this process itself writes to a descriptor, and drop torch's noise from it."""
    kept = os.dup(fd)
    with tempfile.TemporaryFile() as held_back:
        os.dup2(held_back.fileno(), fd)
        try:
            yield
        finally:
            os.dup2(kept, fd)
            os.close(kept)
            held_back.seek(0)
            with contextlib.suppress(OSError):
                os.write(fd, drop(held_back.read(), is_debug=is_debug))
