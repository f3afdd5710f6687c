"""Every notebook runs from a fresh kernel without an error, and is committed as it looks after such a run.

A notebook's claims are asserts in its cells, so running it is testing it. A new file in ``notebooks/`` is picked up by
itself.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.needs import needs

pytestmark = needs("nbformat", "nbclient", "ipykernel")
FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
CELL_TIMEOUT_S = 300
# A path of the machine on which a notebook was run, as tracebacks and reprs of modules show it.
PATH_OF_A_MACHINE = re.compile(r"(?<![\w.])/(?:home|root|tmp|work|usr|opt|mnt|Users)/|site-packages|ipykernel_\d")

Runs = dict[Path, Future[None]]

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> Any:
    """The notebook at `path`, in the version of the format that nbclient executes."""
    return import_module("nbformat").read(path, as_version=4)  # which takes seconds, so not at the collection


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_are_notebooks_to_run() -> None:
    assert NOTEBOOKS


def execute(path: Path, folder: Path) -> None:
    """Run the notebook in `folder`, with a kernel of its own; raises what a cell raises."""
    client = import_module("nbclient").NotebookClient(
        read(path), timeout=CELL_TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    asyncio.run(client.async_execute())  # whose loop is closed; in a thread, execute() leaves one behind


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """The notebooks that are to be run, two at a time: much of each is waiting."""
    items = [item for item in request.session.items if getattr(item, "originalname", "") == RUNS]
    with ThreadPoolExecutor(2) as executor:
        # In empty folders: a notebook needs nothing but what is installed, and leaves nothing in the checkout.
        paths: list[Path] = [item.callspec.params["path"] for item in items]  # type: ignore[attr-defined]
        yield {path: executor.submit(execute, path, tmp_path_factory.mktemp(path.stem)) for path in paths}


@pytest.mark.timeout(900)
@pytest.mark.full
@each_notebook
def test_runs_from_a_fresh_kernel(path: Path, runs: Runs) -> None:
    runs[path].result()


RUNS = test_runs_from_a_fresh_kernel.__name__


@pytest.mark.full(but=1)
@each_notebook
def test_is_committed_with_clean_outputs(path: Path) -> None:
    notebook = read(path)
    import_module("nbformat").validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "not run from top to bottom"
    for cell in notebook.cells:
        assert not cell.metadata, f"cell {cell.id}: metadata {dict(cell.metadata)} differ with every run"
    for cell in cells:
        for output in cell.outputs:
            assert output.output_type != "error", f"cell {cell.id} raised"
            assert output.get("name") != "stderr", f"cell {cell.id} warned: {output.text}"
            shown = output.get("text", "") + "".join(
                data for kind, data in output.get("data", {}).items() if kind.startswith("text/")
            )
            found = PATH_OF_A_MACHINE.search(shown)
            assert found is None, f"cell {cell.id} shows a path of the machine it ran on: {found}"
