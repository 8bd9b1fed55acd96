"""Parts for training on many devices: plans, stages, compressed collectives, estimates.

The engines are PyTorch's (DDP, FSDP2, DTensor, pipelining) and DeepSpeed; what is here fits into
them.
"""
