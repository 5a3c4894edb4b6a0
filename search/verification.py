"""What `search.verify` checks, and when a claim counts as borne out."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from search import gate, served
from search.agreement import TOP
from search.claim import TOLERANCE, claim
from search.data import GATE, HELD_OUT, Prompt, Record, content_hash, read_records, read_tasks
from search.endpoint import Endpoint, EndpointError
from search.engine.protocol import EngineError
from search.errors import UsageError
from search.folder import PROMPTS, RECORDS, REFERENCE, TASKS, manifest_hash, read_manifest, read_reference
from search.gates import WHOLE, Finding
from search.identity import Plain, compare_tokens
from search.knobs import DRAFTS, drafts_as_asked
from search.modelfiles import file_hash, model_folder
from search.sources import GivenPrompt, read_given_prompts
from search.spec import LimitSpec

SAME_PPL = 1e-3  # relative: what rounding moves a perplexity by between two builds of one engine
SAME_SHARE = 0.02  # what near ties may move a share of tokens or tasks by, on another machine; at least one task
SAME_KL, SAME_KL_SHARE = 1e-3, 0.1  # the same of a divergence: nats a token, or a share of it
SAME_MACHINE = (0.7, 1.4)  # speed, relative to the claim's machine, that a claim can be carried over
PLAIN_PROMPTS = 32  # whose tokens are held against plain greedy decoding

Say = Callable[[str], None]


@dataclass
class Verification:
    """Every check as what, claim, measured, verdict; `reasons` are those that did not hold."""

    checks: list[dict[str, Any]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether every claim was borne out."""
        return not self.reasons

    def check(self, what: str, claim: Any, measured: Any, *, good: bool, reason: str) -> None:
        """Note one check; a bad one with its reason."""
        verdict = "holds" if good else "does not hold"
        self.checks.append({"what": what, "claim": claim, "measured": measured, "verdict": verdict})
        if not good:
            self.reasons.append(reason)


def verify(folder: Path, prompts_file: Path | None, records_file: Path | None, say: Say) -> Verification:
    """Check a folder: what it holds, then what it does when served, then plain decoding beside it.

    Raises:
        UsageError: a file cannot be read, or the manifest lacks what every exported one has.
    """
    manifest = read_manifest(folder)
    evidence = manifest["evidence"]
    tokens = evidence["output_tokens"]
    claimed = evidence["tps"]["claimed"] if manifest["confirmed"] is True else None
    found = Verification()
    given = _held_out(read_given_prompts(prompts_file or folder / PROMPTS))
    concurrency = evidence.get("concurrency", 1)
    if len(given) < 2 * concurrency:
        raise UsageError(
            f"{prompts_file or folder / PROMPTS} holds {len(given)} prompts: no speed can be told from fewer than "
            f"{'two' if concurrency == 1 else f'two waves of {concurrency}'}."
        )
    records = read_records(records_file) if records_file else read_records(folder / RECORDS)
    _check_files(found, folder, manifest)
    if claimed is None:
        found.check("confirmed", "–", "–", good=False, reason="The manifest is not confirmed: it claims nothing.")
    if found.reasons:
        return found
    logs = folder / "logs"
    try:
        say("Starting the folder's own server …")
        with Endpoint(folder, logs / "verify.log", LimitSpec()) as endpoint:
            prompts = [_tokenised(p, endpoint) for p in given]
            own: dict[str, Any] = {
                "folder": folder,
                "own_prompts": prompts_file is None,
                "own_records": records_file is None,
            }
            speed = _check_served(found, endpoint, manifest, prompts, records, tokens, say, **own)
        if evidence["effective"].get(DRAFTS):
            say("Starting the same model without drafts …")
            with tempfile.TemporaryDirectory(prefix="vllm-pareto-") as scratch:
                plain_folder = _without_drafts(folder, manifest, Path(scratch) / "plain")
                with Endpoint(plain_folder, logs / "verify-plain.log", LimitSpec()) as endpoint:
                    _check_tokens(found, endpoint, speed.tokens, prompts[:PLAIN_PROMPTS], tokens)
    except EndpointError as error:
        found.check("served", "answers", "failed", good=False, reason=str(error))
    return found


def _held_out(prompts: Sequence[GivenPrompt]) -> list[GivenPrompt]:
    return [p for p in prompts if p.split == HELD_OUT] or list(prompts)


def _tokenised(given: GivenPrompt, endpoint: Endpoint) -> Prompt:
    """A prompt's token ids: as they stand, or those that the server makes of its text."""
    tokens = given.content if isinstance(given.content, tuple) else tuple(endpoint.tokenize(given.content))
    return Prompt(given.id, given.split, tokens)


def _check_files(found: Verification, folder: Path, manifest: Mapping[str, Any]) -> None:
    hashes = manifest["evidence"]["hashes"]
    speculation = json.loads(manifest["env"].get("SPECULATIVE_CONFIG", "null"))
    drafter = speculation.get("model") if speculation else None
    actual = {
        "manifest": ("manifest.json", manifest_hash(manifest)),
        "prompts": ("the prompts file", content_hash(folder / PROMPTS)),
        "records": ("the records file", content_hash(folder / RECORDS)),
        "model": (f"the model {manifest['model_id']}", _model_hash(manifest["model_id"])),
        "drafter": (f"the drafter {drafter}", _model_hash(drafter) if drafter else None),
    }
    for name, file in (("tasks", TASKS), ("reference", REFERENCE)):
        if name in hashes:
            there = (folder / file).is_file()
            actual[name] = (f"the file {file}", content_hash(folder / file) if there else None)
    for name, (what, value) in actual.items():
        expected = hashes.get(name)
        found.check(
            f"hash of {name}",
            expected,
            value,
            good=value == expected,
            reason=f"{what} is not what was measured: its hash is {value}, the evidence says {expected}.",
        )


def _check_served(
    found: Verification,
    endpoint: Endpoint,
    manifest: Mapping[str, Any],
    prompts: Sequence[Prompt],
    records: Sequence[Record],
    tokens: int,
    say: Say,
    *,
    folder: Path,
    own_prompts: bool,
    own_records: bool,
) -> served.Served:
    evidence = manifest["evidence"]
    name, expected = manifest["served_model_name"], evidence["effective"]
    found.check("model name", name, endpoint.model, good=endpoint.model == name, reason=f"It serves {endpoint.model}.")
    effective = endpoint.effective()
    wrong = {k: v for k, v in effective.items() if expected.get(k) != v}
    found.check(
        "knobs in effect",
        _knobs({k: expected.get(k) for k in effective}),
        _knobs(effective),
        good=not wrong,
        reason=f"Served, it runs {_knobs(effective)}; the evidence was measured at {_knobs(expected)}.",
    )
    concurrency = evidence.get("concurrency", 1)
    at_once = f", {concurrency} at a time" if concurrency > 1 else ""
    say(f"Timing {len(prompts)} prompts{at_once} …")
    speed = served.time_prompts(endpoint, prompts, tokens, lambda *_: None, concurrency=concurrency)
    machine_s, slope = evidence["machine_s"], evidence["pace_elasticity"]
    measured = claim([speed.at(machine_s, slope)], concurrency * tokens)
    raw = claim([speed.passes], concurrency * tokens)
    claimed = evidence["tps"]["claimed"]
    now_s = speed.pace_s
    say(
        f"As timed {raw.mean:.1f} tok/s; a first token takes {now_s * 1e3:.1f} ms, and took {machine_s * 1e3:.1f} ms "
        f"when the claim was measured; 1 % more there was {slope:.1f} % more for all tokens. On the machine as it was "
        f"then: {measured.mean:.1f} tok/s."
    )
    share, pace = measured.mean / claimed, (machine_s / now_s) ** slope
    found.check(
        "pace of the machine",
        "1",
        f"{pace:.2f}",
        good=SAME_MACHINE[0] <= pace <= SAME_MACHINE[1],
        reason=f"This machine is {pace:.2f} × as fast as the one the claim was measured on: it cannot be checked here.",
    )
    found.check(
        "tokens a second" + ("" if own_prompts else " (other prompts)"),
        f"{claimed:.1f}",
        f"{measured.mean:.1f} ({share - 1:+.1%})",
        good=share >= 1 - TOLERANCE,
        reason=f"It makes {measured.mean:.1f} tokens a second, {1 - share:.1%} less than the {claimed:.1f} it claims.",
    )
    drafts, speculation = expected.get(DRAFTS, 0), json.loads(manifest["env"].get("SPECULATIVE_CONFIG", "{}"))
    found.check(
        "drafts a step",
        drafts,
        f"{speed.drafts_a_step:g}",
        good=drafts_as_asked(speed.drafts_a_step, drafts, speculation.get("method")),
        reason=f"It drafts {speed.drafts_a_step:g} tokens a step, not {drafts}.",
    )
    gate_records = [r for r in records if r.split == GATE] or list(records)
    say(f"Scoring {len(gate_records)} records …")
    claims = evidence.get("gates") or {}
    agreement = own_records and ("top1" in claims or "kl" in claims)
    scores = served.score_records(endpoint, gate_records, lambda *_: None, TOP if agreement else 0)
    _check_ppl(found, evidence, gate.perplexity(scores.values()), own_records=own_records)
    limits = {name: claims[name]["limit"] for name in claims}
    if agreement:
        try:
            findings = served.agreement_gates(read_reference(folder), scores, limits)
        except ValueError as error:
            raise UsageError(f"{folder / REFERENCE} holds the distributions of other records: {error}.") from error
        for finding in findings:
            _check_gate(found, finding, claims[finding.gate]["figure"])
    if (asked := claims.get("exact")) is not None:
        tasks, stop = read_tasks(folder / TASKS), asked.get("stop", [])
        say(f"Asking {len(tasks)} tasks …")
        finding = served.task_gate(endpoint, tasks, asked["max_tokens"], stop, asked["limit"], lambda *_: None)
        _check_gate(found, finding, asked["figure"], least_off=1 / len(tasks))
    shift = served.path_shift(endpoint, prompts, tokens)
    found.check(
        "scored path is served path",
        f"within {served.SELF_SHIFT}",
        f"{shift:.4f} nats a token",
        good=shift <= served.SELF_SHIFT,
        reason=f"The tokens it generates score {shift:.3f} nats a token off what it said of them when it made them.",
    )
    return speed


def _check_ppl(found: Verification, evidence: Mapping[str, Any], ppl: float, *, own_records: bool) -> None:
    ceiling, claimed = evidence["ceiling"], evidence["ppl"]
    found.check(
        "perplexity under the ceiling",
        f"{ceiling:.4f}",
        f"{ppl:.4f}",
        good=ppl <= ceiling,
        reason=f"Its perplexity is {ppl:.4f}, over the ceiling of {ceiling:.4f}.",
    )
    if own_records:
        found.check(
            "perplexity",
            f"{claimed:.4f}",
            f"{ppl:.4f}",
            good=abs(ppl / claimed - 1) <= SAME_PPL,
            reason=f"Its perplexity is {ppl:.4f}; the evidence says {claimed:.4f} on the same records.",
        )


def _check_gate(found: Verification, finding: Finding, claimed: float, least_off: float = 0.0) -> None:
    """Hold a gate's served figure against its limit and against the claim, from which rounding may move it a little."""
    share = finding.gate != "kl"
    found.check(
        f"gate {finding.gate}",
        f"{'≥' if share else '≤'} {finding.limit:.4f}",
        f"{finding.figure:.4f}",
        good=finding.outcome == "under",
        reason=f"Served, {finding.reason}.",
    )
    off = max(SAME_SHARE, least_off) if share else max(SAME_KL, SAME_KL_SHARE * claimed)
    found.check(
        f"figure of gate {finding.gate}",
        f"{claimed:.4f}",
        f"{finding.figure:.4f}",
        good=abs(finding.figure - claimed) <= off + WHOLE,
        reason=f"Its figure of gate {finding.gate} is {finding.figure:.4f}; the evidence says {claimed:.4f}.",
    )


def _check_tokens(
    found: Verification,
    endpoint: Endpoint,
    tokens: Mapping[str, Sequence[int]],
    prompts: Sequence[Prompt],
    output_tokens: int,
) -> None:
    plain = {}
    for prompt in prompts:
        shown = endpoint.complete(prompt.token_ids, output_tokens, show=True)
        plain[prompt.id] = Plain(shown.token_ids, shown.gaps)
    identity = compare_tokens(plain, tokens)
    bad = identity.unexplained
    found.check(
        "tokens are plain greedy ones",
        "but for near ties",
        f"{identity.rate:.0%} of {identity.prompts} identical, {len(identity.divergences) - len(bad)} near ties",
        good=not bad,
        reason=f"{len(bad)} of {identity.prompts} prompts leave plain greedy decoding, and no near tie explains it.",
    )


def _without_drafts(folder: Path, manifest: Mapping[str, Any], out: Path) -> Path:
    """A copy of the folder that serves the same model and window without drafter."""
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("logs", "drafter-*"))
    env = {k: v for k, v in manifest["env"].items() if k not in ("SPECULATIVE_CONFIG", "CENTROID_TOP_K")}
    (out / "manifest.json").write_text(json.dumps({**manifest, "env": env}))
    return out


def _knobs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in values.items())


def _model_hash(name: str) -> str | None:
    try:
        return file_hash(model_folder(name))
    except EngineError:
        return None
