"""one_bit_hook: DistributedDataParallel sends gradients as signs, for any optimizer."""

import torch

from torchweld.collectives.one_bit.all_reduce import OneBitAllReduce

# No postponed annotations in this file: torch compares a hook's annotations with its classes.


def one_bit_hook(
    state: OneBitAllReduce, bucket: torch.distributed.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """A communication hook that averages gradients from their signs, with error feedback.

        ddp.register_comm_hook(OneBitAllReduce(), one_bit_hook)

    Errors belong to parameters, not to buckets, which DistributedDataParallel rebuilds after its
    first step. Buckets are reduced one after another, as they become ready. Save
    `state.state_dict()` in checkpoints.
    """
    state.reduce_keyed(bucket.gradients(), bucket.parameters())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done
