"""The spares' connections to node rank 0, during an attempt (no torch)."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from launcher.agent.nodes.protocol import NodeBeat, Peer


@dataclass
class Waiting:
    """Those that are still there; the run goes on without one that is gone."""

    peers: dict[int, Peer] = field(default_factory=dict)  # by place
    on_lost: Callable[[int, Peer], None] = lambda place, peer: None

    def attach(self, selector: selectors.BaseSelector) -> None:
        """Listen to them."""
        self._selector = selector
        for place, peer in self.peers.items():
            peer.heard = time.monotonic()
            selector.register(peer.socket, selectors.EVENT_READ, partial(self._read, place))

    def beat(self) -> None:
        """Tell them that node rank 0 lives, and see whether they do."""
        for place, peer in list(self.peers.items()):
            peer.send(NodeBeat(None))
            if peer.is_silent:
                self._drop(place)

    def _read(self, place: int) -> None:
        if self.peers[place].receive() is None:
            self._drop(place)

    def _drop(self, place: int) -> None:
        peer = self.peers.pop(place)
        self._selector.unregister(peer.socket)
        peer.close()
        self.on_lost(place, peer)
