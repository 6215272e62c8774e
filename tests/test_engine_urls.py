import pytest

from extproc.config.sections import Config, Endpoints, Member
from extproc.engine_urls import EngineUrlError, with_engines

LISTED = Config(endpoints=Endpoints(static=(Member(address="10.0.0.9:1"),), poll_s=7.0))


def addresses(config):
    return [member.address for member in config.endpoints.static]


@pytest.mark.parametrize("urls", [None, "", "  "])
def test_without_a_list_the_config_stays(urls):
    assert with_engines(LISTED, urls) is LISTED


def test_a_list_replaces_the_endpoints_and_keeps_the_rest():
    config = with_engines(LISTED, "http://engine-1:8000, http://10.0.0.2,")

    assert addresses(config) == ["engine-1:8000", "10.0.0.2:80"]
    assert config.endpoints.poll_s == 7.0


@pytest.mark.parametrize("urls", ["https://a:1", "http://a:1/v1", "http://", "http://a:x"])
def test_what_is_no_engine_is_named(urls):
    with pytest.raises(EngineUrlError, match="should be http://host:port"):
        with_engines(LISTED, urls)
