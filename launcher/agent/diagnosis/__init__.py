"""Which rank is stuck, which collectives do not match, which network NCCL uses."""
