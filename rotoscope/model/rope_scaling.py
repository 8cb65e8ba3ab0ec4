"""Other angles for a model's rotary embedding: transformers' own length scalings, for the time of a block."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from rotoscope.errors import BadInput, Refused
from rotoscope.model.forwards import ancestors, covered
from rotoscope.model.layers import decoder_layers
from rotoscope.model.lm import LM
from rotoscope.model.quiet import in_short

_ANGLES = "inv_freq"
_KIND, _PLAIN = "rope_type", "default"
_LENGTHS = ("max_position_embeddings", "original_max_position_embeddings")


@contextmanager
def rescaled(lm: LM, parameters: Mapping[str, Any]) -> Iterator[None]:
    """Let a model turn queries and keys by the angles that transformers makes of other ``rope_parameters``.

    The module that makes the table of angles is covered by one of its own class, made from a copy of its config; the
    base and the share of dims that rotate stay its own. Config, buffers and hooks are not touched, and the old table
    is back on any exit. Angles that depend on length (dynamic NTK) are those of the whole text that a forward is given.

    Parameters
    ----------
    lm : LM
        The model. Lengths that a scaling starts from are its trained length.
    parameters : mapping
        As in a config: ``{"rope_type": "yarn", "factor": 2.0}``, ``{"rope_type": "dynamic", "factor": 2.0}``.

    Raises
    ------
    BadInput
        If transformers makes no table of these parameters.
    Refused
        If the model has no such module, or its table is a scaled one already.
    """
    if _KIND not in parameters:
        raise BadInput("rope parameters need a rope_type, as in {'rope_type': 'yarn', 'factor': 2.0}")
    makers = _makers(lm.model)
    if not lm.anatomy.rotary or not makers:
        raise Refused("no module of this model makes its rotary angles from a config: they cannot be scaled")
    twins = [_twin(maker, lm, parameters) for maker in makers]
    with ExitStack() as stack:
        for maker, twin in zip(makers, twins, strict=True):
            stack.enter_context(covered(maker, "forward", twin.forward))
        yield


def _makers(model: nn.Module) -> list[nn.Module]:
    """The modules that make the decoder's tables: they hold angles and the config that these came from."""
    layers = decoder_layers(model)
    beside = [child for above in ancestors(model, layers) for child in above.children() if child is not layers]
    some = dict.fromkeys([*(m for m in beside if not any(True for _ in m.parameters())), *layers.modules()])
    return [module for module in some if _angles(module) and _parameters(getattr(module, "config", None))]


def _angles(module: nn.Module) -> dict[str, torch.Size]:
    """Shapes of the angles that a module itself holds, by the names of their buffers."""
    return {name: x.shape for name, x in module.named_buffers(recurse=False) if name.endswith(_ANGLES)}


def _parameters(config: Any) -> dict[str, Any]:
    return getattr(config, "rope_parameters", None) or {}


def _twin(maker: nn.Module, lm: LM, parameters: Mapping[str, Any]) -> nn.Module:
    """A module of the same class with angles from other parameters."""
    config: Any = copy.deepcopy(maker.config)
    own = _parameters(config)
    if lm.trained_length is not None:
        for name in _LENGTHS:
            if hasattr(config, name):
                setattr(config, name, lm.trained_length)
    if getattr(config, "head_dim", 0) is None:  # which scalings, unlike plain angles, take at its word
        config.head_dim = config.hidden_size // config.num_attention_heads
    if any(isinstance(of_kind, Mapping) for of_kind in own.values()):  # one table for each kind of layer
        config.rope_parameters = {kind: of_kind and _changed(of_kind, parameters) for kind, of_kind in own.items()}
    else:
        config.rope_parameters = _changed(own, parameters)
    device = next(maker.buffers()).device
    try:
        twin: nn.Module = type(maker)(config)
    except Exception as error:  # whatever transformers makes of the parameters
        raise BadInput(f"transformers makes no rotary angles of {dict(parameters)}: {in_short(error)}") from error
    if _angles(twin) != _angles(maker):
        raise Refused("this model's config and its rotary module disagree on how many dims rotate")
    return twin.to(lm.device if device.type == "meta" else device)


def _changed(own: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of one table.

    Raises
    ------
    Refused
        If it is scaled already.
    """
    kind = own.get(_KIND, _PLAIN)
    if kind != _PLAIN:
        raise Refused(
            f"this model's rotary angles are scaled already ({kind}): {parameters[_KIND]} in its place would undo what "
            "it was trained with"
        )
    return {**own, **parameters}
