"""What values look like when they are printed, and in notebooks: short, and without reading what they hold."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import ltx
from tests.kinds import Ranks
from tests.needs import needs

SGD = ltx.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)


def loss(w: dict[str, Tensor], x: Tensor) -> Tensor:
    return (x @ w["kernel"] + w["bias"]).square().mean()


def trained(**others: Any) -> tuple[ltx.TrainState, ltx.Metrics, Any]:
    train = ltx.train_step(ltx.data_parallel(loss, **others), SGD)
    return *train(train.init({"kernel": torch.zeros(64, 8), "bias": torch.zeros(8)}), torch.ones(2, 64)), train


def test_a_state_and_what_made_it() -> None:
    state, metrics, train = trained()
    assert repr(train) == f"TrainStep(\n  step=DataParallel(fn=<function loss>),\n  optimizer={SGD!r}\n)"
    assert repr(metrics) == "Metrics(loss=tensor(0.))"
    said = repr(state)
    assert said.startswith("TrainState(\n  params={'kernel': f32[64,8], 'bias': f32[8]},\n")
    assert "'momentum_buffer': f32[64,8]" in said
    assert "sync_state=SyncState(leaves={}, step=1)" in said
    assert len(said.splitlines()) < 24
    assert "axis='replicas'" in repr(trained(axis=None)[2].step.__class__(loss, axis="replicas"))


def rows_of(html: str | None) -> list[list[str]]:
    """The cells of a table's rows, as they are written in HTML."""
    return [re.findall("<t[hd] [^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in (html or "").split("</tr>")[:-1]]


def test_tables_of_what_has_fields() -> None:
    state, metrics, train = trained(strategy=ltx.DDPStrategy(comm_hook="fp16"))
    step = "DataParallel(fn=&lt;function loss&gt;, strategy=DDPStrategy(comm_hook=FP16()))"
    assert rows_of(train._repr_html_()) == [["TrainStep", ""], ["step", step], ["optimizer", repr(SGD)]]
    assert rows_of(metrics._repr_html_()) == [["Metrics", ""], ["loss", "tensor(0.)"]]
    assert rows_of(train.step.strategy._repr_html_()) == [["DDPStrategy", ""], ["comm_hook", "FP16()"]]
    assert ltx.DDPStrategy()._repr_html_() is None, "no field, no table"
    rows = dict(rows_of(state._repr_html_()))
    assert list(rows) == ["TrainState", "params", "buffers", "opt_state", "sync_state", "step"]
    assert (rows["params"], rows["step"]) == ("{&#x27;kernel&#x27;: f32[64,8], &#x27;bias&#x27;: f32[8]}", "1")


def test_what_was_donated_is_printed_all_the_same() -> None:
    """A notebook shows it at the end of a cell, a debugger among the variables."""
    state, _, train = trained()
    kernel = state.params["kernel"]
    train(state, torch.ones(2, 64))
    assert repr(state).startswith("<this TrainState (step 1) was donated to the step that made state 2: ")
    assert state._repr_html_() is None, "its text says that, once"
    assert repr([kernel]) == "[f32[64,8](DonatedTensor)]"
    assert repr(ltx.Metrics(loss=kernel, aux=state)).endswith(f"aux={state!r}\n)")


def test_what_would_be_tall_is_folded() -> None:
    many = {f"<{n}>": torch.zeros(5, 8) for n in range(300)}
    for html in (ltx.Metrics(loss=many)._repr_html_(), ltx.PerRank([many])._repr_html_()):
        _, (_, cell) = rows_of(html)
        assert cell.startswith("<details><summary>{ &#x27;&lt;0&gt;&#x27;: f32[5,8], ")
        assert "&lt;299&gt;&#x27;: f32[5,8]\n}</pre></details>" in cell
        assert "<0>" not in cell
        assert len(cell.split("</summary>")[0]) < 300


def test_a_table_of_workers(ranks: Ranks) -> None:
    shown = rows_of(ranks(2)._repr_html_())
    assert shown == [["Pool of 2", "process"], *([f"rank {r}", str(pid)] for r, pid in enumerate(ranks(2).pids))]


DTYPES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64", torch.bool: "bool", torch.complex64: "c64"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: torch.dtype) -> None:
    metrics = ltx.Metrics(loss=torch.zeros(3, 1, dtype=dtype), aux=(torch.zeros(0, dtype=dtype), [1, "two"]))
    assert repr(metrics) == f"Metrics(loss={DTYPES[dtype]}[3,1], aux=({torch.zeros(0, dtype=dtype)!r}, [1, 'two']))"


def test_nothing_is_read_that_may_not_be() -> None:
    said = []

    def look(x: Tensor) -> Tensor:
        said.append(repr(ltx.Metrics(loss=x)))
        return x * 2

    torch.vmap(look)(torch.ones(3))
    torch.func.grad(look)(torch.tensor(1.0))
    with FakeTensorMode():
        look(torch.ones(()))
    look(torch.ones((), device="meta"))
    assert said == ["Metrics(loss=f32[])"] * 2 + ["Metrics(loss=f32[](FakeTensor))", "Metrics(loss=f32[])"]
    look(torch.tensor(1.0, requires_grad=True))
    assert said[-1] == "Metrics(loss=tensor(1.))"


def test_values_of_ranks() -> None:
    results = ltx.PerRank([{"loss": torch.tensor(r / 2), "<w>": torch.zeros(5, 8)} for r in range(2)])
    rows = [
        f"  rank {r}: {{'loss': {loss}, '<w>': f32[5,8]}}" for r, loss in enumerate(("tensor(0.)", "tensor(0.5000)"))
    ]
    assert repr(results) == f"PerRank(\n{rows[0]},\n{rows[1]}\n)"
    assert re.sub(" style='[^']*'", "", results._repr_html_()) == (
        "<table><thead><tr><th>rank</th><th>loss</th><th>&lt;w&gt;</th></tr></thead><tbody>"
        "<tr><td>0</td><td>tensor(0.)</td><td>f32[5,8]</td></tr>"
        "<tr><td>1</td><td>tensor(0.5000)</td><td>f32[5,8]</td></tr></tbody></table>"
    )
    assert ">tensor([1., 1.])</td></tr>" in ltx.PerRank([3, torch.ones(2)])._repr_html_()
    assert ltx.PerRank([])._repr_html_().startswith("<table>")


@needs("matplotlib")
def test_a_timeline_draws_itself() -> None:
    with ltx.profile.record() as trace:
        trained()
    timeline = ltx.profile.timeline([trace])
    assert repr(trace) == "<Trace of rank 0: 0 collectives, 0 B sent>"
    assert repr(timeline) == "<Timeline of 1 rank: no communication>"
    assert (timeline._repr_png_() or b"").startswith(b"\x89PNG")
    assert (timeline.traces[0]._repr_png_() or b"").startswith(b"\x89PNG")
