"""Train a fused transformer with any parallel strategy; copy what you need.

torchrun --nproc-per-node 2 examples/train.py --strategy zero3 --optimizer adamw8bit
torchrun --nproc-per-node 4 examples/train.py --config parallel.toml

where parallel.toml has, for example,

    [parallel]
    pipeline = 2
    tensor = {mode = "1d", size = 2}
    data = "zero2"
"""

from __future__ import annotations

import argparse
import json
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torchweld.distributed import CountCollectives, Training, parallelize
from torchweld.distributed.train.parallel import STRATEGIES, read_config
from torchweld.errors import ArgumentError
from transformer import Settings, Transformer, compute_loss, make_batch

OPTIMIZERS = ("adamw", "adamw8bit", "lamb", "one_bit_adam")


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--strategy", choices=STRATEGIES, default="ddp", help="how processes share the work"
    )
    parser.add_argument(
        "--config", type=Path, help="a TOML file with a [parallel] table, instead of --strategy"
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument(
        "--sparse", action="store_true", help="use a Longformer layout for attention"
    )
    parser.add_argument("--bf16", action="store_true", help="run under autocast to bfloat16")
    parser.add_argument("--steps", type=_parse_count, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dropout", type=_parse_share, default=0.1)
    parser.add_argument("--lr", type=_parse_size, default=1e-3)
    parser.add_argument(
        "--max-norm", type=float, default=1.0, help="clip gradients to this norm; 0: do not clip"
    )
    parser.add_argument("--width", type=_parse_count, default=128)
    parser.add_argument("--layers", type=_parse_count, default=4)
    parser.add_argument("--length", type=_parse_count, default=128)
    parser.add_argument(
        "--rows", type=_parse_count, default=2, help="number of sequences in a microbatch"
    )
    parser.add_argument(
        "--microbatches", type=_parse_count, default=4, help="per step, over all processes"
    )
    parser.add_argument(
        "--recompute",
        choices=("none", "full", "selective"),
        default="none",
        help="which activations are recomputed in the backward pass",
    )
    parser.add_argument("--save", type=Path, help="a folder for the final checkpoint")
    parser.add_argument(
        "--resume", type=Path, help="a checkpoint of any strategy and world size to resume from"
    )
    parser.add_argument(
        "--json", type=Path, help="a file for losses, tokens/s, bytes and collectives"
    )
    return parser.parse_args(arguments)


def _parse_count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def _parse_size(text: str) -> float:
    if not 0 < (number := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number


def _parse_share(text: str) -> float:
    if not 0 <= (number := float(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 up to 1")
    return number


def check(args: argparse.Namespace) -> None:
    """Exit before training if files cannot be used."""
    if args.width % Settings.heads:
        raise SystemExit(f"--width: {args.width} is not a multiple of {Settings.heads} heads")
    if args.resume is not None and not (args.resume / ".metadata").exists():
        raise SystemExit(f"--resume: {args.resume} holds no checkpoint")
    for option, path in (("--save", args.save), ("--json", args.json)):
        if path is None:
            continue
        above = path.absolute().parent
        existing = next(folder for folder in (above, *above.parents) if folder.exists())
        if (
            not existing.is_dir()
            or not os.access(existing, os.W_OK)
            or (option == "--json" and path.is_dir())
        ):
            raise SystemExit(f"{option}: {path} cannot be written")


def declare(args: argparse.Namespace) -> dict[str, Any]:
    """Return a declaration of the options; a file of --config has precedence."""
    optimizer: dict[str, Any] = {"name": args.optimizer, "lr": args.lr}
    if args.optimizer == "one_bit_adam":
        optimizer |= {"freeze_step": max(args.steps // 4, 1), "bias_correction": True}
    table = read_config(args.config or args.strategy)
    return {"checkpoint": args.recompute, "optimizer": optimizer} | dict(table)


def count_local_bytes(model: torch.nn.Module, optimizer: Any) -> dict[str, int]:
    """Count the bytes that this process keeps between steps."""

    def size(values: Any) -> int:
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)

    inner = getattr(optimizer, "optimizer", optimizer)  # of RowSharded
    states = [value for state in inner.state.values() for value in state.values()]
    return {"parameters": size(model.parameters()), "optimizer": size(states)}


def train(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Run all steps in torch's default process group, and return a record of them."""
    check(args)
    names = ("width", "layers", "length", "dropout", "sparse")
    settings = Settings(**{name: getattr(args, name) for name in names})
    torch.manual_seed(args.seed)
    try:
        training = parallelize(
            Transformer(settings),
            declare(args),
            device=device,
            example=(torch.zeros((args.rows, args.length), dtype=torch.int64),),
            loss_fn=compute_loss,
            microbatches=args.microbatches,
            max_norm=args.max_norm,
            autocast=torch.bfloat16 if args.bf16 else None,
            seed=args.seed,
        )
    except ArgumentError as error:
        raise SystemExit(str(error)) from None
    rank, world = dist.get_rank(), dist.get_world_size()
    say = print if rank == 0 else lambda *_: None
    first = _resume(args, training) if args.resume else 0
    record: dict[str, Any] = {"losses": [], "norms": []}
    counter, start = CountCollectives(), time.perf_counter()
    for step in range(first, first + args.steps):
        seeds = (args.seed + step * args.microbatches + number for number in training.own)
        batch = [make_batch(settings, args.rows, seed, device) for seed in seeds]
        with counter if step == first + args.steps - 1 else nullcontext():
            loss, norm = training.step(batch, step)
        dist.all_reduce(loss)
        record["losses"].append(loss.item() / world)
        record["norms"].append(norm.item())
        say(f"step {step}  loss {record['losses'][-1]:.4f}  gradients {norm.item():.3f}")
    tokens = args.steps * args.microbatches * args.rows * args.length
    record["tokens_per_second"] = tokens / (time.perf_counter() - start)
    record["bytes"] = count_local_bytes(training.model, training.optimizer)
    record["collectives"] = {k: [counter.calls[k], counter.bytes[k]] for k in counter.calls}
    say(f"{record['tokens_per_second']:.0f} tokens/s; bytes of rank 0: {record['bytes']}")
    say(f"the last step's collectives, calls and bytes: {record['collectives']}")
    if args.save:
        training.save(args.save, first + args.steps)
    if args.json and rank == 0:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return record


def _resume(args: argparse.Namespace, training: Training) -> int:
    try:
        return training.load(args.resume)
    except ArgumentError as error:
        raise SystemExit(f"--resume: {error}") from None


def main() -> None:
    args, device = options(), torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    defaults = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": "1"}
    os.environ.update(defaults | dict(os.environ))  # a single process without torchrun
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(args, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
