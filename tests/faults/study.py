"""The synthetic study, as tests/conftest.py makes it, with limits that a hang reaches soon."""

from tests.conftest import STUDY, write_texts


def write_study(folder):
    folder.mkdir()
    (folder / "study.yaml").write_text(STUDY + "limits: {stall_s: 4}\n")
    write_texts(folder)
    return folder
