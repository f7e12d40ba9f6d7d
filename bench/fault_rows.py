"""The faults of `make bench-faults`: how each is caused on one of four nodes, and what is expected.

`make`, `during`, `undo`, `command` and `torchrun` are bash that uses the functions of faults.bash.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

COPY = 'every mkdir "$OWN"; every cp "$ROOT/bench/fault_steps.py" "$OWN/steps.py"'
# Each host has its own Python.
PYTHONS = """every mkdir "$OWN"
printf '#!/bin/sh\\nexec %s "$@"\\n' "$VENV_PYTHON" >python
every cp python "$OWN"
every chmod +x "$OWN/python"
"""
# The same, but node3 has another version of torch.
OTHER_TORCH = f"""{PYTHONS}
torch=$("$VENV_PYTHON" -c 'import importlib.util as u; print(u.find_spec("torch").origin)')
on node3 mkdir "$OWN/torch"
on node3 ln -s "${{torch%/*}}"/* "$OWN/torch"
on node3 rm "$OWN/torch/version.py"
sed 's/^__version__ = .*/__version__ = "2.12.1"/' "${{torch%/*}}/version.py" |
  on node3 tee "$OWN/torch/version.py" >/dev/null
on node3 sed -i "s|^exec|PYTHONPATH=$OWN exec|" "$OWN/python"
"""
SECRET = "of these tests, not a secret"
FAST_CLOCK = "import time; now = time.time; time.time = lambda: now() + 42"


@dataclass(frozen=True, eq=False)
class Fault:
    """A fault, how it is caused on one node, and how it must be shown."""

    name: str
    made: str  # in words
    make: str = ""  # before the start
    during: str = ""  # once the ranks take steps
    undo: str = ""
    command: str = "plain"
    torchrun: str = "torchrun"  # "": it cannot be caused for torchrun
    host: str = "node3"  # the host to be named, as a regular expression
    also: str = ""  # another fault that a late node may show
    code: int = 3
    limit_s: float = 15.0  # until it is shown
    steps: int = 30
    variables: Mapping[str, str] = field(default_factory=dict)
    is_apart: bool = True  # does not affect other runs on the same nodes


@dataclass(frozen=True, eq=False)
class Elsewhere:
    """A fault that cannot be caused here."""

    name: str
    why: str = "needs a GPU"


BEFORE: tuple[Fault | Elsewhere, ...] = (
    Fault(
        "port-in-use",
        "another program listens at node1's port",
        make='on node1 "$PYTHON" -c "import socket, time;'
        " s = socket.create_server(('', $MASTER_PORT)); time.sleep(600)\" & echo $! >holder;"
        ' until on node1 bash -c "</dev/tcp/127.0.0.1/$MASTER_PORT"; do sleep 0.1; done',
        undo='kill "$(<holder)"',
        host="node1",
        is_apart=False,  # it must be measured alone
    ),
    Fault(
        "host-unreachable",
        "node3's cable is unplugged",
        make='"$CLUSTER" cut node3',
        undo="restore node3",
        is_apart=False,
    ),
    Fault(
        "port-blocked",
        "node1's firewall drops the port where the nodes meet",
        make='"$CLUSTER" drop node1 "$MASTER_PORT"',
        undo="restore node1",
        host=r"node[234]: cannot reach 10\.0\.0\.1",
    ),
    Fault(
        "port-blocked",
        "node3's firewall drops what comes from node4",
        make="on node3 iptables --append INPUT --source 10.0.0.4 --protocol tcp --jump DROP",
        undo="restore node3",
        host="node3: cannot reach node4|node4: cannot reach node3",
        is_apart=False,
    ),
    Fault(
        "name-unresolved",
        "node3's hosts file lacks the master's name",
        make="name_head ''",
        undo="on node3 umount /etc/hosts",
        variables={"MASTER_ADDR": "head"},
        is_apart=False,
    ),
    Fault(
        "loopback-address",
        "node3's hosts file has `127.0.1.1` for the master's name",
        make="name_head '127.0.1.1 head'",
        undo="on node3 umount /etc/hosts",
        variables={"MASTER_ADDR": "head"},
        is_apart=False,
    ),
    Fault(
        "ssh-refused",
        "node3 does not know the user's key",
        make='on node3 mount --bind /dev/null "$CLUSTER_DIR/keys/user.pub"',
        undo='on node3 umount "$CLUSTER_DIR/keys/user.pub"',
        is_apart=False,
    ),
    Fault(
        "node-missing",
        "by hand: node3 is not started",
        command="hand",
        host="node rank 2 did not check in",
        variables={"THIRD": "", "RUN_SECRET": SECRET, "JOIN_S": "3"},
    ),
    Fault(
        "node-missing",
        "SLURM: SIGSTOP to node3's slurmd",
        make="on node3 pkill -STOP slurmd",
        undo="on node3 pkill -CONT slurmd",
        command="slurm",
        torchrun="",
    ),
    Fault(
        "node-missing",
        "SLURM: node3's slurmd has died",
        make="on node3 pkill -KILL slurmd",
        undo="on node3 slurmd -N node3",
        command="slurm",
        torchrun="",
    ),
    Fault(
        "duplicate-node-rank",
        "by hand: node3 is given node2's node rank",
        command="hand",
        host="on node[23] and on node[23]",
        also="node-missing",  # the other nodes have ended
        variables={"THIRD": "4 1", "RUN_SECRET": SECRET},
    ),
    Fault(
        "wrong-world",
        "by hand: node3 is started with 5 nodes",
        command="hand",
        also="node-missing",
        variables={"THIRD": "5 2", "RUN_SECRET": SECRET, "JOIN_S": "120"},
    ),
    Fault(
        "wrong-world",
        "SLURM: 4 tasks are started and 5 nodes expected",
        command='job srun "$PYTHON" "$ROOT/train.py" --config "$ROOT/config/local3.yaml" --nodes 5',
        torchrun="",
        host="",
        code=2,
    ),
    Fault(
        "batch-step",
        "SLURM: `python train.py` without srun in a job of 4 nodes",
        command='job "$PYTHON" "$ROOT/train.py" --config "$ROOT/config/local3.yaml"',
        torchrun="",
        host="",
        code=2,
    ),
    Fault(
        "clock-skew",
        "node3's clock, as Python reads it, is 42 s ahead",
        make=f"mkdir clock; echo '{FAST_CLOCK}' >clock/sitecustomize.py;"
        ' log_in_with "export PYTHONPATH=$PWD/clock"',
        undo="log_in_as_before",
        code=0,
        is_apart=False,
    ),
    Fault(
        "version-mismatch",
        "node3's torch says it is 2.12.1",
        make=OTHER_TORCH,
        undo='every rm -r "$OWN"',
        variables={"PYTHON": "$OWN/python"},
    ),
    Fault(
        "code-mismatch",
        "the training script differs on node3",
        make=f'{COPY}; on node3 tee -a "$OWN/steps.py" <<<"# newer" >/dev/null',
        undo='every rm -r "$OWN"',
        variables={"SCRIPT": "$OWN/steps.py"},
    ),
    Fault(
        "env-missing",
        "node3 lacks the Python",
        make=f'{PYTHONS}on node3 rm "$OWN/python"',
        undo='every rm -r "$OWN"',
        variables={"PYTHON": "$OWN/python"},
        is_apart=False,
    ),
    Fault(
        "env-missing",
        "node3 lacks the training script",
        make=f'{COPY}; on node3 rm "$OWN/steps.py"',
        undo='every rm -r "$OWN"',
        variables={"SCRIPT": "$OWN/steps.py"},
        is_apart=False,
    ),
    Fault(
        "no-such-interface",
        "`GLOO_SOCKET_IFNAME=eth0`, and node3's is called ib9",
        make="rename_link eth0 ib9",
        undo="rename_link ib9 eth0",
        variables={"GLOO_SOCKET_IFNAME": "eth0"},
        is_apart=False,
    ),
    Elsewhere("too-few-gpus"),
    Elsewhere("duplicate-gpu"),
    Elsewhere("gpu-unhealthy"),
    Elsewhere("torch-without-gpu"),
    Fault(
        "low-memlock",
        "`ulimit -l 16` on node3",
        make="log_in_with 'ulimit -l 16'",
        undo="log_in_as_before",
        code=0,
        is_apart=False,
    ),
    Fault(
        "low-nofile",
        "`ulimit -n 256` on node3",
        make="log_in_with 'ulimit -n 256'",
        undo="log_in_as_before",
        code=0,
        is_apart=False,
    ),
    Fault(
        "small-shm",
        "/dev/shm of node3 holds 64 MiB",
        make="on node3 mount -t tmpfs -o size=64m shm /dev/shm",
        undo="on node3 umount /dev/shm",
        code=0,
        is_apart=False,
    ),
    Fault(
        "disk-low",
        "the disk with node3's logs holds 100 MiB",
        make='mkdir logs; on node3 mount -t tmpfs -o size=100m logs "$PWD/logs"',
        undo='on node3 umount "$PWD/logs"',
        code=0,
        variables={"LOGS": "--log-dir=logs --tee=3"},
    ),
    Fault(
        "dir-unwritable",
        "the folder for logs is read-only on node3",
        make='mkdir logs; on node3 mount --bind logs "$PWD/logs";'
        ' on node3 mount -o remount,ro,bind "$PWD/logs"',
        undo='on node3 umount "$PWD/logs"',
        variables={"LOGS": "--log-dir=logs --tee=3"},
        is_apart=False,
    ),
    Fault(
        "dir-not-shared",
        "SLURM: node3 has another folder for checkpoints",
        make='mkdir checkpoints; on node3 mount -t tmpfs checkpoints "$PWD/checkpoints"',
        undo='on node3 umount "$PWD/checkpoints"',
        command="slurm",
        torchrun="",
    ),
    Fault(
        "run-is-live",
        "a run with the same id is live on node1 and node2",
        make="start_another",
        undo="end_other",
        torchrun="",
        host="node1",
        variables={"RUN_ID": "mine"},
    ),
    Fault(
        "few-cpus",
        "node3's logins may use one CPU, for 2 ranks",
        make="log_in_with 'taskset -pc 0 $$ >/dev/null'",
        undo="log_in_as_before",
        command="NODES[2]=node3:2; plain",
        torchrun="",
        code=0,
        is_apart=False,
    ),
    Fault(
        "partial-launch",
        "SLURM: `NPROC_PER_NODE=1` where each node has 2 GPUs",
        command='job --gpus-per-node=2 env NPROC_PER_NODE=1 "$ROOT/scripts/slurm/slurm_train.sh"'
        ' "$ROOT/config/local3.yaml" "${SMALL[@]}"',
        torchrun="",
        host="1 of the job's 2 GPUs",
        code=0,
    ),
    Fault(
        "config-invalid",
        "an unknown key: `train.max_step=6`",
        command="train train.max_step=6",
        torchrun="",
        host="",
        code=2,
    ),
)
