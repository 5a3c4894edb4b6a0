"""What acts in a served vLLM: a worker extension that reads it, and a middleware that answers with it.

Both are named on vLLM's command line (`--worker-extension-cls`, `--middleware`) by `search.serving`.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from search.engine.live import acting_values
from search.engine.protocol import Setting

ASGIMessage = MutableMapping[str, Any]


class ReadBack:
    """Mixed into vLLM's worker class; `collective_rpc("effective_knobs")` calls it."""

    model_runner: Any

    def effective_knobs(self) -> Setting:
        """Window, top-k and K as this worker's layers, modules and configuration hold them."""
        return acting_values(self.model_runner)


class EffectiveKnobs:
    """ASGI middleware: GET /effective answers with the first worker's effective knobs."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(
        self,
        scope: ASGIMessage,
        receive: Callable[[], Awaitable[ASGIMessage]],
        send: Callable[[ASGIMessage], Awaitable[None]],
    ) -> None:
        """Answer /effective; everything else goes on to vLLM."""
        if scope["type"] != "http" or scope["path"] != "/effective":
            await self._app(scope, receive, send)
            return
        client = scope["app"].state.engine_client
        body = json.dumps((await client.collective_rpc("effective_knobs"))[0]).encode()
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
