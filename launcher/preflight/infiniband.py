"""The ports of this machine's InfiniBand and RoCE cards, as the kernel shows them (no torch)."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from launcher.text import Environ, read_text

SYSFS = Path("/sys/class/infiniband")
DEVICES = Path("/dev/infiniband")


@dataclass(frozen=True)
class Port:
    """One port; over Ethernet, it uses RoCE."""

    device: str  # such as mlx5_0
    number: str
    state: str  # ACTIVE, DOWN, INIT or ARMED
    physical: str  # LinkUp, Polling, Disabled or another

    @property
    def name(self) -> str:
        """The port's name in NCCL's format."""
        return f"{self.device}:{self.number}"

    @property
    def is_active(self) -> bool:
        """Whether the port can be used."""
        return self.state.startswith("ACTIVE")

    @property
    def is_down(self) -> bool:
        """Whether the port should be active but is not; a disabled port should not be active."""
        return self.state != "" and not self.is_active and self.physical != "Disabled"


def read_ports() -> list[Port]:
    """Return all ports; none on a machine without such cards."""
    return [
        Port(folder.parts[-3], folder.name, _read(folder / "state"), _read(folder / "phys_state"))
        for folder in sorted(SYSFS.glob("*/ports/*"))
    ]


def _read(file: Path) -> str:
    """Return the word in a state such as "4: ACTIVE"; empty if there is none."""
    return read_text(file).partition(":")[2].strip()


def is_wanted(environ: Environ) -> bool:
    """Whether the user lets NCCL use InfiniBand."""
    is_off = environ.get("NCCL_IB_DISABLE", "0") not in ("", "0")
    is_ethernet = environ.get("NCCL_PROFILE") == "ethernet"
    return not (is_off or is_ethernet or environ.get("NCCL_NET", "IB").lower() == "socket")


def ports_of_nccl(ports: Iterable[Port], environ: Environ) -> list[Port]:
    """Return the ports that NCCL may use, according to NCCL_IB_HCA."""
    names = environ.get("NCCL_IB_HCA", "")
    return [port for port in ports if is_chosen(port.device, names, port.number)]


def is_chosen(device: str, names: str, number: str = "") -> bool:
    """Whether a variable lets NCCL use a device; it lists prefixes, =exact or ^excluded names.

    An empty list allows all devices. The list may give a port; `number` is the device's.
    """
    # The two signs, if any, come first, in either order.
    is_exact = "=" in names[:2]
    excludes = "^" in names[:2]
    is_named = False
    for word in names.lstrip("^=").split(","):
        name, _, port = word.partition(":")
        is_device = device == name if is_exact else device.startswith(name)
        is_named |= is_device and port in ("", number)
    return is_named != excludes


def spell(variable: str, environ: Environ) -> str:
    """Return a variable that is_chosen() reads with its value, and what the value's signs mean."""
    value = environ.get(variable, "")
    signs = {"^": "^ excludes", "=": "= before a name: only this one"}
    meanings = [words for sign, words in signs.items() if sign in value[:2]]
    explained = f" ({'; '.join(meanings)})" if meanings else ""
    return f"{variable}={value}{explained}"


def can_open_devices() -> bool:
    """Whether this process may use a card: a container often lacks the device files."""
    return any(os.access(file, os.R_OK | os.W_OK) for file in DEVICES.glob("uverbs*"))
