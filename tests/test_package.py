"""What is published: an sdist and a wheel, which work in an environment that hasn't seen the checkout."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import ltx

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(sdist, wheel), the wheel built of the sdist alone."""
    pytest.importorskip("hatchling", reason="needs pip install 'ltx[test]'")
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run([*build, "-t", "sdist"], cwd=ROOT, check=True, capture_output=True)
    [sdist] = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    subprocess.run(
        [*build, "-t", "wheel"], cwd=folder / sdist.name.removesuffix(".tar.gz"), check=True, capture_output=True
    )
    [wheel] = folder.glob("*.whl")
    return sdist, wheel


def test_the_wheel_has_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    listed = subprocess.run(["git", "ls-files", "ltx"], cwd=ROOT, check=True, capture_output=True, text=True)
    names = {name for name in zipfile.ZipFile(built[1]).namelist() if ".dist-info/" not in name}
    assert names == set(listed.stdout.split())


def test_its_page_elsewhere(built: tuple[Path, Path]) -> None:
    """The version is the package's, and no link in the README leads to a file that isn't there."""
    wheel = zipfile.ZipFile(built[1])
    [metadata] = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    page = email.message_from_string(wheel.read(metadata).decode())
    assert page["Version"] == ltx.__version__
    text = str(page.get_payload())
    assert "the tutorial" in text
    assert [target for target in re.findall(r"\]\(([^)]*)\)", text) if not re.match("https://|#", target)] == []


def test_it_runs_where_no_checkout_is(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Dependencies are those of this environment: what differs is where ltx comes from."""
    env = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(env)], check=True)
    [site] = env.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    zipfile.ZipFile(built[1]).extractall(site)
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LTX_KEY")}
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, ltx\nwith ltx.init() as world:\n    total = ltx.psum(torch.tensor(world.rank + 1.0))\n"
        '    print(f"{ltx.__file__} {ltx.__version__} {total.item()}")\n'
    )
    command = [str(env / "bin" / "python"), "-m", "ltx", "run", "-n", "2", str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"{site}/ltx/__init__.py {ltx.__version__} 3.0") == 2, done.stdout + done.stderr


def test_the_oldest_torch_is_tried_beside_what_it_takes() -> None:
    """Else pip would rather have another torch, and say nothing."""
    workflows = ROOT / ".github/workflows"
    steps = (workflows / "oldest.yml").read_text()
    (lowest,) = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert re.findall(r'torch: {type: string, default: "([\d.]+)"}', steps) == [f"{lowest}.0"]
    (command,) = re.findall(r"sed .* constraints.txt(?= >)", steps.replace("${{ inputs.torch }}", f"{lowest}.0"))
    given = subprocess.run(command, shell=True, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    assert f"torch=={lowest}.0" in given
    assert not [line for line in given if line.startswith("setuptools==")]  # torch 2.11 takes those below 82
    for name in ("test.yml", "nightly.yml"):
        assert "uses: ./.github/workflows/oldest.yml" in (workflows / name).read_text()


def test_the_newest_torch_that_pages_name_is_tried_every_night() -> None:
    nightly = (ROOT / ".github/workflows/nightly.yml").read_text()
    ((tested, newest),) = re.findall(r'matrix: {torch: \["(\d+\.\d+)\.\d+", "(\d+\.\d+)\.\d+"\]}', nightly)
    for page in ("README.md", "docs/start/install.md"):
        text = " ".join((ROOT / page).read_text().split())
        assert f"torch 2.11 to {tested}" in text, page
        assert f"tries the others, and {newest}" in text, page
    assert f"(2.11 to {newest})" in (ROOT / "ltx/core/base/private.py").read_text()
