"""The libraries beneath: imported when they are needed, quietly, and asked for one weight at a time."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rotoscope.errors import BadInput


@contextmanager
def importing(library: str, who: str) -> Iterator[None]:
    """Around the imports of a heavy library: without its chatter, and with one line where it is missing.

    Raises
    ------
    BadInput
        If it cannot be imported.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    except ImportError:
        raise BadInput(f"{who} needs {library}: pip install rotoscope[quant]") from None
    finally:
        logging.disable(before)


def through_torchao(config: Any, weight: Tensor) -> Any:
    """What torchao makes of a weight ``[out, in]`` under one of its configs: its own kind of tensor.

    It takes no float64, which goes through float32.
    """
    from torchao.quantization import quantize_

    rows, width = weight.shape
    holder = nn.Linear(width, rows, bias=False, device="meta")
    exact = weight.float() if weight.dtype == torch.float64 else weight
    holder.weight = nn.Parameter(exact, requires_grad=False)
    quantize_(holder, config)
    return holder.weight.data
