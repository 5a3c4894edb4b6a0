"""The messages between the search (parent) and a worker (child): one JSON line each.

The parent sends a request and reads exactly one reply. `Failed` may answer any request.
"""

from __future__ import annotations

from typing import Any

import msgspec

KnobValue = bool | int | float | str
Setting = dict[str, KnobValue]


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of all messages; on the wire the field `type` carries the class name."""


# Requests -------------------------------------------------------------------------------------------------


class Load(Message, frozen=True):
    """Build an engine that can take every value of the live knobs.

    `limits` holds the largest value each live knob may take. `args` are the arguments that all engines of a study
    share, `build_args` what this one has over them, and `build` the knobs behind that, which are read back.
    `speculation` is vLLM's speculative_config but for drafter and K, empty for a drafter that says itself what it is.
    `environment` was set before the worker started.
    """

    model: str
    drafter: str | None
    args: dict[str, Any]
    limits: Setting
    seed: int = 0
    build: Setting = {}
    build_args: dict[str, Any] = {}
    speculation: dict[str, Any] = {}
    environment: dict[str, str] = {}


class Apply(Message, frozen=True):
    """Put the live knobs to `setting`; `probe` is decoded so that K can be counted (not with 0 probe tokens)."""

    setting: Setting
    probe: list[int]
    probe_tokens: int


class Score(Message, frozen=True):
    """Score `target` after `context` (token ids), and show the `top` likeliest tokens at each token of the target."""

    record: str
    context: list[int]
    target: list[int]
    top: int = 0


class Decode(Message, frozen=True):
    """Decode exactly `max_tokens` greedy tokens after `prompt` (token ids), alone on the engine.

    With `show_tokens` the answer holds them, and how sure the model was of each; the latency is then none to quote.
    """

    prompt_id: str
    prompt: list[int]
    max_tokens: int
    show_tokens: bool = False


class DecodeTogether(Message, frozen=True):
    """Decode exactly `max_tokens` greedy tokens after each of `prompts` (token ids by prompt id), all at once.

    The answer is one `Decoded` under the id `wave`: its latency is wall time from the submission of all to the last
    token of any, its counts are sums over the prompts, and its hash is over all outputs in their order.
    """

    wave: str
    prompts: dict[str, list[int]]
    max_tokens: int


class Solve(Message, frozen=True):
    """Continue `prompt` greedily until the model ends the text or writes a text of `stop`, or for `max_tokens`.

    A prompt that is a text becomes tokens as the model's tokenizer makes them, with the special tokens it adds.
    """

    task: str
    prompt: str | list[int]
    max_tokens: int
    stop: list[str] = []


class Pace(Message, frozen=True):
    """Do some work that is always the same, and say how long it took: how fast the processor is, whatever is built."""


class Sample(Message, frozen=True):
    """Continue `prompt` (token ids) by sampling until the model ends the text, or for `max_tokens`."""

    prompt: list[int]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int


# Replies --------------------------------------------------------------------------------------------------


class Loaded(Message, frozen=True):
    """The engine stands. `native` is what the model itself declares for each knob.

    `step_bytes` are the weights that every decoding step reads, at the least, and `bandwidth` is the peak of the memory
    that they lie in (bytes a second); None where they are not known. With `variable_drafts` a step may draft fewer
    tokens than K, or none.
    """

    native: Setting
    vocabulary: int
    model_hash: str
    drafter_hash: str | None
    build_hash: str
    environment: dict[str, Any]
    start_s: float
    step_bytes: int | None = None
    bandwidth: float | None = None
    variable_drafts: bool = False


class Applied(Message, frozen=True):
    """The setting as read back from the layers, modules and counters that act."""

    effective: Setting
    apply_s: float


class Scored(Message, frozen=True):
    """Negative log-likelihood (nats) summed over the record's target tokens.

    Where likeliest tokens were asked for, `top_ids[i]` are those in place of target token i, that token always among
    them, and `top_logprobs[i]` their log-probabilities (nats).
    """

    record: str
    nll: float
    tokens: int
    score_s: float
    top_ids: list[list[int]] = []
    top_logprobs: list[list[float]] = []


class Decoded(Message, frozen=True):
    """One timed prompt or wave. `latency_s` is wall time from submission to the last token, prefill included.

    `drafts` counts verify steps that carried drafts, `draft_tokens` the tokens drafted in them, and
    `accepted_per_pos[i]` how often the draft at position i was accepted. `distinct_4grams` is a share of the output's.

    `first_token_s` is, for each prompt, the time from submission to its first token; `waits_s` are those between one
    arrival of tokens and the next of the same prompt: as many tokens as a step accepts arrive together. `peak_bytes`
    is the most memory that the worker held meanwhile, `energy_j` what the device took. Empty or None: not known.
    """

    prompt_id: str
    tokens: int
    latency_s: float
    output_hash: str
    drafts: int
    draft_tokens: int
    accepted_per_pos: list[int]
    distinct_4grams: float
    token_ids: list[int] = []
    gaps: list[float] = []
    first_token_s: list[float] = []
    waits_s: list[float] = []
    peak_bytes: int | None = None
    energy_j: float | None = None


class Solved(Message, frozen=True):
    """The text that was written after a task's prompt, without special tokens and without the text that stopped it."""

    task: str
    text: str


class Paced(Message, frozen=True):
    """Seconds that the work took."""

    seconds: float


class Sampled(Message, frozen=True):
    """The tokens that were sampled, without one that ends the text."""

    token_ids: list[int]


class Failed(Message, frozen=True):
    """The request could not be carried out: `kind` is one of FAILURE_KINDS, `reason` one sentence."""

    kind: str
    reason: str


FAILURE_KINDS = ("bad-setting", "out-of-memory", "mismatch", "impossible-figure", "crash", "hang", "infrastructure")


class EngineError(Exception):
    """An engine's refusal or failure; `kind` is one of FAILURE_KINDS."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


Request = Load | Apply | Score | Decode | DecodeTogether | Solve | Sample | Pace
Reply = Loaded | Applied | Scored | Decoded | Solved | Sampled | Paced | Failed

_encoder = msgspec.json.Encoder()
_request_decoder = msgspec.json.Decoder(Request)
_reply_decoder = msgspec.json.Decoder(Reply)


def encode(message: Message) -> bytes:
    """One message as one line."""
    return _encoder.encode(message) + b"\n"


def decode_request(line: bytes) -> Request:
    """The request in `line`; raises msgspec.ValidationError if it is none."""
    return _request_decoder.decode(line)


def decode_reply(line: bytes) -> Reply:
    """The reply in `line`; raises msgspec.ValidationError if it is none."""
    return _reply_decoder.decode(line)
