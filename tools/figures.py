"""Write what the rows of bench/results/*.csv say: the README's measured section and picture, docs/article.md's section,
and the times that `fusedce plan` counts with (fusedce/plan/measured.csv). Standard library only.

    python tools/figures.py            rewrites all four
    python tools/figures.py --check    fails if one of them is not what the rows say

A table an op and GPU, a line a case, mode and metric, a column a provider: the median (p50), in the row's unit. Where a
case was measured more than once, the latest date counts.
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import svg  # noqa: E402

from bench.series import Row, read  # noqa: E402

README = ROOT / "README.md"
ARTICLE = ROOT / "docs" / "article.md"
ARTICLE_CASE = ("linear_ce", "N65536_D2048_V124160_random", "fwd_bwd")
PLAN = ROOT / "fusedce" / "plan" / "measured.csv"
PLAN_COLUMNS = ("op", "provider", "case", "mode", "p50", "gpu", "commit", "date")
BEGIN = "<!-- figures: written by `make figures` from bench/results/*.csv -->\n"
END = "<!-- end of figures -->"
IMAGE = ROOT / "docs" / "images" / "measured.svg"


def main() -> None:
    """Write, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if one is out of date")
    check = parser.parse_args().check
    rows = read_rows(ROOT / "bench" / "results")
    readme, article = (path.read_text(encoding="utf-8") for path in (README, ARTICLE))
    case = [row for row in rows if (row["op"], row["case"], row["mode"]) == ARTICLE_CASE]
    written = {
        README: with_figures(readme, section(rows)),
        ARTICLE: with_figures(article, section(case)),
        PLAN: plan_rows(rows),
        IMAGE: svg.picture(rows),
    }
    for path, after in written.items():
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        if check and before != after:
            sys.exit(f"{path.relative_to(ROOT)} does not show the rows of bench/results; `make figures` writes them")
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(after, encoding="utf-8")


def plan_rows(rows: list[Row]) -> str:
    """The newest time of each of our own backends, op, case and mode, as CSV."""
    newest = {
        (row["op"], row["provider"], row["case"], row["mode"], row["gpu"]): row
        for row in rows
        if row["provider"].startswith("fusedce-")
        and row["metric"] == "time"
        and row["op"] in ("linear_ce", "moe_experts")
    }
    lines = [",".join(row[column] for column in PLAN_COLUMNS) for row in newest.values()]
    return "\n".join([",".join(PLAN_COLUMNS), *lines]) + "\n"


def read_rows(folder: Path) -> list[Row]:
    """All rows of all files, by date."""
    return read(sorted(folder.glob("*.csv")))


def with_figures(page: str, figures: str) -> str:
    """A page with its section replaced."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}{figures}{END}{tail}"


def section(rows: list[Row]) -> str:
    """The text between the marks."""
    if not rows:
        return "No row in bench/results yet.\n"
    tables: dict[tuple[str, str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        tables[row["op"], row["gpu"], row["torch"], row["triton"]].append(row)
    parts = []
    for (op, gpu, torch, triton), members in sorted(tables.items()):
        commits = ", ".join(dict.fromkeys(row["commit"][:7] for row in members))
        title = f"**{op}** at {commits}, on {gpu}, torch {torch}, Triton {triton}; medians"
        parts.append(f"{title}\n\n{table(members)}")
    return "\n".join(parts)


def table(rows: list[Row]) -> str:
    """One table in Markdown."""
    providers = sorted({row["provider"] for row in rows}, key=lambda name: (not name.startswith("fusedce"), name))
    cells: dict[tuple[str, str, str], dict[str, str]] = defaultdict(dict)
    for row in rows:
        cells[row["case"], row["mode"], f"{row['metric']}, {row['unit']}"][row["provider"]] = row["p50"]
    lines = [f"| case | mode | metric | {' | '.join(providers)} |", "|---|---|---|" + "---:|" * len(providers)]
    for (case, mode, metric), values in cells.items():
        shown = " | ".join(number(values[name]) if name in values else "" for name in providers)
        lines.append(f"| {case} | {mode} | {metric} | {shown} |")
    return "\n".join(lines) + "\n"


def number(text: str) -> str:
    """Four significant digits at most."""
    return f"{float(text):.4g}"


if __name__ == "__main__":
    main()
