import json

import pytest

from search.data import read_conversations
from search.errors import UsageError


def test_a_conversation_is_its_first_human_turn(tmp_path):
    rows = [
        {"id": "a", "conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "first"}]},
        {"conversations": [{"from": "user", "value": "second"}, {"from": "gpt", "value": "…"}]},
    ]
    (tmp_path / "p.json").write_text(json.dumps(rows))
    assert read_conversations(tmp_path / "p.json") == {"a": "first", "1": "second"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[", "is not JSON"),
        ("[]", "holds no conversations"),
        ('{"a": 1}', "holds no conversations"),
        ('[{"conversations": [{"from": "gpt", "value": "x"}]}]', "conversation 0: it has no turn of a human"),
    ],
)
def test_a_file_of_no_conversations_is_named(tmp_path, text, says):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(UsageError, match=says):
        read_conversations(tmp_path / "p.json")
