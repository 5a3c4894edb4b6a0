"""Whether a study's model, drafter, prompts and records fit together: everything that can be told before an engine.

Reads config.json of model and drafter, and no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from search.agreement import TOP
from search.data import Prompt, Record, Task
from search.engine.protocol import EngineError
from search.errors import UsageError
from search.knobs import TOP_K, WINDOW
from search.modelfiles import read_hub_config, text_config
from search.section import line_of
from search.spec import StudySpec

SUPPORTED_DRAFTER = "gemma4_assistant"


def check_inputs(spec: StudySpec) -> None:
    """Check a study against its model.

    Raises:
        UsageError: naming the key and line of the study file, or the prompt or record, and what does not fit.
    """
    check_concurrency(spec)
    check_texts(spec, check_models(spec))


def context_length(spec: StudySpec, model: Mapping[str, Any]) -> int:
    """Tokens that prompt and output may hold together; 0 where it cannot be told (vLLM takes words like auto, too)."""
    asked = spec.engine.args.get("max_model_len", model.get("max_position_embeddings"))
    return asked if isinstance(asked, int) and asked > 0 else 0


def check_concurrency(spec: StudySpec) -> None:
    """Check that an engine decodes as many prompts at once as the workload asks, and that they fill enough waves.

    Raises:
        UsageError: naming the key and line of the study file, and what does not fit.
    """
    spec.waves()
    spec.held_out_waves()
    wanted = spec.workload.concurrency
    allowed = {"engine.args.max_num_seqs": [spec.engine.args.get("max_num_seqs")]}
    allowed |= {f"knobs.{knob.name}": list(knob.values) for knob in spec.build_knobs if knob.name == "max_num_seqs"}
    for key, values in allowed.items():
        if too_few := [v for v in values if type(v) is int and v < wanted]:
            what = f"{too_few[0]} is under workload.concurrency ({wanted}), the prompts that are decoded at once"
            raise _error(spec, key, what)


def check_models(spec: StudySpec) -> dict[str, Any]:
    """Check model, drafter and ranges against each other; the language model's config.

    Raises:
        UsageError: naming the key and line of the study file, and what does not fit.
    """
    model = text_config(_config(spec, "engine.model", spec.engine.model))
    _check_window(spec, model)
    for method, config in spec.engine.speculation.items():
        if isinstance(config.get("model"), str):
            _config(spec, f"engine.speculation.{method}", config["model"])
    if spec.engine.drafter is not None:
        _check_drafter(spec, model, _config(spec, "engine.drafter", spec.engine.drafter))
    return model


def _config(spec: StudySpec, key: str, name: str) -> dict[str, Any]:
    try:
        return read_hub_config(name)
    except EngineError as error:
        raise _error(spec, key, str(error).rstrip(".")) from error


def _check_window(spec: StudySpec, model: Mapping[str, Any]) -> None:
    knob = next((k for k in spec.knobs if k.name == WINDOW), None)
    native = model.get("sliding_window")
    if knob is None:
        return
    if not native:
        raise _error(spec, f"knobs.{WINDOW}", f"{spec.engine.model_name} has no sliding window")
    if knob.largest > native:
        what = f"{knob.largest} is over the window of {native} that {spec.engine.model_name} was trained with"
        raise _error(spec, f"knobs.{WINDOW}.high", what)


def _check_drafter(spec: StudySpec, model: Mapping[str, Any], drafter: Mapping[str, Any]) -> None:
    if drafter.get("model_type") != SUPPORTED_DRAFTER:
        kind = drafter.get("model_type")
        what = f"a drafter of type {kind} is not supported yet; Gemma 4's assistants ({SUPPORTED_DRAFTER}) are"
        raise _error(spec, "engine.drafter", what)
    text = text_config(dict(drafter))
    for what, mine, theirs in (
        ("vocabulary", text.get("vocab_size"), model.get("vocab_size")),
        ("hidden size of its target", drafter.get("backbone_hidden_size"), model.get("hidden_size")),
    ):
        if mine is not None and mine != theirs:
            model_words = f"{spec.engine.model_name} has {theirs}"
            raise _error(
                spec, "engine.drafter", f"this drafter is another model's: its {what} is {mine}, {model_words}"
            )
    knob = next((k for k in spec.knobs if k.name == TOP_K), None)
    if not drafter.get("use_ordered_embeddings"):
        if knob is not None:
            raise _error(spec, f"knobs.{TOP_K}", "the drafter has no centroids (use_ordered_embeddings is off)")
        return
    centroids, vocabulary = drafter.get("num_centroids"), text.get("vocab_size")
    if not isinstance(centroids, int) or centroids < 1 or not isinstance(vocabulary, int) or vocabulary % centroids:
        what = f"its {centroids} centroids do not divide its vocabulary of {vocabulary}"
        raise _error(spec, "engine.drafter", what)
    if knob is not None and knob.largest > centroids:
        raise _error(spec, f"knobs.{TOP_K}.high", f"{knob.largest} is over the drafter's {centroids} centroids")


def check_texts(spec: StudySpec, model: Mapping[str, Any]) -> None:
    """Check prompts, records and tasks against the language model's config, and that distributions can be had.

    Raises:
        UsageError: naming the file, the prompt or record, and what does not fit.
    """
    most = spec.engine.args.get("max_logprobs", TOP)
    if spec.gate.agreement is not None and isinstance(most, int) and 0 <= most < TOP:
        what = f"{most} log-probabilities are too few: gate.agreement asks for {TOP}, which vLLM gives by default"
        raise _error(spec, "engine.args.max_logprobs", what)
    vocabulary = int(model["vocab_size"])
    context = context_length(spec, model)
    generated = spec.workload.output_tokens
    tasks = spec.gate.tasks
    texts: list[tuple[Path, str, Prompt | Record | Task, tuple[int, ...], int]] = [
        *(
            (spec.workload.prompts, "prompt", p, p.token_ids, generated)
            for p in spec.prompts() + spec.held_out_prompts()
        ),
        *((spec.gate.records, "record", r, r.context + r.target, 1) for r in spec.records() + spec.held_out_records()),
        *(
            (tasks.file, "task", t, t.prompt, tasks.max_tokens)
            for t in spec.tasks()
            if tasks is not None and isinstance(t.prompt, tuple)
        ),
    ]
    for path, what, text, tokens, more in texts:
        if max(tokens) >= vocabulary:
            raise UsageError(
                f"{path}, {what} {text.id}: token {max(tokens)} is beyond the vocabulary of {vocabulary} tokens: the "
                "file was made with another model's tokenizer."
            )
        if context and len(tokens) + more > context:
            raise UsageError(
                f"{path}, {what} {text.id}: {len(tokens)} tokens and {more} to generate do not fit the context of "
                f"{context} tokens. Shorten it, or raise engine.args.max_model_len."
            )


def _error(spec: StudySpec, key: str, what: str) -> UsageError:
    line = line_of(spec.path, key)
    return UsageError(f"{spec.path}, line {line}: {key}: {what}.")
