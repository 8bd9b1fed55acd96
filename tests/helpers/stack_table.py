"""Writes the matrix into docs/stack.md: `make stack` runs this with its results."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "stack.md"
BEGIN, END = "<!-- matrix -->", "<!-- end -->"
SEAMS, MODELS, DECLARED = "<!-- seams -->", "<!-- models -->", "<!-- declared -->"


def table(rows: list[dict]) -> str:
    """One row per strategy, one column per model and dtype."""
    found = {(r["strategy"], r["model"], r["dtype"]): r for r in rows}
    strategies = list(dict.fromkeys(r["strategy"] for r in rows))
    kinds = [(m, d) for m in ("GPT", "BERT", "sparse GPT") for d in ("fp32", "bf16")]
    lines = ["| | " + " | ".join(f"{m}, {d}" for m, d in kinds) + " | sent in a step |"]
    lines += ["|---" * (len(kinds) + 2) + "|"]
    for strategy in strategies:
        cells = [_cell(found.get((strategy, *kind))) for kind in kinds]
        sent = found.get((strategy, "GPT", "fp32"), {}).get("sent", {})
        lines.append(f"| {strategy} | " + " | ".join([*cells, _words(sent)]) + " |")
    return "\n".join(lines)


def _words(sent: dict[str, int]) -> str:
    return ", ".join(f"{kind} {size / 1024:.0f} KiB" for kind, size in sent.items())


def _cell(row: dict | None) -> str:
    if row is None:
        return "not run"
    return "bitwise" if row["bitwise"] else f"{row['rms']:.2f}"


def seams(rows: list[dict]) -> str:
    """One row for each name, with its largest figure."""
    lines = ["| seam | difference from one process | sent |", "|---|---|---|"]
    for name in dict.fromkeys(row["row"] for row in rows):
        some = [row for row in rows if row["row"] == name]
        worst = max(some, key=lambda row: row["off"])
        found = f"`{worst['error']}`" if worst["error"] else f"{worst['off']:.0e}"
        sent = _words(worst["sent"])
        lines.append(f"| {name} | {found} | {sent} |")
    return "\n".join(lines)


def models(rows: list[dict]) -> str:
    """One row for each model: what its plans are."""
    lines = ["| model | tensor parallel | with a sharded sequence |", "|---|---|---|"]
    for row in rows:
        lines.append(f"| {row['planned']} | {row['tensor']} | {row['sequence']} |")
    return "\n".join(lines)


def declarations(rows: list[dict]) -> str:
    """One row for each declaration of parallelize()."""
    lines = ["| declaration | processes | with | difference |", "|---|---:|---|---:|"]
    for row in rows:
        start = f"| {row['declared'] or 'one process'} | {row['processes']} | {row['given']} |"
        lines.append(f"{start} {row['off']:.0e} |")
    return "\n".join(lines)


def main() -> None:
    """Replace the tables in the page, those that have new rows."""
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    page = PAGE.read_text()
    made = (
        (BEGIN, table, [row for row in rows if "strategy" in row]),
        (SEAMS, seams, [row for row in rows if "row" in row]),
        (MODELS, models, [row for row in rows if "planned" in row]),
        (DECLARED, declarations, [row for row in rows if "declared" in row]),
    )
    for begin, write, some in made:
        if some:
            now = f"{begin}\n{write(some)}\n{END}"
            page = re.sub(f"{begin}.*?{END}", lambda _, now=now: now, page, flags=re.S)
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
