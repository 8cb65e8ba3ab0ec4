"""A quantized checkpoint of a model, loaded beside it, and whether it does what its config promises."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from contextlib import redirect_stderr
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rotoscope.errors import BadInput, Refused, RotoscopeError
from rotoscope.model.classes import auto_class
from rotoscope.model.files import names_in, weight_files
from rotoscope.model.layers import decoder_layers
from rotoscope.model.lm import evaluating, wrap
from rotoscope.model.quiet import in_short, quiet
from rotoscope.quantizers.base import LEAST, linear_layers

if TYPE_CHECKING:
    from rotoscope.model.lm import LM

COMPRESSED_TENSORS = "compressed-tensors"
ROUNDED = 0.02
"""A linear layer that is further from additive than this rounds its inputs: 16-bit floats are below .01, eight bits
above .03."""
_TOKENS = 16
_UNITS = 1024
_SMALL, _OUTLIER, _EVERY = 128, 1920, 32


def load(path: str | PathLike[str], like: LM) -> LM:
    """Load a quantized checkpoint of a model by the route on which nothing that it stores is dropped.

    Of compressed-tensors, weight-only ones are dequantized on loading: packed zero points do not load otherwise. Those
    that quantize inputs, too, are not, as that would drop it without a word. Other formats load as transformers does
    it.

    Parameters
    ----------
    path : str or path
        A folder with ``config.json``, which says how it is quantized, and safetensors.
    like : LM
        The model that it was made from: whose tokenizer, floating type and devices it gets.

    Returns
    -------
    LM

    Raises
    ------
    BadInput
        If there is no such folder, it is not quantized, or cannot be loaded; also where a library for it is missing.
    Refused
        If it belongs to another model; if under half of the decoder's weights differ from the model's; if it promises
        quantized inputs, and under half of the linear layers round them.
    """
    folder = Path(path)
    config = _config(folder)
    weight_files(names_in(folder), str(folder))
    with redirect_stderr(io.StringIO()):  # bars of compressed-tensors, which unpacks weights in the first forward only
        model = _model(folder, config, like)
        lm = wrap(model.eval(), like.tokenizer, source=str(folder), trained_length=like.trained_length)
    _check_same(lm, like)
    changed = share_changed(lm, like)
    if changed < LEAST:
        raise Refused(f"{folder} changed {changed:.0%} of the weights of the decoder of {like.source}")
    if _promises_inputs(config):
        rounding = share_rounding(lm, like)
        if rounding < LEAST:
            raise Refused(f"{folder} promises quantized inputs, but {rounding:.0%} of its linear layers round theirs")
    return lm


def about(lm: LM, like: LM) -> dict[str, float]:
    """What a loaded checkpoint changed and takes.

    Parameters
    ----------
    lm : LM
        What `load` returned.
    like : LM
        The model that it was made from.

    Returns
    -------
    dict
        ``bits`` (stored for each weight of the linear layers inside the decoder layers, with scales and zero points;
        NaN where the files name their tensors otherwise than the model does), ``share_changed`` (of the elements of all
        parameters of two dims or more inside the decoder layers; where a method moved scales into norms, most differ
        whatever it rounds), ``share_rounding`` (of the linear layers: those that round their inputs), ``bytes`` (of
        all weights on disk).
    """
    folder = Path(lm.source)
    return {
        "bits": _stored_bits(folder, like),
        "share_changed": share_changed(lm, like),
        "share_rounding": share_rounding(lm, like),
        "bytes": float(sum((folder / name).stat().st_size for name in weight_files(names_in(folder), lm.source))),
    }


@torch.no_grad()
def share_changed(lm: LM, like: LM) -> float:
    """The share of the decoder's weights whose dequantized values differ from those of the model beside it.

    It is of the elements of all parameters of two dims or more inside its decoder layers.
    """
    matrices = {id(p): p for p in decoder_layers(like.model).parameters() if p.ndim > 1}
    changed = 0
    for linear in linear_layers(like):
        weight = linear.weight
        values = effective_weight(lm.model.get_submodule(linear.name), linear.width, lm.dtype, lm.device)
        changed += int((values.to(weight) != weight).sum())
    return changed / sum(p.numel() for p in matrices.values())


@torch.no_grad()
def effective_weight(module: nn.Module, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What a linear layer multiplies its inputs by, ``[out, in]``, however it is stored."""
    weight: Any = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and weight.is_floating_point() and weight.dtype.itemsize > 1:
        return weight.detach() if type(weight) in (Tensor, nn.Parameter) else weight.dequantize()
    units = torch.eye(width, dtype=dtype, device=device).split(_UNITS)
    return torch.cat([module(some) - module(torch.zeros_like(some[:1])) for some in units]).T


@torch.no_grad()
def share_rounding(lm: LM, like: LM) -> float:
    """The share of linear layers inside the decoder layers that round their inputs, of those that a forward calls.

    A layer that multiplies its input as it is, is additive: ``f(x + y) = f(x) + f(y) − f(0)``. One that rounds it is
    not, where ``x`` and ``y`` have an outlier that their sum lacks, in the range of the inputs that it has in a short
    forward.
    """
    modules = {linear.name: lm.model.get_submodule(linear.name) for linear in linear_layers(like)}
    largest: dict[str, float] = {}

    def hook(name: str) -> Any:
        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            largest[name] = max(largest.get(name, 0.0), float(args[0].abs().amax())) if args[0].numel() else 0.0

        return before

    hooks = [module.register_forward_pre_hook(hook(name)) for name, module in modules.items()]
    with evaluating(lm.model):
        try:
            ids = torch.arange(1, _TOKENS + 1, device=lm.device)[None] % lm.anatomy.vocabulary
            lm.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        finally:
            for handle in hooks:
                handle.remove()
        widths = {linear.name: linear.width for linear in linear_layers(like)}
        rounding = [_unadditive(modules[name], widths[name], most, lm) > ROUNDED for name, most in largest.items()]
    return sum(rounding) / len(rounding)


def _unadditive(module: nn.Module, width: int, most: float, lm: LM) -> float:
    """How far ``f(x + y)`` is from ``f(x) + f(y) − f(0)``, relative to what inputs contribute to it."""
    random = torch.Generator().manual_seed(0)
    # Integers times a power of two: sums are exact in 16-bit floats, and eight bits up to the outlier are coarser.
    x, y = torch.randint(-_SMALL, _SMALL + 1, (2, 4, width), generator=random).to(lm.device, lm.dtype)
    unit = 2.0 ** math.floor(math.log2(most / _OUTLIER)) if most else 1.0
    x[:, ::_EVERY], y[:, ::_EVERY] = _OUTLIER, -_OUTLIER
    of_x, of_y, of_sum, of_none = (module(z * unit) for z in (x, y, x + y, torch.zeros_like(x)))
    off = of_sum.double() - of_x.double() - of_y.double() + of_none.double()
    return float(off.norm() / (of_sum.double() - of_none.double()).norm())


def _config(folder: Path) -> dict[str, Any]:
    """How a checkpoint says that it is quantized."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        how = config.get("quantization_config")
    except (OSError, ValueError, AttributeError) as error:
        raise BadInput(f"{folder} is no checkpoint: it has no readable config.json ({in_short(error)})") from error
    if not isinstance(how, dict):
        raise BadInput(f"{folder} is no quantized checkpoint: its config.json has no quantization_config")
    return how


def _model(folder: Path, how: dict[str, Any], like: LM) -> Any:
    from transformers import AutoConfig

    try:
        with quiet():
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            model, info = auto_class(config, str(folder)).from_pretrained(
                folder,
                dtype=like.dtype,
                device_map=getattr(like.model, "hf_device_map", None) or {"": like.device},
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                **_route(how),
            )
    except RotoscopeError:
        raise
    except ImportError as error:
        method = how.get("quant_method")
        mend = "pip install rotoscope[quant]" if method == COMPRESSED_TENSORS else in_short(error)
        raise BadInput(f"{folder} needs a library for {method}: {mend}") from error
    except Exception as error:  # transformers, safetensors and every library beneath raise what they like
        raise BadInput(f"{folder} cannot be loaded: {in_short(error)}") from error
    own = {name.rpartition(".")[0] for name in info["missing_keys"]}
    quantized = {linear.name for linear in linear_layers(like)}
    if missing := sorted(own - quantized):
        raise Refused(f"{folder} lacks the weights of {', '.join(missing[:3])}, which would be random numbers")
    return model


def _route(how: dict[str, Any]) -> dict[str, Any]:
    """What `from_pretrained` must be told besides."""
    if how.get("quant_method") != COMPRESSED_TENSORS or _promises_inputs(how):
        return {}
    from transformers import CompressedTensorsConfig

    return {"quantization_config": CompressedTensorsConfig(dequantize=True)}


def _promises_inputs(how: dict[str, Any]) -> bool:
    """Whether a config of compressed-tensors has inputs quantized in some layers."""
    groups = how.get("config_groups") or {}
    return any(isinstance(group, dict) and group.get("input_activations") for group in groups.values())


def _check_same(lm: LM, like: LM) -> None:
    """See that every linear layer of the model is there, and that the vocabularies have one size."""
    there = {name for name, _ in lm.model.named_modules()}
    missing = [linear.name for linear in linear_layers(like) if linear.name not in there]
    shapes = [(len(decoder_layers(one.model)), one.anatomy.vocabulary) for one in (lm, like)]
    if missing or shapes[0] != shapes[1]:
        what = f"it has no {missing[0]}" if missing else "layers or vocabularies differ in number"
        raise Refused(f"{lm.source} is no checkpoint of {like.source}: {what}")


def _stored_bits(folder: Path, like: LM) -> float:
    """Bits of all that the files hold for the linear layers but biases, over the elements of their weights."""
    names = {linear.name: linear.weight.numel() for linear in linear_layers(like)}
    stored, found = 0, set()
    for tensor, size in _tensors(folder):
        module, _, part = tensor.rpartition(".")
        owner = module if module in names else module.rpartition(".")[0]  # such as weight.absmax, one name further in
        if owner in names and part != "bias":
            stored += size
            found.add(owner)
    return 8 * stored / sum(names.values()) if len(found) == len(names) else float("nan")


def _tensors(folder: Path) -> Iterator[tuple[str, int]]:
    """Names and bytes of all tensors in the files, from their headers."""
    for name in weight_files(names_in(folder), str(folder)):
        with (folder / name).open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for tensor, facts in header.items():
            if tensor != "__metadata__":
                begin, end = facts["data_offsets"]
                yield tensor, end - begin
