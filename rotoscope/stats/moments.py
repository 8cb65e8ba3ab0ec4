"""First and second moments of un-rotated queries, keys and angles: all that the full-grid fit ever sees."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Moments:
    """Count, sum and second moments of complex vectors held as real ones, real parts first.

    Leading dimensions (heads, say) are free. Moments of several batches or texts add up.

    Attributes
    ----------
    n : int
        Vectors counted.
    sum : torch.Tensor
        ``[..., 2M]``, float64.
    gram : torch.Tensor
        ``Σ x xᵀ``, ``[..., 2M, 2M]``, float64.
    """

    n: int
    sum: torch.Tensor
    gram: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor) -> Moments:
        """Moments of complex ``[..., n, M]`` or real-then-imaginary ``[..., n, 2M]`` vectors."""
        x = torch.cat([x.real, x.imag], -1) if x.is_complex() else x
        x = x.double()
        return cls(x.shape[-2], x.sum(-2), x.transpose(-1, -2) @ x)

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.n + other.n, self.sum + other.sum, self.gram + other.gram)

    def add_(self, other: Moments) -> Moments:
        """The same in the room of the first, which is not to be used any more."""
        return Moments(self.n + other.n, self.sum.add_(other.sum), self.gram.add_(other.gram))

    @property
    def pairs(self) -> int:
        return self.sum.shape[-1] // 2

    @property
    def mean(self) -> torch.Tensor:
        """``[..., 2M]``."""
        return self.sum / self.n

    @property
    def pair_energy(self) -> torch.Tensor:
        """``E|x_m|²`` per pair, ``[..., M]``."""
        diagonal = self.gram.diagonal(dim1=-2, dim2=-1) / self.n
        return diagonal[..., : self.pairs] + diagonal[..., self.pairs :]

    @property
    def pair_mean_energy(self) -> torch.Tensor:
        """``|E x_m|²`` per pair, ``[..., M]``."""
        square = self.mean.square()
        return square[..., : self.pairs] + square[..., self.pairs :]

    def centred(self) -> Moments:
        """The same vectors less their mean."""
        mean = self.mean
        gram = self.gram - self.n * mean[..., :, None] * mean[..., None, :]
        return Moments(self.n, torch.zeros_like(self.sum), gram)

    def equalised(self) -> Moments:
        """The same vectors with each pair divided by its root mean square; pairs without energy stay as they are."""
        energy = self.pair_energy
        scale = torch.where(energy > 0, energy, torch.ones_like(energy)).rsqrt().repeat(*[1] * (energy.ndim - 1), 2)
        return Moments(self.n, self.sum * scale, self.gram * scale[..., :, None] * scale[..., None, :])

    def complex_grams(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``Σ x̄ xᵀ`` and ``Σ x xᵀ`` over the complex vectors, each ``[..., M, M]``."""
        m = self.pairs
        aa, bb, ab = self.gram[..., :m, :m], self.gram[..., m:, m:], self.gram[..., :m, m:]
        ba = ab.transpose(-1, -2)
        return torch.complex(aa + bb, ab - ba), torch.complex(aa - bb, ab + ba)

    def quadratic(self, real: torch.Tensor, imaginary: torch.Tensor) -> torch.Tensor:
        """``Σ (x_re · real + x_im · imaginary)²`` for direction vectors ``[..., M]``."""
        v = torch.cat([real, imaginary], -1)
        return torch.einsum("...a,...ab,...b->...", v, self.gram, v)
