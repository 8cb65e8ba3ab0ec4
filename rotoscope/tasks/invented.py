"""Names of places that do not exist, so that nothing about them is in any weights."""

from __future__ import annotations

import random
from itertools import product

_STARTS = "Zen Kal Ost Pel Varn Bre Tas Quil Har Dov Ren Ska Ulm Yor Mor Fen Gral Lod Nev Rov Sel Trav Vel Wex Bal Hol"
_ENDS = "dria muth eria onia lund mora quil hara skoi via dale gard esta orum enia atha ovar istan umbra ellia"


def names(rng: random.Random) -> list[str]:
    """All 520 of them, shuffled."""
    every = [a + b for a, b in product(_STARTS.split(), _ENDS.split())]
    rng.shuffle(every)
    return every
