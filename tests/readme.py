"""The README's shell commands."""

import re
import shlex
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def commands():
    """Every command in a sh block of the README, without its comment."""
    blocks = re.findall(r"^```sh\n(.*?)^```", README.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [line.split("  #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


def command(start):
    """The one command that starts so, as a list of words."""
    (found,) = [line for line in commands() if line.startswith(start)]
    return shlex.split(found)
