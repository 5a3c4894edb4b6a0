"""Model folders on disk: where they are, what their config says, and a hash that names their content."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from search.engine.protocol import EngineError


def model_folder(name: str) -> Path:
    """The local folder of a model: `name` itself, or its snapshot from the Hugging Face hub.

    Raises:
        EngineError: there is no such folder and the hub cannot give one.
    """
    if Path(name).is_dir():
        return Path(name).resolve()
    if name.startswith((".", "/")):
        raise EngineError("bad-setting", f"There is no model folder {name}.")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name))
    except Exception as error:
        raise EngineError("bad-setting", _not_fetched(name, error)) from error


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        EngineError: it is missing or is not JSON.
    """
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise EngineError("bad-setting", f"{folder} holds no readable config.json.") from error
    if not isinstance(config, dict) or not isinstance(text_config(config), dict):
        raise EngineError("bad-setting", f"{folder / 'config.json'} is no model's configuration.")
    return config


def read_hub_config(name: str) -> dict[str, Any]:
    """A model's config.json: of a local folder, or alone from the Hugging Face hub.

    Raises:
        EngineError: it cannot be had.
    """
    if name.startswith((".", "/")) or Path(name).is_dir():
        return read_config(model_folder(name))
    from huggingface_hub import hf_hub_download

    try:
        return read_config(Path(hf_hub_download(name, "config.json")).parent)
    except Exception as error:
        raise EngineError("bad-setting", _not_fetched(name, error)) from error


def weight_bytes(name: str) -> int | None:
    """Bytes of a model's weight files, in a local folder or on the Hugging Face hub; None if the hub does not say."""
    if name.startswith((".", "/")) or Path(name).is_dir():
        return sum(path.stat().st_size for path in Path(name).glob("*.safetensors"))
    from huggingface_hub import HfApi

    try:
        files = HfApi().model_info(name, files_metadata=True).siblings or []
    except Exception:  # no network, no licence, no such model: what needs the weights will say so
        return None
    return sum(file.size or 0 for file in files if file.rfilename.endswith(".safetensors"))


def _not_fetched(name: str, error: Exception) -> str:
    return (
        f"Model {name} is no local folder and could not be fetched from the Hugging Face hub ({type(error).__name__}); "
        "a gated model needs its licence accepted and HF_TOKEN set."
    )


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config (multimodal models nest it)."""
    nested: dict[str, Any] = config.get("text_config", config)
    return nested


def hf_overrides(config: dict[str, Any], window: int) -> dict[str, Any]:
    """The `hf_overrides` that give vLLM a sliding window, in the shape this model's config has."""
    override = {"sliding_window": window}
    return {"text_config": override} if "text_config" in config else override


def file_hash(folder: Path) -> str:
    """Hash of a model folder's config, weights and tokenizer: 16 hex digits."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.suffix in {".json", ".safetensors", ".model"}):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]
