"""Ports for tests."""

import os
import random
import socket


def free_port() -> int:
    """Return a port that is free on this machine now.

    It is below the ports that runs and the kernel choose; each pytest worker has its own range.
    """
    first = 2000 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 8 * 1000
    while True:
        port = random.randrange(first, first + 1000)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:  # taken
            pass
