"""The names of torch that only one file may use: each version has them, or goes without."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from distributed import torch_internals


class OldStore(TCPStore):
    """torch's store as it was before 2.8: libuv's takes no listening socket."""

    def __init__(self, *args: Any, **options: Any) -> None:
        if options["use_libuv"]:
            raise NotImplementedError("The libuv TCPStore backend does not support this")
        super().__init__(*args, **options)


@pytest.mark.parametrize("kind", [TCPStore, OldStore])
def test_the_store_takes_over_the_port_that_is_open(
    monkeypatch: pytest.MonkeyPatch, kind: type[TCPStore]
) -> None:
    monkeypatch.setattr(torch_internals, "TCPStore", kind)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    early = socket.create_connection(("127.0.0.1", port))  # before there is a store
    store = torch_internals.serve_store("127.0.0.1", port, listener.detach())
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", port))
    store.set("key", "value")
    client = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    assert client.get("key") == b"value"
    early.close()
