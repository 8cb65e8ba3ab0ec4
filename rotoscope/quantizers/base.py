"""What quantizers share: they reach the linear layers of the decoder, say what they changed, and put it all back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import gcd
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from rotoscope.errors import BadInput, Refused
from rotoscope.interventions.base import Intervention, Layers, Run, chosen_layers
from rotoscope.model.layers import decoder_layers

if TYPE_CHECKING:
    from rotoscope.model.lm import LM

LEAST = 0.5
EXACT_BITS = 16
"""What a weight that stays as it is counts, whatever it is kept in here."""


@dataclass(frozen=True)
class Linear:
    """A linear layer of the decoder.

    Attributes
    ----------
    layer
        The decoder layer that it lies in.
    name
        Its name within the model.
    module
        The layer itself, its weight ``[out, in]``.
    """

    layer: int
    name: str
    module: nn.Linear = field(repr=False)

    @property
    def weight(self) -> Tensor:
        return self.module.weight.detach()

    @property
    def width(self) -> int:
        """Inputs."""
        return self.module.weight.shape[1]


@dataclass(frozen=True)
class Quantized:
    """What a quantizer makes of one weight.

    Attributes
    ----------
    weight
        What takes its place, ``[out, in]``: plain values, or a tensor with a matrix product of its own.
    values
        What it stands for, ``[out, in]``.
    bits
        What it takes to store it.
    kept
        Elements left as they were on purpose.
    """

    weight: Tensor
    values: Tensor
    bits: float
    kept: int = 0


@dataclass(frozen=True)
class Quantizer(Intervention):
    """Quantize the linear layers inside the decoder layers for the length of a block.

    ``with RTN(bits=4).on(lm) as run: …``. Embeddings, norms, biases and the output head stay as they are. On any exit
    the model has its own parameters again, the same objects; until then both copies are in memory.

    Parameters
    ----------
    layers
        One decoder layer, several, or None for all.

    Attributes
    ----------
    kind : str
        ``weights``: the products are those of the model's own floating type, with dequantized weights, as a
        weight-only kernel computes them. ``activations``: inputs are quantized, too, and products are of integers.
    library : str
        What does it.

    Raises
    ------
    BadInput
        On opening, if there is no such layer, or the library is missing.
    Refused
        On opening, if weights are quantized already or not in memory, or under half of the elements that should
        change did.

    Notes
    -----
    ``run.fired`` counts linear layers. ``run.measured`` sums over the decoder layers chosen: ``should`` (elements of
    all parameters of two dims or more, fused experts included), ``changed`` (elements whose dequantized value
    differs), ``kept`` (elements left exact on purpose), ``weights`` (elements of the linear layers), ``bits`` (stored
    for those, with scales and zero points at their stored width), ``error`` (``Σ (w′ − w)²``), ``energy`` (``Σ w²``).
    """

    kind: ClassVar[str] = "weights"
    library: ClassVar[str] = "torchao"
    layers: Layers = field(default=None, kw_only=True)

    def attach(self, lm: LM, run: Run, stack: ExitStack) -> None:
        layers = decoder_layers(lm.model)
        chosen = chosen_layers(self.layers, range(len(layers)), "the layers")
        linears = [linear for linear in linear_layers(lm) if linear.layer in chosen]
        matrices = _matrices(lm, chosen)
        _check_reach(self.name, linears, matrices)
        for linear in linears:
            _check_plain(linear)
        self.check(linears)
        run.measure(should=sum(p.numel() for p in matrices.values()))
        with torch.no_grad():
            learned = self.learn(lm, linears)
            for linear in linears:
                made = self.quantize(linear, learned.get(linear.name))
                _measure(run, linear.weight, made)
                _put(linear.module, made.weight, stack)
                run.fired += 1
        changed, due = run.measured["changed"], run.measured["should"] - run.measured["kept"]
        if changed < LEAST * due:
            why = "they lie on its grid already"
            raise Refused(f"{self.name} changed {changed / due:.0%} of the weights of the decoder: {why}")

    def check(self, linears: Sequence[Linear]) -> None:
        """Raise `BadInput` if some of these layers cannot be quantized with these settings."""

    def learn(self, lm: LM, linears: Sequence[Linear]) -> Mapping[str, Any]:
        """What calibration finds for each layer, by its name; nothing for methods that need none."""
        return {}

    @abstractmethod
    def quantize(self, linear: Linear, learned: Any) -> Quantized:
        """Quantize one layer's weight, which is left as it is."""


def linear_layers(lm: LM) -> Iterator[Linear]:
    """The linear layers inside the decoder layers, in the model's own order."""
    layers = decoder_layers(lm.model)
    prefix = next(name for name, module in lm.model.named_modules() if module is layers)
    for index, layer in enumerate(layers):
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear):
                yield Linear(index, ".".join(filter(None, (prefix, str(index), name))), module)


def check_group(group: int, linears: Sequence[Linear], sizes: Collection[int] | None = None) -> None:
    """See that the inputs of all layers fall into groups of ``group``.

    Parameters
    ----------
    group : int
        Weights along the input that share a scale.
    linears : sequence of Linear
        The layers.
    sizes : collection of int, optional
        The sizes that the method has; any where None.

    Raises
    ------
    BadInput
        If they do not, naming the first layer and the largest size, up to ``group``, that would do for all.
    """
    wrong = next((linear for linear in linears if linear.width % group), None)
    if wrong is None:
        return
    common = gcd(*(linear.width for linear in linears))
    fits = [size for size in sizes or range(1, group) if common % size == 0 and size < group]
    mend = f"the largest group that would do is {max(fits)}" if fits else f"of {sizes} none would do"
    raise BadInput(f"groups of {group} do not divide the {wrong.width} inputs of {wrong.name}; {mend}")


def _check_reach(who: str, linears: Sequence[Linear], matrices: Mapping[str, Tensor]) -> None:
    """Refuse a model of which under half would change, naming what holds most of the rest."""
    own = {id(linear.module.weight) for linear in linears}
    others = {name: p.numel() for name, p in matrices.items() if id(p) not in own}
    due = sum(p.numel() for p in matrices.values())
    reached = due - sum(others.values())
    if not linears or reached < LEAST * due:
        largest = max(others, key=others.__getitem__).partition(".")[2]
        share = f"{reached / due:.0%} of the weights of the decoder"
        raise Refused(f"{who} would change {share}: {largest} is no linear layer")


def _check_plain(linear: Linear) -> None:
    weight = linear.weight
    if weight.is_meta:
        raise Refused(f"the weight of {linear.name} is offloaded: load the model into memory to quantize it")
    if type(weight) is not Tensor or not weight.is_floating_point():
        raise Refused(f"the weight of {linear.name} is quantized already: load the model as it was before")


def _put(module: nn.Module, weight: Tensor, stack: ExitStack) -> None:
    """Let a parameter of its own stand in the place of a module's weight until the stack closes."""
    parameters: dict[str, Any] = module._parameters
    stack.callback(parameters.__setitem__, "weight", parameters["weight"])
    parameters["weight"] = nn.Parameter(weight, requires_grad=False)


def _measure(run: Run, weight: Tensor, made: Quantized) -> None:
    values = made.values.to(weight.dtype)
    difference = values.float() - weight.float()
    run.measure(
        changed=int((values != weight).sum()),
        kept=made.kept,
        weights=weight.numel(),
        bits=made.bits,
        error=float(difference.square().sum(dtype=torch.float64)),
        energy=float(weight.float().square().sum(dtype=torch.float64)),
    )


def _matrices(lm: LM, layers: Collection[int]) -> dict[str, Tensor]:
    """The parameters of two dims or more inside some decoder layers, by name; a shared one once."""
    stack = decoder_layers(lm.model)
    named = ((f"{layer}.{name}", p) for layer in sorted(layers) for name, p in stack[layer].named_parameters())
    return dict({id(p): (name, p) for name, p in named if p.ndim > 1}.values())
