"""Let this many nodes join torchrun's rendezvous, and print the processor time of all of them.

python bench/scale_c10d.py NODES

Each node is a thread with its own handler and its own connection to the store; the first one serves
the store, as under torchrun.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler


def join_all(number: int) -> float:
    """Return the processor seconds until every node has its rank."""
    handlers = []
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"

    def join(node: int) -> int:
        asked = RendezvousParameters(
            *("c10d", endpoint, "scale", number, number, "127.0.0.1"),
            is_host=node == 0,
            read_timeout=300,
        )
        backend, store = create_backend(asked)
        handler = create_handler(store, backend, asked)
        handlers.append(handler)  # the first one serves the store
        return handler.next_rendezvous().rank

    start = time.process_time()
    with ThreadPoolExecutor(number) as pool:
        ranks = sorted(pool.map(join, range(number)))
    took = time.process_time() - start
    assert ranks == [*range(number)], ranks
    return took


if __name__ == "__main__":
    print(join_all(int(sys.argv[1])), flush=True)
    os._exit(0)  # without waiting for the handlers' heartbeats
