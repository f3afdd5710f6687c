"""axis_index, axis_size, and the forms in which an axis can be given."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import ltx
from ltx.errors import AxisError
from tests import inside
from tests.forks import open_now, settles
from tests.kinds import Ranks
from tests.meshes import mesh_of


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


def test_every_form_of_an_axis(ranks: Ranks) -> None:
    """None, a name, an Axis, a process group, and a DeviceMesh."""

    def sums() -> list[tuple[float, int, int]]:
        group = dist.new_group([0, 1])
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        mine = ltx.axis_from_group(dist.new_group([0, 1]), "mine")
        forms = [None, "data", inside.resolve("data"), group, mesh, mine, mine.comm.group]
        x = torch.tensor(1.0 + dist.get_rank())
        try:
            return [(ltx.psum(x, axis=a).item(), ltx.axis_index(a).item(), ltx.axis_size(a)) for a in forms]
        finally:
            for opened in {inside.resolve(a) for a in forms} - {inside.resolve("data")}:
                inside.close_axis(opened)

    for rank, by_form in enumerate(ranks(2).run(sums)):
        assert by_form == [(3.0, rank, 2)] * 7


def test_a_mesh_of_two_dimensions_is_one_axis(ranks: Ranks) -> None:
    def run() -> list[float]:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("node", "data"))
        # The second dimension is the whole world, whose axis is open already.
        forms = [mesh, mesh["data"], (mesh["node"], mesh["data"]), (mesh["data"], mesh["node"])]
        return [ltx.psum(torch.ones(()), axis=form).item() for form in forms]

    assert ranks(2).run(run).replicated() == [2.0] * 4


@pytest.mark.full
def test_dimensions_of_a_mesh_by_name(ranks: Ranks) -> None:
    """A dimension that was given once is found by its name; a name of two axes is refused."""

    def run() -> tuple[dict[str, Any], list[str]]:
        def text(axis: Any) -> str:
            with pytest.raises(AxisError) as caught:
                ltx.axis_size(axis)
            return str(caught.value)

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
    with pytest.raises(
        AxisError, match=r"no axis called 'model' is in scope; in scope: none \(ltx.init hasn't made any\)"
    ):
        ltx.psum(torch.ones(1), axis="model")
    with pytest.raises(AxisError, match=r"in scope: 'outer', 'inner'\. Open it with ltx.vmap\(f, axis_name='model'\)"):
        ltx.vmap(ltx.vmap(lambda x: ltx.psum(x, axis="model"), axis_name="inner"), axis_name="outer")(torch.ones(2, 2))

    def text() -> str:
        with pytest.raises(AxisError) as caught:
            ltx.psum(torch.ones(1), axis="model")
        return str(caught.value)

    assert "no axis called 'model' is in scope; in scope: 'data'." in ranks(2).run(text).replicated()


def test_what_is_no_axis_at_all() -> None:
    with pytest.raises(AxisError, match=r"an axis is a name, a tuple of names, an ltx.Axis, .* got 0\."):
        ltx.psum(torch.ones(1), axis=0)


def test_an_axis_is_gone_after_its_function(ranks: Ranks) -> None:
    with pytest.raises(ZeroDivisionError):
        ltx.vmap(lambda x: 1 / 0, axis_name="gone")(torch.ones(2))
    with pytest.raises(AxisError, match="no axis called 'gone'"):
        ltx.axis_size("gone")


# --- rank_seed and shard ---------------------------------------------------------------------------------------------


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
    with pytest.raises(AxisError) as caught:
        ltx.vmap(lambda: ltx.shard({"batch": {"x": torch.zeros(5, 2)}}), axis_size=2)()
    assert str(caught.value) == (
        "shard: leaf 'batch.x' of shape [5, 2] can't be split along dim 0 into 2 equal parts, one for each rank of "
        "axis 'data'. Drop or pad the remainder, or return ltx.Weighted from the step."
    )
    with pytest.raises(AxisError, match="can't be split along dim 2"):
        ltx.shard(torch.zeros(4, 2), dim=2)


# --- Axes over some ranks of the world: opened by these alone, with or without a name, and closed again --------------


def test_a_set_of_ranks(ranks: Callable[[int], Any], seed: int) -> None:
    def run() -> Any:
        rank = ltx.world().rank
        mine = [0, 2] if rank != 1 else [1]
        with ltx.axis_from_group(mine) as axis:
            inside = (ltx.psum(torch.tensor(rank), axis), ltx.psum(torch.tensor(rank), axis.name), axis.size)
            step = ltx.data_parallel(lambda w: w * (rank + 1.0), axis=axis)
            grad = ltx.grad(step)(torch.tensor(1.0))
        return *(x.item() for x in inside[:2]), inside[2], grad.item(), ltx.psum(torch.tensor(rank)).item()

    assert list(ranks(3).run(run)) == [(2, 2, 2, 2.0, 3), (1, 1, 1, 2.0, 3), (2, 2, 2, 2.0, 3)]


def test_ranks_in_another_order(ranks: Callable[[int], Any]) -> None:
    def run() -> Any:
        with ltx.axis_from_group([1, 0]) as axis:
            return ltx.axis_index(axis).item(), ltx.all_gather(torch.tensor(ltx.world().rank), axis).tolist()

    assert list(ranks(2).run(run)) == [(1, [1, 0]), (0, [1, 0])]


def test_opened_and_closed_again_and_again(ranks: Callable[[int], Any]) -> None:
    def run() -> Any:
        groups = len(dist.distributed_c10d._world.pg_map)
        sums = []
        for turn in range(3):
            with ltx.axis_from_group([0, 1]) as axis, ltx.axis_from_group([0, 1], "other") as other:
                sums.append(float(ltx.psum(torch.tensor(1.0), axis) + ltx.psum(torch.tensor(turn), "other")))
                assert axis.name != other.name
        return sums, len(dist.distributed_c10d._world.pg_map) - groups

    assert ranks(2).run(run).replicated() == ([2.0, 4.0, 6.0], 0)


def test_what_is_closed_leaves_no_threads_and_files(ranks: Callable[[int], Any]) -> None:
    """Though what was planned and differentiated on it may still refer to it."""

    def run() -> Any:
        mine, seen = dist.new_group([0, 1]), []
        for _ in range(3):
            for group in ([0, 1], mine):
                with ltx.axis_from_group(group, "closed") as axis:
                    ltx.grad(ltx.data_parallel(lambda w: (w**2).sum(), axis=axis))(torch.ones(3))
                    ltx.psum(torch.ones(4), axis, axis_index_groups=[[0], [1]])
            seen.append(axis)
            if len(seen) == 1:
                first = settles(open_now, lambda now: False, 1.0)
        last = settles(open_now, lambda now: sum(now.values()) <= sum(first.values()))
        again = float(ltx.psum(torch.ones(()), mine))
        dist.destroy_process_group(mine)
        return sum(last.values()) - sum(first.values()), again

    for more, again in ranks(2).run(run):
        assert more <= 0
        assert again == 2.0


def test_what_is_closed_says_so(ranks: Callable[[int], Any]) -> None:
    def run() -> list[str]:
        group = dist.new_group([0, 1])
        said = []
        for axis in (ltx.axis_from_group([0, 1], "closed"), ltx.axis_from_group(group)):
            ltx.psum(torch.ones(1), axis)
            axis.close()
            axis.close()
            try:
                ltx.psum(torch.ones(1), axis)
            except AxisError as error:
                said.append(str(error))
        with ltx.axis_from_group(group) as again:  # the group is its user's
            said.append(str(float(ltx.psum(torch.ones(1), again))))
        dist.destroy_process_group(group)
        return said

    one, two, again = ranks(2).run(run).replicated()
    assert one == "axis 'closed' is closed: by its close(), the end of its `with`, or of its world."
    assert re.fullmatch(r"axis '\w+' is closed: .*", two)
    assert again == "2.0"


@pytest.mark.parametrize(
    ("group", "text"),
    [
        ([0, 0], "expected different ranks from 0 to 1, got [0, 0]"),
        ([0, 2], "expected different ranks from 0 to 1, got [0, 2]"),
        ([], "expected different ranks from 0 to 1, got []"),
        (["0"], "expected different ranks from 0 to 1, got ['0']"),
        ("01", "takes a torch.distributed process group or ranks, and a name, got '01' and None"),
    ],
)
def test_what_is_no_set(ranks: Callable[[int], Any], group: Any, text: str) -> None:
    def run() -> str:
        try:
            ltx.axis_from_group(group)
        except AxisError as error:
            return str(error)
        return ""

    assert text in ranks(2).run(run).replicated()


def test_only_members_may_call(ranks: Callable[[int], Any]) -> None:
    def run() -> str:
        try:
            with ltx.axis_from_group([0], "mine") as axis:
                return str(axis.size)
        except AxisError as error:
            return str(error)

    assert list(ranks(2).run(run)) == [
        "1",
        "axis_from_group: rank 1 isn't among ranks [0]. Only these may call it.",
    ]


def test_a_world_of_one() -> None:
    with ltx.axis_from_group([0]) as axis:
        assert ltx.psum(torch.tensor(3.0), axis) == 3.0
    with pytest.raises(AxisError, match=re.escape("ranks are those of a world that is up. Call ltx.init() first")):
        ltx.axis_from_group([0, 1])


def test_a_group_by_two_names(ranks: Callable[[int], Any]) -> None:
    """Each has its own channels; both are found, and to close one leaves the other and no thread behind."""

    def run() -> Any:
        threads = threading.active_count()
        group = dist.new_group([0, 1])
        one, two = (ltx.axis_from_group(group, name) for name in ("one", "two"))
        sums = [float(ltx.psum(torch.tensor(k), axis)) for k, axis in enumerate(("one", "two", group, one, two))]
        one.close()
        with pytest.raises(AxisError, match="'one' is closed"):
            ltx.psum(torch.ones(1), one)
        sums.append(float(ltx.psum(torch.tensor(5), "two")))
        two.close()
        left = [axis.name for axis in inside.open_axes() if axis.name in ("one", "two")]
        dist.destroy_process_group(group)
        del group, one, two
        gc.collect()
        return sums, left, threading.active_count() <= threads

    assert ranks(2).run(run).replicated() == ([0.0, 2.0, 4.0, 6.0, 8.0, 10.0], [], True)


def test_the_worlds_axis_by_its_name_stays_open(ranks: Callable[[int], Any]) -> None:
    def run() -> Any:
        (world,) = inside.axes_in_scope()
        with ltx.axis_from_group(dist.group.WORLD, world.name) as axis:
            same = axis.comm is world.comm
        return same, float(ltx.psum(torch.tensor(1.0)))

    assert ranks(2).run(run).replicated() == (True, 2.0)


@pytest.mark.full
def test_groups_and_meshes_wait_as_long_as_the_world() -> None:
    """Its timeout and heartbeat, not the defaults, which would lower the process' own."""

    def run() -> Any:
        world = ltx.world()
        ltx.shutdown()
        limits = []
        with ltx.init(timeout=77, heartbeat_timeout=33):
            mesh = dist.device_mesh.init_device_mesh("cpu", (world.size,), mesh_dim_names=("rows",))
            group = dist.new_group([0, 1])
            with ltx.axis_from_group([1, 0]) as ranked, ltx.axis_from_group(group) as grouped:
                for axis in (None, ranked, grouped, mesh):
                    comm = inside.resolve(axis).comm
                    limits.append((comm.timeout_s, comm.watcher.heartbeat_s))
        return limits

    with ltx.Pool(2, timeout_s=60.0) as pool:
        assert pool.run(run).replicated() == [(77.0, 33.0)] * 4
