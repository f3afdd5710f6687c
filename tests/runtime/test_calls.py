"""What a call takes along to the workers, and what they import."""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import cloudpickle
import pytest

from ltx.runtime.calls import pickle_call
from ltx.runtime.pool import Pool


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], ModuleType]]:
    """Make modules from source; those whose names begin with "here" are where Python looks for them."""
    (tmp_path / "path").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "path"))
    made = []

    def make(name: str, source: str) -> ModuleType:
        file = tmp_path / ("path" if name.startswith("here") else "elsewhere") / f"{name}.py"
        file.write_text(source)
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        made.append(name)
        spec.loader.exec_module(module)
        return module

    yield make
    for name in made:
        del sys.modules[name]


def _call_elsewhere(frame: bytes) -> str:
    """What the call gives in a process with this one's path, and which modules it has imported for that."""
    program = (
        "import sys, pickle\n"
        "sys.path[:] = pickle.loads(sys.stdin.buffer.read(int(sys.argv[1])))\n"
        "fn, args, kwargs = pickle.loads(sys.stdin.buffer.read())\n"
        "print(fn(*args, **kwargs), *sorted(m for m in sys.modules if m.startswith(('here', 'there'))))"
    )
    path = pickle.dumps(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", program, str(len(path))], input=path + frame, capture_output=True, timeout=30
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


@pytest.mark.parametrize("own", ["here_own", "there_own"])
def test_the_functions_own_module_goes_by_value(own: str, modules: Callable[[str, str], ModuleType]) -> None:
    module = modules(own, "LIMIT = 3\ndef helper(x): return min(x, LIMIT)\ndef f(x): return helper(x) + 1\n")
    assert _call_elsewhere(pickle_call(module.f, (5,), {})) == "4"
    vars(module)["LIMIT"] = 1  # as an editor or a notebook would
    assert _call_elsewhere(pickle_call(module.f, (5,), {})) == "2"


def test_other_modules_are_imported_if_they_can_be(modules: Callable[[str, str], ModuleType]) -> None:
    modules("here_other", "def g(x): return 10 * x\n")
    modules("there_other", "def h(x): return x + 1\n")
    own = modules("there_own", "from here_other import g\nfrom there_other import h\ndef f(x): return g(h(x))\n")
    assert _call_elsewhere(pickle_call(own.f, (1,), {})) == "20 here_other"


def test_nothing_stays_registered_with_cloudpickle(modules: Callable[[str, str], ModuleType]) -> None:
    own = modules("there_own", "def f(x): return x\n")
    users = modules("there_users", "def f(x): return x\n")
    cloudpickle.register_pickle_by_value(users)
    registered = set(cloudpickle.list_registry_pickle_by_value())
    try:
        pickle_call(own.f, (users.f,), {})
        assert "there_users" in registered
        assert cloudpickle.list_registry_pickle_by_value() == registered
    finally:
        cloudpickle.unregister_pickle_by_value(users)


def test_workers_do_not_import_test_modules(ranks: Callable[[int], Pool]) -> None:
    name = __name__
    assert ranks(2).run(lambda: name in sys.modules).replicated() is False
