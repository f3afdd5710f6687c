"""``%%ltx`` in JupyterLab, in a browser: what a user sees."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.needs import found, needs

playwright = found("playwright.sync_api")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ROOT = Path(__file__).parents[3]
LIMIT_MS = 100_000

pytestmark = [
    pytest.mark.full,
    pytest.mark.browser,
    pytest.mark.timeout(240),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium"),
    needs("playwright", "jupyterlab"),
]

CELLS = {
    "load": "%load_ext ltx",
    "print": "%%ltx -n 2\nimport ltx\nrank = ltx.world().rank\nprint('hello from', rank)",
    "bar": "%%ltx\nfrom tqdm.notebook import tqdm\nfor _ in tqdm(range(3)):\n    ltx.barrier()",
    "display": "%%ltx\ndisplay({'rank': rank})",
    "figure": "%%ltx --rank 0\nimport matplotlib.pyplot as plt\nplt.plot([1, 2, 4])\nplt.show()",
    "curve": "%%ltx\nimport matplotlib.pyplot as plt\nlosses = []\nif rank:\n"
    "    figure, axes = plt.subplots(figsize=(3, 1.5))\n    curve = display(figure, display_id=True)\n"
    "for step in (bar := tqdm(range(4), desc='steps', disable=rank > 0)):\n    losses.append(1 / (1 + step))\n"
    "    bar.set_postfix(loss=losses[-1])\n    if rank:\n        axes.plot(losses, 'C0')\n"
    "        curve.update(figure)\n    ltx.barrier()\nif rank:\n    plt.close(figure)",
    "cleared": "%%ltx\nimport matplotlib.pyplot as plt\nfrom IPython.display import clear_output\n"
    "for step in range(3):\n    clear_output(wait=True)\n    print('step', step)\n    plt.figure(figsize=(3, 1.5))\n"
    "    plt.plot([step, 1])\n    plt.show()",
    "bars": "%%ltx --rank 0\nfrom tqdm.auto import tqdm\nfor epoch in tqdm(range(2), desc='epochs'):\n"
    "    for step in tqdm(range(3), desc='steps', leave=False):\n        pass",
    "values": "%%ltx\nimport torch\ntrain = ltx.train_step(ltx.data_parallel(lambda w: (w**2).sum()), "
    "ltx.optim.from_torch(torch.optim.Adam, lr=0.1))\nstate = train.init(torch.ones(64, 8))\n"
    "with ltx.profile.record() as trace:\n    state, metrics = train(state)\n"
    "display(train, state, metrics)\nltx.profile.timeline([trace])",
    "error": "%%ltx\ndef f():\n    raise ValueError('no such luck')\nf()",
    "notebook": "import time\nfactor = 3\ndef scaled(x):\n    return factor * x",
    "names": "%%ltx\nprint('scaled', scaled(rank))",
    "forever": "%%ltx\nprint('begun')\nwhile True:\n    time.sleep(0.01)",
    "after": "%%ltx\nprint('still here', rank)",
}


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """Where a JupyterLab of its own shows a notebook with `CELLS`."""
    cells = [
        {"cell_type": "code", "id": name, "metadata": {}, "execution_count": None, "outputs": [], "source": source}
        for name, source in CELLS.items()
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    (home := tmp_path / "home").mkdir()
    (home / "cells.ipynb").write_text(
        json.dumps({"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5})
    )
    quiet = tmp_path / "settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    quiet.parent.mkdir(parents=True)
    quiet.write_text('{"fetchNews": "false", "checkForUpdates": false}')
    places = {
        "JUPYTERLAB_SETTINGS_DIR": tmp_path / "settings",
        "JUPYTERLAB_WORKSPACES_DIR": tmp_path / "workspaces",
        "JUPYTER_CONFIG_DIR": tmp_path / "config",
        "JUPYTER_RUNTIME_DIR": tmp_path / "runtime",
        "IPYTHONDIR": tmp_path / "ipython",
    }
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", "--port=0", "--allow-root"]
    command += ["--IdentityProvider.token=secret", f"--ServerApp.root_dir={home}"]
    command += ["--LabApp.extension_manager=readonly"]
    environment = os.environ | {name: str(place) for name, place in places.items()} | {"PYTHONPATH": path}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        said = []
        try:
            for line in server.stderr:
                said.append(line)
                if found := re.search(r"http://127\.0\.0\.1:\d+/lab", line):
                    break
            else:
                raise AssertionError(f"JupyterLab didn't start: {''.join(said)}")
            yield f"{found[0]}/tree/cells.ipynb?token=secret"
        finally:
            server.terminate()
            server.communicate(timeout=20)


@pytest.fixture
def page() -> Iterator[Any]:
    """A page that reaches this machine alone."""
    with playwright.sync_playwright() as tools:
        browser = tools.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        )
        opened = browser.new_page(viewport={"width": 1100, "height": 4200})
        opened.set_default_timeout(LIMIT_MS)
        yield opened
        browser.close()


def test_cells_in_a_browser(url: str, page: Any, tmp_path: Path) -> None:
    page.goto(url)
    cells = page.locator(".jp-CodeCell")
    cells.nth(len(CELLS) - 1).wait_for()
    page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
    outputs = {name: cells.nth(at).locator(".jp-Cell-outputArea") for at, name in enumerate(CELLS)}
    prompts = [cells.nth(at).locator(".jp-InputPrompt") for at in range(len(CELLS))]
    for at, (name, prompt) in enumerate(zip(CELLS, prompts, strict=True)):
        for _ in range(5):  # on a busy machine JupyterLab may not listen yet, and forgets the key
            cells.nth(at).locator(".cm-content").click()
            page.keyboard.press("Shift+Enter")
            with contextlib.suppress(AssertionError):
                playwright.expect(prompt).not_to_have_text("[ ]:", timeout=15_000)
                break
        if name == "forever":
            playwright.expect(outputs[name]).to_contain_text("begun", timeout=LIMIT_MS)
            for key in ("Escape", "i", "i"):  # JupyterLab's Ctrl-C
                page.keyboard.press(key)
        playwright.expect(prompt).to_have_text(f"[{at + 1}]:", timeout=LIMIT_MS)  # it has [*]: while it runs
    playwright.expect(outputs["error"]).to_contain_text("ValueError: no such luck")
    page.screenshot(path=tmp_path / "cells.png")
    texts = {name: output.inner_text() for name, output in outputs.items()}
    assert texts["load"].strip() == ""
    assert sorted(texts["print"].strip().split("\n")) == ["[rank 0] hello from 0", "[rank 1] hello from 1"], texts[
        "print"
    ]
    for rank in (0, 1):
        assert len(re.findall(rf"\[rank {rank}\] 100%.*3/3", texts["bar"])) == 1, texts["bar"]
        assert f"[rank {rank}] {{'rank': {rank}}}" in texts["display"]
    assert outputs["figure"].locator("img").count() == 1, texts["figure"]
    assert outputs["figure"].locator("img").evaluate("image => image.naturalWidth") > 100
    for name, images in {"curve": 1, "cleared": 2, "values": 2}.items():
        assert outputs[name].locator("img").count() == images, texts[name]
    assert len(re.findall(r"steps: 100%.* 4/4 .*loss=0.25", texts["curve"])) == 1, texts["curve"]
    assert sorted(re.findall(r"step \d", texts["cleared"])) == ["step 2", "step 2"], texts["cleared"]
    assert len(re.findall(r"epochs: 100%.* 2/2 ", texts["bars"])) == 1, texts["bars"]
    assert "steps" not in texts["bars"]
    assert outputs["values"].locator("table").count() == 6, texts["values"]
    assert re.search(r'File "Cell In\[10\]", line 4, in <module>\s+f\(\)', texts["error"]), texts["error"]
    assert re.search(r"line 3, in f\s+raise ValueError\('no such luck'\)", texts["error"]), texts["error"]
    assert "ltx/" not in texts["error"]
    assert sorted(texts["names"].strip().split("\n")) == ["[rank 0] scaled 0", "[rank 1] scaled 3"], texts["names"]
    assert "CallInterruptedError: Cell In[13] was interrupted" in texts["forever"], texts["forever"]
    assert sorted(texts["after"].strip().split("\n")) == ["[rank 0] still here 0", "[rank 1] still here 1"], texts[
        "after"
    ]
