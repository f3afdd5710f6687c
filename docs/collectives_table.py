"""The table of collectives: what each computes, its gradient, and what it sends.

``python docs/collectives_table.py`` prints it as Markdown; ``docs/reference/collectives.md`` is that page.
Transposes and operations are read from the rules of :mod:`ltx.core.collectives.linear`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ltx.core.collectives.linear import RULES, Static
from ltx.core.comm.operations import OPERATIONS


@dataclass(frozen=True)
class Row:
    """One public collective.

    Attributes:
        name: as ``ltx.<name>``.
        forward: what rank r gets, from x_s of every rank s.
        gradient: the cotangent of x_r, from ȳ_s of every rank s, where it isn't that of the rule's transpose.
        rule: the linear rule it follows, if it is one.
        operation: the operation that it issues, where that isn't the rule's.
        static: arguments with which the rule is shown.
        simulated: whether it works under :func:`ltx.vmap`.
    """

    name: str
    forward: str
    gradient: str = ""
    rule: str = ""
    static: Static = ()
    operation: str = ""
    simulated: bool = True


ROWS = (
    Row("psum", "Σ_s x_s", rule="psum"),
    Row("pmean", "Σ_s x_s / n; integers give floats", gradient="psum(ȳ) / n", rule="psum"),
    Row("pmax", "max_s x_s", gradient="m · psum(ȳ) / psum(m), m = (x == y)", operation="pmax"),
    Row("pmin", "min_s x_s", gradient="m · psum(ȳ) / psum(m), m = (x == y)", operation="pmin"),
    Row("adasum", "the adaptive sum: what x_s have in common counts once", gradient="its exact one", operation="psum"),
    Row("weighted_mean", "Σ_s w_s x_s / Σ_s w_s", gradient="w_r · psum(ȳ) / psum(w)"),
    Row("pvary", "x_r", rule="pvary"),
    Row("all_gather", "[x_0, ..., x_{n-1}], stacked or concatenated", rule="all_gather", static=(0, 0)),
    Row("psum_scatter", "part r of Σ_s x_s", rule="psum_scatter", static=(0, 0)),
    Row("all_to_all", "[(x_0)_r, ..., (x_{n-1})_r]", rule="all_to_all", static=(0, 1, True)),
    Row("ppermute", "x_src, 0 without a source", rule="ppermute", static=(0, 1)),
    Row("broadcast", "x_src", rule="broadcast", static=(0,)),
    Row("psum_to", "Σ_s x_s on dst, 0 elsewhere", rule="psum_to", static=(0,)),
    Row("gather", "[x_0, ..., x_{n-1}] on dst, 0 elsewhere", rule="gather", static=(0, 0, 0)),
    Row("scatter", "part r of x_src", rule="scatter", static=(0, 0, 0)),
    Row("reduce", "the reduction that is named", gradient="that of the reduction"),
    Row("gather_all_tensors", "the list of all x_s, of any shapes", gradient="Σ_s ȳ_s[r]", simulated=False),
    Row("reduce_boolean_decision", "whether all, or any, say True", gradient="none", simulated=False),
    Row("all_gather_object", "the list of all objects", gradient="none", simulated=False),
    Row("broadcast_object", "the object of rank src", gradient="none", simulated=False),
    Row("barrier", "nothing, once all are there", gradient="none"),
)

_SAID = {
    "psum_to": "psum(ȳ) on src, 0 elsewhere",
    "ppermute": "ppermute(ȳ), pairs turned round",
    "gather": "[ȳ_0, ..., ȳ_{n-1}] on src, 0 elsewhere",
    "scatter": "part r of ȳ_dst",
    "broadcast": "ȳ_dst",
}


def gradient_of(row: Row) -> str:
    """The gradient as the table says it."""
    if row.gradient or not row.rule:
        return row.gradient
    name, _ = RULES[row.rule].transpose(torch.Size((2, 2)), row.static)
    return _SAID.get(name, f"{name}(ȳ)")


def sent(row: Row) -> str:
    """What a rank sends of a tensor of 1 byte an element, as part of its size, on four ranks."""
    operation = row.operation or (RULES[row.rule].operation if row.rule else None)
    if operation is None:
        return ""
    n, size = 4, 400
    times = OPERATIONS[operation].bytes_sent(size, n) / size
    return f"{times:g}"


def markdown() -> str:
    """The page."""
    lines = [
        "# Collectives",
        "",
        "Rank r of n gets y_r; the loss is the sum over ranks of each rank's loss, ȳ_r = ∂loss / ∂y_r. Printed by",
        "`python docs/collectives_table.py`.",
        "",
        "| `ltx.` | y_r | gradient | `ltx.vmap` | sent by each of 4 ranks, of the size of x |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| `{row.name}` | {row.forward} | {gradient_of(row)} | {'yes' if row.simulated else 'no'} | {sent(row)} |"
        for row in ROWS
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
