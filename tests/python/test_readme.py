"""Every code block of the README runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
SHELL = [
    line.split("#")[0].strip() for language, code in BLOCKS if language == "bash" for line in code.splitlines() if line.strip()
]


def test_every_block_has_a_language_that_is_tested():
    assert {language for language, _ in BLOCKS} <= {"python", "bash"}
    assert PYTHON and SHELL


@pytest.mark.parametrize("code", PYTHON, ids=lambda code: code.strip().splitlines()[-1][:40])
def test_python_block(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{code}\n{done.stderr}"


@pytest.mark.parametrize("line", SHELL)
def test_shell_line(line):
    words = shlex.split(line)
    if words[0] == "qla":
        done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    elif words[0] == "./dev":  # the verb exists; `./dev test` is what runs this
        usage = subprocess.run(["bash", str(ROOT / "dev"), "help"], capture_output=True, text=True, check=True).stdout
        assert f"./dev {words[1]}" in usage
    else:
        assert words == ["pip", "install", "."]  # `./dev wheel` builds and installs it in a clean environment


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text()):
        assert target.startswith("http") or (ROOT / target).exists(), f"README links to {target}, which is not there"


def test_measured_figures_are_the_tables():
    done = subprocess.run([sys.executable, str(ROOT / "tools/readme_figures.py"), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
