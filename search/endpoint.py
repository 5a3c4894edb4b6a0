"""An exported folder, served in a process of its own and asked over HTTP, as a stranger would."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from search.engine.process import group_lives
from search.errors import SearchError
from search.gate import RecordScore

READY_S = 1800.0  # to load, compile and warm up
ANSWER_S = 300.0
WARM = "Warm-up done"  # what search.serving prints then
# All that a served folder may know of who started it.
PASSED_ON = (
    *("PATH", "HOME", "USER", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES"),
    *("HF_HOME", "HF_TOKEN", "HF_ENDPOINT", "XDG_CACHE_HOME", "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR"),
)


class EndpointError(SearchError):
    """The server did not start, went away, or answered what cannot be true."""


@dataclass(frozen=True)
class Completion:
    """One greedy completion: `latency_s` from request to answer, `logprobs` of its tokens where asked for."""

    token_ids: list[int]
    latency_s: float
    logprobs: list[float]
    gaps: list[float]


class Endpoint:
    """A context manager: entering starts `python serve.py` in `folder` and waits until it is warm."""

    def __init__(self, folder: Path, log: Path) -> None:
        self._folder = folder
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.model = ""

    def __enter__(self) -> Endpoint:
        """Start the server.

        Raises:
            EndpointError: it ended or was not ready in time; with its last words.
        """
        port = _free_port()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        env = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "serve.py", "--port", str(port)],
                cwd=self._folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=ANSWER_S, trust_env=False)
        try:
            self._wait()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """End the server and every process it started."""
        self._http.close()
        if self._process is None:
            return
        for sign, patience_s in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 30.0)):
            try:
                os.killpg(self._process.pid, sign)
            except ProcessLookupError:
                break
            deadline = time.monotonic() + patience_s
            while time.monotonic() < deadline and group_lives(self._process.pid):
                time.sleep(0.05)
        self._process.wait()
        self._process = None

    def effective(self) -> dict[str, Any]:
        """The knobs as they act in the server."""
        found: dict[str, Any] = self._get("/effective")
        return found

    def draft_counts(self) -> tuple[int, int]:
        """Verify steps with drafts, and tokens drafted in them, since the server started."""
        lines = self._http.get("/metrics").text.splitlines()
        names = ("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total")
        drafts, tokens = (sum(int(float(x.rsplit(" ", 1)[1])) for x in lines if x.startswith(n)) for n in names)
        return drafts, tokens

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a user's turn in the model's chat template, ready to be answered.

        Raises:
            EndpointError: the model has no chat template, or the server refuses.
        """
        body = {"model": self.model, "messages": [{"role": "user", "content": text}], "add_generation_prompt": True}
        try:
            answer = self._http.post("/tokenize", json=body)
            answer.raise_for_status()
            return [int(token) for token in answer.json()["tokens"]]
        except (httpx.HTTPError, KeyError, ValueError) as error:
            raise EndpointError(f"The server did not tokenize a conversation: {error}.") from error

    def complete(self, prompt: Sequence[int], max_tokens: int, *, show: bool = False) -> Completion:
        """Exactly `max_tokens` greedy tokens after `prompt`; with `show` how likely each was.

        Raises:
            EndpointError: another number of tokens came back.
        """
        body = {"max_tokens": max_tokens, "ignore_eos": True, "return_token_ids": True}
        if show:
            body |= {"logprobs": 2, "return_tokens_as_token_ids": True}
        started = time.perf_counter()
        choice = self._complete(prompt, body)
        latency_s = time.perf_counter() - started
        token_ids = list(choice.get("token_ids") or [])
        if len(token_ids) != max_tokens:
            raise EndpointError(f"The server returned {len(token_ids)} tokens where {max_tokens} were asked for.")
        logprobs, gaps = [], []
        if show:
            logprobs = [float(value) for value in choice["logprobs"]["token_logprobs"]]
            for candidates in choice["logprobs"]["top_logprobs"]:
                first, second, *_ = sorted(candidates.values(), reverse=True)
                gaps.append(first - second)
        return Completion(token_ids, latency_s, logprobs, gaps)

    def score(self, context: Sequence[int], target: Sequence[int]) -> RecordScore:
        """Negative log-likelihood of `target` after `context`, from the served `prompt_logprobs`.

        Raises:
            EndpointError: a token has no log-probability.
        """
        tokens = [*context, *target]
        found = self._complete(tokens, {"max_tokens": 1, "prompt_logprobs": 0}).get("prompt_logprobs") or []
        if len(found) != len(tokens):
            raise EndpointError(f"The server scored {len(found)} tokens of {len(tokens)}.")
        values = []
        for position in range(len(context), len(tokens)):
            entry = (found[position] or {}).get(str(tokens[position]))
            if entry is None or not math.isfinite(entry["logprob"]):
                raise EndpointError(f"The server gave no log-probability of token {position}.")
            values.append(float(entry["logprob"]))
        return RecordScore(-math.fsum(values), len(values))

    def _complete(self, prompt: Sequence[int], body: dict[str, Any]) -> dict[str, Any]:
        fixed = {"model": self.model, "prompt": list(prompt), "temperature": 0.0, "add_special_tokens": False}
        try:
            answer = self._http.post("/v1/completions", json={**fixed, **body})
            answer.raise_for_status()
            choice: dict[str, Any] = answer.json()["choices"][0]
        except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
            raise EndpointError(f"The server did not answer a completion: {error}. {self._last_words()}") from error
        return choice

    def _get(self, path: str) -> Any:
        try:
            answer = self._http.get(path)
            answer.raise_for_status()
            return answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise EndpointError(f"The server did not answer {path}: {error}. {self._last_words()}") from error

    def _wait(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise EndpointError(f"The server ended before it was ready: {self._last_words()}")
            if WARM in self._log.read_text(errors="replace"):
                self.model = self._get("/v1/models")["data"][0]["id"]
                return
            time.sleep(0.25)
        raise EndpointError(f"The server was not ready after {READY_S:.0f} s. {self._last_words()}")

    def _last_words(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error: ")]
        said = (errors or lines or ["it printed nothing"])[-1]
        return f"{said.removeprefix('error: ')} (log: {self._log})"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
