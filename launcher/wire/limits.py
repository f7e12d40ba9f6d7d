"""Every time limit and interval of the launcher, in seconds, each with its reason.

`tests/unit/test_limits.py` holds which must be longer than which: whoever waits for a process that
waits itself must wait longer. The helper has a few of its own (distributed/limits.py).
"""

from __future__ import annotations

from distributed.limits import GRACE_S as GRACE_S
from distributed.limits import SCHEDULER_S as SCHEDULER_S

POLL_S = 0.01  # between two looks at what wakes nobody

# Signs of life between a launcher and the agents, and among the agents.
BEAT_S = 2.0  # between two of them
SILENCE_S = 10.0  # without one for so long, the other end is lost: a shorter gap ends no run
STILL_S = 5.0  # between two readings of a clock: more than a turn of any loop takes
CLIENT_LOOK_S = 0.2  # between two looks for podman's client

# The preflight.
JOIN_S = 300.0  # distributed.join_timeout, where the config says nothing else
LOGIN_NODE_S = 3  # for a scheduler to answer, to know a login node by
CHECKS_S = 3  # of the preflight's time, the least for the checks of a node
SSH_CONNECT_S = 5
PDSH_CONNECT_S = 10
PDSH_READY_S = 8.0  # for every node to wait for pdsh
PDSH_FETCH_S = 20.0  # for pdsh to reach a node that waits for it
PROBE_S = 3.0  # to find out why there is no connection to a node
CONNECT_PACE_S = 0.1  # between groups of new connections
CONNECT_AGAIN_S = 0.3  # before another try: twice, four times, ... as long
STEP_PREFLIGHT_S = 300.0  # in a job; other steps of it may have to end first
STEP_NAMING_S = 10.0  # after which nodes that have not answered are named, if others have
STEP_IMAGE_S = 1800.0  # with pyxis, which may load the image on each node
NVIDIA_SMI_S = 8.0  # in all; a GPU that fell off the bus can make it hang
PBSDSH_S = 5.0  # for all nodes to answer
GREETING_S = 3.0  # a connection to the master's port that says nothing for so long is dropped
PAIR_AGAIN_S = 0.3  # between two tries to reach another node
PAIR_PASS_S = 1.0  # for packets of any size to pass, at least
SKEW_S = 5.0  # a larger difference between clocks is reported
PROOF_S = 3.0  # for whoever connects to prove that it knows the secret

# The agents meet at node rank 0.
CHECKIN_TELL_S = 3.0  # a wait that takes longer says what it waits for
CHECKIN_CONNECT_S = 4.0  # the kernel knows after 3 s that a host of this network is down
CHECKIN_AGAIN_S = 0.1  # between two tries
PAIRS_S = 6.0  # for each pair of nodes to test its link
LOSS_SPREAD_S = 6.0  # from one agent's notice of a lost node to the last one's
SUCCESSOR_S = 20.0  # to find the node that replaces node rank 0

# A rank fails, or is stuck.
SETTLE_S = 0.3  # after an end that looks like a consequence: the time for its cause to show
RANK_TERM_S = 1.0  # from SIGTERM to SIGKILL
VERDICT_S = 1.5  # if no restart follows: for the other nodes' ends
# A rank that runs for so long after a traceback has caught the exception. On a busy machine one
# that has not takes more than a second to end.
TRACEBACK_S = 3.0
RAISED_S = 10.0  # the same, of a rank that has left an error file: it is about to end
STACKS_WRITE_S = 2.0  # for the ranks of a node to write their stacks
STACKS_ANSWER_S = 5.0  # for the other nodes' stacks
STACKS_SHOW_S = 12.0  # for `--stacks` to wait for all of them
ASKED_LOOK_S = 1.0  # between two looks whether they are asked for, or a notice has come
NOTICE_WARN_S = 10.0  # for a script that has only begun to set its handler

# A stop. GRACE is the seconds for the ranks to save; each of these comes on top of it, and
# whoever waits for another one waits longer.
STOP_SNAPSHOT_S = 8.0  # for an agent to write a snapshot
STOP_CLOSE_S = 10  # then the launcher ends the control streams: the nodes end their parts
STOP_AGENT_S = 15.0  # then a supervisor kills its agent, which may have waited for other nodes
STOP_COMMAND_S = 25.0  # then `--stop` waits no longer

# The end of a run.
ORPHANS_S = 1.0  # after the supervisor's end: for the agent to end the run
OTHERS_S = 5.0  # once a node's part has ended: for the others
CONTROL_TERM_S = 1.0  # after the end of its control stream: for an agent's ranks to save
CONTROL_END_S = 10.0  # after the end of the control streams: for the nodes to end their parts
SRUN_END_S = 3.0  # for srun to end once the run has
REQUEUE_S = 8.0  # after an srun that was killed: for SLURM to start a job again that lost a node
DECIDE_S = SILENCE_S + 10.0  # after the end of a node's part: for the run to go on without it
RECALL_S = 5.0  # for so long after a gap in the signs of life, an exit is attributed to it
SWEEP_S = 2.0  # for what is left of a run on a node to end by itself
KILL_S = 1.0  # for killed processes to be gone

# Output and records.
PARTIAL_S = 0.2  # a line without an end, of one stream among several, is shown after so long
PARTIAL_LOOK_S = PARTIAL_S / 2  # between two looks at such lines
DRAIN_S = 2.0  # at the end: for a terminal or pipe that is slow to take the last output
TRICKLE_S = 0.001  # so many small writes of a rank become one of the agent's
TERMINAL_STUCK_S = 0.5  # a terminal that has taken nothing for so long is not waited for
REDRAW_S = 5.0  # between two lines in the log of one that redraws itself
PROGRESS_S = 60.0  # between two lines on a node that was started by itself and shows no rank
STEP_RECORD_S = 5.0  # between two updates of a run's step in run.json
RECORD_LOCK_S = 2.0  # the longest wait for another writer of it

# Snapshots in memory.
SNAPSHOT_PIECE_S = 0.002  # between two pieces: 64 MB/s at most
SNAPSHOT_LOOK_S = 0.1  # between two looks for a newer one

# The self-test.
SELFTEST_S = 60.0  # for all ranks to come to the same point
SELFTEST_LOOK_S = 0.5  # between two looks whether a rank is stuck
COMPUTE_S = 0.2  # of computing, for one rank
COLLECTIVES_S = 1.0  # for all collectives; with --quick a fifth
CALL_S = 0.5  # for one call: on a very slow link, larger sizes would tell nothing more
TRANSFER_S = 10.0  # for one transfer between two nodes
ROUND_S = 0.2  # of transfers, on up to 4 nodes
LEAST_ROUND_S = 0.03  # of transfers, on very many
