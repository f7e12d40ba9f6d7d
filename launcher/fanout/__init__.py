"""The ways to start the node agents: here, by srun, over ssh, through pdsh."""
