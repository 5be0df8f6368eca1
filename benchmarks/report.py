"""What the measurements say: CSV, Markdown, plots, and the tables of operators in docs/benchmarks.

    python -m benchmarks.report out/benchmarks [out/another ...]

Merges the ops.csv of the folders into docs/benchmarks/operators.csv and writes the tables of the pages beside it,
between the lines `<!-- begin: name -->` and `<!-- end: name -->`. A row maps names of COLUMNS to text or numbers.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .case import Case, Operator
from .operators import OPERATORS
from .peers import NAMES

Row = dict[str, Any]

_TEXTS = ("kind", "operator", "shape", "by", "timed", "bar", "met", "gate")
_NUMBERS = {
    "ms": "{:.3f}",
    "wall ms": "{:.3f}",
    "GB/s": "{:.0f}",
    "TFLOP/s": "{:.0f}",
    "share": "{:.1%}",
    "of products": "{:.3f}",
    "of full": "{:.3f}",
    "of nn wall": "{:.2f}",
    "of grouped_mm": "{:.3f}",
    "extra MiB": "{:.0f}",
    "check s": "{:.1f}",
    "measure s": "{:.1f}",
}
COLUMNS = (*_TEXTS[:5], *_NUMBERS, *_TEXTS[5:])
# How a bar reads, by the column that it is for.
_BARS = {
    "share": "≥ {:.0%}",
    "of products": "≤ {:.2f} of the products",
    "of full": "≤ {:.2f} of the full time",
    "of nn wall": "≤ {:.2f} of nn.RMSNorm's",
    "of grouped_mm": "≤ {:.2f} of grouped_mm's time",
    "extra MiB": "≤ {:.0f} MiB",
}
_CASES: dict[tuple[str, str], tuple[Operator, Case]] = {
    (operator.name, operator.label(case.shape)): (operator, case) for operator in OPERATORS for case in operator.cases
}
_BY = {"ours": "Strata", **NAMES}
# How `benchmarks.ops` begins to say which errors did not pass.
_RED = "RED: "
DOCS = Path(__file__).parents[1] / "docs/benchmarks"
DATA = DOCS / "operators.csv"


def is_green(row: Row) -> bool:
    """Whether the row's function passed the gate and so has times."""
    return str(row["gate"]).startswith("ok")


def finish(rows: Sequence[Row]) -> list[Row]:
    """The rows with what needs several of them: ratios to other rows, and the bars of ours, met or missed."""
    green = {(row["operator"], row["shape"], row["by"]): row for row in rows if row["kind"] == "case" and is_green(row)}
    return [_finish(row, green) if row["kind"] == "case" and is_green(row) else row for row in rows]


def _finish(row: Row, green: dict[tuple[str, str, str], Row]) -> Row:
    name, by = row["operator"], row["by"]
    operator, case = _CASES[name, row["shape"]]
    row = dict(row)
    if "ignored" in case.shape:
        full = operator.label({axis: size for axis, size in case.shape.items() if axis != "ignored"})
        if other := green.get((name, full, by)):
            row["of full"] = row["ms"] / other["ms"]
    if other := green.get((name, row["shape"], "nn")):
        row["of nn wall"] = row["wall ms"] / other["wall ms"]
    if other := green.get((name, row["shape"], "grouped_mm")):
        row["of grouped_mm"] = row["ms"] / other["ms"]
    if by == "ours" and case.bars:
        row["bar"] = "; ".join(_percent(_BARS[column].format(limit)) for column, limit in case.bars.items())
        row["met"] = "; ".join(_verdict(row, column, limit) for column, limit in case.bars.items())
    return row


def _verdict(row: Row, column: str, limit: float) -> str:
    if column not in row:
        return "not measured"
    return "met" if (row[column] >= limit if column == "share" else row[column] <= limit) else "missed"


def show(row: Row, column: str) -> str:
    """One value as tables show it."""
    value = row.get(column, "")
    return _percent(_NUMBERS[column].format(value)) if isinstance(value, float) else str(value)


def _percent(text: str) -> str:
    return text.replace("%", " %")


def _markdown(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [titles, ["---"] * len(titles), *lines]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def table(rows: Sequence[Row]) -> str:
    """All that was measured, in Markdown."""
    return _markdown(COLUMNS, [[show(row, column) for column in COLUMNS] for row in rows])


def write(out: Path, heads: Sequence[str], rows: Sequence[Row]) -> None:
    """ops.csv with full precision, ops.md to read."""
    out.mkdir(parents=True, exist_ok=True)
    write_csv(out / "ops.csv", heads, finish(rows))
    (out / "ops.md").write_text("\n".join(heads) + f"\n\n{table(finish(rows))}\n")


def write_csv(path: Path, heads: Sequence[str], rows: Sequence[Row]) -> None:
    with path.open("w", newline="") as file:
        file.writelines(f"# {head}\n" for head in heads)
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_csv(path: Path) -> tuple[list[str], list[Row]]:
    """The heads and rows that `write_csv` wrote."""
    lines = path.read_text().splitlines()
    heads = [line.removeprefix("# ") for line in lines if line.startswith("# ")]
    rows = csv.DictReader(line for line in lines if not line.startswith("# "))
    return heads, [{c: float(v) if c in _NUMBERS else v for c, v in row.items() if v} for row in rows]


def plot(out: Path, rows: Sequence[Row]) -> list[Path]:
    """A figure per operator: the share of the limit by shape, ours against the peers. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    paths = []
    for name in dict.fromkeys(row["operator"] for row in rows):
        mine = [row for row in rows if row["operator"] == name and is_green(row)]
        shapes = list(dict.fromkeys(row["shape"] for row in mine))
        by = [b for b in _BY if any(row["by"] == b for row in mine)]
        figure, axes = pyplot.subplots(figsize=(max(6, 1.2 * len(shapes)), 4), layout="constrained")
        for i, b in enumerate(by):
            shares = {row["shape"]: row["share"] for row in mine if row["by"] == b}
            positions = [j + (i - (len(by) - 1) / 2) * 0.8 / len(by) for j in range(len(shapes))]
            axes.bar(positions, [100 * shares.get(shape, 0) for shape in shapes], 0.8 / len(by), label=_BY[b])
        axes.set_xticks(range(len(shapes)), shapes, rotation=30, ha="right")
        axes.set(title=name, ylabel="share of the limit, %", ylim=(0, 105))
        axes.legend(ncols=3, fontsize="small")
        paths.append(out / f"{name}.png")
        figure.savefig(paths[-1], dpi=120)
        pyplot.close(figure)
    return paths


def _compared(rows: Sequence[Row], wanted: Callable[[Operator, Case], bool], cell: Callable[[Row], str]) -> str:
    """A line per case: the bar, then a cell for ours and for each peer, the fastest in bold."""
    cases = {key: pair for key, pair in _CASES.items() if wanted(*pair)}
    found = {(row["operator"], row["shape"], row["by"]): row for row in rows if row["kind"] == "case"}
    by = [b for b in _BY if any((*key, b) in found for key in cases)]
    lines = []
    for key, (_, case) in cases.items():
        column = "wall ms" if case.wall else "ms"
        here = {b: found[*key, b] for b in by if (*key, b) in found}
        fastest = min((row[column] for row in here.values() if is_green(row)), default=None)
        cells = [_cell(here.get(b), cell, column, fastest) for b in by]
        if here:
            lines.append([*key, _bar(here.get("ours", {})), *cells])
    return _markdown(["operator", "shape", "bar", *(_BY[b] for b in by)], lines)


def _cell(row: Row | None, cell: Callable[[Row], str], column: str, fastest: float | None) -> str:
    if row is None:
        return "-"
    if not is_green(row):
        return "fails" if row["gate"].startswith("error") else "gate not passed"
    text = f"**{cell(row)}**" if row[column] == fastest else cell(row)
    return text + " †" if "overwrites" in row["gate"] else text


def _bar(row: Row) -> str:
    pairs = zip(row.get("bar", "").split("; "), row.get("met", "").split("; "), strict=True)
    return "; ".join(f"{bar}: {met}" for bar, met in pairs if bar)


def operators_table(rows: Sequence[Row]) -> str:
    return _compared(
        rows,
        lambda operator, case: operator.bytes > 0 and not case.wall,
        lambda row: f"{show(row, 'ms')} ms, {show(row, 'share')}",
    )


def heads_table(rows: Sequence[Row]) -> str:
    def cell(row: Row) -> str:
        ratio = next((show(row, column) for column in ("of products", "of full") if column in row), "-")
        return f"{row['ms']:.1f} ms, {ratio}, {row['extra MiB']:,.0f} MiB"

    return _compared(rows, lambda operator, case: operator.products is not None, cell)


def experts_table(rows: Sequence[Row]) -> str:
    return _compared(
        rows,
        lambda operator, case: operator.name in ("experts", "experts_lora"),
        lambda row: f"{row['ms']:.2f} ms, {show(row, 'share')}, {row['extra MiB']:,.0f} MiB",
    )


def refused_table(rows: Sequence[Row]) -> str:
    """Which tensors of which fused heads did not pass the gate: how far from fp64, and how far was allowed."""
    red = [r for r in rows if r["kind"] == "case" and r["gate"].startswith(_RED) and _CASES[_key(r)][0].products]
    found = {(r["shape"], r["by"]): r for r in red}
    shapes = [shape for name, shape in _CASES if any((name, shape) == _key(r) for r in red)]
    by = [b for b in _BY if any(r["by"] == b for r in red)]
    lines = [[shape, *(_beyond(found[shape, b]) if (shape, b) in found else "-" for b in by)] for shape in shapes]
    return _markdown(["shape", *(_BY[b] for b in by)], lines)


def _key(row: Row) -> tuple[str, str]:
    return row["operator"], row["shape"]


def _beyond(row: Row) -> str:
    """The tensors of a fused head's red row whose error is not within what is allowed, in the order of the gate."""
    told = []
    for tensor, error in zip(("loss", "dx", "dw"), row["gate"].removeprefix(_RED).split("; "), strict=True):
        mine, allowed = map(float, error.split(" of "))
        if not mine <= allowed:  # or NaN
            told.append(f"{tensor} {error}")
    return "; ".join(told)


def wall_table(rows: Sequence[Row]) -> str:
    return _compared(rows, lambda operator, case: case.wall, lambda row: f"{1e3 * row['wall ms']:.0f} µs")


def sweep_table(rows: Sequence[Row]) -> str:
    """A table per axis: sizes across, operators down."""
    tables = []
    for axis in dict.fromkeys(operator.sweep[0] for operator in OPERATORS if operator.sweep):
        swept = [o for o in OPERATORS if o.sweep and o.sweep[0] == axis]
        sizes = swept[0].sweep_cases()
        found = {(row["operator"], row["shape"], row["by"]): row for row in rows if row["kind"] == "sweep"}
        lines = []
        for operator in swept:
            assert operator.sweep is not None
            others = ", ".join(f"{size} {name}" for name, size in operator.sweep[2].items())
            labels = [operator.label(case.shape) for case in operator.sweep_cases()]
            for by in _BY:
                here = [found.get((operator.name, label, by)) for label in labels]
                if any(here):
                    lines.append([operator.name, others, _BY[by], *(_sweep_cell(row) for row in here)])
        tables.append(_markdown(["operator", "of", "by", *(str(case.shape[axis]) for case in sizes)], lines))
    return "\n\n".join(tables)


def _sweep_cell(row: Row | None) -> str:
    if row is None:
        return "-"
    if not is_green(row):
        return "fails" if row["gate"].startswith("error") else "gate not passed"
    return show(row, "of products" if "of products" in row else "share")


def lost(rows: Sequence[Row]) -> str:
    """A line per case in which a peer that passes the gate is faster than ours."""
    lines = []
    for (name, shape), (_, case) in _CASES.items():
        column = "wall ms" if case.wall else "ms"
        here = [r for r in rows if (r["kind"], r["operator"], r["shape"]) == ("case", name, shape) and is_green(r)]
        ours = next((row for row in here if row["by"] == "ours"), None)
        best = min(here, key=lambda row: row[column], default=None)
        if best and best is not ours:
            mine = f"{show(ours, column)} ms against" if ours else "gate not passed, beside"
            lines.append(f"- `{name}` {shape}: {mine} {show(best, column)} ms of {_BY[best['by']]}")
    return "\n".join(lines) or "None."


def runs(heads: Sequence[str]) -> str:
    """The machines and versions, a line for each run."""
    return "\n".join(f"- {head}" for head in heads)


# The tables, by the name in their marks. Each is on one page.
PARTS: dict[str, Callable[[Sequence[Row]], str]] = {
    "operators": operators_table,
    "experts": experts_table,
    "linear_cross_entropy": heads_table,
    "refused": refused_table,
    "wall": wall_table,
    "lost": lost,
    "sweep": sweep_table,
}
_MARKED = re.compile(r"(<!-- begin: (\w+) -->\n).*?(\n<!-- end: \2 -->)", re.DOTALL)


def marks(text: str) -> list[str]:
    """Names of the parts that a page has marks for."""
    return [found[2] for found in _MARKED.finditer(text)]


def fill(text: str, heads: Sequence[str], rows: Sequence[Row]) -> str:
    """The page with every part between its marks written again. Raises KeyError for marks of an unknown part."""

    def written(found: re.Match[str]) -> str:
        part = runs(heads) if found[2] == "runs" else PARTS[found[2]](rows)
        return f"{found[1]}{part}{found[3]}"

    return _MARKED.sub(written, text)


def merge(folders: Sequence[Path]) -> tuple[list[str], list[Row]]:
    """The heads and rows of all folders, in the order of OPERATORS; of rows measured twice the last."""
    heads: list[str] = []
    found: dict[tuple[str, ...], Row] = {}
    for folder in folders:
        head, rows = read_csv(folder / "ops.csv")
        heads += head
        found |= {tuple(row[column] for column in ("kind", "operator", "shape", "by")): row for row in rows}
    labels = [(o.name, o.label(case.shape)) for o in OPERATORS for case in (*o.cases, *o.sweep_cases())]
    ordered = sorted(found.values(), key=lambda row: (row["kind"], labels.index((row["operator"], row["shape"]))))
    return list(dict.fromkeys(heads)), finish(ordered)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="what benchmarks.ops wrote to --out")
    arguments = parser.parse_args()
    heads, rows = merge(arguments.folders)
    write_csv(DATA, heads, rows)
    for page in DOCS.glob("*.md"):
        page.write_text(fill(page.read_text(), heads, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
