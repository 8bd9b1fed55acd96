"""Train a fused transformer by any strategy of parallelism; copy what you need.

torchrun --nproc-per-node 2 examples/train.py --strategy zero3 --optimizer adamw8bit
torchrun --nproc-per-node 4 examples/train.py --config parallel.toml, which says for instance

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
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor

from torchweld import optim
from torchweld.distributed import (
    CountCollectives,
    LayerSeeds,
    Memory,
    Parallel,
    checkpoint,
    grad_norm,
    memory_estimate,
    recompute,
    ring_slice,
)
from transformer import Settings, Transformer, batch_of, loss_of

OPTIMIZERS = {"adamw": "AdamW", "adamw8bit": "AdamW8bit", "lamb": "LAMB", "onebit": "OneBitAdam"}
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "tp", "tp+sp", "pp", "fsdp+tp")


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", choices=STRATEGIES, default="ddp")
    parser.add_argument("--config", type=Path, help="a TOML file with a table [parallel] instead")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--sparse", action="store_true", help="attention by a Longformer's layout")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--steps", type=_count, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dropout", type=_share, default=0.1)
    parser.add_argument("--lr", type=_size, default=1e-3)
    parser.add_argument("--max-norm", type=_size, default=1.0, help="that gradients are cut to")
    parser.add_argument("--width", type=_count, default=128)
    parser.add_argument("--layers", type=_count, default=4)
    parser.add_argument("--length", type=_count, default=128)
    parser.add_argument("--rows", type=_count, default=2, help="sequences in a microbatch")
    parser.add_argument(
        "--microbatches", type=_count, default=4, help="of all processes, in a step"
    )
    parser.add_argument("--recompute", choices=("none", "full", "selective"), default="none")
    parser.add_argument("--save", type=Path, help="a folder for the checkpoint at the end")
    parser.add_argument("--resume", type=Path, help="a checkpoint, of any strategy and world size")
    parser.add_argument("--json", type=Path, help="write losses, tokens/s, bytes and collectives")
    return parser.parse_args(arguments)


def _count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def _size(text: str) -> float:
    if not 0 < (number := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number


def _share(text: str) -> float:
    if not 0 <= (number := float(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 up to 1")
    return number


def declared(given: argparse.Namespace, world: int) -> Parallel:
    """How processes share the work; an error names the option."""
    if given.config is None:
        return Parallel.of(given.strategy, world)
    import tomllib  # since Python 3.11

    try:
        return Parallel.of(tomllib.loads(given.config.read_text())["parallel"], world)
    except OSError as error:
        raise SystemExit(f"--config: {given.config}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise SystemExit(f"--config: {given.config}: {error}") from None
    except KeyError:
        raise SystemExit(f"--config: {given.config} has no table [parallel]") from None


def check(given: argparse.Namespace, parallel: Parallel) -> None:
    """Refuse what cannot be trained, resumed or written, before anything begins."""
    heads = Settings.heads
    divisors = [("--width", given.width, heads, "heads")]
    divisors += [("--length", given.length, parallel.ring, "processes of a ring")]
    if parallel.sequence:
        own = given.length // parallel.ring
        divisors += [("--length", own, parallel.tensor, "processes that share the sequence")]
    if heads % parallel.tensor:
        raise SystemExit(f"--strategy or --config: {parallel.tensor} processes share {heads} heads")
    divisors += [("--microbatches", given.microbatches, parallel.replicas, "replicas")]
    for option, size, count, of in divisors:
        if size % count:
            raise SystemExit(f"{option}: {size} is not a multiple of {count} {of}")
    if given.layers < parallel.pipeline:
        raise SystemExit(f"--layers: {given.layers} layers for {parallel.pipeline} stages")
    is_plain = (parallel.tensor, parallel.pipeline, parallel.data) == (1, 1, "ddp")
    if given.optimizer == "onebit" and not is_plain:
        raise SystemExit("--optimizer onebit goes with --strategy ddp")
    if given.resume is not None and not (given.resume / ".metadata").exists():
        raise SystemExit(f"--resume: {given.resume} holds no checkpoint")
    for option, path in (("--save", given.save), ("--json", given.json)):
        if path is None:
            continue
        above = path.absolute().parent
        there = next(folder for folder in (above, *above.parents) if folder.exists())
        if (
            not there.is_dir()
            or not os.access(there, os.W_OK)
            or (option == "--json" and path.is_dir())
        ):
            raise SystemExit(f"{option}: {path} cannot be written")


class Training:
    """A model, or this process's stage of it, and what trains it."""

    def __init__(self, given: argparse.Namespace, parallel: Parallel, device: torch.device) -> None:
        self.given, self.parallel, self.device = given, parallel, device
        self.mesh = parallel.mesh(device.type)
        self.slice = given.length // parallel.ring
        names = ("width", "layers", "length", "dropout", "sparse")
        self.settings = Settings(**{name: getattr(given, name) for name in names})
        torch.manual_seed(given.seed)
        self.stage = self.mesh.get_local_rank("pipeline")
        model: Any = Transformer(self.settings).stage(self.stage, parallel.pipeline).to(device)
        model = parallel.cut(model, self.mesh)
        for name, block in model.blocks.items() if given.recompute != "none" else ():
            model.blocks[name] = recompute(block, keep=given.recompute == "selective")
        kind = getattr(optim, OPTIMIZERS[given.optimizer])
        self.averages = given.optimizer == "onebit"  # averages gradients itself
        if self.averages:
            kind = partial(kind, freeze_step=max(given.steps // 4, 1), bias_correction=True)
        self.estimate = self._estimate(model, kind(model.parameters()))
        self.model = parallel.wrap(model, self.mesh)
        self.seeds = LayerSeeds(model.blocks.items(), given.seed)
        self.optimizer = parallel.optimizer(self.model, kind, lr=given.lr)
        if self.averages and self.model is not model:
            self.optimizer.attach(self.model)
        replica, replicas = self.mesh.get_local_rank("data"), parallel.replicas
        each = given.microbatches // replicas
        self.mine = range(replica * each, (replica + 1) * each)
        self.schedule = self._schedule() if parallel.pipeline > 1 else None

    def _estimate(self, model: Any, optimizer: Any) -> Memory:
        """What this process will hold, by the dimension that divides most of it."""
        p, strategy, count = self.parallel, self.parallel.data, self.parallel.replicas
        if count == 1 and p.tensor * p.pipeline > 1:
            strategy, count = ("tp", p.tensor) if p.tensor > 1 else ("pp", p.pipeline)
        rank = self.stage if strategy == "pp" else 0
        given = (self._shapes()[1 if self.stage else 0],)
        several = self.given.microbatches > p.replicas and p.pipeline == 1
        return memory_estimate(
            *(model, optimizer, strategy, count), rank=rank, example=given, accumulates=several
        )

    def _shapes(self) -> list[torch.Tensor]:
        """A microbatch's tokens, stream and logits."""
        sizes, s, device = (self.given.rows, self.slice), self.settings, self.device
        made = [torch.zeros(sizes, dtype=torch.int64, device=device)]
        for width in (s.width, s.vocabulary):
            made.append(torch.zeros((*sizes, width), device=device, requires_grad=True))
        return made

    def _schedule(self) -> Schedule1F1B:
        if self.given.bf16:
            self.model.forward = self.autocast()(self.model.forward)
        tokens, stream, logits = self._shapes()
        last = self.stage == self.parallel.pipeline - 1
        stage = PipelineStage(
            *(self.model, self.stage, self.parallel.pipeline, self.device),
            input_args=stream if self.stage else tokens,
            output_args=logits if last else stream,
            group=self.mesh.get_group("pipeline"),
        )
        return Schedule1F1B(stage, len(self.mine), loss_fn=loss_of)

    def autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.given.bf16)

    def batch(self, step: int, number: int) -> tuple[torch.Tensor, ...]:
        which, group = step * self.given.microbatches + number, self.mesh.get_group("ring")
        whole = batch_of(self.settings, self.given.rows, self.given.seed + which, self.device)
        return tuple(ring_slice(x, 1, group) for x in whole)

    def step(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, a mean over this process's microbatches, and the gradients' norm."""
        self.seeds.begin(step, self.mine.start)
        loss = self._pipelined(step) if self.schedule is not None else self._accumulated(step)
        stages = self.mesh.get_group("pipeline") if self.schedule is not None else None
        norm = grad_norm(self.model.parameters(), stages)
        factor = (self.given.max_norm / (norm + 1e-6)).clamp(max=1.0)
        for parameter in () if self.averages else self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, norm

    def _accumulated(self, step: int) -> torch.Tensor:
        total, parts = torch.zeros((), device=self.device), len(self.mine) * self.parallel.ring
        for number in self.mine:
            tokens, targets = self.batch(step, number)
            first = self.mesh.get_local_rank("ring") * tokens.shape[1]
            with self._exchanges(number == self.mine[-1]):
                with self.autocast():
                    loss = loss_of(self.model(tokens, first), targets)
                (loss / parts).backward()
            total += loss.detach() / len(self.mine)
        return total

    def _exchanges(self, wanted: bool) -> Any:
        """Gradients are exchanged after the last microbatch only."""
        if hasattr(self.model, "set_requires_gradient_sync"):
            self.model.set_requires_gradient_sync(wanted)
        waits = hasattr(self.model, "no_sync") and not wanted
        return self.model.no_sync() if waits else nullcontext()

    def _pipelined(self, step: int) -> torch.Tensor:
        parts = [self.batch(step, number) for number in self.mine]
        tokens, targets = (torch.cat(some) for some in zip(*parts, strict=True))
        losses: list[torch.Tensor] = []
        last = self.stage == self.parallel.pipeline - 1
        given = () if self.stage else (tokens,)
        self.schedule.step(*given, target=targets if last else None, losses=losses)
        loss = torch.stack(losses).mean().detach() if last else torch.zeros((), device=self.device)
        dist.all_reduce(loss, group=self.mesh.get_group("pipeline"))
        return loss


def local_bytes(model: torch.nn.Module, optimizer: Any) -> dict[str, int]:
    """What this process keeps between steps."""

    def size(values: Any) -> int:
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)

    inner = getattr(optimizer, "optim", optimizer)
    states = [value for state in inner.state.values() for value in state.values()]
    return {"parameters": size(model.parameters()), "optimizer": size(states)}


def train(given: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """All steps, between the processes of torch's default group; what is known of them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    parallel = declared(given, world)
    check(given, parallel)
    training = Training(given, parallel, device)
    say = print if rank == 0 else lambda *_: None
    say(parallel)
    if rank == 0:
        training.estimate.show()
    trained = (training.model, training.optimizer)
    first = _resumed(given, *trained) if given.resume else 0
    record: dict[str, Any] = {"losses": [], "norms": []}
    counted, start = CountCollectives(), time.perf_counter()
    for step in range(first, first + given.steps):
        with counted if step == first + given.steps - 1 else nullcontext():
            loss, norm = training.step(step)
        dist.all_reduce(loss)
        record["losses"].append(loss.item() / world)
        record["norms"].append(norm.item())
        say(f"step {step}  loss {record['losses'][-1]:.4f}  gradients {norm.item():.3f}")
    tokens = given.steps * given.microbatches * given.rows * given.length
    record["tokens_per_second"] = tokens / (time.perf_counter() - start)
    record["bytes"] = local_bytes(*trained)
    record["collectives"] = {k: [counted.calls[k], counted.bytes[k]] for k in counted.calls}
    say(f"{record['tokens_per_second']:.0f} tokens/s; bytes of rank 0: {record['bytes']}")
    say(f"the last step's collectives, calls and bytes: {record['collectives']}")
    if given.save:
        checkpoint.save(given.save, *trained, first + given.steps)
    if given.json and rank == 0:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(record, indent=1) + "\n")
    return record


def _resumed(given: argparse.Namespace, model: Any, optimizer: Any) -> int:
    try:
        return checkpoint.load(given.resume, model, optimizer)
    except (RuntimeError, ValueError, KeyError, dist.checkpoint.api.CheckpointException) as error:
        what = f"a model of these sizes with --optimizer {given.optimizer}"
        reason = str(error).strip().splitlines()[-1]
        raise SystemExit(f"--resume: {given.resume} is not of {what}: {reason}") from None


def main() -> None:
    given, device = options(), torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": "1"}
    os.environ.update(alone | dict(os.environ))  # a single process without torchrun
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(given, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
