"""The golden table: what each kernel of the matrix took when it was last looked at, so that a change is seen.

    python -m tests.compile.golden        measures all of them (minutes) and writes golden.csv

With the Triton release that wrote a row, a kernel must take exactly what the row says. With another one it may take up
to a quarter and 16 registers more, other shared memory and spills within the budget; matrix instructions are the same.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

import triton

from tests.compile.matrix import Case, cases, compile_case, measure
from tests.compile.resources import Resources, over_budget

TABLE = Path(__file__).with_name("golden.csv")
COLUMNS = ("kernel", "options", "target", "dtype", "triton", "registers", "shared", "spills", "matrix")
Key = tuple[str, str, str, str]


@dataclass(frozen=True)
class Row:
    """What a kernel took, and with which Triton."""

    triton: str
    registers: int
    shared: int
    spills: int
    matrix: str


def row_of(used: Resources) -> Row:
    """The row for a kernel compiled just now."""
    return Row(triton.__version__, used.registers, used.shared, used.spills, " ".join(used.matrix))


def read() -> dict[Key, Row]:
    """The table, by kernel, options, target and dtype."""
    with TABLE.open(newline="") as file:
        return {
            (line["kernel"], line["options"], line["target"], line["dtype"]): Row(
                line["triton"], int(line["registers"]), int(line["shared"]), int(line["spills"]), line["matrix"]
            )
            for line in csv.DictReader(file)
        }


def differences(now: Row, golden: Row) -> list[str]:
    """In what `now` is not what the table says: every number for the Triton that wrote it, for others the instructions.

    Registers of small kernels double between releases without harm; the budgets hold for all of them.
    """
    wrong = []
    if now.triton == golden.triton:
        pairs = [(now.registers, golden.registers, "registers"), (now.shared, golden.shared, "bytes of shared memory")]
        pairs.append((now.spills, golden.spills, "spilled"))
        wrong = [f"{have} {what}, golden {had}" for have, had, what in pairs if have != had]
    if now.matrix != golden.matrix:
        wrong.append(f"matrix instructions {now.matrix or 'none'}, golden {golden.matrix or 'none'}")
    return wrong


def is_gemm_16bit(case: Case) -> bool:
    """Whether the case's kernel must use the 16-bit matrix units that large tiles are made for."""
    return case.tile is not None and case.dtype != "fp32" and case.options != "few"


def main() -> None:
    """Measure and write; say what is over its budget, which the table records but the tests refuse."""
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for case in cases():
            used = measure(compile_case(case), case.arch)
            row = row_of(used)
            writer.writerow((*case.key, row.triton, row.registers, row.shared, row.spills, row.matrix))
            complaint = "; ".join(over_budget(used, case.arch, is_gemm_16bit(case)))
            print(*case.key, row.registers, "registers", row.shared, "shared", complaint or "good", flush=True)


if __name__ == "__main__":
    main()
