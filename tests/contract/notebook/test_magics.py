"""``%%ltx`` in a real kernel: what cells show, keep and give back, how they fail, and how they are interrupted."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import pytest

from tests.needs import found, needs

pytestmark = needs("jupyter_client", "ipykernel")
jupyter_client = found("jupyter_client")

ROOT = Path(__file__).parents[3]
LIMIT_S = 50.0


class Kernel:
    """A kernel with workers, and what its cells show: [("stdout" | "display" | "error" | ..., text), ...]."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.screen: dict[str, str] = {}  # what displays of the last cell show in the end, by id
        self._manager, self._client = jupyter_client.manager.start_new_kernel(
            kernel_name="python3", env=os.environ | {"PYTHONPATH": path}
        )

    def run(self, cell: str, interrupt_at: str = "") -> list[tuple[str, str]]:
        """Execute `cell`; interrupt it once its output contains `interrupt_at`."""
        asked = self._client.execute(cell)
        self.screen.clear()
        shown: list[tuple[str, str]] = []
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                message = self._client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
            except Empty:
                raise AssertionError(f"nothing more came from {cell!r} after {shown}") from None
            if message["parent_header"].get("msg_id") != asked:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return _joined(shown)
            shown.extend(_seen(kind, content))
            if "display_id" in (transient := content.get("transient", {})):
                self.screen[transient["display_id"]] = shown[-1][1]
            if interrupt_at and any(interrupt_at in text for _, text in shown):
                interrupt_at = ""
                self._manager.interrupt_kernel()

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


def _seen(kind: str, content: dict[str, Any]) -> list[tuple[str, str]]:
    if kind == "stream":
        return [(content["name"], content["text"])]
    if kind == "error":
        return [("error", "\n".join(content["traceback"]))]
    if kind in ("display_data", "execute_result", "update_display_data"):
        return [("image" if "image/png" in content["data"] else "display", content["data"]["text/plain"])]
    return []


def _joined(shown: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Pieces of one stream that follow each other, as one."""
    joined: list[tuple[str, str]] = []
    for kind, text in shown:
        if joined and joined[-1][0] == kind in ("stdout", "stderr"):
            text = joined.pop()[1] + text
        joined.append((kind, text))
    return joined


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    started = Kernel()
    assert started.run("%load_ext ltx\nimport torch, ltx\nhere = torch.ones(2)") == []
    assert started.run("%%ltx -n 2\nimport os\nrank = ltx.world().rank") == []
    yield started
    started.close()


def _pids(kernel: Kernel) -> str:
    return str(kernel.run("%ltx"))


@pytest.mark.full
def test_a_value_that_is_the_same_everywhere_is_shown_once(kernel: Kernel) -> None:
    assert kernel.run("%%ltx\nltx.psum(torch.ones(2))") == [("display", "tensor([2., 2.])")]


def test_values_that_differ_are_shown_with_their_ranks(kernel: Kernel) -> None:
    assert kernel.run("%%ltx\nrank + 1") == [("display", "[rank 0] 1"), ("display", "[rank 1] 2")]
    assert kernel.run("%%ltx\nrank if rank else None") == [("display", "[rank 1] 1")]


def test_what_is_printed_is_shown_line_by_line(kernel: Kernel) -> None:
    shown = kernel.run("%%ltx\nprint('one\\ntwo')\nos.system('echo from a child') and None\nprint('begun', end='')")
    printed = "".join(text for kind, text in shown if kind == "stdout")
    lines = sorted(re.sub(r"\[all\] (.*)", r"[rank 0] \1\n[rank 1] \1", printed).splitlines())
    assert lines == [f"[rank {r}] {w}" for r in (0, 1) for w in ("begun", "from a child", "one", "two")]


def test_cells_keep_what_they_define_and_one_rank_can_be_asked(kernel: Kernel) -> None:
    kernel.run("%%ltx\nkept = [rank]\ndef add(x):\n    return kept.append(x) or kept")
    assert kernel.run("%%ltx --rank 1\nadd(5)") == [("display", "[rank 1] [1, 5]")]
    assert kernel.run("%%ltx\nkept") == [("display", "[rank 0] [0]"), ("display", "[rank 1] [1, 5]")]


@pytest.mark.parametrize("again", ["%reload_ext ltx", "%load_ext ltx.notebook"])
def test_loading_the_extension_again_keeps_the_workers_and_what_they_hold(kernel: Kernel, again: str) -> None:
    before = _pids(kernel)
    kernel.run("%%ltx\nheld = [rank]")
    assert kernel.run(again) == []
    assert _pids(kernel) == before
    assert kernel.run("%%ltx\nheld") == [("display", "[rank 0] [0]"), ("display", "[rank 1] [1]")]


def test_values_go_in_and_out(kernel: Kernel) -> None:
    assert kernel.run("%%ltx --in here --out there\nhere * rank") == []
    assert kernel.run("there.stack()") == [("display", "tensor([[0., 0.],\n        [1., 1.]])")]
    assert "--in: the notebook has no 'nowhere'" in kernel.run("%%ltx --in nowhere\n1")[0][1]
    kernel.run("%%ltx --out nothing\nNone")
    assert kernel.run("nothing") == [], "no table of None"


@pytest.mark.full
def test_what_one_rank_displays(kernel: Kernel) -> None:
    shown = kernel.run("%%ltx\nprint('before')\nif rank:\n    display({'at': rank})\nprint('after')")
    lines = [line.replace("[all]", "[rank 1]") for _, text in shown for line in text.splitlines()]
    mine = [line for line in lines if line.startswith("[rank 1]")]
    assert mine == ["[rank 1] before", "[rank 1] {'at': 1}", "[rank 1] after"]
    shown = kernel.run(
        "%%ltx\nimport matplotlib\nmatplotlib.use('agg')\nimport matplotlib.pyplot as plt\n"
        "figure, _ = plt.subplots()\nif rank == 0:\n    display(figure)"
    )
    assert [kind for kind, _ in shown if kind != "stderr"] == ["display", "image"]


def test_a_failing_cell_shows_its_own_lines_and_the_workers_stay(kernel: Kernel) -> None:
    before = _pids(kernel)
    [(kind, text)] = kernel.run(
        "%%ltx\n\ndef f():\n    raise ValueError('no such luck')\nif rank == 1:\n    f()\nltx.barrier()"
    )
    assert kind == "error"
    assert text.startswith("CallFailedError: rank 1 of 2 raised ValueError: no such luck\n")
    assert re.search(r'File "Cell In\[\d+\]", line 6, in <module>\n    f\(\)\n', text), "as on the screen"
    assert "line 4, in f\n    raise ValueError('no such luck')\n" in text
    assert "ltx/" not in text, "the library's own frames are no news"
    assert "rank 0 raised DeadlockDetectedError: rank 0: rank 1 has left axis 'data'" in text
    assert kernel.run("%%ltx\nltx.psum(torch.ones(1) * (rank + 1))") == [("display", "tensor([3.])")]
    assert _pids(kernel) == before


@pytest.mark.full
def test_functions_of_cells_show_their_lines_under_the_cells_number(kernel: Kernel) -> None:
    [(_, text)] = kernel.run(
        "def f(x):\n    return 1 / x\n\nwith ltx.Pool(1) as pool:\n    pool.run(lambda: f(0))  # zero\n"
    )
    assert re.search(r'File "<cell In\[\d+\]>", line 5, in <lambda>\n    pool\.run\(lambda: f\(0\)\)  # zero\n', text)
    assert re.search(r'File "<cell In\[\d+\]>", line 2, in f\n    return 1 / x\n +[~^]+\n', text)


#: A cell of the notebook, a cell of the workers, and what rank 1's value is then, or what an error says.
BROUGHT = [
    ("scale, box = 3, []\ndef scaled(x):\n    return scale * x", "import ltx\nscaled(rank)", "3"),
    ("scale = 5", "class Of:\n    scale = 1\n    def it(self):\n        return scaled(rank) + scale\nOf().it()", "10"),
    ("", "box.append(rank)\nlen(box)", "1"),
    ("", "len(box) + len([box.append(n) for n in range(2)])", "3"),  # changed on the worker: kept
    ("box.append('of the notebook')", "box", "'box' has changed in the notebook, and on the workers since it came"),
    ("names = [0]", "names", "[0]"),
    ("names.append('of the notebook')", "names", "[0, 'of the notebook']"),  # changed in the notebook: brought again
    ("", "scale = rank + 10\nscale", "11"),
    ("scale = 7", "scale, scaled(1)", "(11, 11)"),  # a cell has assigned it: the workers' own
    (
        "import torch\nmodel = torch.nn.Linear(1, 1)\ndef value():\n    return model.weight.item()",
        "with torch.no_grad():\n    _ = model.weight.fill_(3.0)\nmodel.weight.item()",
        "3.0",
    ),
    ("", "value()", "3.0"),  # a function that comes later has the workers' model, and not another one
    ("_ = model.eval()", "model.training", "'model' has changed in the notebook, and on the workers since it came"),
    ("", "model = model\nmodel.weight.item()", "3.0"),
    ("one, two = [1], [2]", "one.append(3)\n(one, two)", "([1, 3], [2])"),
    ("one.append(0); two.append(0)", "two, one", "'one' has changed in the notebook, and on the workers since it came"),
    ("", "two = two\ntwo", "[2]"),  # of a cell that is refused nothing comes
    (
        "class Rate:\n    value = 0.1\nrate, other_rate = Rate(), Rate()\nrate.value = other_rate.value = 0.1",
        "rate.value, other_rate.value",
        "(0.1, 0.1)",
    ),
    ("rate.value = other_rate.value = 0.2", "rate.value", "0.2"),  # and the class comes once more
    ("", "other_rate.value", "0.2"),
    ("late = 1", "late += 1", "'late' is defined in the notebook, not on the workers. A cell brings the names that it"),
    (
        "import threading\nlock = threading.Lock()",
        "lock",
        "%%ltx: the cell uses 'lock' of the notebook: a lock can't be",
    ),
    ("def locked():\n    return lock", "locked()", "%%ltx: the cell uses 'lock' of the notebook: a lock can't be"),
    ("", "lock = rank\nlock", "1"),
    ("", "lock", "1"),
]


def test_cells_bring_the_names_that_they_use(kernel: Kernel) -> None:
    for plain, cell, told in BROUGHT:
        kernel.run(plain)
        [(kind, text)] = kernel.run(f"%%ltx --rank 1\n{cell}")
        assert text == f"[rank 1] {told}" if kind == "display" else told in text, (cell, text)
    assert kernel.run("%%ltx\nscale") == [("display", "[rank 0] 7"), ("display", "[rank 1] 11")], "each what it has"


def test_values_of_two_cells_that_share_a_module_are_refused(kernel: Kernel) -> None:
    """A copy would be trained in the model's place. Together, or without anything in common, they come."""
    made = "layer = torch.nn.Linear(1, 1)\nits_sgd = torch.optim.SGD(layer.parameters(), lr=0.1)"
    assert kernel.run(f"{made}\nrows = torch.ones(2)\nrow = rows[:1]\nthrough = lambda: layer(row)") == []
    assert kernel.run("%%ltx\nassert layer.training, rows") == []
    [(_, text)] = kernel.run("%%ltx\nits_sgd.step()")
    assert "'its_sgd' and 'layer' share a Parameter, and 'layer' came to the workers in an earlier cell" in text
    assert "`%%ltx --in layer,its_sgd`" in text
    assert kernel.run("%%ltx\nassert through().shape == (1,)") == []
    same = "assert its_sgd.param_groups[0]['params'][0] is layer.weight"
    assert kernel.run(f"%%ltx --in layer,its_sgd\n{same}") == []
    assert kernel.run(f"{made}\nlayers = [layer]") == []
    assert kernel.run("%%ltx\nassert layers[0].training") == [], "of a new module, which no cell has brought"


def test_cells_that_are_not_python(kernel: Kernel) -> None:
    [(_, text)] = kernel.run("%%ltx\n1 +")
    assert "line 2\n    1 +\n" in text
    assert "invalid syntax" in text
    assert "interactiveshell" not in text


def test_a_cell_is_called_by_the_number_beside_it(kernel: Kernel) -> None:
    kernel.run("'a value'")
    [(_, number)] = kernel.run("max(Out)")  # of the cell before
    [(_, text)] = kernel.run("%%ltx --rank 0\n\n1 / 0")
    assert f'File "Cell In[{int(number) + 2}]", line 3, in <module>' in text


def test_bad_arguments_end_no_workers(kernel: Kernel) -> None:
    before = _pids(kernel)
    for arguments, said in {
        "--nowhere": "%%ltx: unrecognized arguments: --nowhere",
        "-n 0": "expected a number of workers of at least 1, got '0'",
        "-n=-1": "expected a number of workers of at least 1, got '-1'",
        "-n 3 --rank 3": "--rank 3: there are the ranks 0 to 2",
        "-n 3 --rank 1 --out x": "--out takes a value of every rank. Leave --rank out and take x.rank(1)",
        "-n 3 --out 3x": "expected a name to assign to, got '3x'",
        "-n 3 --timeout 0": "expected seconds above 0, got '0'",
        "-n 3 --in lock": "--in lock: a lock can't be sent to the workers: ",
    }.items():
        kernel.run("import threading\nlock = threading.Lock()")
        [(kind, text)] = kernel.run(f"%%ltx {arguments}\n1")
        assert said in text, (arguments, kind, text)
    [(kind, text)] = kernel.run("%%ltx --help\n1 / 0")
    assert kind == "stdout"
    assert "--out OUT" in text
    assert _pids(kernel) == before


def test_commands_take_the_names_of_the_worker(kernel: Kernel) -> None:
    """As IPython fills them in; what it can't fill in is the shell's."""
    kernel.run("rank = 'of the notebook'")
    kernel.run("%%ltx\nword = f'of rank {rank}'")
    [(kind, text)] = kernel.run("%%ltx\n!echo {rank + 10} $word")
    assert (kind, sorted(text.splitlines())) == ("stdout", ["[rank 0] 10 of rank 0", "[rank 1] 11 of rank 1"])
    assert kernel.run("%%ltx --rank 1\n!echo {nowhere}") == [("stdout", "[rank 1] {nowhere}\n")]
    cell = "%%ltx --rank 1\nlines = !echo {rank + 10} $word\nlines"
    assert kernel.run(cell) == [("display", "[rank 1] ['11 of rank 1']")]


@needs("tqdm")
@pytest.mark.parametrize("module", ["auto", "notebook"])
def test_tqdm_of_notebooks(kernel: Kernel, module: str) -> None:
    """Workers have no kernel to put a widget into: the bar is text."""
    shown = kernel.run(f"%%ltx --rank 1\nfrom tqdm.{module} import tqdm\nfor _ in tqdm(range(3)): pass")
    assert "3/3" in shown[-1][1], shown
    assert all(text.startswith("[rank 1] ") for _, text in shown), shown


def test_who_asks_every_module_for_names_gets_an_answer(kernel: Kernel) -> None:
    """As pickle and inspect do."""
    cell = "import sys\n'tqdm.notebook' in sys.modules, hasattr(sys.modules['tqdm.notebook'], 'no_such_name')"
    assert kernel.run(f"%%ltx --rank 1\n{cell}") == [("display", "[rank 1] (True, False)")]


def test_what_ipython_knows(kernel: Kernel) -> None:
    """await, !command, %time, display, plt.show(); other magics say where they work."""
    cell = "%%ltx --rank 1\nfrom asyncio import *\nx = await sleep(0, 4)\ny = ensure_future(sleep(0, 2))\nx + await y"
    assert kernel.run(cell) == [("display", "[rank 1] 6")]
    assert kernel.run("%%ltx --rank 0\n!echo one\nlines = !echo two; echo three\nlines") == [
        ("stdout", "[rank 0] one\n"),
        ("display", "[rank 0] ['two', 'three']"),
    ]
    [(_, text)] = kernel.run("%%ltx --rank 0\n%time timed = 3\ntimed and None")
    assert re.fullmatch(r"\[rank 0\] CPU times: .+\n\[rank 0\] Wall time: .+\n", text)
    [(_, text)] = kernel.run("%%ltx --rank 0\n%pip list")
    assert "%pip and its like would install on every rank at once" in text
    assert kernel.run("%%ltx --rank 1\ndisplay({'at': rank})") == [("display", "[rank 1] {'at': 1}")]
    assert kernel.run("%%ltx\nrank;") == []


def pictures(shown: list[tuple[str, str]]) -> list[str]:
    """The kinds of what came, without the ranks' labels."""
    return [kind for kind, text in shown if not re.fullmatch(r"\[rank \d\]", text) and kind != "stderr"]


def test_figures_left_open_are_drawn_where_the_cell_or_call_ends(kernel: Kernel) -> None:
    plot = "%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.close('all')\nplt.plot([1, 2]);"
    assert pictures(kernel.run(f"%%ltx\n{plot}")) == ["image", "image"]
    assert kernel.run("%%ltx\nplt.get_fignums()") == [("display", "[]")]
    call = (
        "def draw():\n    import matplotlib.pyplot as plt\n    plt.plot([1, 2])\n    plt.subplots()\n    return 3\n"
        "with ltx.Pool(1) as pool:\n    print(list(pool.run(draw)))\n    print(list(pool.run(lambda: 4)))"
    )
    shown = kernel.run(call)
    assert pictures(shown) == ["image", "image", "stdout"]
    assert shown[-1] == ("stdout", "[3]\n[4]\n")
    shown = kernel.run("%%ltx --rank 1\nplt.subplots()\n1 / 0")
    assert pictures(shown) == ["image", "error"]


def test_displays_are_updated_and_a_rank_clears_its_own(kernel: Kernel) -> None:
    shown = kernel.run(
        "%%ltx\nfrom IPython.display import clear_output\nhandle = display(f'first of {rank}', display_id=True)\n"
        "ltx.barrier()\nhandle.update('second')\nif rank == 0:\n"
        "    clear_output(wait=True)\n    display('in its place')\n    print('with a line')"
    )
    assert sorted(text for _, text in shown if "first" in text) == ["[rank 0] 'first of 0'", "[rank 1] 'first of 1'"]
    expected = ["[rank 0] 'in its place'", "[rank 0] with a line", "[rank 1] 'second'"]
    assert sorted(kernel.screen.values()) == expected, "each in the place of what it had shown"
    kernel.run("%%ltx\nhandle.update('in a later cell')")
    assert sorted(kernel.screen.values()) == [f"[rank {rank}] 'in a later cell'" for rank in (0, 1)]
    kernel.run("%%ltx --rank 1\nfor i in range(3):\n    clear_output(wait=True)\n    print(i)\n    display(i)")
    assert list(kernel.screen.values()) == ["[rank 1] 2", "[rank 1] 2"]


@needs("tqdm")
def test_bars_in_bars_are_one_display_each(kernel: Kernel) -> None:
    """As a widget each in a plain cell; and an inner one goes when it is done."""
    shown = kernel.run(
        "%%ltx --rank 0\nfrom tqdm.auto import tqdm, trange\nfor epoch in tqdm(range(2), desc='epochs'):\n"
        "    for step in (steps := trange(3, leave=False)):\n        steps.set_postfix(loss=0.5)"
    )
    assert {kind for kind, _ in shown} == {"display"}
    assert list(kernel.screen.values()) == [shown[-1][1], "", ""]
    assert re.match(r"\[rank 0\] epochs: 100%\|.+\| 2/2 ", shown[-1][1])
    assert any("loss=0.5" in text for _, text in shown)


def test_a_line_that_is_written_over_moves(kernel: Kernel) -> None:
    shown = kernel.run(
        "%%ltx --rank 0\nimport sys, time\nfor i in range(4):\n    print(f'\\r{i} of 3', end='', file=sys.stderr)\n"
        "    time.sleep(0.06)\nprint(file=sys.stderr)\nprint('after')"
    )
    assert shown[-1] == ("stdout", "[rank 0] after\n")
    lines = [text for kind, text in shown if kind == "display"]
    assert lines[0] == "[rank 0] 0 of 3"
    assert lines[-1] == "[rank 0] 3 of 3"
    assert len(lines) > 2


@pytest.mark.full
def test_many_lines_come_in_batches(kernel: Kernel) -> None:
    shown = kernel.run("%%ltx --rank 0\nfor i in range(5000): print(i)")
    assert shown == [("stdout", "".join(f"[rank 0] {i}\n" for i in range(5000)))]


WAITING = "if rank == 1:\n    import time\n    time.sleep(100)\nltx.barrier()"


@pytest.mark.full
@pytest.mark.parametrize("waiting", [WAITING, "while True: pass"])
def test_an_interrupt_reaches_every_rank_and_the_workers_stay(kernel: Kernel, waiting: str) -> None:
    before = _pids(kernel)
    shown = kernel.run(f"%%ltx\nprint('waiting', flush=True)\n{waiting}", interrupt_at="waiting")
    text = shown[-1][1]
    assert re.match(r"CallInterruptedError: Cell In\[\d+\] was interrupted: rank 0 ", text)
    assert text.endswith("The workers keep their state, and the next run begins with a new world.")
    shown = kernel.run("%%ltx\nltx.psum(torch.ones(1) * (rank + 1))")
    assert shown[-1] == ("display", "tensor([3.])")
    assert _pids(kernel) == before


@pytest.mark.full
def test_other_numbers_of_workers_and_the_end(kernel: Kernel) -> None:
    [(_, text)] = kernel.run("%%ltx -n 1\nrank")
    assert "%%ltx -n 1: there are 2 workers, which keep what cells have made. `%%ltx -n 1 --restart` ends them" in text
    assert kernel.run("%%ltx --rank 1\nrank") == [("display", "[rank 1] 1")]
    assert kernel.run("%%ltx -n 1 --restart\nimport ltx\nltx.world().size") == [("display", "1")]
    assert kernel.run("%ltx stop") == [("stdout", "no workers; the next %%ltx cell starts some\n")]
    assert kernel.run("%%ltx -n 2\nimport ltx\nltx.world().size") == [("display", "2")]


def test_plain_cells_show_no_frames_of_the_library(kernel: Kernel) -> None:
    """Nor those of what an error came of; with LTX_TRACEBACKS=full they do."""
    cell = "def loss(w):\n    return w / {}['of nothing']\nltx.vmap(ltx.grad(loss))(torch.ones(2))"
    for full in (False, True):
        kernel.run(f"%env LTX_TRACEBACKS={'full' if full else ''}")
        [(kind, text)] = kernel.run(cell)
        assert kind == "error"
        assert "return w / {}" in re.sub(r"\x1b\[[\d;]*m", "", text)
        assert ("ltx/core" in text) == full
    kernel.run("%env LTX_TRACEBACKS=")
    [(kind, text)] = kernel.run("ltx.vmap(3)")
    assert "ltx/core" not in text
    assert "ArgumentError" in text
