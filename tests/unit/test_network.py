"""Which interface, and which settings of NCCL, ranks on several nodes are given."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed.network import choose_variables, interface_to

ELSEWHERE = "192.0.2.1"  # kept for documents, RFC 5737


def default_interface() -> str:
    """Return the interface of the default route, as the kernel lists it."""
    routes = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    names = [name for name, destination, *_ in routes if destination == "00000000"]
    return names[0] if names else pytest.skip("this machine has no default route")


def test_interface_to_an_address() -> None:
    assert interface_to("127.0.0.1") == "lo"
    assert interface_to("::1") in ("lo", None)  # without IPv6 there is no way
    assert interface_to("no-such-host.invalid") is None
    assert interface_to(ELSEWHERE) == default_interface()


def test_the_interface_to_the_master_is_named() -> None:
    name = default_interface()
    both = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    assert choose_variables(ELSEWHERE, 2, {}) == both
    assert choose_variables("127.0.0.1", 2, {}) == {}  # all nodes on one machine


def test_what_the_user_has_set_is_not_overridden() -> None:
    theirs = {"GLOO_SOCKET_IFNAME": "x0", "NCCL_SOCKET_IFNAME": "^docker", "NCCL_NET": "Socket"}
    assert choose_variables(ELSEWHERE, 2, {**theirs, "NCCL_PROFILE": "infiniband"}) == {}


def test_profiles() -> None:
    assert choose_variables(ELSEWHERE, 2, {"NCCL_PROFILE": "none"}) == {}
    chosen = choose_variables(ELSEWHERE, 2, {"NCCL_PROFILE": "infiniband"})
    assert chosen.pop("NCCL_NET") == "IB"
    assert chosen == choose_variables(ELSEWHERE, 2, {})
    assert choose_variables("127.0.0.1", 2, {"NCCL_PROFILE": "ethernet"}) == {
        "NCCL_IB_DISABLE": "1"
    }
    with pytest.raises(ValueError, match="'fast'; use infiniband, ethernet, none"):
        choose_variables(ELSEWHERE, 2, {"NCCL_PROFILE": "fast"})


def test_one_machine_stays_on_loopback() -> None:
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    assert choose_variables(ELSEWHERE, 1, {}) == loopback
    assert choose_variables(ELSEWHERE, 1, {"NCCL_PROFILE": "infiniband"}) == loopback
    assert choose_variables(ELSEWHERE, 1, {"NCCL_PROFILE": "none"}) == {}
    assert choose_variables(ELSEWHERE, 1, {**loopback, "GLOO_SOCKET_IFNAME": "x0"}) == {}
