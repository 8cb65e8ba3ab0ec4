"""Which rows of which linear layers make the queries and keys of each head, measured without knowing the architecture.

In some forwards of one token every linear layer inside the decoder is made to answer with signs of its own: row ``i``
of a layer's rows gives the ``b``-th binary digit of ``i`` in forward ``b``. Norms of queries and keys, scales and the
turn at position 0, which is none, keep signs where they are; so the signs of a query's dim spell the row it came from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rotoscope.errors import Refused
from rotoscope.model.call import AttentionCall
from rotoscope.model.layers import decoder_layers
from rotoscope.model.lm import evaluating
from rotoscope.model.tap import tap

if TYPE_CHECKING:
    from rotoscope.model.lm import LM

_CHECKS = 12
_TOKEN = 1


@dataclass(frozen=True)
class Projection:
    """Where a layer's queries, or its keys, come from.

    Attributes
    ----------
    modules
        Names, within the model, of the linear layers that make them.
    module, row
        For each head and dim the number of its linear layer among ``modules``, and its row there, ``[heads, dims]``.
    """

    modules: tuple[str, ...]
    module: Tensor
    row: Tensor


def projections(lm: LM) -> dict[int, dict[str, Projection]]:
    """The rows that queries (``q``) and keys (``k``) of every layer of attention come from.

    It takes some twenty forwards of one token.

    Raises
    ------
    Refused
        If they come from anything but rows of linear layers, one for each dim, in some layer.
    """
    rows = _rows(lm)
    if bare := [layer for layer, of in rows.items() if not of]:
        raise Refused(f"layer {bare[0]} has no linear layers, so that no row can be told to make a channel")
    digits = max((sum(m.out_features for m in of.values()) for of in rows.values()), default=1).bit_length()
    generator = torch.Generator().manual_seed(0)
    base = {i: _signs(of, generator) for i, of in rows.items()}
    zeroth = _answers(lm, rows, base)
    read = {key: torch.zeros(x.shape, dtype=torch.long) for key, x in zeroth.items()}
    for digit in range(digits):
        coded = {i: s * _digit(len(s), digit) for i, s in base.items()}
        for key, x in _answers(lm, rows, coded).items():
            read[key] += (x != zeroth[key]).long() << digit
    for _ in range(_CHECKS):
        flips = {i: _signs(of, generator) for i, of in rows.items()}
        for (layer, name), x in _answers(lm, rows, {i: s * flips[i] for i, s in base.items()}).items():
            at = read[layer, name].clamp_max(len(flips[layer]) - 1)
            if not torch.equal(x != zeroth[layer, name], flips[layer][at] < 0):
                what = {"q": "queries", "k": "keys"}[name]
                raise Refused(
                    f"layer {layer}: its {what} do not come from rows of linear layers, one for each dim, so that no "
                    "row can be told to make a channel"
                )
    out: dict[int, dict[str, Projection]] = {}
    for (layer, name), at in read.items():
        out.setdefault(layer, {})[name] = _located(rows[layer], at)
    return out


def row_masks(
    found: Mapping[int, Mapping[str, Projection]], lm: LM, chosen: Mapping[int, Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """The rows that make some channels.

    Parameters
    ----------
    found
        What `projections` says.
    lm : LM
        The model.
    chosen
        By layer, for ``q`` and ``k``: boolean ``[heads, dims]``.

    Returns
    -------
    dict
        By the name of a linear layer: boolean ``[out]``.
    """
    out: dict[str, Tensor] = {}
    for layer, by_name in chosen.items():
        for name, mask in by_name.items():
            of = found[layer][name]
            for number, module in enumerate(of.modules):
                mine = out.setdefault(
                    module, torch.zeros(lm.model.get_submodule(module).out_features, dtype=torch.bool)
                )
                mine[of.row[mask & (of.module == number)]] = True
    return out


def _rows(lm: LM) -> dict[int, dict[str, nn.Linear]]:
    """The linear layers of each layer of attention, by name, in order."""
    layers = decoder_layers(lm.model)
    prefix = next(name for name, module in lm.model.named_modules() if module is layers)
    return {
        a.layer: {
            ".".join(filter(None, (prefix, str(a.layer), name))): module
            for name, module in layers[a.layer].named_modules()
            if isinstance(module, nn.Linear)
        }
        for a in lm.anatomy.attention
    }


def _signs(of: Mapping[str, nn.Linear], generator: torch.Generator) -> Tensor:
    rows = sum(module.out_features for module in of.values())
    return 1 - 2 * torch.randint(0, 2, (rows,), generator=generator)


def _digit(rows: int, digit: int) -> Tensor:
    """-1 where that binary digit of a row's number is 1."""
    return 1 - 2 * ((torch.arange(rows) >> digit) & 1)


class _First:
    """Signs of the queries and keys of one token, by layer: of the first attention call of each."""

    def __init__(self) -> None:
        self.negative: dict[tuple[int, str], Tensor] = {}

    def observe(self, call: AttentionCall) -> None:
        for name, x in (("q", call.q), ("k", call.k)):
            self.negative.setdefault((call.layer, name), x[0, :, -1].detach().cpu() < 0)


@torch.no_grad()
def _answers(
    lm: LM, rows: Mapping[int, Mapping[str, nn.Linear]], signs: Mapping[int, Tensor]
) -> dict[tuple[int, str], Tensor]:
    """Which queries and keys ``[heads, dims]`` are negative when linear layers answer with these signs."""
    seen = _First()
    ids = torch.full((1, 1), _TOKEN, device=lm.device)
    with evaluating(lm.model), tap(lm, seen), ExitStack() as hooks:
        for layer, of in rows.items():
            for module, own in _split(of, signs[layer]):
                hooks.enter_context(module.register_forward_hook(_answer_with(own)))
        lm.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    return seen.negative


def _split(of: Mapping[str, nn.Linear], signs: Tensor) -> Iterator[tuple[nn.Linear, Tensor]]:
    modules = list(of.values())
    yield from zip(modules, signs.split([module.out_features for module in modules]), strict=True)


def _answer_with(signs: Tensor) -> Any:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return signs.to(output).expand_as(output).contiguous()

    return hook


def _located(of: Mapping[str, nn.Linear], at: Tensor) -> Projection:
    """Rows counted through all linear layers of a decoder layer, as rows of each."""
    ends = torch.tensor([module.out_features for module in of.values()]).cumsum(0)
    number = torch.bucketize(at, ends, right=True)
    used = number.unique()
    names = list(of)
    starts = torch.cat([torch.zeros(1, dtype=torch.long), ends[:-1]])
    return Projection(tuple(names[i] for i in used.tolist()), torch.searchsorted(used, number), at - starts[number])
