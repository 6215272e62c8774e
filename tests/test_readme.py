"""Every command in README is run, or shown to be what another test runs."""

import asyncio
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from extproc.config.sections import Config
from extproc.local import StackSettings, run_stack

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.strip().splitlines()
]
# These run until they are stopped; tests/test_cli.py, tests/test_local.py and
# tests/test_demo.py run each of them through its life.
LASTING = ("extproc up ", "extproc serve ", "extproc demo")


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("extproc")])
def test_a_command_of_the_readme_is_accepted(command):
    arguments = shlex.split(command)[1:]
    if command.startswith(LASTING):
        arguments.append("--help")
    done = subprocess.run(
        [sys.executable, "-m", "extproc", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    for option in re.findall(r"--[a-z-]+", command):
        assert option in done.stdout or not command.startswith(LASTING)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make")])
def test_a_make_target_of_the_readme_exists(command):
    shown = subprocess.run(
        [*shlex.split(command), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout

    assert {"make run": "extproc up", "make test": "pytest"}[command] in shown


async def test_the_request_of_the_readme_is_answered(tmp_path):
    (curl,) = [c for c in COMMANDS if c.startswith("curl")]
    async with run_stack(StackSettings(port=0)) as stack:
        arguments = shlex.split(curl.replace("http://127.0.0.1:8080", stack.url))
        body = tmp_path / "answer"
        process = await asyncio.create_subprocess_exec(
            *arguments, "-sS", "-o", str(body), "-w", "%{http_code}", stdout=subprocess.PIPE
        )
        status, _ = await asyncio.wait_for(process.communicate(), 20)

    assert status == b"200"
    assert "chat.completion" in body.read_text()


def test_every_command_of_the_readme_is_one_of_these():
    assert len(COMMANDS) >= 8
    assert all(c.startswith(("extproc ", "make ", "curl ")) for c in COMMANDS)


def test_every_default_in_the_table_is_the_default():
    rows = re.findall(r"^\| `(\w+)\.(\w+)` \| `?([^`|]+?)`? \|", README, re.MULTILINE)
    config = Config()

    assert len(rows) >= 8
    for section, key, shown in rows:
        value = getattr(getattr(config, section), key)
        assert type(value)(shown) == value
