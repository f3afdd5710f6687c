"""Whatever is passed to a public function: it returns, or raises an error of ltx. It never crashes and never hangs.

Errors of the caller's own pass through: of a step that can't work with what it was given, or of an object that raises.
And Python's TypeError for arguments that a signature doesn't have.
"""

from __future__ import annotations

import math
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ltx
from ltx.errors import LtxError
from tests import inside
from tests.contract.bad_input import public
from tests.inside import Levels, VmapRanks, axes_in_scope
from tests.train_on import refuses


class RefusedError(Exception):
    """Raised by objects of the caller's own."""


class Evil:
    """Compares, hashes, counts, prints and says yes or no by raising."""

    def _refuse(self, *args: Any) -> Any:
        raise RefusedError("an object of the caller's that can't do this")

    __eq__ = __hash__ = __bool__ = __len__ = __int__ = __float__ = __index__ = _refuse  # type: ignore[assignment]


class Subclass(torch.Tensor):
    """A tensor of the caller's own kind."""


def _cyclic_list() -> list[Any]:
    made: list[Any] = [torch.ones(2)]
    made.append(made)
    return made


def _cyclic_dict() -> dict[str, Any]:
    made: dict[str, Any] = {"w": torch.ones(2)}
    made["self"] = made
    return made


def _deep() -> Any:
    made: Any = torch.ones(2)
    for _ in range(5000):
        made = [made]
    return made


#: By name, made anew each time.
BAD: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "minus one": lambda: -1,
    "zero": lambda: 0,
    "seven": lambda: 7,
    "a fraction": lambda: 1.5,
    "NaN": lambda: math.nan,
    "minus infinity": lambda: -math.inf,
    "a huge number": lambda: 10**30,
    "a complex number": lambda: 1j,
    "an empty text": lambda: "",
    "a text": lambda: "nonsense",
    "a text of NUL and half a character": lambda: "\0\ud800",
    "bytes": lambda: b"bytes",
    "a path": lambda: Path("/nonexistent/of/nobody"),
    "an object": lambda: object(),
    "a class": lambda: Evil,
    "a function of anything": lambda: lambda *args, **kwargs: 0,
    "a generator": lambda: (x for x in [torch.ones(1)]),
    "an empty list": list,
    "an empty dict": dict,
    "a list of None": lambda: [None],
    "a tuple of texts": lambda: ("a", "b"),
    "a tuple of fractions": lambda: (0.5, math.nan),
    "a set": lambda: {1, 2},
    "a dict of other keys": lambda: {1: torch.ones(1), "a": torch.ones(1), None: torch.ones(1)},
    "a dict of numbers": lambda: {"data": -3, "w": "x"},
    "a list in itself": _cyclic_list,
    "a dict in itself": _cyclic_dict,
    "a deep list": _deep,
    "an evil object": lambda: Evil(),
    "a dict of an evil object": lambda: {"w": Evil()},
    "a 0-dim tensor": lambda: torch.tensor(2.0),
    "a tensor of NaN": lambda: torch.full((4, 4), math.nan),
    "an empty tensor": lambda: torch.ones(0, 3),
    "whole numbers": lambda: torch.ones(3, dtype=torch.int64),
    "a tensor of booleans": lambda: torch.ones(4, 4, dtype=torch.bool),
    "a tensor of complex numbers": lambda: torch.ones(4, 4, dtype=torch.complex64),
    "a tensor of bytes in 8 bit floats": lambda: torch.ones(4, 4).to(torch.float8_e4m3fn),
    "a meta tensor": lambda: torch.ones(4, 4, device="meta"),
    "a sparse tensor": lambda: torch.eye(4).to_sparse(),
    "a CSR tensor": lambda: torch.eye(4).to_sparse_csr(),
    "a quantized tensor": lambda: torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.qint8),
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "a tensor subclass": lambda: torch.ones(4, 4).as_subclass(Subclass),
    "a tree of odd tensors": lambda: {"w": torch.ones(3, 2, device="meta"), "b": torch.ones(2, dtype=torch.int8)},
    "a tree with None": lambda: {"w": None, "b": torch.zeros(2)},
    "a tree of one dtype too many": lambda: {"w": torch.ones(3, 2), "b": torch.ones(2, dtype=torch.float64)},
    "a module": lambda: torch.nn.Identity(),
    "a dtype": lambda: torch.int8,
    "a device": lambda: torch.device("meta"),
    "a closed axis": lambda: ltx.Axis("data", 3, VmapRanks(Levels((7,)))),
    "the name of another axis": lambda: "model",
}


_OF_THE_SIGNATURE = re.compile(r"positional argument|keyword argument|takes no arguments|missing \d")
_TENSORS = st.sampled_from([lambda: torch.ones(3), lambda: torch.ones(2, 2, dtype=torch.int64), lambda: torch.ones(())])

#: Trees of good and of bad leaves; what is drawn makes them anew.
TREES: Any = st.recursive(
    _TENSORS | st.sampled_from(list(BAD.values())),
    lambda below: (
        st.lists(below, max_size=3).map(lambda made: lambda: [make() for make in made])
        | st.tuples(below, below).map(lambda made: lambda: tuple(make() for make in made))
        | st.dictionaries(st.sampled_from(["w", "b", 3, None, ("a", 1)]), below, max_size=3).map(
            lambda made: lambda: {key: make() for key, make in made.items()}
        )
    ),
    max_leaves=6,
)
VALUES = st.sampled_from(list(BAD.values())) | TREES

some = settings(
    max_examples=12,
    deadline=timedelta(seconds=20),
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[public.Call]]]:
    """A good call, or some, of every public name. Whatever is written goes to a directory of its own."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield public.calls(folder)


def returns_or_refuses(action: Callable[[], Any]) -> None:
    """Raises where `action` does neither as it should."""
    said = "what it returned"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            action()
    except (LtxError, RefusedError) as error:
        said = str(error)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        in_step = any(frame.filename == public.__file__ and frame.name in ("loss", "grads_fn") for frame in frames)
        if not in_step and not (isinstance(error, TypeError) and _OF_THE_SIGNATURE.search(str(error))):
            raise
    finally:
        assert axes_in_scope() == (), "an axis stayed open"
    assert said, "an error says what was wrong"


def test_every_public_name_is_in_the_table(calls: dict[str, list[public.Call]]) -> None:
    assert set(calls) == public.public_names()


NAMES = sorted(public.public_names())


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_bad_arguments(calls: dict[str, list[public.Call]], name: str) -> None:
    """One or two arguments of a good call replaced by something else."""
    for call in calls[name]:
        call.run()  # is good
    places = [(call, place) for call in calls[name] for place in call.places()]
    if not places:
        return

    @some
    @given(st.sampled_from(places), VALUES, st.booleans(), st.data())
    def refused(at: tuple[public.Call, int | str], make: Callable[[], Any], two: bool, data: st.DataObject) -> None:
        call, place = at
        makers = {place: make}
        if two:
            makers[data.draw(st.sampled_from(call.places()))] = data.draw(VALUES)
        returns_or_refuses(lambda: call.run({place: made() for place, made in makers.items()}))

    refused()


def failures(calls: list[public.Call], run: Callable[[public.Call, dict[int | str, Any]], Any]) -> list[str]:
    """Of each call with each bad value at each place."""
    failed = []
    for one, place, said in ((call, place, said) for call in calls for place in call.places() for said in BAD):
        try:
            returns_or_refuses(lambda one=one, place=place, said=said: run(one, {place: BAD[said]()}))
        except Exception as error:
            failed.append(f"{place}: {said}: {type(error).__name__}: {error}")
    return failed


# The same few checks stand behind all of them.
@pytest.mark.covering(1, of=lambda name: (NAMES.index(name) // 6,))
@pytest.mark.parametrize("name", NAMES)
def test_each_bad_value_at_each_place(calls: dict[str, list[public.Call]], name: str) -> None:
    assert not failures(calls[name], lambda call, bad: call.run(bad))


@pytest.mark.full(but=1)
@pytest.mark.parametrize("name", ["ltx.psum", "ltx.all_gather", "ltx.ppermute", "ltx.sync_gradients", "ltx.train_step"])
def test_on_simulated_ranks(calls: dict[str, list[public.Call]], name: str) -> None:
    assert not failures(calls[name], lambda call, bad: ltx.vmap(lambda x: (call.run(bad), x)[1])(torch.ones(2)))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: ltx.all_gather(torch.ones(2), dim="rows"), "all_gather: dim must be int, got 'rows' of type str."),
        (lambda: ltx.all_gather(torch.ones(2), tiled="no"), "all_gather: tiled must be bool, got 'no' of type str."),
        (lambda: ltx.psum(BAD["a list in itself"]()), "a tree of type list holds itself, or is nested too deeply"),
        (lambda: ltx.vmap(3), "vmap: f must be Callable[..., Any], got 3 of type int."),
        (lambda: ltx.grad(None), "grad: step must be Step, got None of type NoneType."),
        (lambda: ltx.hooks.TopK("half"), "TopK.ratio must be float, got 'half' of type str."),
        (lambda: ltx.hooks.QSGD(block=10**12), "QSGD.block must be a whole number of at least 1, and at most 16777216"),
        (lambda: ltx.checkpoint.latest(3), "latest: path must be str or os.PathLike[str], got 3 of type int."),
    ],
)
def test_what_is_said(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(LtxError, match=re.escape(said)) as raised:
        call()
    assert isinstance(raised.value, TypeError | ValueError)


def test_a_path_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no checkpoint")
    refuses(ltx.errors.CheckpointError, "can't be read as a directory", ltx.checkpoint.latest, tmp_path / "file")


def test_a_closed_axis_is_refused() -> None:
    kept: list[ltx.Axis] = []
    ltx.vmap(lambda x: kept.append(inside.find("data")) or x)(torch.ones(2))
    with pytest.raises(ltx.errors.AxisError, match=r"axis 'data' is closed: the ltx\.vmap that opened it has ended"):
        ltx.psum(torch.ones(1), kept[0])
