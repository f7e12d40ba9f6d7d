"""SLURM_* variables from a real SLURM; tests/cluster/environments/take.sh captures them again."""

from pathlib import Path

CAPTURED = Path(__file__).resolve().parents[1] / "cluster/environments"


def captured(name: str, **more: str) -> dict[str, str]:
    """Return the variables of one kind of step, with additions."""
    lines = (CAPTURED / f"{name}.env").read_text().splitlines()
    return {**dict(line.split("=", 1) for line in lines if "=" in line), **more}
