"""Parts for training on many devices: plans, stages, compressed collectives, estimates.

The engines are PyTorch's (DDP, FSDP2, DTensor, pipelining) and DeepSpeed; what is here fits into
them.
"""

from torchweld.distributed.checkpointing import save_policy, selective

__all__ = ["save_policy", "selective"]
