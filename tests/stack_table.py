"""Writes the matrix into docs/stack.md: python tests/stack_table.py RESULTS (`make stack`)."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "stack.md"
BEGIN, END = "<!-- matrix -->", "<!-- end -->"


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
        words = ", ".join(f"{kind} {size / 1024:.0f} KiB" for kind, size in sent.items())
        lines.append(f"| {strategy} | " + " | ".join([*cells, words]) + " |")
    return "\n".join(lines)


def _cell(row: dict | None) -> str:
    if row is None:
        return "not run"
    return "bitwise" if row["bitwise"] else f"{row['rms']:.2f}"


def main() -> None:
    """Replace the table in the page."""
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    made = f"{BEGIN}\n{table(rows)}\n{END}"
    page = PAGE.read_text()
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: made, page, flags=re.S))


if __name__ == "__main__":
    main()
