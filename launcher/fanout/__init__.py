"""The ways to start the node agents: on this machine, with srun, over ssh, with pdsh."""
