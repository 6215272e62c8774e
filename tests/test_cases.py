"""The table of cases names tests that exist, and leaves out no row."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROWS = re.findall(
    r"^\| (\d+)\*? \|.*\| (.*) \|$", (ROOT / "docs/cases.md").read_text(), re.MULTILINE
)


def test_every_case_names_tests_that_exist():
    assert [int(number) for number, _ in ROWS] == list(range(1, 37))
    for number, tests in ROWS:
        named = re.findall(r"`(\S+)::(\w+)`", tests)
        assert named, number
        for path, name in named:
            assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), (
                name
            )
