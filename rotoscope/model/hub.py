"""From a hub id to a folder on this machine."""

from __future__ import annotations

from pathlib import Path

from rotoscope.errors import BadInput
from rotoscope.model.files import wanted
from rotoscope.model.quiet import in_short

_PATIENCE = 10.0
"""Seconds until the hub counts as unreachable; asked once, where transformers would retry for half a minute."""


def fetch(name: str, revision: str | None, code: bool) -> tuple[Path, str]:
    """Download what is needed of a repository, or find it among earlier downloads if the hub cannot be reached.

    Parameters
    ----------
    name : str
        Such as ``owner/model``.
    revision : str, optional
        Branch, tag or commit; by default the main branch.
    code : bool
        Whether the repository's Python files are wanted too.

    Returns
    -------
    folder : Path
    commit : str
        The commit that the folder holds, which is also its name.

    Raises
    ------
    BadInput
        If there is no such repository or revision, or it cannot be had.
    Refused
        If its weights are pickles; nothing is downloaded then.
    """
    from huggingface_hub import snapshot_download

    try:
        names = _names(name, revision)
    except _Unreachable as error:
        return _earlier(name, revision, error)
    files = wanted(names, name, code)
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=files))
    except Exception as error:
        raise BadInput(f"{name} could not be downloaded: {in_short(error)}") from error
    return folder, folder.name


def fetch_config(name: str, revision: str | None) -> Path:
    """The folder that holds a repository's ``config.json``, and perhaps nothing else.

    Raises
    ------
    BadInput
        As :func:`fetch`; also if the repository has no such file.
    """
    from huggingface_hub import hf_hub_download

    try:
        names = _names(name, revision)
    except _Unreachable as error:
        return _earlier(name, revision, error)[0]
    if "config.json" not in names:
        raise BadInput(f"{name} has no config.json")
    try:
        return Path(hf_hub_download(name, "config.json", revision=revision)).parent
    except Exception as error:
        raise BadInput(f"{name} could not be downloaded: {in_short(error)}") from error


class _Unreachable(Exception):
    """The hub did not answer."""


def _names(name: str, revision: str | None) -> list[str]:
    """The files of a repository."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        info = HfApi().model_info(name, revision=revision, timeout=_PATIENCE)
    except HFValidationError as error:
        raise BadInput(f"{name}: no such file or folder, and no hub id either (those read owner/model)") from error
    except GatedRepoError as error:
        raise BadInput(f"{name} is gated: accept its terms on the hub, then log in with `hf auth login`") from error
    except RevisionNotFoundError as error:
        raise BadInput(f"{name} has no revision {revision}") from error
    except RepositoryNotFoundError as error:
        raise BadInput(
            f"{name}: no such file or folder, and no such model on the hub (a private one needs `hf auth login`)"
        ) from error
    except Exception as error:
        raise _Unreachable(in_short(error)) from error
    return [file.rfilename for file in info.siblings or []]


def _earlier(name: str, revision: str | None, unreachable: Exception) -> tuple[Path, str]:
    """What an earlier download left."""
    from huggingface_hub import hf_hub_download

    try:
        folder = Path(hf_hub_download(name, "config.json", revision=revision, local_files_only=True)).parent
    except Exception as error:
        reason = in_short(unreachable)
        raise BadInput(
            f"{name}: no such file or folder, not downloaded before, and the hub cannot be reached ({reason})"
        ) from error
    return folder, folder.name
