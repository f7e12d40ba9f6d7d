"""The results of the self-test, as lines and tables, and as JSON."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from launcher.selftest.bandwidth import Measured, rate
from launcher.selftest.judge import Links, Pair, SlowLink, slower_way


@dataclass(frozen=True)
class Fault:
    """What is wrong: the fault's name in TROUBLESHOOTING.md, and the cause in words."""

    name: str
    cause: str
    host: str = ""  # to exclude because of it

    def __str__(self) -> str:
        return f"{self.cause} [{self.name}]"


@dataclass(frozen=True)
class Member:
    """One rank of the test."""

    host: str
    node_rank: int
    local_rank: int
    device: str
    version: str  # torch's
    speed: float = 0.0  # FLOP/s
    faults: Sequence[Fault] = ()  # its wrong results

    @property
    def kind(self) -> str:
        """The model of its device, for comparisons: "cuda:3 NVIDIA H100" without "cuda:3"."""
        return self.device.partition(" ")[2] or self.device


@dataclass
class Findings:
    """All measurements, the same on every rank."""

    members: Sequence[Member] = ()
    links: Links = field(default_factory=dict)
    slow_ranks: Mapping[int, float] = field(default_factory=dict)  # how many times slower
    slow_links: Sequence[SlowLink] = ()
    collectives: list[Measured] = field(default_factory=list)
    links_s: float = 0.0  # how long it took to measure the links
    latencies: dict[Pair, float] = field(default_factory=dict)  # of the links, in s

    def faults(self) -> list[Fault]:
        """Return all faults. The first is shown in the verdict, the others above it."""
        wrong_results = [fault for member in self.members for fault in member.faults]
        return [*self._versions(), *wrong_results, *self._slow_ranks(), *self._slow_links()]

    def excluded(self) -> list[str]:
        """Return the hosts to exclude, by node rank; none if all hosts have a fault."""
        named = {fault.host for fault in self.faults()}
        hosts = dict.fromkeys(member.host for member in self.members)
        faulty = [host for host in hosts if host in named]
        return faulty if len(faulty) < len(hosts) else []

    def _versions(self) -> Iterator[Fault]:
        """Yield a fault if the ranks have different versions of torch."""
        versions = {member.version: member.host for member in self.members}
        if len(versions) > 1:
            cause = ", ".join(f"torch {version} on {host}" for version, host in versions.items())
            yield Fault("version-mismatch", f"{cause}; install one version everywhere")

    def _slow_links(self) -> Iterator[Fault]:
        """Yield the slow nodes, and the slow links of other nodes that have no slow rank."""
        hosts_of_slow_ranks = {self.members[rank].host for rank in self.slow_ranks}
        for slow in self.slow_links:
            way = slower_way(slow.pair, self.links)
            source, target = (self.members[rank].host for rank in way)
            speed = rate(self.links[way])
            usual = rate(slow.usual)
            if slow.node is not None:
                host = self.members[slow.node].host
                cause = f"{host} has a slow link: {speed} at best; other nodes have {usual}"
                yield Fault("slow-link", cause, host)
            elif not hosts_of_slow_ranks & {source, target}:  # a slow rank slows its node's links
                cause = f"the link from {source} to {target} is slow: {speed}; others have {usual}"
                # Either end may be the cause. Exclude the later one: node rank 0 stays.
                yield Fault("slow-link", cause, self.members[max(way)].host)

    def _slow_ranks(self) -> Iterator[Fault]:
        """Yield the ranks that compute slowly, each with its host as the one to exclude."""
        for rank, times in self.slow_ranks.items():
            host = self.members[rank].host
            cause = f"rank {rank} ({host}) takes {times:.2f} times as long to compute as others"
            yield Fault("slow-rank", cause, host)


def flops(speed: float) -> str:
    """Return FLOP/s in a readable form."""
    return f"{speed / 1e12:.1f} TFLOP/s" if speed >= 1e12 else f"{speed / 1e9:.1f} GFLOP/s"


def show_members(members: Sequence[Member]) -> Iterator[str]:
    """Yield the table of the ranks."""
    yield f"{'host':<20}{'rank':>6}  {'device':<30}  {'torch':<14}  matrix product"
    for rank, member in enumerate(members):
        speed = flops(member.speed) if member.speed else "-"
        yield f"{member.host:<20}{rank:>6}  {member.device:<30}  {member.version:<14}  {speed}"


def as_json(findings: Findings, verdict: str, *, passed: bool) -> str:
    """Return all results for a program. Units: seconds, bytes/s, FLOP/s."""
    links = [
        {
            "from": findings.members[source].host,
            "to": findings.members[target].host,
            "bandwidth": speed,
            "latency": findings.latencies[source, target],
        }
        for (source, target), speed in findings.links.items()
    ]

    content = {
        "passed": passed,
        "verdict": verdict,
        "faults": findings.faults(),
        "exclude": findings.excluded(),
        "ranks": [*map(vars, findings.members)],
        "links": links,
        "links_seconds": findings.links_s,
        "collectives": [*map(vars, findings.collectives)],
    }
    return json.dumps(content, indent=1, default=str) + "\n"  # a fault as its text
