"""Rules for the lines that show a failure but not its cause: warnings, exits, consequences.

They are tried in this order, after those in causes.py: the first rule that matches a line wins.
"""

from launcher.explain.kinds import code, consequence, end, exception, lost, warning

SIGNS = (
    warning(
        "env-missing",
        r"""
        bash: \S+: No such file
        No module named
        command not found|: \d+: \S+: not found
        error while loading shared libraries|cannot open shared object file
        No such file or directory.*(python|bin/)
        cd: \S+: No such file
        [Ff]ailed to activate conda environment
        pyxis: .*(failed|does not exist|couldn't)
        """,
    ),
    warning(
        "version-mismatch",
        r"compiled (with|against|using) NumPy .*cannot|_ARRAY_API not found",
    ),
    warning("loss-not-finite", r"\b[Ll]oss\b\W{1,4}nan\b"),
    exception(
        "rank-error",
        r"""
        codec can't (de|en)code
        size mismatch for \S+: copying a param
        """,
    ),
    code("node-missing", r"RendezvousClosedError"),
    lost(
        "link-lost",
        r"""
        received errors while waiting for send/recv
        TCPStore server has shut down
        Horovod has been shut down
        [Ff]ailed to recv, got 0 bytes
        actor (died|is dead)|(ActorDied|RayActor|WorkerCrashed)Error|^EOFError$
        """,
    ),
    end(
        "port-blocked",
        r"""
        ECONNREFUSED|[Cc]onnection refused
        unable to complete a TCP connection|caused by a firewall|connectFullMesh failed
        """,
    ),
    end(
        "host-unreachable",
        r"""
        client socket has (timed out|failed to connect to any)
        client has timed out after
        """,
    ),
    end(
        "node-missing",
        r"""
        RendezvousTimeoutError|RendezvousConnectionError
        \d+/\d+ clients joined
        [Tt]imed out (after \d+ seconds|initializing process group) ?(in store|waiting)
        Timed out initializing|Timeout waiting for.*(rank|worker|key)
        [Ww]ait timeout after \d+ms, keys
        DistStoreError|store based barrier|Socket Timeout
        ^srun: error: (Task launch|Application launch|slurm_receive_msgs)
        [Cc]annot connect to master
        """,
    ),
    end(
        "collective-mismatch",
        r"""
        Collective(FingerPrint)? .*mismatch|Detected mismatch between collectives
        distributed collective mismatch in your code
        """,
    ),
    end(
        "rank-stuck",
        r"""
        Watchdog caught collective operation timeout
        Timed out waiting \d+ms for (recv|send) operation
        [Mm]onitoredBarrier
        [Hh]eartbeat monitor timed out|HeartbeatMonitor|stuck at a collective
        ran for \d+ milliseconds before timing out
        watchdog got stuck|watchdog hang|collective timeout
        submitted to be reduced.* by subset of ranks
        """,
    ),
    code("rank-killed", r"^srun: error: \S+: tasks? [\d,-]+: Killed"),
    end(
        "small-shm",
        r"exitcode *: -7|\(exitcode: -7\)|return code = -7|SIGBUS|Signal 7|signal 7\b",
    ),
    end(
        "rank-killed",
        r"""
        exitcode *: -9|\(exitcode: -9\)|Signal 9 \(SIGKILL\)|on signal 9|signal: 9|SIGKILL
        return code = -9|exit(ed with)? (code|status) 137|code:? -9|EXIT CODE: 9
        KILLED BY SIGNAL: 9|killed by signal: Killed|: Killed$|^Killed|line \d+: +\d+ Killed
        died with <Signals.SIGKILL
        """,
    ),
    end(
        "rank-crashed",
        r"""
        [Ss]egmentation fault|SIGSEGV|exitcode *: -11|\(exitcode: -11\)|signal 11|code:? -11
        EXIT CODE: 11|return code = -11
        Fatal Python error
        free\(\): invalid|double free|malloc\(\)|corrupted (size|double)|munmap_chunk
        [Ii]llegal instruction|SIGILL|exitcode *: -4|return code = -4|SIGFPE
        """,
    ),
    lost(
        "link-lost",
        r"""
        [Cc]onnection (was )?(reset|closed|aborted)( by (remote )?peer)?
        [Bb]roken pipe|rank 0 failed in main_first
        ncclRemoteError|remote process (exited|has terminated)
        recvValue failed|sendBytes failed|Failed to recv|socket is not connected
        Application timeout caused pair closure|Socket is not connected
        Transport (endpoint|retry count)|[Cc]all to recv from .* failed
        transport retry counter exceeded|Got completion from peer
        """,
    ),
    lost(
        "rank-crashed",
        r"""
        SIGABRT|exitcode *: -6|\(exitcode: -6\)|code:? -6|return code = -6|signal 6\b
        Aborted( \(core|$)
        terminate called
        DataLoader worker .* exited unexpectedly
        """,
    ),
    end(
        "nccl-error",
        r"""
        unhandled (system|cuda) error|ncclUnhandledCudaError|ncclSystemError
        [Ii]nternal (check|error).*NCCL|NCCL.*internal error|ncclInternalError
        NCCL.*invalid (usage|argument)|ncclInvalid(Usage|Argument)
        NCCL error|NCCL Error|ncclDevMemAlloc|DistBackendError: NCCL
        """,
    ),
    lost(
        "launcher-killed",
        r"""
        SignalException|got signal: (1|2|15)\b|Received (signal )?(15|1|2)\b
        Sending process \d+ closing signal SIG(HUP|INT)
        ^KeyboardInterrupt|Received \d+ death signal|Received Signals\.SIG(TERM|INT|HUP)
        JOB \S+ ON \S+ CANCELLED AT|CANCELLED by|interrupt \(one more within
        """,
    ),
    code(
        "launcher-killed",
        r"""
        STEP \S+ ON \S+ CANCELLED AT \S+ \*\*\*
        exitcode *: -(1|2|15)\b|return code = -(1|2|15)\b|Signal (1|2|15) \(SIG
        signal: Terminated
        """,
    ),
    code(
        "rank-error",
        r"""
        exits with return code = [1-9]|exitcode *: [1-9]|\(exitcode: [1-9]
        [Ee]xited with (exit )?(code|status) [1-9]|returned (a )?non-zero exit (status|code)
        terminated with (exit )?code [1-9]|Error executing job with overrides|ChildFailedError
        EXIT CODE: [1-9]
        """,
    ),
    consequence(
        r"""
        pickle data was truncated
        Sending process \d+ closing signal
        ^srun: (error: )?.*([Tt]erminated|Job step aborted|[Kk]illing)
        ^srun: (error: )?.*(First task exited|Terminating StepId)
        ^srun: (error: )?\S+: tasks? [\d,-]+: (Aborted|Broken pipe)
        Some NCCL operations have failed or timed out
        entire process down
        NCCL communicator was aborted
        Killing subprocess|sigkill_handler
        did not receive grad for rank
        CalledProcessError|ProcessExitedException|ProcessRaisedException
        MPI_ABORT was invoked|prterun|mpirun
        """,
    ),
)
