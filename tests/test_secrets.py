"""Secrets stay out of everything that is shown or stored."""

import subprocess
from pathlib import Path

import pytest

from search.errors import UsageError
from search.secrets import is_secret_name, redact
from search.spec import read_study
from search.store import open_engine, safe_url

TOKEN = "hf_" + "AbCdEfGhIjKlMnOpQrSt"


def test_passwords_tokens_and_secret_variables_are_hidden(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "correct horse battery")
    text = f"postgresql://me:pass@db/x {TOKEN} and correct horse battery at http://localhost:8000/v1"
    assert redact(text) == "postgresql://me:***@db/x *** and *** at http://localhost:8000/v1"


def test_counts_of_tokens_are_no_secrets(monkeypatch):
    monkeypatch.setenv("MAX_TOKENS", "12345678")
    assert redact("12345678 tokens") == "12345678 tokens"
    assert is_secret_name("hf_token") and is_secret_name("api_key") and is_secret_name("OPENAI_API_KEY")
    assert not is_secret_name("max_num_batched_tokens") and not is_secret_name("block_size")
    assert not is_secret_name("tokenizer") and not is_secret_name("skip_tokenizer_init")


def test_an_unreadable_url_is_refused_without_its_password():
    with pytest.raises(UsageError) as caught:
        safe_url("postgresql//me:hunter22@db/x://me:hunter22@")
    assert "hunter22" not in str(caught.value)
    with pytest.raises(Exception, match="cannot be written") as refused:
        open_engine("postgresql+nothing://me:hunter22@db/x")
    assert "hunter22" not in str(refused.value)


def test_a_study_file_may_hold_no_secret(edit_study):
    folder = edit_study("max_num_seqs: 1", f"hf_token: {TOKEN}")
    with pytest.raises(UsageError, match="engine.args.hf_token would store a secret") as caught:
        read_study(folder)
    assert TOKEN not in str(caught.value)


def test_after_a_search_no_file_holds_a_secret_of_the_environment(study_folder, python, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("DB_PASSWORD", "hunter22-hunter22")
    command = [python, "-m", "search.run", "--study", str(study_folder), "--engine", "simulated", "--trials", "5"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    said = [done.stdout, done.stderr]
    files = [path for path in Path(tmp_path).rglob("*") if path.is_file()]
    assert any(path.name == "study.db" for path in files)
    for content in [*said, *(path.read_bytes().decode(errors="replace") for path in files)]:
        assert TOKEN not in content and "hunter22-hunter22" not in content
