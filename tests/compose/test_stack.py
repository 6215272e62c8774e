"""The compose stack for real. `make test-compose` runs it; it needs docker, or root and dockerd."""

from __future__ import annotations

import concurrent.futures
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import images
from daemon import NoDockerError, docker_engine

FOLDER = Path(__file__).parents[2] / "compose"
PROJECT = "extproc-test"
FIRST_REQUEST_S = 90.0
HEALTHY_S = 90.0
LARGEST_IMAGE_MB = 300.0
ENGINES = [f"engine-{n}" for n in range(1, 5)]

pytestmark = [
    pytest.mark.skipif(not os.environ.get("EXTPROC_COMPOSE"), reason="run by make test-compose"),
    pytest.mark.timeout(600),
]


class Stack:
    def __init__(self, environment):
        self.environment = environment
        self.programs = None
        self.envoy_port = 0

    def docker(self, *command):
        done = subprocess.run(
            ["docker", *command], env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def compose(self, *command, env_file=".env"):
        whole = ["docker-compose", "-p", PROJECT, "--env-file", env_file, *command]
        done = subprocess.run(
            whole, cwd=FOLDER, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-2_000:]
        return done.stdout

    def containers(self):
        ids = self.docker(
            "ps", "-aq", "--filter", f"label=com.docker.compose.project={PROJECT}"
        ).split()
        return json.loads(self.docker("inspect", *ids)) if ids else []

    def container(self, service):
        return next(one for one in self.containers() if service_of(one) == service)

    def until_healthy(self):
        deadline_s = time.monotonic() + HEALTHY_S
        while True:
            states = {
                one["Name"]: one["State"].get("Health", {}).get("Status", one["State"]["Status"])
                for one in self.containers()
            }
            if set(states.values()) <= {"healthy", "running"}:
                return
            if time.monotonic() > deadline_s:
                pytest.fail(f"not healthy: {states}\n{self.compose('logs', '--tail', '20')}")
            time.sleep(0.2)

    def port(self, service, port):
        ports = self.container(service)["NetworkSettings"]["Ports"]
        (published,) = ports[f"{port}/tcp"]
        assert published["HostIp"] == "127.0.0.1"
        return int(published["HostPort"])

    def ask(self, prompt):
        """Send one chat; give its status and the endpoint that served it."""
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 2,
        }
        self.envoy_port = self.envoy_port or self.port("envoy", 8080)
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.envoy_port}/v1/chat/completions",
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
                return answer.status, answer.headers["x-standin-endpoint"]
        except urllib.error.HTTPError as error:
            with error:
                return error.code, None

    def query(self, expression):
        """Ask Prometheus until it gives something, within a limit."""
        where = f"http://127.0.0.1:{self.port('prometheus', 9090)}/api/v1/query?"
        url = where + urllib.parse.urlencode({"query": expression})
        deadline_s = time.monotonic() + 30.0
        while True:
            try:
                with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310
                    found = json.load(answer)["data"]["result"]
            except OSError:
                found = []
            if found or time.monotonic() > deadline_s:
                return {json.dumps(one["metric"]): float(one["value"][1]) for one in found}
            time.sleep(0.5)


def service_of(container):
    return container["Config"]["Labels"]["com.docker.compose.service"]


def conversation(number, turns):
    return f"You are assistant {number}. " + " ".join(
        f"Turn {turn}: " + "words and more words " * 60 for turn in range(turns)
    )


@pytest.fixture(scope="module")
def stack(pytestconfig):
    try:
        with docker_engine() as environment:
            base = images.base_image(environment)
            stack = Stack(
                {
                    **environment,
                    "BASE": base,
                    "BUILD_NETWORK": "host",
                    "ENVOY_IMAGE": images.ENVOY_IMAGE,
                    "PROMETHEUS_IMAGE": images.PROMETHEUS_IMAGE,
                    "VALKEY_IMAGE": images.VALKEY_IMAGE,
                    "PORT": "0",
                    "PROMETHEUS_PORT": "0",
                }
            )
            images.build_envoy(environment, base)
            stack.programs = images.build_prometheus(environment, base)
            began_s = time.monotonic()
            services = ["envoy", *ENGINES, *(["prometheus"] if stack.programs else [])]
            stack.compose("build", "router")
            built_s = time.monotonic() - began_s
            stack.compose("up", "-d", "--no-build", *services)
            stack.until_healthy()
            status, _ = stack.ask("the first request")
            took_s = time.monotonic() - began_s
            assert status == 200
            with pytestconfig.pluginmanager.getplugin(
                "capturemanager"
            ).global_and_fixture_disabled():
                sys.stdout.write(
                    f"\nfirst request {took_s:.1f} s after `up`, {built_s:.1f} s of it to build\n"
                )
            assert took_s < FIRST_REQUEST_S
            yield stack
            stack.compose("--profile", "scale", "down", "-v", "-t", "3")
            assert stack.containers() == []
            label = f"label=com.docker.compose.project={PROJECT}"
            assert stack.docker("network", "ls", "-q", "--filter", label) == ""
            assert stack.docker("volume", "ls", "-q", "--filter", label) == ""
    except NoDockerError as reason:
        pytest.skip(str(reason))


def test_requests_follow_their_prefixes(stack):
    homes = {}
    for turns in (1, 2, 3):
        for number in range(8):
            status, endpoint = stack.ask(conversation(number, turns))
            assert status == 200
            assert homes.setdefault(number, endpoint) == endpoint
    assert len(set(homes.values())) > 1


def test_containers_are_confined(stack):
    for container in stack.containers():
        assert container["HostConfig"]["ReadonlyRootfs"], container["Name"]
        assert container["Config"]["User"] not in {"", "0", "root"}, container["Name"]
        assert container["HostConfig"]["CapDrop"] == ["ALL"]
        assert container["HostConfig"]["Init"]


def test_the_image_is_small_and_builds_nothing(stack):
    (image,) = json.loads(stack.docker("image", "inspect", "extproc:local"))
    size_mb = image["Size"] / 1e6

    assert size_mb < LARGEST_IMAGE_MB, f"{size_mb:.0f} MB"
    router = stack.container("router")["Id"]
    tools = "command -v gcc cc make; ls /opt/extproc/bin | grep -E '^(pip|wheel)' || true"
    found = stack.docker("exec", router, "/bin/sh", "-c", tools)
    assert found.strip() == ""


@pytest.mark.parametrize("service", ["engine-2", "router"])
def test_nothing_is_lost_with(stack, service):
    killed = stack.container(service)["Id"]
    with concurrent.futures.ThreadPoolExecutor(8) as clients:
        first = [clients.submit(stack.ask, conversation(n, 2)) for n in range(30)]
        stack.docker("kill", killed)
        rest = [clients.submit(stack.ask, conversation(n, 2)) for n in range(30, 120)]
        statuses = [one.result()[0] for one in first + rest]
    stack.docker("start", killed)
    stack.until_healthy()

    assert statuses == [200] * 120


def test_prometheus_has_our_series_and_takes_our_rules(stack):
    if stack.programs is None:
        pytest.skip("no Prometheus here")
    assert sum(stack.query("extproc_decisions_total").values()) > 0
    assert set(stack.query('up{job="extproc"}').values()) == {1.0}
    assert stack.query('envoy_cluster_upstream_rq_total{envoy_cluster_name="llm"}')
    tool = [stack.programs / "promtool", "check", "rules", FOLDER / "prometheus" / "alerts.yml"]
    done = subprocess.run(tool, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_three_routers_share_their_decisions(stack):
    images.build_valkey(stack.environment, stack.environment["BASE"])
    services = ["envoy", *ENGINES, "valkey", *(["prometheus"] if stack.programs else [])]
    options = ("-d", "--no-build", "--scale", "router=3")
    stack.compose("up", *options, *services, env_file="scale.env")
    stack.until_healthy()
    routers = [one for one in stack.containers() if service_of(one) == "router"]
    assert len(routers) == 3

    homes = {}
    for turns in (1, 2, 3, 4):
        for number in range(8):
            status, endpoint = stack.ask(conversation(number + 100, turns))
            assert status == 200
            assert homes.setdefault(number, endpoint) == endpoint
    for router in routers:
        page = (
            "import urllib.request as r; "
            "print(r.urlopen('http://127.0.0.1:9090/debug/log').read().decode())"
        )
        python = ("/opt/extproc/bin/python", "-c", page)
        log = json.loads(stack.docker("exec", router["Id"], *python))
        assert (log["connected"], log["peers"]) == (True, 2)
