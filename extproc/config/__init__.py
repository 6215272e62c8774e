"""One YAML file to one frozen tree, or an error that names file, key and reason.

The tree itself is in `sections`; `Config` is importable from here as well, as the one
exception to importing from the defining module, since it is this package's result.
"""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import TypeAdapter, ValidationError

from extproc.config.sections import Config, Intake, Member
from extproc.core.errors import ExtprocError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pydantic_core import ErrorDetails

__all__ = ["Config", "ConfigError", "load_config", "load_members"]

_MAX_FILE_BYTES = 4 * 1024 * 1024
_MEMBERS = TypeAdapter(tuple[Member, ...])
# Keys the tree adds where the file writes a plain list.
_IMPLIED_KEYS = ("endpoints", "static")


class ConfigError(ExtprocError, ValueError):
    """A file can't be used; one `FILE: key.path: reason` line per problem."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


def load_config(path: str | Path, environ: Mapping[str, str] | None = None) -> Config:
    """Read a config file; an empty one gives the defaults. Raise ConfigError.

    Relative file names are taken from the folder of the config file, and `intake.secret_env`
    is resolved from `environ` (default: the process's) into the secret.
    """
    path = Path(path)
    data = _read_yaml(path)
    try:
        config = Config.model_validate_json(_as_json(path, {} if data is None else data))
    except ValidationError as error:
        raise ConfigError(_describe(path, data, error)) from None
    environ = os.environ if environ is None else environ
    config = _resolve_secret(path, config, environ)
    config = _resolve_log(path, config, environ)
    return config.model_copy(
        update={
            name: section.model_copy(update={"file": str(path.parent / section.file)})
            for name, section in (("endpoints", config.endpoints), ("record", config.record))
            if section.file is not None
        }
    )


def load_members(path: str | Path) -> tuple[Member, ...]:
    """Read an endpoint file: a YAML or JSON list as under `endpoints`. Raise ConfigError."""
    path = Path(path)
    data = _read_yaml(path)
    try:
        return _MEMBERS.validate_json(_as_json(path, [] if data is None else data))
    except ValidationError as error:
        raise ConfigError(_describe(path, data, error)) from None


def _resolve_secret(path: Path, config: Config, environ: Mapping[str, str]) -> Config:
    name = config.intake.secret_env
    if name is None:
        return config
    if not environ.get(name):
        problem = f"{path}: intake.secret_env: environment variable {name} is not set"
        raise ConfigError([problem])
    intake: Intake = config.intake.model_copy(update={"secret": environ[name]})
    return config.model_copy(update={"intake": intake})


def _resolve_log(path: Path, config: Config, environ: Mapping[str, str]) -> Config:
    log = config.decision_log
    if log is None:
        return config
    if log.password_env is not None and not environ.get(log.password_env):
        reason = f"environment variable {log.password_env} is not set"
        raise ConfigError([f"{path}: decision_log.password_env: {reason}"])
    files = {
        name: str(path.parent / file)
        for name, file in (("password_file", log.password_file), ("ca_file", log.ca_file))
        if file is not None
    }
    for name, file in files.items():
        if not os.access(file, os.R_OK):
            raise ConfigError([f"{path}: decision_log.{name}: {file} is not readable"])
    return config.model_copy(update={"decision_log": log.model_copy(update=files)})


class _UniqueKeyLoader(yaml.SafeLoader):
    """Safe YAML in which a key occurs once and is text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                problem = f"key {key!r} is not text"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            if key in seen:
                problem = f"duplicate key '{key}'"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _read_yaml(path: Path) -> object:
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise ConfigError([f"{path}: {reason}"]) from None
    if len(raw) > _MAX_FILE_BYTES:
        raise ConfigError([f"{path}: larger than {_MAX_FILE_BYTES} bytes"])
    try:
        return yaml.load(raw, Loader=_UniqueKeyLoader)  # noqa: S506 - derives from SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "YAML"
        raise ConfigError([f"{path}: {place}: {error.problem}"]) from None
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError([f"{path}: not readable as YAML: {reason}"]) from None


def _as_json(path: Path, data: object) -> str:
    # Through JSON, since pydantic's strict mode then takes a list for a tuple but still
    # refuses "5" for 5; YAML dates become text and are refused where a number belongs.
    try:
        return json.dumps(data, default=str)
    except (ValueError, RecursionError):
        raise ConfigError([f"{path}: an alias refers to itself"]) from None


def _describe(path: Path, data: object, error: ValidationError) -> list[str]:
    listed = isinstance(data, dict) and isinstance(data.get("endpoints"), list)
    lines = []
    for problem in error.errors(include_url=False):
        where = problem["loc"]
        if listed and where[:2] == _IMPLIED_KEYS:
            where = (where[0], *where[2:])
        key = ".".join(str(part) for part in where)
        lines.append(": ".join(filter(None, (str(path), key, _reason(problem)))))
    return lines


def _reason(problem: ErrorDetails) -> str:
    if problem["type"] == "extra_forbidden":
        close = difflib.get_close_matches(str(problem["loc"][-1]), _known_keys(problem["loc"]), 1)
        return f"unknown key; did you mean '{close[0]}'?" if close else "unknown key"
    if problem["type"] in {"model_type", "model_attributes_type", "dict_type"}:
        return "should be a mapping of keys to values"
    if problem["type"] == "tuple_type":
        return "should be a list"
    reason = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    shown = json.dumps(problem["input"], default=str)
    simple = not isinstance(problem["input"], dict | list) and problem["type"] != "value_error"
    return f"{reason}, not {shown[:80]}" if simple else reason


def _known_keys(where: tuple[int | str, ...]) -> list[str]:
    fields = Config.model_fields
    if len(where) > 1:
        section = fields.get(str(where[0]))
        in_list = any(isinstance(part, int) for part in where)
        model: object = Member if in_list else section and section.annotation
        fields = getattr(model, "model_fields", {})
    elif isinstance(where[0], int):
        fields = Member.model_fields
    return list(fields)
