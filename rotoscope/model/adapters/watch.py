"""Sees an attention computation in the operations of a running module, and can compute it again with other inputs.

Every torch function that runs inside the block passes by. From the product of queries and keys to the product of
weights and values, whatever depends on the former is noted, so that exactly these operations can run again on edited
queries, keys or values. What is not of this shape (other products in between, several products added up, positions
that are multiplied with queries) is left alone, and the model is then refused rather than misread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}
_SUMMED = {torch.baddbmm, Tensor.baddbmm}
_SOFTMAX = {torch.softmax, Tensor.softmax, F.softmax}
# Weights of keys this far below the largest bias underflow to 0 in every dtype: such entries are masks, not biases.
_FAR = 5e3


class Found(ABC):
    """One attention computation: its inputs in ``[batch, heads, tokens, head_dim]``, and how to run it.

    Attributes
    ----------
    q, k, v, mask, scaling
        As in an attention call; ``scaling`` is None until it has been measured.
    weights
        What the values were weighed with, where the module has it.
    shape
        Of the result, as the module expects it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    scaling: float | None
    weights: Tensor | None
    shape: torch.Size

    @abstractmethod
    def measured_scaling(self) -> float | None:
        """Factor of ``q · k`` in the scores; None where they are no multiple of it."""

    @abstractmethod
    def run(self, changed: Mapping[str, Any]) -> Tensor:
        """The weighted values, with some of q, k, v, mask and scaling changed, as the module expects them."""


Meet = Callable[[Found], Tensor]


class Watch(TorchFunctionMode):
    """While it is open, hands each attention computation to ``meet``; what that returns goes on in its place.

    Parameters
    ----------
    batch : int
        Rows of the batch, which some files fold into the heads.
    meet : callable
        Told of each computation at its end, when queries, keys and values are known.
    """

    def __init__(self, batch: int, meet: Meet):
        super().__init__()
        self._batch, self._meet = batch, meet
        self._steps: list[_Step] = []
        self._product = 0
        # Which product each tensor descends from; the tensors themselves are kept so that no id is used twice.
        self._origin: dict[int, int] = {}
        self._kept: list[Tensor] = []

    def __torch_function__(
        self, function: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            return self._meet(_Fused(*args, **kwargs))
        step = _Step(function, args, kwargs, function(*args, **kwargs), _factors(function, args, kwargs))
        if not any(True for _ in _tensors(step.out)):
            return step.out
        given = [*_tensors((args, kwargs))]
        origins = {self._origin[id(x)] for x in given if id(x) in self._origin}
        follows = bool(self._steps) and self._product in origins
        if step.factors and not (follows and any(s.function in _SOFTMAX for s in self._steps)):
            self._product += 1
            self._steps, origins = [step], {self._product}
        elif step.factors:
            return self._end(step, *step.factors)
        elif follows:
            overwritten = any(step.out is x and self._origin.get(id(x)) != self._product for x in given)
            plain = len(origins) == 1 and isinstance(step.out, Tensor) and not overwritten
            self._steps = [*self._steps, step] if plain else []
        if origins:
            for x in _tensors(step.out):
                self._origin[id(x)] = max(origins)
                self._kept.append(x)
        return step.out

    def _end(self, step: _Step, weights: Tensor, values: Tensor) -> Any:
        """A product of what follows from the scores: the attention's last step, where there was one softmax."""
        steps, self._steps = [*self._steps, step], []
        left, right = (self._origin.get(id(x)) for x in (weights, values))
        at = [i for i, s in enumerate(steps) if s.function in _SOFTMAX]
        if left != self._product or right == self._product or len(at) != 1:
            return step.out
        return self._meet(_Spelled(steps, at[0], self._batch))


@dataclass(frozen=True)
class _Step:
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    factors: tuple[Tensor, Tensor] | None


class _Spelled(Found):
    """Product, softmax and product, spelled out in a modeling file."""

    def __init__(self, steps: list[_Step], at: int, batch: int):
        self._steps, self._at, self._batch = steps, at, batch
        (self._q, self._k), (self._weights, self._v) = (step.factors for step in (steps[0], steps[-1]) if step.factors)
        self._scores = next(_tensors((steps[at].args, steps[at].kwargs)))
        self.q, self.k, self.v = map(self._heads, (self._q, self._k.transpose(-1, -2), self._v))
        self.weights, self.shape, self.scaling = self._heads(self._weights), steps[-1].out.shape, None
        # What the softmax receives when all queries are 0, with the dtype's minimum where nothing may be attended.
        bias = self._bias()
        far = bias < bias.amax(-1, keepdim=True) - _FAR
        self.mask = bias.masked_fill(far, torch.finfo(bias.dtype).min)

    @torch.no_grad()
    def measured_scaling(self) -> float | None:
        bias = self._bias().double()
        at = bias.abs().argmin()
        growth = []
        for size in (16.0, 1024.0):
            q, k = torch.zeros_like(self._q), torch.zeros_like(self._k)
            q[..., 0], k[..., 0, :] = size, 1
            scores = self._heads(self._play({id(self._q): q, id(self._k): k}, 0, self._at)[id(self._scores)])
            growth.append(((scores.double() - bias).flatten()[at] / size).item())
        rounding = 4 * torch.finfo(self._q.dtype).eps
        if not growth[1] > 0 or abs(growth[0] / growth[1] - 1) > rounding:
            return None
        usual = (1.0, self._q.shape[-1] ** -0.5)
        return next((x for x in usual if abs(growth[1] / x - 1) <= rounding), growth[1])

    def run(self, changed: Mapping[str, Any]) -> Tensor:
        if not changed:
            return self._steps[-1].out  # type: ignore[no-any-return]
        q, k, v = (changed.get(name, getattr(self, name)) for name in "qkv")
        env = {id(self._v): _laid_out(v, self._v)}
        start = 0
        if changed.keys() & {"mask", "scaling"}:
            mask, scaling = (changed.get(name, getattr(self, name)) for name in ("mask", "scaling"))
            scores = (q @ k.transpose(-1, -2)) * scaling
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
            env[id(self._scores)] = scores.to(self._scores.dtype).reshape(self._scores.shape)
            start = self._at
        else:
            env[id(self._q)] = _laid_out(q, self._q)
            env[id(self._k)] = _laid_out(k, self._k.transpose(-1, -2)).transpose(-1, -2)
        env = self._play(env, start, len(self._steps))
        with torch.no_grad():  # the weights that the module returns beside its output are those of the edited call
            self._weights.copy_(env[id(self._weights)])
        return env[id(self._steps[-1].out)]

    @torch.no_grad()
    def _bias(self) -> Tensor:
        env = self._play({id(self._q): torch.zeros_like(self._q)}, 0, self._at)
        return self._heads(env[id(self._scores)])

    def _play(self, env: dict[int, Tensor], start: int, stop: int) -> dict[int, Tensor]:
        """Run the steps again with some tensors swapped for others."""

        def swap(x: Any) -> Any:
            if isinstance(x, tuple | list):
                return type(x)(map(swap, x))
            return env.get(id(x), x)

        for step in self._steps[start:stop]:
            kwargs = {name: swap(x) for name, x in step.kwargs.items()}
            env[id(step.out)] = step.function(*swap(step.args), **kwargs)
        return env

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(self._batch, -1, *x.shape[-2:]) if x.ndim == 3 else x


class _Fused(Found):
    """One call of torch's fused attention."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ):  # fmt: skip
        self.q, self.k, self.v, self.mask = query, key, value, attn_mask
        if attn_mask is None and not is_causal and query.shape[-2] > 1:
            self.mask = torch.ones(1, 1, 1, key.shape[-2], dtype=torch.bool, device=query.device)
        elif attn_mask is None and query.shape[-2] not in (1, key.shape[-2]):  # torch aligns rows with the first keys
            rows = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device)
            self.mask = rows.tril()[None, None]
        self.weights, self.shape = None, torch.Size((*query.shape[:-1], value.shape[-1]))
        self.scaling = query.shape[-1] ** -0.5 if scale is None else scale
        self._rest: dict[str, Any] = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale}
        self._rest |= {"dropout_p": dropout_p, "enable_gqa": enable_gqa}

    def measured_scaling(self) -> float | None:
        return self.scaling

    def run(self, changed: Mapping[str, Any]) -> Tensor:
        q, k, v = (changed.get(name, getattr(self, name)) for name in "qkv")
        rest = dict(self._rest)
        if "mask" in changed:
            rest |= {"attn_mask": changed["mask"], "is_causal": changed["mask"] is None}
        if "scaling" in changed:
            rest["scale"] = changed["scaling"]
        return F.scaled_dot_product_attention(q, k, v, **rest)


def _factors(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """The two factors of a batched matrix product; a product with a layer's weight has a matrix on its right."""
    if function in _SUMMED:
        given = [*args[1:], *(kwargs[name] for name in ("batch1", "batch2") if name in kwargs)]
    elif function in _PRODUCTS:
        given = [*args, *(kwargs[name] for name in ("other", "mat2") if name in kwargs)]
    else:
        return None
    left, right = given[:2]
    return (left, right) if left.ndim > 2 and right.ndim > 2 else None


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """The values of one in the shape and, since the last bit of a product depends on it, the strides of the other."""
    x = x.reshape(like.shape)
    if x.stride() == like.stride() or 0 in like.stride():
        return x
    return torch.empty_strided(like.shape, like.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, tuple | list):
        for item in x:
            yield from _tensors(item)
    elif isinstance(x, Mapping):
        yield from _tensors(list(x.values()))
