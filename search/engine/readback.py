"""What acts in a served vLLM, knobs and patches: a worker extension that reads it, a middleware that answers with it.

Both are named on vLLM's command line (`--worker-extension-cls`, `--middleware`) by `search.serving`.
"""

from __future__ import annotations

import json
import os
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


class EffectiveKnobs:
    """ASGI middleware: GET /effective answers with the first worker's effective knobs, /patches with its patches."""

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
        if scope["type"] != "http" or scope["path"] not in self._ANSWERS:
            await self._app(scope, receive, send)
            return
        client = scope["app"].state.engine_client
        body = json.dumps((await client.collective_rpc(self._ANSWERS[scope["path"]]))[0]).encode()
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
