"""Which class of transformers a configuration is loaded with, and which configurations are refused."""

from __future__ import annotations

from typing import Any

from rotoscope.errors import Refused


def auto_class(config: Any, source: str) -> Any:
    """The auto class that loads a decoder with this configuration.

    A model of images and text comes whole and is used with text only.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
    source : str
        How the message names the model.

    Raises
    ------
    Refused
        If it is an encoder, an encoder-decoder or no language model; the sentence names what was found.
    """
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    mappings: dict[Any, Any] = {
        AutoModelForImageTextToText: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
    }
    found = _described(config)
    if _has_encoder(config):
        raise Refused(f"{source} is an encoder-decoder ({found}); rotoscope reads decoder-only language models")
    if _is_encoder(config):
        raise Refused(f"{source} is an encoder ({found}); rotoscope reads decoder-only language models")
    classes = {auto: mapping[type(config)] for auto, mapping in mappings.items() if type(config) in mapping}
    if not classes and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return AutoModelForCausalLM  # the repository's own code, which the user trusts
    if not classes:
        raise Refused(f"{source} is no causal language model ({found}); rotoscope reads decoder-only language models")
    saved = getattr(config, "architectures", None) or []
    named = [auto for auto, loaded in classes.items() if loaded.__name__ in saved]
    return (named or list(classes))[0]


def _described(config: Any) -> str:
    architectures = getattr(config, "architectures", None) or [type(config).__name__]
    return str(architectures[0])


def _has_encoder(config: Any) -> bool:
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))]
    return any(getattr(part, "is_encoder_decoder", False) for part in parts)


def _is_encoder(config: Any) -> bool:
    """A configuration that serves masked language models, unless it says that it is a decoder here."""
    from transformers import MODEL_FOR_MASKED_LM_MAPPING

    return type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
