"""What a stranger, who does not know the run's secret, may send to a port."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Iterator
from typing import Any

from agents import PATIENCE_S

MESSAGES = [
    '{"NodeReport":{"node_rank":1,"num_nodes":2,"nproc":2,"host":"h","run_id":"","versions":{},"files":{}}}',
    '{"Assignment":{"run_id":"../../x","first_rank":0,"world_size":2,"hosts":["a","b"]}}',
    '{"Verdict":{"code":0,"failure":null}}',
    '{"StopRequest":{"signum":15}}',
    '{"EndRanks":{"stuck":0}}',
    '{"NodeEnd":{"stopped":[],"first_rank":0,"codes":[0]}}',
    '{"Refusal":{"fault":"x","message":"y"}}',
    '{"NodeBeat":{"straggler":null}}',
    "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "SSH-2.0-OpenSSH_9.2\r\n",
]
VALUES: list[Any] = [None, True, -1, 1e308, 10**30, "", "\x1b[2J", "x" * 1000, [], {}, [[[[]]]]]


def random_bytes(rng: random.Random, number: int) -> Iterator[bytes]:
    for _ in range(number):
        yield rng.randbytes(rng.choice((0, 1, 31, 32, 63, 64, 65, 96, 5000)))


def mutated_messages(rng: random.Random, number: int) -> Iterator[bytes]:
    for _ in range(number):
        text = rng.choice(MESSAGES)
        kind = rng.randrange(4)
        if kind == 0 and text.startswith("{"):
            [(name, fields)] = json.loads(text).items()
            fields[rng.choice([*fields, "more"])] = rng.choice(VALUES)
            text = json.dumps({name: fields})
        data = bytearray(text.encode())
        if kind == 1:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del data[rng.randrange(len(data)) :]
        yield bytes(data) + b"\n" * rng.randrange(3)


def attack(port: int, rng: random.Random, times: int) -> None:
    """Send so many byte sequences and as many mutated messages, each over its own connection."""
    for data in (*random_bytes(rng, times), *mutated_messages(rng, times)):
        send(port, data)


def send(port: int, data: bytes) -> None:
    """Send it over a connection of its own."""
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        try:
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
        except OSError:  # it was dropped meanwhile
            pass


def keep_silent(port: int, number: int) -> list[socket.socket]:
    """Return so many connections that say nothing, once something listens there."""
    return [_connect(port) for _ in range(number)]


def _connect(port: int, within_s: float = PATIENCE_S) -> socket.socket:
    deadline = time.monotonic() + within_s
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
