"""axis_index, axis_size, the forms in which an axis can be given, rank_seed and shard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import ltx
from ltx.errors import AxisError
from tests import inside
from tests.kinds import Ranks
from tests.meshes import mesh_of
from tests.train_on import on_ranks, refuses, said


def _index_and_size() -> tuple[Tensor, int]:
    return ltx.axis_index(), ltx.axis_size()


def test_alone() -> None:
    index, size = _index_and_size()
    assert (index.shape, index.dtype, index.item(), size) == (torch.Size([]), torch.int64, 0, 1)


def test_simulated() -> None:
    seen: list[Any] = []

    def look() -> Tensor:
        index, size = _index_and_size()
        seen.append((index.shape, index.dtype, size))
        return index

    assert ltx.vmap(look, axis_size=4)().tolist() == [0, 1, 2, 3]
    assert seen == [(torch.Size([]), torch.int64, 4)]


@on_ranks(2)
def test_every_form_of_an_axis() -> None:
    """None, a name, an Axis, a process group, and a DeviceMesh."""
    group, rank = dist.new_group([0, 1]), dist.get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    mine = ltx.axis_from_group(dist.new_group([0, 1]), "mine")
    forms = [None, "data", inside.resolve("data"), group, mesh, mine, mine.comm.group]
    try:
        for form in forms:
            assert ltx.psum(torch.tensor(1.0 + rank), axis=form) == 3.0
            assert (ltx.axis_index(form), ltx.axis_size(form)) == (rank, 2)
    finally:
        for opened in {inside.resolve(a) for a in forms} - {inside.resolve("data")}:
            inside.close_axis(opened)


@on_ranks(2)
def test_a_mesh_of_two_dimensions_is_one_axis() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("node", "data"))
    # The second dimension is the whole world, whose axis is open already.
    for form in (mesh, mesh["data"], (mesh["node"], mesh["data"]), (mesh["data"], mesh["node"])):
        assert ltx.psum(torch.ones(()), axis=form) == 2.0


@pytest.mark.full
def test_dimensions_of_a_mesh_by_name(ranks: Ranks) -> None:
    """A dimension that was given once is found by its name; a name of two axes is refused."""

    def run() -> tuple[dict[str, Any], list[str]]:
        def text(axis: Any) -> str:
            return said(AxisError, ltx.axis_size, axis)

        def on(axis: Any) -> tuple[float, int, int, int]:
            rank = torch.tensor(10.0 ** dist.get_rank())
            (row,) = ltx.shard(torch.arange(ltx.axis_size(axis)), axis=axis).tolist()
            return ltx.psum(rank, axis).item(), int(ltx.axis_index(axis)), ltx.axis_size(axis), row

        with mesh_of(2, 1, 2, names=("node", "data", "model")) as mesh:
            before = text("model")
            found = {
                "model": on(mesh["model"]),
                "by name": on("model"),
                "node, data": on(mesh["node", "data"]),
                "tuple": on((mesh["node"], mesh["data"])),
                "names": on(("model", "node")) if ltx.axis_size(mesh["node"]) == 2 else None,
                "turned": on((mesh["model"], mesh["node"])),
                "all": on(mesh),
                "world": on("data"),
            }
            ltx.axis_size(mesh["data"])  # from here on two axes are called so
            texts = [
                before,
                text("data"),
                text(("node", "data")),
                text((mesh["node"], mesh["node"])),
                text((mesh["node"], "elsewhere")),
            ]
            return found, texts

    for rank, (found, texts) in enumerate(ranks(4).run(run)):
        row, column = divmod(rank, 2)
        model, node = (11.0 if row == 0 else 1100.0), (101.0 if column == 0 else 1010.0)
        assert found["model"] == found["by name"] == (model, column, 2, column)
        assert found["node, data"] == found["tuple"] == (node, row, 2, row)
        assert found["names"] == found["turned"] == (1111.0, 2 * column + row, 4, 2 * column + row)
        assert found["all"] == found["world"] == (1111.0, rank, 4, rank)
        assert "no axis called 'model' is in scope" in texts[0]
        assert "axis='data' is the name of two axes: of the world's, with 4 ranks, and of a dimension of a" in texts[1]
        assert "mixes axes in scope with dimensions of a DeviceMesh" in texts[2]
        assert "a dimension occurs more than once" in texts[3]
        assert "mixes axes in scope with dimensions of a DeviceMesh" in texts[4]


def test_names_that_are_not_in_scope(ranks: Ranks) -> None:
    with pytest.raises(AxisError, match=r"in scope: 'outer', 'inner'\. Open it with ltx.vmap\(f, axis_name='model'\)"):
        ltx.vmap(ltx.vmap(lambda x: ltx.psum(x, axis="model"), axis_name="inner"), axis_name="outer")(torch.ones(2, 2))

    text = ranks(2).run(said, AxisError, ltx.psum, torch.ones(1), axis="model").replicated()
    assert "no axis called 'model' is in scope; in scope: 'data'." in text


def test_an_axis_is_gone_after_its_function() -> None:
    said(ZeroDivisionError, lambda: ltx.vmap(lambda x: 1 / 0, axis_name="gone")(torch.ones(2)))
    refuses(AxisError, "no axis called 'gone'", ltx.axis_size, "gone")


def test_seeds_differ_between_ranks_and_repeat(ranks: Ranks) -> None:
    def seeds() -> list[int]:
        return [ltx.rank_seed(s) for s in (0, 1, -5, 2**63 + 1, 0)]

    by_rank = ranks(3).run(seeds)
    assert all(mine[0] == mine[-1] for mine in by_rank)
    assert len({s for mine in by_rank for s in mine}) == 12
    assert all(0 <= s < 2**63 for mine in by_rank for s in mine)
    assert seeds() == by_rank.rank(0), "alone, one is rank 0"


def test_seeds_of_neighbours_are_unrelated() -> None:
    """About half of the bits differ between one seed and the next."""
    flips = [(ltx.rank_seed(s) ^ ltx.rank_seed(s + 1)).bit_count() for s in range(200)]
    assert 28 < sum(flips) / len(flips) < 35


def test_seeds_have_no_simulated_form() -> None:
    with pytest.raises(AxisError, match=r'share one generator.*ltx.vmap\(f, randomness="different"\)'):
        ltx.vmap(lambda x: x + ltx.rank_seed(0))(torch.ones(2))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_shard_takes_a_batch_apart(ranks: Ranks, dim: int, seed: int) -> None:
    batch = {"x": torch.randn(4, 6, 2), "name": "kept", "scale": torch.tensor(2.0)}

    def run() -> tuple[Tensor, str, Tensor]:
        mine = ltx.shard(batch, dim=dim)
        return mine["x"], mine["name"], mine["scale"]

    simulated = ltx.vmap(lambda: ltx.shard({"x": batch["x"]}, dim=dim)["x"], axis_size=2)()
    for rank, (x, name, scale) in enumerate(ranks(2).run(run)):
        assert torch.equal(x, batch["x"].chunk(2, dim)[rank])
        assert torch.equal(simulated[rank], x)
        assert (name, scale.item()) == ("kept", 2.0)
    assert torch.equal(run()[0], batch["x"]), "alone"


def test_shard_of_what_does_not_divide() -> None:
    assert said(AxisError, lambda: ltx.vmap(lambda: ltx.shard({"batch": {"x": torch.zeros(5, 2)}}), axis_size=2)()) == (
        "shard: leaf 'batch.x' of shape [5, 2] can't be split along dim 0 into 2 equal parts, one for each rank of "
        "axis 'data'. Drop or pad the remainder. Processes can take unequal parts in place of this, "
        "x[rank::size]; an ltx.Weighted step then counts each sample alike."
    )
    refuses(AxisError, "can't be split along dim 2", ltx.shard, torch.zeros(4, 2), dim=2)
