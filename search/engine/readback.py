"""What acts in a served vLLM, knobs and patches: a worker extension that reads it, a middleware that answers with it.

The middleware also answers nobody before the server is warm.

Both are named on vLLM's command line (`--worker-extension-cls`, `--middleware`) by `search.serving`.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from kernels import plugin
from search.engine.live import acting_values
from search.engine.protocol import EngineError, Setting

ASGIMessage = MutableMapping[str, Any]


class ReadBack:
    """Mixed into vLLM's worker class; `collective_rpc("effective_knobs")` calls its methods by name."""

    model_runner: Any

    def effective_knobs(self) -> Setting:
        """Window, top-k and K as this worker's layers, modules and configuration hold them.

        Raises:
            EngineError: they disagree, or a patch that the environment asks for does not act.
        """
        missing = plugin.missing(os.environ)
        if missing:
            raise EngineError("mismatch", plugin.NOT_LOADED.format(keys=" and ".join(missing)))
        return acting_values(self.model_runner)

    def active_patches(self) -> dict[str, dict[str, int]]:
        """Patches that act in this worker: calls that they took, and that they left to vLLM's own code."""
        return plugin.report()


warm = threading.Event()
"""Set once the warm-up's prompts have run."""
WARM_UP_PASS = secrets.token_hex(8)
"""What the warm-up's own requests carry in the header `WARM_UP_HEADER`."""
WARM_UP_HEADER = "x-warm-up"


class EffectiveKnobs:
    """ASGI middleware: GET /effective answers with the first worker's effective knobs, /patches with its patches.

    Until the server is warm all requests but the warm-up's own are answered with 503: a client that waits for
    /v1/models or /health to answer waits for the warm-up too.
    """

    _ANSWERS: Mapping[str, str] = {"/effective": "effective_knobs", "/patches": "active_patches"}

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(
        self,
        scope: ASGIMessage,
        receive: Callable[[], Awaitable[ASGIMessage]],
        send: Callable[[ASGIMessage], Awaitable[None]],
    ) -> None:
        """Answer these two; everything else goes on to vLLM."""
        if scope["type"] == "http" and not warm.is_set() and not _of_the_warm_up(scope):
            await _answer(send, 503, {"error": "warming up"})
        elif scope["type"] == "http" and scope["path"] in self._ANSWERS:
            client = scope["app"].state.engine_client
            try:
                status, answer = 200, (await client.collective_rpc(self._ANSWERS[scope["path"]]))[0]
            except Exception as error:  # vLLM raises no narrower one for what a worker refused
                status, answer = 500, {"error": str(error)}
            await _answer(send, status, answer)
        else:
            await self._app(scope, receive, send)


def _of_the_warm_up(scope: ASGIMessage) -> bool:
    return (WARM_UP_HEADER.encode(), WARM_UP_PASS.encode()) in scope["headers"]


async def _answer(send: Callable[[ASGIMessage], Awaitable[None]], status: int, document: Any) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(document).encode()})
