"""What a call takes along to the workers, and what they import."""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import cloudpickle
import pytest
import torch

from ltx import Pool
from ltx.runtime.messages import LARGE_BYTES, pack_call


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
        "load = pickle.Unpickler(sys.stdin.buffer).load\n"
        "_, fn, (args, kwargs), _ = load(), load(), load(), load()\n"
        "print(fn(*args, **kwargs), *sorted(m for m in sys.modules if m.startswith(('here_', 'there_'))))"
    )
    path = pickle.dumps(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", program, str(len(path))], input=path + frame, capture_output=True, timeout=100
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


@pytest.mark.full
def test_other_modules_are_imported_if_they_can_be(modules: Callable[[str, str], ModuleType]) -> None:
    modules("here_other", "def g(x): return 10 * x\n")
    modules("there_other", "def h(x): return x + 1\n")
    own = modules("there_own", "from here_other import g\nfrom there_other import h\ndef f(x): return g(h(x))\n")
    assert _call_elsewhere(pack_call(1, own.f, (1,), {}).pickled) == "20 here_other"


@pytest.mark.full
def test_cached_functions_begin_with_an_empty_cache(modules: Callable[[str, str], ModuleType]) -> None:
    own = modules(
        "there_own",
        "import functools\ncalls = []\n@functools.lru_cache(maxsize=7)\ndef g(x):\n    calls.append(x)\n    return x\n"
        "def f(x): return g(x) + g(x), len(calls), g.cache_info().maxsize\n",
    )
    own.g(3)
    vars(own)["calls"].clear()
    assert _call_elsewhere(pack_call(1, own.f, (3,), {}).pickled) == "(6, 1, 7)"


@pytest.mark.full
@pytest.mark.slow_compile
def test_what_goes_by_value_can_be_compiled(
    modules: Callable[[str, str], ModuleType], ranks: Callable[[int], Pool]
) -> None:
    """Dynamo looks for the globals of a function that it inlines in its module, which workers don't have."""
    own = modules(
        "there_own",
        "import functools, torch, ltx\nSCALE = 2.0\n"
        "def loss(x):\n    @functools.wraps(max)\n    def square(x): return SCALE * x.square()\n"
        "    return ltx.psum(square(x).sum())\n"
        "def file(): return __file__\n"
        "def f(x): return torch.compile(torch.func.grad(loss), fullgraph=True, backend='eager')(x)\n",
    )
    for scale in (2.0, 3.0):
        vars(own)["SCALE"] = scale
        assert ranks(2).run(own.f, torch.ones(1)).replicated() == 4 * scale
    assert ranks(2).run(own.file).replicated() == own.__file__


def test_what_a_function_carries_along_is_warned_about() -> None:
    big, small = torch.zeros(LARGE_BYTES), torch.zeros(2)
    with pytest.warns(UserWarning, match=r"<lambda> carries 67 MB along to the workers at each call: 'big' with 67 MB"):
        pack_call(1, lambda: big + small, (), {}).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pack_call(1, lambda x: x + small, (big,), {}).close()


def test_nothing_stays_registered_with_cloudpickle(modules: Callable[[str, str], ModuleType]) -> None:
    own = modules("there_own", "def f(x): return x\n")
    users = modules("there_users", "def f(x): return x\n")
    cloudpickle.register_pickle_by_value(users)
    registered = set(cloudpickle.list_registry_pickle_by_value())
    try:
        pack_call(1, own.f, (users.f,), {})
        assert "there_users" in registered
        assert cloudpickle.list_registry_pickle_by_value() == registered
    finally:
        cloudpickle.unregister_pickle_by_value(users)


def test_workers_do_not_import_test_modules(ranks: Callable[[int], Pool]) -> None:
    name = __name__
    assert ranks(2).run(lambda: name in sys.modules).replicated() is False
