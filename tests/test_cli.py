import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from extproc.cli import main

ENVOY_FOLDER = Path(__file__).parents[1] / "envoy"
LIMIT_S = 20


@pytest.fixture
def file(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_text(content, encoding="utf-8")
        return str(path)

    return write


def start(*arguments):
    command = [sys.executable, "-m", "extproc", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def fetch(url):
    try:
        with urllib.request.urlopen(url, timeout=LIMIT_S) as response:  # noqa: S310 - our own URL
            return response.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_check_accepts_a_good_file_and_sums_it_up(file, capsys):
    path = file("good.yaml", "endpoints: ['10.0.0.1:8000']\nrouting: {policy: prefix}")

    assert main(["check", path]) == 0
    out = capsys.readouterr().out
    assert f"{path}: ok" in out
    assert "1 listed" in out
    assert "prefix" in out


def test_check_warns_of_a_config_without_endpoints(file, capsys):
    assert main(["check", file("empty.yaml", "")]) == 0
    assert "no endpoints" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        pytest.param(["check", "{bad}"], "routing.gamma: should be", id="check"),
        pytest.param(["serve", "--config", "{bad}"], "routing.gamma: should be", id="serve"),
        pytest.param(["check", "/none.yaml"], "/none.yaml: no such file", id="a missing file"),
        pytest.param(["explain", "/none.json"], "/none.json: no such file", id="no request"),
        pytest.param(["standin", "--cache-tokens", "1"], "at least one block", id="stand-in"),
        pytest.param(["up", "--endpoint", "https://a:1"], "should be http://host:port", id="https"),
        pytest.param(["up", "--envoy", "/none"], "no Envoy binary at '/none'", id="no Envoy"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(file, capsys, arguments, reason):
    bad = file("bad.yaml", "routing: {gamma: x}")

    assert main([argument.format(bad=bad) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("extproc: ")
    assert reason in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["check"],
        ["up", "--port", "70000"],
        ["up", "--policy", "x"],
        ["serve", "x"],
    ],
)
def test_a_wrong_command_line_is_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)

    assert caught.value.code == 2
    assert "usage: extproc" in capsys.readouterr().err


@pytest.mark.parametrize("snippet", [False, True])
def test_envoy_config_prints_the_shipped_files(snippet, capsys, monkeypatch):
    monkeypatch.chdir(ENVOY_FOLDER.parent)
    name = "ext_proc-snippet.yaml" if snippet else "bootstrap.yaml"
    command = ["envoy-config", "--config", "envoy/config.yaml", *["--snippet"][:snippet]]

    assert main(command) == 0
    assert capsys.readouterr().out == (ENVOY_FOLDER / name).read_text()


def test_explain_prints_the_decision(file, capsys):
    body = {"messages": [{"role": "user", "content": "hi"}]}
    config = file("c.yaml", "endpoints: ['10.0.0.1:8000']")

    assert main(["explain", file("r.json", json.dumps(body)), "--config", config]) == 0
    assert "tiered: 10.0.0.1:8000 (cold)" in capsys.readouterr().out


def test_output_that_nobody_reads_to_its_end_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "extproc", "envoy-config"]
    with os.fdopen(writer, "w") as closed:
        done = subprocess.run(
            command, stdout=closed, stderr=subprocess.PIPE, timeout=LIMIT_S, check=False
        )

    assert done.stderr == b""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_drains_at_a_signal(file, tmp_path, number):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = (
        f"listen: {{address: 'unix:{tmp_path}/s', drain_s: 0.2}}\n"
        f"metrics: {{address: '127.0.0.1:{port}'}}\n"
    )
    process = start("serve", "--config", file("c.yaml", config))
    lines = iter(process.stderr.readline, "")
    assert any("listening on" in line for line in lines)
    assert fetch(f"http://127.0.0.1:{port}/readyz") == 503
    process.send_signal(number)
    _, rest = process.communicate(timeout=LIMIT_S)

    assert process.returncode == 0
    assert "draining" in rest
    assert "Traceback" not in rest


def test_serve_on_a_taken_address_is_one_line(file):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = f"metrics: {{address: '{address}'}}\nlisten: {{address: '127.0.0.1:0'}}"
        process = start("serve", "--config", file("c.yaml", config))
        _, err = process.communicate(timeout=LIMIT_S)

    assert process.returncode == 2
    assert "extproc: " in err
    assert "address already in use" in err
    assert "Traceback" not in err


def test_standin_serves_until_it_is_ended():
    process = start("standin", "--model", "m")
    url = process.stdout.readline().split()[-1]
    assert fetch(f"{url}/health") == 200
    process.terminate()
    out, err = process.communicate(timeout=LIMIT_S)

    assert (process.returncode, out, err) == (0, "", "")
