"""The command `torchweld bench`: its options and its run."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from torchweld.bench.cases import DTYPES, MIDDLE, name_dtype
from torchweld.bench.measure import evidence, gpu, jobs, launched, limits, machine, steps
from torchweld.bench.measure.contenders import COMPILE, PEERS, rivals
from torchweld.bench.measure.jobs import Job
from torchweld.bench.measure.machine import (
    Refusal,
    check_outputs,
    choose_device,
    describe_machine,
    parse_positive,
)
from torchweld.bench.measure.overhead import overhead
from torchweld.bench.measure.runner import Plan
from torchweld.bench.measure.timing import clock_for
from torchweld.bench.models import own_model
from torchweld.bench.models.blocks import BLOCKS
from torchweld.bench.show import plots
from torchweld.bench.show.report import Report, load, markdown, show, show_machine, table_csv
from torchweld.files import write_json, write_text
from torchweld.ops.optimizer.rule import RULES
from torchweld.registry import BACKENDS, OPS
from torchweld.registry.cost import DIRECTIONS
from torchweld.table import Table, progress

NAMED_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


PLOTS = {"plot": plots.draw_speeds, "roofline": plots.draw_roofline, "scaling": plots.draw_scaling}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `torchweld bench`."""
    add_ops(parser, [*evidence.PROVEN, *BLOCKS])
    parser.add_argument(
        "--quick", action="store_true", help="take a minute: one shape and one dtype of each op"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")
    parser.add_argument(
        "--dtype", action="append", choices=NAMED_DTYPES, metavar="DTYPE", help="may be repeated"
    )
    parser.add_argument("--direction", action="append", choices=DIRECTIONS, help="may be repeated")
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="may be repeated")
    parser.add_argument(
        "--vs",
        action="append",
        choices=(COMPILE, *PEERS, *steps.PEERS),
        help="rivals to measure; default: all installed ones, none with --quick",
    )
    parser.add_argument(
        "--model",
        metavar="pkg.module:build",
        help="measure your own model instead: build() returns it and a batch of arguments",
    )
    _add_outputs(parser)
    parser.add_argument(
        "--record", action="store_true", help="on a GPU: test and time the kernels, as evidence"
    )
    parser.add_argument(
        "--minutes", type=parse_positive, default=9.0, help="with --record; default: 9"
    )
    parser.add_argument(
        "--evidence",
        type=Path,
        metavar="DIR",
        help="where --record writes; default: bench/evidence",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="without a GPU: fill Triton's cache with what --record launches, to carry it there",
    )
    parser.add_argument(
        "--check-evidence",
        action="store_true",
        help="say which files of bench/evidence are stale",
    )
    parser.add_argument(
        "--default-allocator",
        action="store_true",
        help="keep the C allocator's settings: large CPU blocks may fault in at every call",
    )


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw speeds relative to eager"
    )
    parser.add_argument(
        "--roofline", type=Path, metavar="FILE.png", help="draw rates against operations per byte"
    )
    parser.add_argument("--scaling", type=Path, metavar="FILE.png", help="draw times against sizes")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write one line per result")
    parser.add_argument("--markdown", metavar="FILE", help="write the README's table; - prints it")
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="FILE",
        help="measure nothing: show a file that --json or --record wrote",
    )


def add_ops(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Add the argument that names ops."""

    def known(name: str) -> str:
        if name not in names:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(names)}")
        return name

    parser.add_argument(
        "ops",
        nargs="*",
        metavar="op",
        type=known,
        help=f"ops to measure; default: all of {', '.join(names)}",
    )


def run(options: argparse.Namespace) -> int:
    """Run the command. Its exit status is 1 if a contender's result was wrong."""
    try:
        if options.check_evidence:
            return _check_evidence()
        if options.compile:
            return _compile_ahead(options)
        check_outputs(options, pictures=tuple(PLOTS))
        if options.model:
            return _measure_model(options)
        if options.source:
            report = _read(options.source)
        else:
            report = _record(options) if options.record else _measure(options)
        return _deliver(report, options)
    except Refusal as refusal:
        print(f"torchweld bench: {refusal}", file=sys.stderr)
        return 2


def _record(options: argparse.Namespace) -> Report:
    """Record evidence on a GPU."""
    root = evidence.root()
    if not torch.cuda.is_available():
        raise Refusal("--record needs a GPU; torch sees none here")
    if root is None:
        raise Refusal("--record needs the repository; this torchweld is installed without it")
    if lacks := machine.list_missing():
        raise Refusal("--record: nothing was measured or recorded: " + "; ".join(lacks))
    report = _begin_report("cuda")
    folder = options.evidence or root / "bench" / "evidence"
    record = gpu.EvidenceRecord(folder, report.machine, root)
    names = options.ops or [*evidence.PROVEN, *BLOCKS]
    try:
        report.results = gpu.run(names, record, root, options.minutes, rivals=options.vs or [])
    except KeyboardInterrupt:
        print(f"interrupted; the results so far are in {record.path}", file=sys.stderr)
    return report


def _check_contenders(options: argparse.Namespace, device: str) -> None:
    """Refuse a backend or a rival that was named and cannot take part in anything measured."""
    names = _names(options)
    for backend in options.backend or []:
        if reason := _why_not_measured(backend, names, device):
            raise Refusal(f"--backend {backend}: {reason}")
    for rival in options.vs or []:
        if reason := _why_not_against(rival, device):
            raise Refusal(f"--vs {rival}: {reason}")


def _why_not_measured(backend: str, names: Sequence[str], device: str) -> str | None:
    its = BACKENDS[backend]
    if device not in its.devices:
        return f"it serves no tensors on --device {device}"
    if its.why_missing() or any(name in RULES for name in names):
        return its.why_missing()
    served = any(backend in OPS[name].sources for name in names if name in OPS)
    return None if served else "none of these ops has such a kernel"


def _why_not_against(rival: str, device: str) -> str | None:
    if rival == COMPILE:
        return None
    if rival in PEERS:
        peer = PEERS[rival]
        return peer.why_missing() or (None if device in peer.devices else "it runs only on GPUs")
    return None if rival in steps.peers() else f"not installed: pip install {rival}"


def _begin_report(device: str) -> Report:
    """A report with only the machine and its measured copy bandwidth."""
    copy_gbps = limits.copy_gbps(clock_for(device), device)
    report = Report(describe_machine(device) | {"copy_gbps": copy_gbps})
    show_machine(report.machine)
    return report


def _measure(options: argparse.Namespace) -> Report:
    device = choose_device(options)
    _check_contenders(options, device)
    if device == "cpu":
        machine.settle(default_allocator=options.default_allocator)

    report = _begin_report(device)
    backends = options.backend or [name for name, b in BACKENDS.items() if device in b.devices]
    directions = options.direction or DIRECTIONS
    against = options.vs or [*rivals(device), *steps.peers()]
    plan = Plan(directions, backends, against, seconds=0.6)
    dtypes: Sequence[torch.dtype] = DTYPES[device]
    sizes: Sequence[float] | None = None
    if options.quick:
        directions = options.direction or ("fwd", "full")
        plan = Plan(directions, backends, options.vs or [], seconds=0.1, rounds=(5, 101))
        dtypes, sizes = dtypes[:1], (MIDDLE,)
    if options.dtype:
        dtypes = tuple(NAMED_DTYPES[name] for name in options.dtype)
    names = _names(options)
    try:
        if device == "cuda":
            job = Job("", plan, [name_dtype(d) for d in dtypes], sizes, options.quick, True)
            _in_processes(job, names, report)
        else:
            wanted = jobs.list_cases(names, device, dtypes, sizes, quick=options.quick)
            clock = clock_for(device)
            for at in progress(wanted):
                for results in jobs.measure_case(wanted[at], plan, clock):
                    report.results += results
            for op in [OPS[name] for name in names if name in OPS]:
                report.overheads += overhead(op, device, plan.backends, plan.seconds)
    except KeyboardInterrupt:
        print("interrupted; the results so far:", file=sys.stderr)
    if device == "cpu" and (root := evidence.root()):
        report.sources = evidence.hash_cpu_sources(names, root)
    return report


def _in_processes(job: Job, names: Sequence[str], report: Report) -> None:
    """Measure each op with all its backends, in another process."""
    wanted = []
    for op in names:
        served = evidence.gpu_backends(evidence.PROVEN[op]) if op in evidence.PROVEN else []
        backends = [b for b in served if b in job.plan.backends]
        wanted.append(replace(job, op=op, plan=replace(job.plan, backends=backends)))
    shown = iter(progress(wanted))
    next(shown, None)
    for _, results, overheads, has_ended in jobs.run_apart(wanted):
        report.results += results
        report.overheads += overheads
        if has_ended:
            next(shown, None)


def _names(options: argparse.Namespace) -> list[str]:
    """The names to measure: those given, or all that have the directions and backends asked for.

    An optimizer's step has no direction, and one dtype. A block has no backend of its own.
    """
    if options.ops:
        return list(options.ops)
    rules = ["adam"] if options.quick else list(RULES)
    return [
        *OPS,
        *(rules if not (options.direction or options.dtype) else []),
        *(BLOCKS if not options.backend else []),
    ]


def _measure_model(options: argparse.Namespace) -> int:
    device = choose_device(options)
    if device == "cpu":
        machine.settle(default_allocator=options.default_allocator)
    model, batch = own_model.built(options.model)
    where = _begin_report(device).machine
    rows = own_model.measure(model, batch, device, own_model.chosen(options.vs))
    if options.json:
        write_json(options.json, {"machine": where, "model": rows})
        print(f"results: {options.json}")
    return 0


def _read(path: Path) -> Report:
    try:
        saved = json.loads(path.read_text())
        if "gpu" not in saved:
            return load(path)
        where = {"device": "cuda", "name": saved["gpu"], **saved["limits"]}
        where |= {name: saved[name] for name in ("capability", "date", "versions")}
        return Report(where, evidence.list_results(saved, evidence.root()))
    except OSError as error:
        raise Refusal(f"--from: {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise Refusal(f"--from: {path} is not a file of --json or --record: {error!r}") from None


def _deliver(report: Report, options: argparse.Namespace) -> int:
    """Show, save and draw the results."""
    if options.source:
        show_machine(report.machine)
    show(report)
    if options.json:
        report.save(options.json)
        print(f"results: {options.json}")
    if options.csv:
        write_text(options.csv, table_csv(report.results))
        print(f"table: {options.csv}")
    if options.markdown:
        _write(markdown(report.results), options.markdown)
    for kind, path in ((kind, getattr(options, kind)) for kind in PLOTS):
        if path:  # last, since too few results are refused
            PLOTS[kind](report, path)
            print(f"{kind}: {path}")
    return 1 if any(r.status == "refused" for r in report.results) else 0


def _write(text: str, target: str) -> None:
    if target == "-":
        print(text)
    else:
        write_text(Path(target), text)
        print(f"table: {target}")


def _compile_ahead(options: argparse.Namespace) -> int:
    root = evidence.root()
    if root is None:
        raise Refusal("--compile needs the repository; this torchweld is installed without it")
    if importlib.util.find_spec("triton") is None:
        raise Refusal("--compile needs Triton, and it is not installed")
    from triton import knobs

    known = partial(gpu.list_known, evidence.read_records().values(), root)
    count = launched.compile_ahead(options.ops or list(OPS), known)
    print(f"{count} kernels are in {knobs.cache.dir}: carry it, and name it by TRITON_CACHE_DIR")
    return 0


def _check_evidence() -> int:
    """Report stale evidence without failing: only machines with a GPU can renew it."""
    root = evidence.root()
    if root is None:
        raise Refusal("--check-evidence needs the repository's sources; they are not in a wheel")
    records = evidence.read_records()
    if importlib.util.find_spec("triton") is not None:
        folder = root / "bench" / "evidence"
        evidence.write_codes(folder / evidence.COMPILED, launched.renew(records, root))
        for path in folder.glob("*.json"):
            write_json(path, records[json.loads(path.read_text())["gpu"]])
    table = Table(["op", "backend", "GPU", "evidence"], numbers_from=4)
    for line in evidence.list_states(root, records):
        table.add(*line)
    table.show()
    return 0
