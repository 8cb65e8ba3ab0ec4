"""Loading without transformers' chatter, and what it says when it fails in one line."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Within the block transformers logs errors only and shows no bars; what the user had set comes back after it."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    hub_bars = not are_progress_bars_disabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()  # which switches the hub's on as well
        if hub_bars:
            enable_progress_bars()
        else:
            disable_progress_bars()


def in_short(error: Exception) -> str:
    """An error's message in one line of bearable length."""
    return textwrap.shorten(str(error) or type(error).__name__, 240, placeholder=" …")
