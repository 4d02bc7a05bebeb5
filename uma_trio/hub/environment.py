"""What the environment says about the hub and the folders of models: the variables of Hugging Face's and Ollama's tools."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import attrs
import platformdirs

from uma_trio.files import read_text
from uma_trio.hub.errors import HubError
from uma_trio.hub.names import HUB
from uma_trio.hub.urls import parse_url

_TRUE: Final = ("1", "on", "yes", "true")
_OLLAMA_SERVICE: Final = Path("/usr/share/ollama/.ollama/models")
"""Where Ollama keeps models if it is a service of the system."""


@attrs.frozen(kw_only=True)
class ModelLocations:
    """Where models are, and where they come from."""

    folder: Path
    """Our own folder of models."""
    endpoint: str = HUB
    """URL of the hub, without a slash at its end."""
    token_file: Path | None = None
    token: str | None = None
    """For the hub alone; ``None``: see ``token_file``."""
    is_offline: bool = False
    huggingface: Path | None = None
    """The cache of Hugging Face's libraries."""
    ollama: tuple[Path, ...] = ()
    """Folders with ``manifests`` and ``blobs``."""
    lmstudio: tuple[Path, ...] = ()
    """Folders with ``OWNER/REPOSITORY/FILE.gguf``."""


def find_model_locations(
    environment: Mapping[str, str], folder: Path | None = None, *, is_offline: bool = False
) -> ModelLocations:
    """Read the environment.

    Args:
        folder: our own folder; ``None``: the platform's folder for data.
        is_offline: a setting; HF_HUB_OFFLINE says it, too.

    Raises:
        HubError: HF_ENDPOINT is not a URL that may be opened.
    """
    home = Path(environment.get("HOME") or Path.home())
    if folder is None:
        folder = Path(platformdirs.user_data_dir("uma-trio")) / "models"
    endpoint = (environment.get("HF_ENDPOINT") or HUB).rstrip("/")
    try:
        parse_url(endpoint)
    except HubError as error:
        raise HubError(f"HF_ENDPOINT: {error.reason}", error.remedy) from None
    cache_home = Path(environment.get("XDG_CACHE_HOME") or home / ".cache")
    hf_home = Path(environment.get("HF_HOME") or cache_home / "huggingface").expanduser()
    hf_cache = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
    ollama = environment.get("OLLAMA_MODELS")
    offline = is_offline or any(_is_true(environment, name) for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return ModelLocations(
        folder=folder.expanduser(),
        endpoint=endpoint,
        token=environment.get("HF_TOKEN") or environment.get("HUGGING_FACE_HUB_TOKEN"),
        token_file=None
        if _is_true(environment, "HF_HUB_DISABLE_IMPLICIT_TOKEN")
        else Path(environment.get("HF_TOKEN_PATH") or hf_home / "token").expanduser(),
        is_offline=offline,
        huggingface=Path(hf_cache).expanduser() if hf_cache else hf_home / "hub",
        ollama=(Path(ollama).expanduser(),) if ollama else (home / ".ollama" / "models", _OLLAMA_SERVICE),
        lmstudio=(_lmstudio_home(home) / "models", home / ".cache" / "lm-studio" / "models"),
    )


def read_token(places: ModelLocations) -> str | None:
    """The token for the hub; ``None`` if there is none.

    Raises:
        HubError: it cannot be sent as it is.
    """
    token, source = places.token, "HF_TOKEN"
    if token is None and places.token_file is not None:
        source = str(places.token_file)
        try:
            token = read_text(places.token_file)
        except (OSError, UnicodeDecodeError):  # nobody has logged in
            return None
    token = (token or "").strip()
    if token and not (token.isascii() and token.isprintable() and " " not in token and len(token) < 1000):
        raise HubError(f"{source} does not hold a valid token", "run hf auth login again, or correct it")
    return token or None


def _lmstudio_home(home: Path) -> Path:
    """LM Studio's folder, which a file in the home folder may name."""
    try:
        return Path(read_text(home / ".lmstudio-home-pointer").strip())
    except (OSError, UnicodeDecodeError):
        return home / ".lmstudio"


def _is_true(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "").strip().lower() in _TRUE
