"""Every name of torch that is not in its documentation, and what is done where one is missing.

No other file of ours may use such a name: a new torch that drops one breaks this file alone.
"""

from __future__ import annotations

from torch.distributed import TCPStore  # type: ignore[attr-defined]


def serve_store(address: str, port: int, listener: int) -> TCPStore:
    """Serve torch's store on a listening socket, which it takes over: nobody can steal the port.

    Before torch 2.8 libuv's store cannot; the classic one can, and speaks the same protocol.
    """

    def serve(*, use_libuv: bool) -> TCPStore:
        return TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener,
            use_libuv=use_libuv,
        )

    try:
        return serve(use_libuv=True)
    except NotImplementedError:
        return serve(use_libuv=False)
