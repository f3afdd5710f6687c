"""Steps whose ranks talk after the optimizer: what they may do to the state that they began with.

Until all has landed, a peer that fails must find everybody's old state as it was, so the optimizer doesn't run in place
there. What is left then, such as to add differences that have arrived, can't fail any more: it may be done in the old
state's memory where the step gives it away (:attr:`ltx.strategies.base.Update.gives`), as
:attr:`ltx.strategies.base.Updated.finish`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ltx import tree
from ltx.sync.reduction import is_plain
from ltx.typing import Tree


def may_be_written_to(tensors: Iterable[torch.Tensor], others: Tree) -> bool:
    """Whether `tensors` are eager ones on the CPU, contiguous, and share no memory's start with each other or `others`.

    An optimizer of one's own may well keep the parameters that it was given in its state.
    """
    mine = [x for x in tensors if x.numel()]
    if not all(is_plain(x) and x.is_contiguous() for x in mine):
        return False
    places = {x.data_ptr() for x in mine}
    return len(places) == len(mine) and not any(x.data_ptr() in places for x in tree.flatten(others)[0] if x.numel())
