"""Serve an exported manifest: vLLM's own OpenAI-compatible server, started with what the manifest says.

The server also answers GET /effective with the knobs as they act in its worker (see `search.engine.readback`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernels.plugin import PATCHES
from search.data import json_hash
from search.engine.preload import with_preload
from search.engine.protocol import EngineError
from search.errors import UsageError
from search.folder import read_manifest
from search.knobs import TOP_K, WINDOW
from search.modelfiles import file_hash, model_folder, read_config, text_config

SERVER, HOST = "vllm.entrypoints.openai.api_server", "127.0.0.1"
# Engine arguments that have an environment key of their own; the rest stand in ENGINE_ARGS.
ARGS_WITH_KEYS = ("max_model_len", "gpu_memory_utilization", "max_num_batched_tokens", "max_num_seqs")
# Every key that a manifest's environment may have for us; others are vLLM's own, or a library's.
OWN_KEYS = frozenset(
    (
        *("ENGINE_ARGS", "HF_OVERRIDES", "SLIDING_WINDOW", "SPECULATIVE_CONFIG", "CENTROID_TOP_K", "PRECACHE_BENCH"),
        *("WARMUP_BRIDGE", "WARMUP_NUM_PROMPTS", "WARMUP_MAX_TOKENS", "WARMUP_SEED"),
        *map(str.upper, ARGS_WITH_KEYS),
    )
)
READY_WAIT_S = 1800.0
WARMUP_PROMPT_TOKENS = 16


def serve(folder: Path) -> None:
    """Serve the manifest in `folder` until interrupted; arguments of this process go on to vLLM."""
    try:
        manifest = read_manifest(folder)
    except UsageError as error:
        sys.exit(f"error: {error}")
    # The engine is a child process. A patch that the manifest does not name is off, whatever this shell says.
    os.environ.update(with_preload({**os.environ, **dict.fromkeys(PATCHES, "0"), **manifest["env"]}))
    hashes = manifest["evidence"]["hashes"]
    target = _checked(manifest["model_id"], hashes["model"])
    drafter = None
    speculation = json.loads(manifest["env"].get("SPECULATIVE_CONFIG", "null"))
    if speculation and speculation.get("model"):
        source = _checked(speculation["model"], hashes["drafter"])
        # vLLM's compile cache is keyed by paths. A relative one that names the content is the same wherever the folder
        # stands, so that the same code is served again; a fresh compilation can take another token path.
        os.chdir(folder)
        drafter = own_drafter(manifest, source, Path())
    arguments = server_arguments(manifest, target, drafter) + sys.argv[1:]
    ours = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    ours.add_argument("--port", type=int)
    ours.add_argument("--api-key", nargs="+", default=[os.environ.get("VLLM_API_KEY")])
    known, _ = ours.parse_known_args(arguments)
    _check_port(known.port)
    vocabulary = int(text_config(read_config(target))["vocab_size"])
    warming = (manifest, known.port, vocabulary, known.api_key[0])
    threading.Thread(target=_warm_up_or_end, args=warming, daemon=True).start()
    sys.argv = [SERVER, *arguments]
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


def drafter_values(env: Mapping[str, str]) -> dict[str, int]:
    """What a manifest's drafter config must say, by knob."""
    return {knob: int(env[key]) for knob, key in ((WINDOW, "SLIDING_WINDOW"), (TOP_K, "CENTROID_TOP_K")) if key in env}


def own_drafter(manifest: Mapping[str, Any], source: Path, folder: Path) -> Path:
    """The drafter that a manifest is served with, made in `folder` of the measured one, under a name that says both."""
    values = drafter_values(manifest["env"])
    name = f"drafter-{json_hash([manifest['evidence']['hashes']['drafter'], values])}"
    return derive_drafter(source, folder / name, values)


def derive_drafter(source: Path, out: Path, values: Mapping[str, int]) -> Path:
    """A folder with `source`'s weights (linked) and a config that carries the window and top-k.

    vLLM's `hf_overrides` reach the target only, so what the drafter should do has to stand in its config.
    """
    config = read_config(source)
    if WINDOW in values and text_config(config).get("sliding_window"):
        text_config(config)["sliding_window"] = values[WINDOW]
    if TOP_K in values:
        config["centroid_intermediate_top_k"] = values[TOP_K]
    new = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    for path in source.iterdir():
        if path.name != "config.json":
            (new / path.name).symlink_to(path.resolve())
    (new / "config.json").write_text(json.dumps(config, indent=2))
    shutil.rmtree(out, ignore_errors=True)
    new.replace(out)
    return out


def server_options(manifest: Mapping[str, Any], target: str, drafter: str | None) -> dict[str, Any]:
    """The arguments of vLLM that a manifest stands for, by name: all that decides what is decoded, and how fast.

    Args:
        manifest: as it was read.
        target: folder or hub id of the model.
        drafter: folder of the drafter with the manifest's values in its config, or None where none is needed.
    """
    env = manifest["env"]
    options: dict[str, Any] = {
        "model": target,
        "served_model_name": manifest["served_model_name"],
        "host": HOST,
        "port": manifest["port"],
        **{name: env[name.upper()] for name in ARGS_WITH_KEYS if name.upper() in env},
        **json.loads(env["ENGINE_ARGS"]),
    }
    if "HF_OVERRIDES" in env:
        options["hf_overrides"] = json.loads(env["HF_OVERRIDES"])
    if "SPECULATIVE_CONFIG" in env:
        of_drafter = {"model": drafter} if drafter is not None else {}
        options["speculative_config"] = json.loads(env["SPECULATIVE_CONFIG"]) | of_drafter
    return options


def server_arguments(manifest: Mapping[str, Any], target: Path, drafter: Path | None) -> list[str]:
    """The arguments of the server that answers for a manifest: vLLM's, and what reads the knobs back."""
    own = {
        "worker_extension_cls": "search.engine.readback.ReadBack",
        "middleware": "search.engine.readback.EffectiveKnobs",
    }
    options = server_options(manifest, str(target), None if drafter is None else str(drafter))
    return flags({**options, **own})


def flags(options: Mapping[str, Any]) -> list[str]:
    """Options by name as the words of a command line."""
    return [word for name, value in options.items() for word in _flag(name, value)]


def _flag(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if value is True:
        return [flag]
    if value is False:
        return ["--no-" + name.replace("_", "-")]
    return [flag, json.dumps(value) if isinstance(value, dict | list) else str(value)]


def _check_port(port: int) -> None:
    """End with a sentence where another program has the port: now, and not when the model is loaded."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError) as error:
            sys.exit(f"error: Port {port} cannot be listened at ({error}): choose another with --port.")


def _checked(model: str, expected: str | None) -> Path:
    """The model's folder, if it holds the files that were measured."""
    try:
        folder = model_folder(model)
        found = file_hash(folder)
    except (EngineError, OSError) as error:
        sys.exit(f"error: {error}")
    if expected is not None and found != expected:
        sys.exit(f"error: {model} is not the model that was measured (hash {found}, evidence says {expected}).")
    return folder


def _warm_up_or_end(manifest: Mapping[str, Any], port: int, vocabulary: int, api_key: str | None) -> None:
    """Warm up; a server that cannot be is ended, as it would answer nobody."""
    try:
        _warm_up(manifest, port, vocabulary, api_key)
    except Exception as error:
        print(f"error: The warm-up failed: {error}", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)


def _warm_up(manifest: Mapping[str, Any], port: int, vocabulary: int, api_key: str | None) -> None:
    """Send the manifest's warm-up prompts (random tokens) once the server answers; nobody else is answered before."""
    from search.engine.readback import WARM_UP_HEADER, WARM_UP_PASS, warm

    own = {WARM_UP_HEADER: WARM_UP_PASS, "Content-Type": "application/json"}
    if api_key:
        own["Authorization"] = f"Bearer {api_key}"
    env = manifest["env"]
    address = f"http://{HOST}:{port}"
    deadline = time.monotonic() + READY_WAIT_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(urllib.request.Request(f"{address}/health", headers=own), timeout=5):
                break
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    draw = random.Random(int(env["WARMUP_SEED"]))
    prompts = int(env["WARMUP_NUM_PROMPTS"]) if env["WARMUP_BRIDGE"] == "1" else 0
    for _ in range(prompts):
        body = {
            "model": manifest["served_model_name"],
            "prompt": [draw.randrange(vocabulary) for _ in range(WARMUP_PROMPT_TOKENS)],
            "max_tokens": int(env["WARMUP_MAX_TOKENS"]),
            "temperature": 0.0,
        }
        request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(), own)
        with urllib.request.urlopen(request, timeout=600):
            pass
    warm.set()
    print(f"Warm-up done: {prompts} prompts.", flush=True)
