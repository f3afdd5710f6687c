"""Updates as nodes of compiled graphs: those of the same class eagerly, on lists of tensors where the class can."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ltx
from ltx.optim import from_torch

CLASSES: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.Adam, {}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    (torch.optim.Rprop, {}),
]


@pytest.mark.slow_compile
@pytest.mark.full(but=2)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(("cls", "options"), CLASSES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_a_class(cls: Any, options: dict[str, Any], backend: str, seed: int) -> None:
    optimizer = from_torch(cls, lr=0.02, **options)
    params = {"a": torch.randn(3, 4), "b": torch.randn(5), "0-dim": torch.randn(())}
    graphs: list[str] = []

    def watched(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        lists = [n for n in graph.graph.nodes if "_foreach_" in str(n.target)]
        graphs.append("lists" if lists else "tensors")
        return graph

    if backend == "aot_eager":
        from torch._dynamo.backends.common import aot_autograd

        compiler: Any = aot_autograd(fw_compiler=watched)
    else:
        compiler = backend
    compiled = torch.compile(lambda g, s, p: optimizer.apply(g, s, p), fullgraph=True, backend=compiler)
    mine = theirs = (params, optimizer.init(params))
    for _ in range(4):
        grads = ltx.tree.map(torch.randn_like, params)
        mine, theirs = compiled(grads, mine[1], mine[0]), optimizer.apply(grads, theirs[1], theirs[0])
    torch.testing.assert_close(dict(mine[0]), dict(theirs[0]), rtol=1e-5, atol=1e-6)
    for own, other in zip(*(ltx.tree.flatten(pair[1])[0] for pair in (mine, theirs)), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
    assert set(graphs) == (set() if backend == "eager" else {"lists"})


def test_one_that_reads_its_count_of_steps_is_refused() -> None:
    optimizer, params = from_torch(torch.optim.Adagrad, lr=0.02), {"a": torch.randn(3)}
    state = optimizer.init(params)
    with pytest.raises(Exception, match=r"UnsupportedError: .* reads numbers off its state"):  # as Dynamo hands it on
        torch.compile(lambda g, s, p: optimizer.apply(g, s, p), backend="eager")(params, state, params)
