"""What the README tells a person to type is what CI runs, and its code runs."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def test_ci_runs_the_install_and_test_commands():
    commands = [command.strip() for block in blocks("bash") for command in block.split("&&")]
    ci = (ROOT / ".ci" / "run").read_text().replace("-q ", "").replace(" -q", "")
    assert 'pip install -c constraints.txt -e ".[test]"' in commands and "pytest" in commands
    assert 'pip install -c constraints.txt -e ".[test]"\npytest\n' in ci


def test_the_code_runs(capsys):
    (code,) = blocks("python")
    exec(code, {})
    assert len(capsys.readouterr().out) > 100


def test_every_link_leads_somewhere():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("http")]
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]
