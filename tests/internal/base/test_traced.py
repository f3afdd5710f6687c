"""What torch before 2.13 needs in compiled graphs, tried on the torch that is here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ltx.core.base import traced


@dataclass(frozen=True)
class Settings:
    factor: float


def _scaled(settings: Settings, plus: float, note: str | None) -> str:
    return traced.keep(f"{settings.factor} {plus} {note}", settings.factor + plus)


@pytest.mark.slow_compile
def test_objects_come_by_their_addresses() -> None:
    key_of = traced._by_address(_scaled)

    def call(settings: Settings, x: torch.Tensor) -> tuple[str, torch.Tensor]:
        return key_of(settings, 0.5, None), x + 1

    compiled: Any = torch.compile(call, fullgraph=True, backend="eager")
    for factor in (2.0, 3.0, 2.0):  # each object is another, on whose identity the graph is guarded
        key, _ = compiled(Settings(factor), torch.zeros(2))
        assert traced.kept(key) == factor + 0.5
    assert traced.kept(call(Settings(4.0), torch.zeros(2))[0]) == 4.5  # and eagerly


@pytest.mark.slow_compile
def test_nodes_are_said_to_compile_while_a_graph_is_made() -> None:
    seen: list[bool] = []

    def node(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_compiling())
        return x * 2

    said = torch.compiler.allow_in_graph(traced._said_to_compile(node))
    compiled: Any = torch.compile(lambda x: said(x) + 1, fullgraph=True, backend="aot_eager")
    assert compiled(torch.ones(2)).tolist() == [3.0, 3.0]
    assert seen
    assert all(seen)
    assert not torch.compiler.is_compiling()
    assert said(torch.ones(2)).tolist() == [2.0, 2.0]
    assert not seen[-1]  # eagerly nothing is compiled


def test_a_node_that_raises_leaves_the_flag_as_it_was() -> None:
    def node(x: torch.Tensor) -> None:
        raise ValueError(str(torch.compiler.is_compiling()))

    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(2))
        with pytest.raises(ValueError, match="True"):
            traced._said_to_compile(node)(fake)
    assert not torch.compiler.is_compiling()
