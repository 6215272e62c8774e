"""The shipped Envoy files: current, and taken by the real Envoy."""

from pathlib import Path

import pytest
import yaml

from extproc.adapters.envoy_config import bootstrap, filter_snippet, to_yaml
from extproc.adapters.envoy_process import find_envoy, validate
from extproc.adapters.envoy_settings import GatewaySettings
from extproc.config import load_config
from extproc.core.endpoint import Endpoint

FOLDER = Path(__file__).parents[1] / "envoy"
HEADER = "# Made by `{command}`; change the settings, not this file.\n"
COMMANDS = {
    "bootstrap.yaml": "extproc envoy-config --config envoy/config.yaml",
    "ext_proc-snippet.yaml": "extproc envoy-config --config envoy/config.yaml --snippet",
}
TYPES = "type.googleapis.com/envoy.extensions.filters"


def settings():
    config = load_config(FOLDER / "config.yaml")
    endpoints = tuple(Endpoint.parse(member.address) for member in config.endpoints.static)
    return GatewaySettings(endpoints=endpoints, routers=(config.listen.address,))


def contents():
    return {
        "bootstrap.yaml": to_yaml(bootstrap(settings())),
        "ext_proc-snippet.yaml": filter_snippet(settings()),
    }


def an_existing_envoy_with(parts):
    """Put each part of the snippet where its comment says."""
    router = {
        "name": "envoy.filters.http.router",
        "typed_config": {"@type": f"{TYPES}.http.router.v3.Router"},
    }
    part = parts["http_connection_manager"]
    host = {"name": "everyone", "domains": ["*"], "routes": parts["routes"]}
    manager = part | {
        "@type": f"{TYPES}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "existing",
        "http_filters": [*part["http_filters"], router],
        "route_config": {"virtual_hosts": [host]},
    }
    chain = {"filters": [{"name": "manager", "typed_config": manager}]}
    address = {"socket_address": {"address": "127.0.0.1", "port_value": 8080}}
    listener = parts["listener"] | {"name": "l", "address": address, "filter_chains": [chain]}
    existing = {"name": "llm", "type": "STATIC", "connect_timeout": "1s"} | parts["llm_cluster"]
    resources = {"listeners": [listener], "clusters": [existing, *parts["clusters"]]}
    return {"static_resources": resources}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_shipped_file_is_current_and_names_the_command_that_makes_it(name):
    header = HEADER.format(command=COMMANDS[name])

    assert (FOLDER / name).read_text() == header + contents()[name]


async def test_envoy_takes_the_shipped_bootstrap():
    await validate(find_envoy(), (FOLDER / "bootstrap.yaml").read_text())


async def test_envoy_takes_the_shipped_snippet_in_an_existing_configuration():
    parts = yaml.safe_load((FOLDER / "ext_proc-snippet.yaml").read_text())

    await validate(find_envoy(), yaml.safe_dump(an_existing_envoy_with(parts)))
