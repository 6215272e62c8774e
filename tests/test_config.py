from pathlib import Path

import pytest

from extproc.config import Config, ConfigError, load_config, load_members
from extproc.core.policies import Tuning
from extproc.core.router import RouterSettings


def write(folder: Path, text: str, name: str = "extproc.yaml") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def problems(folder: Path, text: str) -> tuple[str, ...]:
    file = write(folder, text)
    with pytest.raises(ConfigError) as caught:
        load_config(file, {})
    return tuple(line.removeprefix(f"{file}: ") for line in caught.value.problems)


@pytest.mark.parametrize("text", ["", "# only a comment\n", "{}", "null\n"])
def test_an_empty_file_gives_the_defaults(tmp_path, text):
    assert load_config(write(tmp_path, text), {}) == Config()


def test_routing_defaults_are_those_of_the_core():
    routing = Config().routing

    assert (
        Tuning(**{name: getattr(routing, name) for name in Tuning.__dataclass_fields__}) == Tuning()
    )
    assert routing.cache_tokens == RouterSettings().cache_tokens
    assert routing.fallbacks == RouterSettings().fallbacks


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            "routing: {polcy: tiered}",
            "routing.polcy: unknown key; did you mean 'policy'?",
            id="a misspelt key in a section",
        ),
        pytest.param(
            "rooting: {}", "rooting: unknown key; did you mean 'routing'?", id="a misspelt section"
        ),
        pytest.param("zzz: 1", "zzz: unknown key", id="a key like no other"),
        pytest.param(
            'routing: {gamma: "4"}',
            'routing.gamma: should be a valid number, not "4"',
            id="a text where a number belongs",
        ),
        pytest.param(
            "listen: {max_streams: true}",
            "listen.max_streams: should be a valid integer, not true",
            id="a truth value where a count belongs",
        ),
        pytest.param(
            "stream: {max_body_bytes: -1}",
            "stream.max_body_bytes: should be greater than 0, not -1",
            id="a negative limit",
        ),
        pytest.param(
            "routing: {gamma: .inf}",
            "routing.gamma: should be a finite number, not Infinity",
            id="infinity",
        ),
        pytest.param(
            "endpoints: [10.0.0.1]",
            "endpoints.0.address: not a host:port: '10.0.0.1'",
            id="an endpoint without a port",
        ),
        pytest.param(
            "endpoints: [{address: 'a:1', wieght: 2}]",
            "endpoints.0.wieght: unknown key; did you mean 'weight'?",
            id="a misspelt key of an endpoint",
        ),
        pytest.param(
            "endpoints: {file: a.yaml, static: ['a:1']}",
            "endpoints: give a list or a file, not both",
            id="two sources of endpoints",
        ),
        pytest.param(
            "listen: [1]", "listen: should be a mapping of keys to values", id="a list as section"
        ),
        pytest.param("[1, 2]", "should be a mapping of keys to values", id="a list as the file"),
        pytest.param(
            "listen: {address: 'unix:'}",
            "listen.address: a unix socket path has 1 to 103 bytes",
            id="an empty socket path",
        ),
        pytest.param(
            "health: {path: health}", "health.path: a path starts with '/'", id="a relative path"
        ),
        pytest.param(
            "routing: {gamma: 1}\nrouting: {phi: 2}",
            "line 2, column 1: duplicate key 'routing'",
            id="a key given twice",
        ),
        pytest.param("1: 2", "line 1, column 1: key 1 is not text", id="a number as key"),
        pytest.param("? [a]\n: 1", "line 1, column 3: key ['a'] is not text", id="a list as key"),
        pytest.param(
            "a: &x [*x]", "an alias refers to itself", id="an alias that refers to itself"
        ),
        pytest.param(
            "intake: {secret_env: SEED}",
            "intake.secret_env: environment variable SEED is not set",
            id="a secret that is not in the environment",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_key_and_reason(tmp_path, text, expected):
    assert problems(tmp_path, text) == (expected,)


def test_every_problem_is_named_at_once(tmp_path):
    found = problems(tmp_path, "listen: {drain_s: -1}\nscrape: {nope: 1}")

    assert [line.split(":")[0] for line in found] == ["listen.drain_s", "scrape.nope"]


@pytest.mark.parametrize("text", ["a: [", "\tx: 1", "a: !!python/object:os.system x"])
def test_broken_yaml_names_the_line(tmp_path, text):
    assert problems(tmp_path, text)[0].startswith("line 1, column")


@pytest.mark.parametrize("raw", [b"\xff\xfe\x00", b"a: \x00", b"\x80"])
def test_bytes_that_are_no_text_are_refused(tmp_path, raw):
    file = tmp_path / "extproc.yaml"
    file.write_bytes(raw)

    with pytest.raises(ConfigError, match="not readable as YAML"):
        load_config(file)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml: no such file or directory"):
        load_config(tmp_path / "none.yaml")


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ConfigError, match="is a directory"):
        load_config(tmp_path)


def test_an_endpoint_is_a_text_or_a_mapping(tmp_path):
    text = "endpoints: ['10.0.0.1:8000', {address: 'engine:8000', weight: 2, max_inflight: 8}]"
    first, second = load_config(write(tmp_path, text)).endpoints.static

    assert (first.address, first.weight, first.max_inflight) == ("10.0.0.1:8000", 1.0, None)
    assert (second.address, second.weight, second.max_inflight) == ("engine:8000", 2.0, 8)


def test_a_relative_endpoint_file_lies_next_to_the_config(tmp_path):
    config = load_config(write(tmp_path, "endpoints: {file: pool.yaml}"))

    assert config.endpoints.file == str(tmp_path / "pool.yaml")


def test_the_secret_comes_from_the_environment(tmp_path):
    file = write(tmp_path, "intake: {secret_env: SEED}")

    assert load_config(file, {"SEED": "s3cret"}).intake.secret == "s3cret"


@pytest.mark.parametrize("text", ["['a:1', {address: 'b:2'}]", '["a:1", {"address": "b:2"}]'])
def test_an_endpoint_file_is_yaml_or_json(tmp_path, text):
    members = load_members(write(tmp_path, text, "pool.yaml"))

    assert [member.address for member in members] == ["a:1", "b:2"]


def test_a_broken_endpoint_file_names_the_entry(tmp_path):
    with pytest.raises(ConfigError, match=r"pool\.yaml: 1\.address: not a host:port"):
        load_members(write(tmp_path, "['a:1', 'b']", "pool.yaml"))
