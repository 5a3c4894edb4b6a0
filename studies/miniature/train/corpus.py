"""Collect the training text: the standard library and pinned, permissively licensed packages, without their tests.

    python corpus.py --work DIR

In: packages.txt (name==version a line), fetched with `pip download`. Out: DIR/train.jsonl and DIR/held_out.jsonl,
lines {path, text}, and corpus.json beside this file: what was used, under which licence, and the hash of the text. A
package whose metadata names a copyleft licence, or none, stops the run.
"""

import argparse
import ast
import hashlib
import json
import platform
import re
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import BytesParser
from pathlib import Path

HERE = Path(__file__).parent
SKIP = re.compile(
    r"(^|/)(tests?|testing|conftest|test_[^/]*|[^/]*_test|idlelib|lib2to3|site-packages|turtledemo|_vendor|vendored?)(/|\.py$|$)"
)
MIN_CHARS, MAX_CHARS = 400, 300_000
MAX_PACKAGE_CHARS = 14_000_000
HELD_OUT_PERCENT = 5
PERMISSIVE = re.compile(r"MIT|BSD|Apache|PSF|Python Software Foundation|ISC|Unlicense|HPND", re.I)


def fetch(wheels: Path) -> list[Path]:
    """Wheels of every package in packages.txt, downloaded unless they are there already."""
    wheels.mkdir(parents=True, exist_ok=True)
    pinned = [line.strip() for line in (HERE / "packages.txt").read_text().splitlines() if line.strip()]
    found = []
    for pin in pinned:
        name, version = pin.split("==")
        pattern = f"{re.sub('[-_.]+', '_', name)}-{version}-*.whl"
        if not (match := _match(wheels, pattern)):
            subprocess.run(
                [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", wheels, pin],
                check=True,
            )
            match = _match(wheels, pattern)
        found.append(match[0])
    return found


def licence_of(wheel: zipfile.ZipFile) -> str:
    """The licence that a wheel's metadata states: expression, classifiers or the field's first line."""
    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    meta = BytesParser().parsebytes(wheel.read(name))
    classifiers = [c.split(" :: ")[-1] for c in meta.get_all("Classifier", []) if c.startswith("License ::")]
    stated = (
        meta.get("License-Expression") or "; ".join(classifiers) or (meta.get("License") or "").strip().split("\n")[0]
    )
    if not stated:
        texts = [n for n in wheel.namelist() if re.search(r"dist-info/.*LICEN[CS]E", n)]
        stated = " ".join(wheel.read(texts[0]).decode(errors="replace").split()[:12]) if texts else ""
    return stated


def sources(wheels: list[Path]):
    """Yield (path, text) of every usable file, standard library first, and fill `used` with packages."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root).as_posix()
        if not SKIP.search(relative):
            yield "python", f"python/{relative}", path.read_bytes()
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as z:
            for name in sorted(z.namelist()):
                if name.endswith(".py") and not SKIP.search(name):
                    yield wheel.name, f"{wheel.name.split('-')[0]}/{name}", z.read(name)


def usable(raw: bytes) -> str | None:
    """The file's text, if it is Python of a sensible size written by hand as far as its lines tell."""
    try:
        text = raw.decode("utf-8").replace("\r\n", "\n")
        if not MIN_CHARS <= len(text) <= MAX_CHARS or max(map(len, text.split("\n"))) > 1000:
            return None
        ast.parse(text)
    except (UnicodeDecodeError, SyntaxError, ValueError, RecursionError):
        return None
    return text


def main() -> None:
    """Fetch, filter and split the text, and write its manifest."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True)
    work = parser.parse_args().work
    wheels = fetch(work / "wheels")

    packages = [{"name": "python", "version": platform.python_version(), "licence": "PSF-2.0"}]
    for path in wheels:
        with zipfile.ZipFile(path) as z:
            licence = licence_of(z)
        name, version = path.name.split("-")[:2]
        if not PERMISSIVE.search(licence) or re.search(r"\bA?L?GPL", licence):
            raise SystemExit(
                f"{name} {version}: licence {licence!r} is not one this corpus takes; remove it from packages.txt"
            )
        packages.append({"name": name, "version": version, "licence": licence})

    seen: set[str] = set()
    per_package: dict[str, int] = {}
    digest = hashlib.sha256()
    count = {"train": [0, 0], "held_out": [0, 0]}
    with open(work / "train.jsonl", "w") as train, open(work / "held_out.jsonl", "w") as held_out:
        for package, path, raw in sources(wheels):
            text = usable(raw) if per_package.get(package, 0) < MAX_PACKAGE_CHARS else None
            key = hashlib.sha256(raw).hexdigest()
            if text is None or key in seen:
                continue
            seen.add(key)
            per_package[package] = per_package.get(package, 0) + len(text)
            digest.update(key.encode())
            # The content decides the half, so that adding a package moves no file from one to the other.
            held = int(key[:8], 16) % 100 < HELD_OUT_PERCENT
            (held_out if held else train).write(json.dumps({"path": path, "text": text}) + "\n")
            count["held_out" if held else "train"][0] += 1
            count["held_out" if held else "train"][1] += len(text)
    manifest = {
        "packages": packages,
        **{half: {"files": files, "characters": characters} for half, (files, characters) in count.items()},
        "sha256": digest.hexdigest(),
    }
    (HERE / "corpus.json").write_text(json.dumps(manifest, indent=1) + "\n")
    print(json.dumps({k: v for k, v in manifest.items() if k != "packages"}))


def _match(folder: Path, pattern: str) -> list[Path]:
    return [p for p in sorted(folder.glob("*.whl")) if Path(p.name.lower()).match(pattern.lower())]


if __name__ == "__main__":
    main()
