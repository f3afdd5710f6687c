"""Objects and checkpoints that hold tensors of the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import ltx
from tests.gpu.device import ADAMW, DEVICE, HALVES, batch, check, loss_of, model, on_cpu, params_of
from tests.train_on import go_on


def test_objects(workers: Any) -> None:
    def run() -> Any:
        given = {"x": torch.arange(3.0, device=DEVICE), "name": "a"}
        told, gathered = ltx.broadcast_object(given), ltx.all_gather_object(given)
        return [(found["x"].device.type, on_cpu(found["x"]).tolist(), found["name"]) for found in (told, *gathered)]

    assert list(workers.run(run)) == [[(DEVICE, [0.0, 1.0, 2.0], "a")] * 2]


def test_a_checkpoint(workers: Any, tmp_path: Path) -> None:
    """Saved at once and in the background of steps that overwrite the state; loaded, training goes on as it did."""

    def run() -> Any:
        hook = ltx.hooks.error_feedback(ltx.hooks.FP16())
        step = ltx.data_parallel(loss_of(model()), ltx.DDPStrategy(comm_hook=hook))
        step = ltx.mixed_precision(step, ltx.Precision(loss_scale=ltx.DynamicLossScale(init=2.0)))
        train = ltx.train_step(step, ADAMW)

        later = [batch(number) for number in range(3, 6)]
        state = go_on(train, train.init(params_of(model())), map(batch, range(3))).state
        ltx.checkpoint.save(tmp_path / "now", state)
        saving = ltx.checkpoint.save_async(tmp_path / "meanwhile", state)
        after = on_cpu(go_on(train, state, later).params)
        saving.result()
        found = []
        for name in ("now", "meanwhile"):
            restored = ltx.checkpoint.load(tmp_path / name, train.init(params_of(model())))
            leaves = dict(zip(ltx.tree.leaf_paths(restored.state), ltx.tree.flatten(restored.state)[0], strict=True))
            where = {path: x.device.type for path, x in leaves.items() if not path.startswith("sync_state.c")}
            drawn = torch.randn(2, device=DEVICE)
            found.append((where, on_cpu(go_on(train, restored.state, later).params), on_cpu(drawn)))
        return after, found

    ((after, ((where, first, drawn), (where_too, second, drawn_too))),) = workers.run(run)
    torch.testing.assert_close(first, after, rtol=0, atol=0)
    torch.testing.assert_close(second, after, rtol=0, atol=0)
    torch.testing.assert_close(drawn, drawn_too, rtol=0, atol=0)
    assert where == where_too
    assert {path for path, device in where.items() if device != DEVICE} <= {"sync_state.uses"}


def test_a_state_as_torch_saves_it(workers: Any, tmp_path: Path) -> None:
    def run() -> Any:
        train = ltx.train_step(ltx.data_parallel(loss_of(model()), HALVES), ADAMW)
        state, _ = train(train.init(params_of(model())), *batch(0))
        torch.save(state.state_dict(), tmp_path / "state.pt")
        again = train.init(params_of(model()))
        again.load_state_dict(torch.load(tmp_path / "state.pt"))
        one, other = (train(each, *batch(1))[0] for each in (state, again))
        return on_cpu(one.params), on_cpu(other.params)

    check(workers, run, rtol=0, atol=0)
