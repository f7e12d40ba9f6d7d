"""A rank tells its agent that its script has ended with an error, before it exits (no torch).

An error file alone does not show this: torch's own @record also writes one for an error that the
script then handles. The states follow the heartbeats, in the same shared memory: one byte a rank.
"""

import os

from distributed.heartbeat import RECORD, find_record

MAY_SAVE = 1  # sys.excepthook is running, or the exit code will be 75: it may take longer
ENDED = 2  # threads are joined and exit handlers run


def set_state(record: str, ranks: int, state: int) -> None:
    """In a rank, set its state; `record` is HEARTBEAT_FILE, `ranks` the number on this node."""
    if (place := find_record(record)) is not None:
        fd, number = place
        os.pwrite(fd, bytes([state]), RECORD.size * ranks + number)


def read(fd: int, ranks: int) -> bytes:
    """Return the states of all ranks of a node, by local rank; 0 while a script runs."""
    return os.pread(fd, ranks, RECORD.size * ranks)
