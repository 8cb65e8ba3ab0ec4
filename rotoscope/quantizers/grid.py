"""Whether weights lie on a low-bit grid already: how many values occur in each block of neighbours along the input."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd
import torch
from torch import Tensor

from rotoscope.quantizers.base import linear_layers

if TYPE_CHECKING:
    from rotoscope.model.lm import LM

BITS = 4
"""The widest grid that blocks of 32 can show: on 5 bits any 32 weights have at most 32 values."""
BLOCK = 32
ROWS = 64


def grid_bits(weight: Tensor, block: int = BLOCK) -> int | None:
    """The bits of the grid that a weight lies on; None where it lies on none of 4 bits or fewer.

    Parameters
    ----------
    weight : torch.Tensor
        ``[out, in]``.
    block : int
        Neighbours along the input that share a grid. Grids of larger blocks are found, too.
    """
    return _bits(_distinct(weight, block))


def low_bit_grid(lm: LM, block: int = BLOCK, rows: int = ROWS) -> pd.DataFrame:
    """What grids a model's linear layers lie on.

    A model that was stored in 4 bits and brought back to floats shows it. Rounding it to 4 bits again costs nearly
    nothing or much, as the two grids happen to fit: rankings of 4-bit methods on such a model mean little.

    Parameters
    ----------
    lm : LM
        The model.
    block : int
        Neighbours along the input that share a grid.
    rows : int
        Rows to look at in each layer, evenly spread.

    Returns
    -------
    pandas.DataFrame
        A row for each linear layer: ``layer``, ``name``, ``distinct`` (the most values in a block), ``bits`` (of the
        grid; missing where there is none of 4 bits or fewer), ``share`` (of blocks with 16 values at most).
    """
    found = []
    for linear in linear_layers(lm):
        weight = linear.weight
        some = torch.linspace(0, len(weight) - 1, min(rows, len(weight))).round().long()
        distinct = _distinct(weight[some.to(weight.device)], block)
        share = float((distinct <= 2**BITS).float().mean()) if len(distinct) else float("nan")
        found.append((linear.layer, linear.name, int(distinct.max()) if len(distinct) else 0, _bits(distinct), share))
    table = pd.DataFrame(found, columns=["layer", "name", "distinct", "bits", "share"])
    return table.astype({"bits": "Int64"})


def _distinct(weight: Tensor, block: int) -> Tensor:
    """How many values each whole block has, ``[blocks]``."""
    whole = weight.shape[1] // block * block
    ordered = weight.detach()[:, :whole].reshape(-1, block).sort(-1).values
    return (ordered.diff(dim=-1) != 0).sum(-1) + 1


def _bits(distinct: Tensor) -> int | None:
    if not len(distinct) or int(distinct.max()) > 2**BITS:
        return None
    return max(1, (int(distinct.max()) - 1).bit_length())
