"""What must not be shown or stored: passwords in URLs, access tokens, and secrets in the environment."""

from __future__ import annotations

import os
import re

HIDDEN = "***"
_NAMES = re.compile(r"TOKEN(?!IZ)|SECRET|PASSW|API_?KEY|CREDENTIAL|PRIVATE_?KEY", re.IGNORECASE)
_TOKENS = re.compile(r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|ghp_[A-Za-z0-9]{16,}|AKIA[A-Z0-9]{12,})")
_URL_PASSWORD = re.compile(r"(?<=://)([^\s:/@]*):[^\s@/]+@")
LEAST_LENGTH = 8  # of a value that is told apart from words like "true"


def is_secret_name(name: str) -> bool:
    """Whether a setting of that name holds a secret (hf_token, api_key, …); counts like max_tokens do not."""
    return bool(_NAMES.search(name)) and not re.search(r"tokens\b", name, re.IGNORECASE)


def redact(text: str) -> str:
    """`text` with every secret in it replaced by ***."""
    for name, value in os.environ.items():
        if len(value) >= LEAST_LENGTH and is_secret_name(name):
            text = text.replace(value, HIDDEN)
    return _TOKENS.sub(HIDDEN, _URL_PASSWORD.sub(rf"\1:{HIDDEN}@", text))
