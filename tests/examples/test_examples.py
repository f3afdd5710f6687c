"""Every example comes to what its twin in plain torch comes to, and runs as a script; loops moved from DDP, too."""

from __future__ import annotations

import difflib
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.multiprocessing.reductions import StorageWeakRef

from tests.covering import some
from tests.kinds import Ranks
from tests.needs import needs
from tests.programs import ROOT, printed

EXAMPLES = ROOT / "examples"
# The file: for how many steps it is compared, and how near it comes. Sums in another order make the difference, and
# batch norm and Adam magnify it.
TWINS = {
    "train_gpt": (6, 1e-4),
    "shard_gpt": (6, 1e-4),
    "resnet_digits": (6, 1e-3),
    "hf_finetune": (6, 1e-4),
    "maml": (20, 1e-4),
    "dp_sgd": (10, 1e-4),
    "clip": (20, 1e-4),
    "fedavg": (5, 1e-4),
    "hessian_spectrum": (30, 1e-6),
    "kfac": (10, 1e-8),
    "natural_gradient": (10, 1e-8),
    "curvature_penalty": (20, 1e-8),
    "compare_hooks": (10, 1e-4),
}
SHARED = {"shard_gpt": "train_gpt"}  # the twins of others


@contextmanager
def imported(name: str) -> Iterator[Any]:
    """An example, as Python imports it where it is started as a script."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        try:
            yield importlib.import_module(name)
        finally:
            for new in {each for each in sys.modules if each.partition(".")[0] in ("plain", name)} - before:
                del sys.modules[new]


def main_of(name: str, *args: Any) -> Any:
    with imported(name) as example:
        return example.main(*args)


script = partial(printed, timeout_s=200)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's, of transformers
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", some(TWINS, "maml"))
def test_two_ranks_come_to_what_plain_torch_comes_to(name: str, ranks: Ranks) -> None:
    steps, rtol = TWINS[name]
    plain = main_of(f"plain.{SHARED.get(name, name)}", steps)
    for found in ranks(2).run(main_of, name, steps):
        if isinstance(found, dict):
            found = found["AllReduce()"]  # the others lose something
        torch.testing.assert_close(torch.tensor(found), torch.tensor(plain), rtol=rtol, atol=0.0)


@pytest.mark.full
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", TWINS)
def test_it_runs_as_a_script(name: str, tmp_path: Path) -> None:
    script("-m", "ltx", "run", "-n", "2", str(EXAMPLES / f"{name}.py"), "--steps", "2", cwd=tmp_path)
    assert not list(tmp_path.iterdir()), "an example leaves files behind where it is started"


@pytest.mark.full
@pytest.mark.timeout(240)
def test_the_gpt_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    command = ["-m", "ltx", "run", "-n", "2", str(EXAMPLES / "train_gpt.py"), "--checkpoints", "here", "--steps"]
    assert "step 2: loss" in script(*command, "3", cwd=tmp_path)
    assert re.findall(r"step (\d+): loss", script(*command, "5", cwd=tmp_path)) == ["4"]


@needs("matplotlib")
@pytest.mark.full
@pytest.mark.timeout(240)
def test_the_gpt_keeps_what_it_measures_where_it_is_told_to(tmp_path: Path) -> None:
    command = ["-m", "ltx", "run", "-n", "2", str(EXAMPLES / "train_gpt.py"), "--out", "here", "--steps", "3"]
    told = script(*command, cwd=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "here" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[0]["bytes"] > 4 * 300_000, "the gradients of a rank"
    assert f"{rows[-1]['loss']:.4f}" in told
    assert (tmp_path / "here" / "loss.png").stat().st_size > 1000


def test_a_sharded_layer_is_whole_only_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    whole: list[StorageWeakRef] = []
    left: list[int] = []
    with imported("shard_gpt") as example:
        gather, loss_fn = example.gather, example.cross_entropy

        def noted(*args: Any) -> list[torch.Tensor]:
            tensors: list[torch.Tensor] = gather(*args)
            whole.extend(StorageWeakRef(x.untyped_storage()) for x in tensors)
            return tensors

        def after_forward(*args: Any) -> torch.Tensor:
            left.append(sum(not memory.expired() for memory in whole))
            return loss_fn(*args)

        monkeypatch.setattr(example, "gather", noted)
        monkeypatch.setattr(example, "cross_entropy", after_forward)
        example.main(1)
    assert left == [5], "the two embeddings, the last norm's two and the head lie outside of the layers"
    assert len(whole) > 2 * 3 * 12, "the backward pass gathers anew what the three layers gave back"


@needs("ray")
@pytest.mark.full
@pytest.mark.timeout(400)
def test_ray_train(tmp_path: Path) -> None:
    """The group that Ray makes is adopted, and the loss is that of one process."""
    told = script(str(EXAMPLES / "ray_train.py"), "--steps", "5", cwd=tmp_path)
    found = float(re.findall(r"^loss ([\d.]+)$", told, re.MULTILINE)[-1])
    assert found == pytest.approx(main_of("plain.clip", 5)[-1], rel=1e-3)


def test_clusters_files_start_what_there_is() -> None:
    batch = (EXAMPLES / "slurm.sbatch").read_text(encoding="utf-8")
    subprocess.run(["bash", "-n"], input=batch, text=True, check=True)
    assert "\nsrun --kill-on-bad-exit=0 python " in batch, "75 is a bad exit to srun, and others are still leaving"
    job = list(yaml.safe_load_all((EXAMPLES / "k8s.yaml").read_text(encoding="utf-8")))[1]
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    started = re.search(r"python (examples/\S+) (.*?) \|\|", batch)
    for path, options in ((started[1], started[2]), (command[6], " ".join(command[7:]))):
        source = (ROOT / path).read_text(encoding="utf-8")
        for option in re.findall(r"--[a-z]+", options):
            assert f'add_argument("{option}"' in source


def test_the_gallery_shows_every_example() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    files = {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {"README.md", "gallery.py"}
    assert {f"{name}.py" for name in TWINS} | {"slurm.sbatch", "k8s.yaml", "ray_train.py", "torchft_hook.py"} == files
    assert {path.stem for path in (EXAMPLES / "plain").glob("*.py")} == set(TWINS) - set(SHARED)
    for file in files:
        assert f"]({file})" in page
    for name in TWINS:
        assert f"![](pictures/{name}.svg)" in page
        assert (EXAMPLES / "pictures" / f"{name}.svg").exists()


# Loops moved from DDP: how many lines are written for it, and that both print the same losses.
FROM_DDP = EXAMPLES / "from_ddp"


def code(name: str) -> list[str]:
    """The lines of a twin below its docstring, without empty ones."""
    return [line for line in (FROM_DDP / f"{name}.py").read_text(encoding="utf-8").splitlines()[1:] if line.strip()]


@pytest.mark.parametrize(("name", "most"), [("mlp", 8), ("gpt2", 16), ("gan", 14)])
def test_few_lines_are_new(name: str, most: int) -> None:
    told = list(difflib.unified_diff(code(f"{name}_ddp"), code(f"{name}_ltx"), n=0))[2:]
    new, gone = (sum(line.startswith(sign) for line in told) for sign in "+-")
    assert new <= most, told
    assert new < gone


@pytest.mark.full
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["mlp", "gan", pytest.param("gpt2", marks=needs("transformers"))])
def test_they_print_the_same(name: str, tmp_path: Path) -> None:
    """The second time they go on from what the first has saved, where they save."""
    launched = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    loops = [(str(FROM_DDP / f"{name}_{kind}.py"), str(tmp_path / kind)) for kind in ("ddp", "ltx")]
    for _ in range(2):
        by_ddp, by_ltx = (printed(*launched, *loop) for loop in loops)
        assert by_ddp == by_ltx
        assert by_ddp.startswith("epoch ")
