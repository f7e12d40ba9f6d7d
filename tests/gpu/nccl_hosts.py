"""Rows of `make test-nccl` on two hosts, which are network namespaces joined by one link.

Each function returns what it saw, or raises Failed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from gpu_runs import HAS_GPU, ROOT, CannotRun, Ended, Failed, Machine, share_gpus
from watched import PROBE

TWO_HOSTS = str(ROOT / "tests/gpu/two_hosts.sh")
LEAST_BYTES = 4 << 20  # of an all-reduce of 4 MB, over the link
HEALED_S = 5
LASTS_S = 8  # how long the ranks train if the link heals
SILENCE_S = 10  # the least
THEIRS_S = 30 if HAS_GPU else 45  # for torchrun, from its start, if the link stays cut


def use_link(machine: Machine, how: str) -> str:
    """Check that NCCL's own log names the interface that our launcher chose.

    `how` is launch (by hand on each host) or hosts (over ssh).
    """
    if how == "hosts" and (os.geteuid() or not shutil.which("sshd")):
        raise CannotRun("needs root and sshd")
    ended = run_probe(machine, how, "reduces", NCCL_DEBUG="INFO")
    chosen = re.findall(r"GLOO_SOCKET_IFNAME=(\S+) NCCL_SOCKET_IFNAME==(\S+)", ended.text)
    carried = max([0, *map(int, re.findall(r"^carried (\d+)", ended.text, re.MULTILINE))])
    used = {*re.findall(r"NCCL INFO NET/Socket : Using \[0\]([^:\s]+):", ended.text)}
    told = f"chosen {chosen}, used by NCCL {sorted(used)}, {carried >> 20} MiB over the link"
    is_right = len({*chosen}) == 1 and (used == {chosen[0][1]} or not HAS_GPU)
    if ended.code or "the sum is right" not in ended.text or not is_right or carried < LEAST_BYTES:
        raise Failed(f"code {ended.code}, {told}: {ended.text[-300:]}")
    name = f"NCCL's log names {chosen[0][1]}" if HAS_GPU else "NCCL's log needs a GPU"
    return f"the kit chose {chosen[0][1]}; {name}; {carried >> 20} MiB over that link"


def reject_interface(machine: Machine) -> str:
    """Check that an interface that does not exist is named before the start."""
    ended = run_probe(machine, "launch", "reduces", NCCL_SOCKET_IFNAME="nosuch0")
    lines = [line for line in ended.text.splitlines() if line.endswith("[no-such-interface]")]
    if ended.code != 3 or not lines or "the sum is right" in ended.text:
        raise Failed(f"code {ended.code}: {ended.text[-300:]}")
    return f"code 3: {lines[0]}"


def heal_link(machine: Machine) -> str:
    """Cut the link for some seconds, in which our launcher must not give the run up."""
    ours, theirs = (cut_link(machine, HEALED_S, LASTS_S, UNDER=under) for under in ("", "torchrun"))
    if ours.code or "steps" not in ours.text:
        raise Failed(f"code {ours.code}: {ours.text[-300:]}")
    return f"{steps_of(ours)}; torchrun: code {theirs.code}, {steps_of(theirs)}"


def lose_link(machine: Machine) -> str:
    """Cut the link for good: both hosts must say so, and end."""
    silence = str(SILENCE_S)
    ours = cut_link(machine, 0, 600, SILENCE_SECONDS=silence)
    theirs = cut_link(machine, 0, 600, UNDER="torchrun", LIMIT=str(THEIRS_S))
    machine.blocks.mkdir(parents=True, exist_ok=True)
    (machine.blocks / "link.txt").write_text(f"{ours.text}\n--- torchrun\n{theirs.text}")
    causes = re.findall(r"^cause +(.*)", ours.text, re.MULTILINE)
    told = f"{codes_of(ours)} after {ours.seconds:.0f} s; {'; '.join(causes)}"
    if "124" in codes_of(ours) or ours.text.count("[link-lost]") < 2:
        raise Failed(f"expected [link-lost] on both hosts: {told}: {ours.text[-300:]}")
    return f"{told}; torchrun: {codes_of(theirs)} after {theirs.seconds:.0f} s (124: given up)"


def cut_link(machine: Machine, cut_s: int, lasts_s: int, **variables: str) -> Ended:
    """Cut the link for so long (0: for good), once ranks that train for `lasts_s` take steps."""
    folder = tempfile.mkdtemp(dir=machine.folder)
    before = "cut", str(cut_s), folder
    ended = run_probe(machine, *before, "lasts", str(lasts_s), folder, **variables)
    if not Path(folder, "cut").exists():
        raise Failed(f"the ranks took no steps: {ended.text[-300:]}")
    return ended


def run_probe(machine: Machine, *words: str, **variables: str) -> Ended:
    """Run two_hosts.sh with these words, the last of which are the probe's. Raises CannotRun."""
    made = subprocess.run([TWO_HOSTS, "true"], capture_output=True, text=True, timeout=30)
    if made.returncode != 0:
        raise CannotRun(f"two hosts cannot be made here: {(made.stderr or made.stdout).strip()}")
    number = 3 if words[0] == "cut" else 1
    command = [TWO_HOSTS, *words[:number], PROBE, *words[number:]]
    return machine.run(command, **share_gpus(2), **variables)


def steps_of(ended: Ended) -> str:
    """Return what rank 0 printed about its steps."""
    found = re.search(r"\d+ steps, .*", ended.text)
    return found[0] if found else "no end"


def codes_of(ended: Ended) -> str:
    """Return the exit codes of both launchers, in words."""
    found = re.search(r"^codes (\d+) (\d+)$", ended.text, re.MULTILINE)
    return f"codes {found[1]} and {found[2]}" if found else "no end"
