"""An exported folder, served in a process of its own and asked over HTTP, as a stranger would."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import httpx
import psutil

from search.agreement import pack
from search.engine.group import Ledger, ProcessGroup
from search.errors import SearchError
from search.gate import RecordScore
from search.secrets import redact
from search.sources import Conversation
from search.spec import LimitSpec

T = TypeVar("T")
END_PATIENCE_S = 10.0
WARM = "Warm-up done"  # what search.serving prints then
# All that a served folder may know of who started it.
PASSED_ON = (
    *("PATH", "HOME", "USER", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN", "HF_ENDPOINT", "HTTPS_PROXY", "https_proxy", "NO_PROXY"),
    *("XDG_CACHE_HOME", "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR"),
)


def served_environment() -> dict[str, str]:
    """The environment of a served folder: PASSED_ON, and the folders that this process has its packages from.

    A server runs in its own folder: relative ones are made absolute, and a checkout that is not installed, found as
    the folder where a command was typed, is named.
    """
    found = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    folders = [Path(folder).absolute() for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    checkout = Path(__file__).resolve().parents[1]
    if checkout == Path.cwd() and checkout not in folders:
        folders.append(checkout)
    return found | ({"PYTHONPATH": os.pathsep.join(map(str, folders))} if folders else {})


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
    """A context manager: entering starts `python serve.py` in `folder` and waits until it is warm.

    Args:
        folder: what search.export wrote.
        log: file for what the server prints.
        limits: how long it may take to be ready (`build_s`), to be measured (`confirm_s`), and be silent (`stall_s`).
        ledger: told of its processes.
    """

    def __init__(self, folder: Path, log: Path, limits: LimitSpec, ledger: Ledger | None = None) -> None:
        self._folder = folder
        self._log = log
        self._limits = limits
        self._ledger = ledger
        self._group: ProcessGroup | None = None
        self._deadline = math.inf
        self.model = ""

    def __enter__(self) -> Endpoint:
        """Start the server.

        Raises:
            EndpointError: it ended or was not ready in time; with its last words.
        """
        port = _free_port()
        self._log.unlink(missing_ok=True)
        env = served_environment()
        command = [sys.executable, "serve.py", "--port", str(port)]
        self._group = ProcessGroup(command, self._log, env, "server", self._ledger, cwd=self._folder)
        no_limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, limits=no_limits)
        try:
            self._wait()
            self._check_listener(port)
            self._deadline = time.monotonic() + self._limits.confirm_s
            self.model = self._get("/v1/models")["data"][0]["id"]
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
        if self._group is not None:
            self._group.end(patience_s=END_PATIENCE_S)
        self._group = None

    def effective(self) -> dict[str, Any]:
        """The knobs as they act in the server."""
        found: dict[str, Any] = self._get("/effective")
        return found

    def draft_counts(self) -> tuple[int, int]:
        """Verify steps with drafts, and tokens drafted in them, since the server started."""
        drafts, tokens = self._counters("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total")
        return drafts, tokens

    def cached_tokens(self) -> int:
        """Tokens of prompts that were found in the prefix cache since the server started."""
        (cached,) = self._counters("vllm:prefix_cache_hits_total")
        return cached

    def _counters(self, *names: str) -> list[int]:
        """The server's counters of these names; one that it does not have is 0."""

        def count(text: str) -> list[int]:
            lines = text.splitlines()
            return [sum(int(float(x.rsplit(" ", 1)[1])) for x in lines if x.startswith(n)) for n in names]

        return self._ask("/metrics", None, lambda answer: count(answer.text))

    def tokenize(self, content: str | Conversation) -> list[int]:
        """Token ids of a text, or of a conversation in the model's chat template, ready to be answered.

        Raises:
            EndpointError: the model has no chat template, or the server refuses.
        """
        body: dict[str, Any] = {"model": self.model, "prompt": content}
        if isinstance(content, Conversation):
            messages = [{"role": turn.role, "content": turn.content} for turn in content.turns]
            body = {"model": self.model, "messages": messages, "add_generation_prompt": True}
        return self._ask("/tokenize", body, lambda answer: [int(token) for token in answer.json()["tokens"]])

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
            try:
                logprobs = [float(value) for value in choice["logprobs"]["token_logprobs"]]
                for candidates in choice["logprobs"]["top_logprobs"]:
                    first, second, *_ = sorted(candidates.values(), reverse=True)
                    gaps.append(first - second)
            except (KeyError, TypeError, ValueError) as error:
                raise EndpointError(
                    f"The server said nothing readable of how likely its tokens were: {error}."
                ) from error
        return Completion(token_ids, latency_s, logprobs, gaps)

    def complete_together(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[list[list[int]], float]:
        """Exactly `max_tokens` greedy tokens after each of the prompts, all asked for at the same time.

        Returns:
            Tokens by prompt, and the seconds from the first request to the last answer.

        Raises:
            EndpointError: another number of tokens came back.
        """
        with ThreadPoolExecutor(len(prompts)) as pool:
            started = time.perf_counter()
            found = list(pool.map(lambda prompt: self.complete(prompt, max_tokens), prompts))
            latency_s = time.perf_counter() - started
        return [one.token_ids for one in found], latency_s

    def score(self, context: Sequence[int], target: Sequence[int], top: int = 0) -> RecordScore:
        """Negative log-likelihood of `target` after `context`, from the served `prompt_logprobs`.

        Unless `top` is 0, with the distributions over so many likeliest tokens.

        Raises:
            EndpointError: a token has no log-probability.
        """
        tokens = [*context, *target]
        found = self._complete(tokens, {"max_tokens": 1, "prompt_logprobs": top}).get("prompt_logprobs") or []
        if len(found) != len(tokens):
            raise EndpointError(f"The server scored {len(found)} tokens of {len(tokens)}.")
        values = []
        for position in range(len(context), len(tokens)):
            entry = (found[position] or {}).get(str(tokens[position]))
            if entry is None or not math.isfinite(entry["logprob"]):
                raise EndpointError(f"The server gave no log-probability of token {position}.")
            values.append(float(entry["logprob"]))
        if not top:
            return RecordScore(-math.fsum(values), len(values))
        shown = [
            {int(token): float(one["logprob"]) for token, one in entry.items() if math.isfinite(one["logprob"])}
            for entry in found[len(context) :]
        ]
        return RecordScore(-math.fsum(values), len(values), distributions=pack(shown))

    def solve(self, prompt: str | Sequence[int], max_tokens: int, stop: Sequence[str]) -> str:
        """What is written greedily after `prompt`, until the model ends the text or writes a text of `stop`.

        A prompt that is a text becomes tokens with the special tokens that the tokenizer adds, as in the search.
        """
        body: dict[str, Any] = {"max_tokens": max_tokens, "add_special_tokens": True, "stop": list(stop)}
        return str(self._complete(prompt, body)["text"])

    def _complete(self, prompt: str | Sequence[int], body: dict[str, Any]) -> dict[str, Any]:
        given = prompt if isinstance(prompt, str) else list(prompt)
        fixed = {"model": self.model, "prompt": given, "temperature": 0.0, "add_special_tokens": False}
        return self._ask("/v1/completions", {**fixed, **body}, lambda answer: dict(answer.json()["choices"][0]))

    def _get(self, path: str) -> Any:
        return self._ask(path, None, httpx.Response.json)

    def _ask(self, path: str, body: dict[str, Any] | None, read: Callable[[httpx.Response], T]) -> T:
        """One request (a POST where there is a body), and what `read` finds in its answer."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise EndpointError(f"Measuring the server took longer than {self._limits.confirm_s:.0f} s.")
        timeout = min(left, self._limits.stall_s)
        try:
            answer = (
                self._http.get(path, timeout=timeout)
                if body is None
                else self._http.post(path, json=body, timeout=timeout)
            )
            answer.raise_for_status()
            return read(answer)
        except (httpx.HTTPError, KeyError, IndexError, TypeError, ValueError) as error:
            what = str(error) or type(error).__name__
            if isinstance(error, httpx.HTTPStatusError):
                what = f"{error.response.status_code}, {redact(error.response.text)[:500]}"
            raise EndpointError(
                f"The server did not answer {path} as it should: {what}. {self._last_words()}"
            ) from error

    def _wait(self) -> None:
        """Until the server is warm, in the time that it has, and with something new in its log now and then."""
        assert self._group is not None
        started = heard = time.monotonic()
        size = 0
        while WARM not in (text := self._log.read_text(errors="replace")):
            now = time.monotonic()
            if self._group.exit_code() is not None:
                raise EndpointError(f"The server ended before it was ready: {self._last_words()}")
            if now - started > self._limits.build_s:
                raise EndpointError(
                    f"The server was not ready after {self._limits.build_s:.0f} s. {self._last_words()}"
                )
            if len(text) != size:
                heard, size = now, len(text)
            elif now - heard > self._limits.stall_s:
                raise EndpointError(f"The server was silent for {self._limits.stall_s:.0f} s. {self._last_words()}")
            time.sleep(0.25)

    def _check_listener(self, port: int) -> None:
        """Make sure that whoever listens at the port is the server that was started, or a process of its."""
        assert self._group is not None
        for pid in self._group.members():
            with contextlib.suppress(psutil.Error):
                connections = psutil.Process(pid).net_connections(kind="tcp")
                if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections):
                    return
        raise EndpointError(f"Another program listens at port {port}, not the server that was started.")

    def _last_words(self) -> str:
        lines = [redact(x) for x in self._log.read_text(errors="replace").splitlines() if x.strip()]
        errors = [line for line in lines if line.startswith("error: ")]
        said = (errors or lines or ["it printed nothing"])[-1]
        return f"{said.removeprefix('error: ')} (log: {self._log})"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
