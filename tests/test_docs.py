"""What the documents say runs as they say."""

import doctest
import re
from pathlib import Path

import ep_a2a

ROOT = Path(__file__).resolve().parent.parent


def test_the_guided_tour_runs():
    found = doctest.testmod(ep_a2a)
    assert found.attempted >= 4
    assert found.failed == 0


def test_readme_is_short_and_names_the_two_commands():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    commands = [line.split("#")[0].strip() for line in lines if line.startswith("    bash ")]
    assert commands == ["bash launch/demo.sh", "bash launch/test.sh"]


def test_files_that_documents_name_exist():
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "design.md"):
        for name in re.findall(r"`((?:bench|docs|launch|tests|cuda|ep_a2a)/[\w./]+)`", document.read_text()):
            assert (ROOT / name).exists(), f"{document.name} names {name}"
